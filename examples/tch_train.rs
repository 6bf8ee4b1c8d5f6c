//! Trains a small causal transformer on packed batches with tch.
//!
//!     python libtorch.py cargo run --release --features torch --example tch_train
//!
//! Counts labels, plans and balances, collates with 4D masks and trains; the loss of a step is the
//! sum over all its labels, divided by their number. The samples are made up: questions, which are
//! not trained on, and answers that count on from their last token.

use multipack::batch::MaskDtype;
use multipack::torch::{Batch, CollateOptions, collate, label_counts, microbatch, plan};
use multipack::{Config, Split};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

const VOCABULARY: i64 = 100;
const WIDTH: i64 = 32;
const HEADS: i64 = 2;
const ACCUMULATION: i64 = 2;
const IGNORED: i64 = -100;

const SETTINGS: &str = r#"{
    "sequence_len": 64,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "balance_labels": true
}"#;

fn main() -> multipack::Result<()> {
    for (step, loss) in (1..).zip(train(600, 2)?) {
        println!("step {step} loss {loss:.4}");
    }
    Ok(())
}

/// Trains for some epochs; returns the loss of each step, per label.
fn train(samples: i64, epochs: i64) -> multipack::Result<Vec<f64>> {
    let (tokens, labels, offsets) = made_up_samples(samples);
    let config = Config::from_json(SETTINGS)?;
    let lengths = offsets.f_diff(1, -1, None::<Tensor>, None::<Tensor>)?;
    let (counts, starts) = label_counts(&labels, &offsets, 0, true)?;
    let options = CollateOptions {
        attention_mask: Some(MaskDtype::Bool),
        ..CollateOptions::default()
    };

    tch::manual_seed(0);
    let weights = nn::VarStore::new(Device::Cpu);
    let model = Model::new(&weights.root());
    let mut optimizer = nn::AdamW::default().build(&weights, 1e-2)?;
    let mut losses = Vec::new();
    for epoch in 0..epochs {
        let plan = plan(
            &lengths,
            Some(&counts),
            Some(&starts),
            &config,
            epoch,
            Split::Train,
        )?;
        let (index, rows, batches) = (&plan.index, &plan.row_offsets, &plan.batch_offsets);
        let microbatches = batches.size()[0] - 1; // of the only rank
        for first in (0..microbatches).step_by(ACCUMULATION as usize) {
            let step = (first..microbatches.min(first + ACCUMULATION))
                .map(|k| {
                    let (index, rows) = microbatch(index, rows, batches, 1, 0, k)?;
                    collate(&tokens, &offsets, &index, &rows, Some(&labels), &options)
                })
                .collect::<multipack::Result<Vec<Batch>>>()?;
            losses.push(accumulate(&model, &step)?);
            optimizer.step();
            optimizer.zero_grad();
        }
    }
    Ok(losses)
}

/// Adds up the gradients of a step's microbatches; returns the loss for each label.
fn accumulate(model: &Model, microbatches: &[Batch]) -> multipack::Result<f64> {
    // The first label of a row has nothing that predicts it.
    let targets = |batch: &Batch| batch.labels.slice(1, 1, None, 1).flatten(0, -1);
    let count: i64 = microbatches
        .iter()
        .map(|batch| targets(batch).ne(IGNORED).sum(Kind::Int64).int64_value(&[]))
        .sum();
    let mut total = 0.0;
    for batch in microbatches {
        let logits = model.forward(batch)?.slice(1, 0, -1, 1).flatten(0, 1);
        let sum = logits.f_cross_entropy_loss(
            &targets(batch),
            None::<Tensor>,
            Reduction::Sum,
            IGNORED,
            0.0,
        )?;
        let loss = sum / count.max(1);
        loss.f_backward()?;
        total += loss.double_value(&[]);
    }
    Ok(total)
}

/// One layer of a transformer whose positions begin anew with every sample.
struct Model {
    tokens: nn::Embedding,
    positions: nn::Embedding,
    norms: [nn::LayerNorm; 3],
    qkv: nn::Linear,
    out: nn::Linear,
    up: nn::Linear,
    down: nn::Linear,
    head: nn::Linear,
}

impl Model {
    fn new(path: &nn::Path) -> Model {
        let linear = |name: &str, from, to| nn::linear(path / name, from, to, Default::default());
        Model {
            tokens: nn::embedding(path / "tokens", VOCABULARY, WIDTH, Default::default()),
            positions: nn::embedding(path / "positions", 64, WIDTH, Default::default()),
            norms: ["norm1", "norm2", "norm3"]
                .map(|name| nn::layer_norm(path / name, vec![WIDTH], Default::default())),
            qkv: linear("qkv", WIDTH, 3 * WIDTH),
            out: linear("out", WIDTH, WIDTH),
            up: linear("up", WIDTH, 4 * WIDTH),
            down: linear("down", 4 * WIDTH, WIDTH),
            head: linear("head", WIDTH, VOCABULARY),
        }
    }

    /// Logits, (R, L, VOCABULARY).
    fn forward(&self, batch: &Batch) -> multipack::Result<Tensor> {
        let x = self.tokens.forward(&batch.input_ids) + self.positions.forward(&batch.position_ids);
        let heads = self
            .qkv
            .forward(&self.norms[0].forward(&x))
            .f_unflatten(-1, [3, HEADS, WIDTH / HEADS])?
            .f_permute([2, 0, 3, 1, 4])?;
        // The mask (R, 1, L, L) keeps every sample to itself.
        let seen = Tensor::f_scaled_dot_product_attention(
            &heads.get(0),
            &heads.get(1),
            &heads.get(2),
            Some(&batch.attention_mask),
            0.0,
            false,
            None,
            false,
        )?;
        let x = x + self.out.forward(&seen.transpose(1, 2).flatten(2, -1));
        let hidden = self.up.forward(&self.norms[1].forward(&x)).gelu("none");
        let x = x + self.down.forward(&hidden);
        Ok(self.head.forward(&self.norms[2].forward(&x)))
    }
}

/// Tokens, labels and offsets of questions and answers.
fn made_up_samples(count: i64) -> (Tensor, Tensor, Tensor) {
    let (mut tokens, mut labels, mut offsets) = (Vec::new(), Vec::new(), vec![0]);
    for sample in 0..count {
        let question = 1 + sample * 37 % 29;
        for at in 0..question {
            tokens.push((sample * 61 + at * at * 17) % VOCABULARY);
            labels.push(IGNORED);
        }
        for _ in 0..1 + question / 2 {
            let next = (tokens[tokens.len() - 1] + 1) % VOCABULARY;
            tokens.push(next);
            labels.push(next);
        }
        offsets.push(tokens.len() as i64);
    }
    (
        Tensor::from_slice(&tokens),
        Tensor::from_slice(&labels),
        Tensor::from_slice(&offsets),
    )
}

#[test]
fn it_learns_to_count_and_the_same_way_each_time() -> multipack::Result<()> {
    let losses = train(300, 2)?;

    assert!(losses.iter().all(|loss| loss.is_finite()));
    assert!(losses[losses.len() - 1] < losses[0] / 2.0, "{losses:?}");
    assert_eq!(losses, train(300, 2)?);
    Ok(())
}
