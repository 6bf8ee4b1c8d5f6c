//! Plans an epoch for two ranks and lays out a microbatch, on plain slices and without libtorch.
//!
//!     cargo run --release --example plan              # made-up lengths
//!     cargo run --release --example plan lengths.txt  # one length on a line
//!
//! What a program needs to feed a framework of its own: which samples stand in which row of which
//! rank, and the arrays of a batch.

use std::error::Error;
use std::fs;

use multipack::batch::{BatchSlices, Layout, LayoutOptions};
use multipack::{Config, Plan, Split, plan};

const RANKS: usize = 2;
const SETTINGS: &str = r#"{"sequence_len": 64, "world_size": 2}"#;

fn main() -> Result<(), Box<dyn Error>> {
    let lengths = match std::env::args().nth(1) {
        Some(path) => fs::read_to_string(&path)?
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<Vec<i64>, _>>()?,
        None => (0..200).map(|i| 1 + i * 37 % 64).collect(),
    };
    print!("{}", report(&lengths)?);
    Ok(())
}

/// Plans the samples; returns how full the rows are and what the ranks do first.
fn report(lengths: &[i64]) -> multipack::Result<String> {
    let config = Config::from_json(SETTINGS)?;
    let plan = plan(lengths, None, None, &config, 0, Split::Train, 1)?;
    let (after, dropped) = (&plan.report.after, plan.report.dropped.count());
    let mut text = format!(
        "{} samples, {dropped} dropped; {} rows, at least {} are needed; {} microbatches a rank\n",
        lengths.len(),
        after.rows,
        after.lower_bound,
        plan.len(),
    );
    if !plan.is_empty() {
        for rank in 0..RANKS {
            let batch = first_microbatch(&plan, lengths, rank)?;
            text += &format!(
                "rank {rank} begins with samples {:?}, cu_seqlens {:?}, input_ids {:?} to {:?}, \
                 position_ids {:?} to {:?}\n",
                batch.samples,
                batch.cu_seqlens,
                batch.input_ids[0],
                batch.input_ids[batch.input_ids.len() - 1],
                batch.position_ids[0],
                batch.position_ids[batch.position_ids.len() - 1],
            );
        }
    }
    Ok(text)
}

/// A microbatch as a program would hand it to its framework.
struct Batch {
    samples: Vec<i64>,
    cu_seqlens: Vec<i32>,
    input_ids: Vec<i64>,
    position_ids: Vec<i64>,
}

/// The first microbatch of a rank; token `t` of sample `i` is made up as `1000 * i + t`.
fn first_microbatch(plan: &Plan, lengths: &[i64], rank: usize) -> multipack::Result<Batch> {
    // The microbatches of a step stand side by side, rank after rank.
    let rows = plan.rows_of(rank);
    let samples: Vec<i64> = rows
        .clone()
        .flat_map(|row| plan.row(row))
        .map(|&sample| sample.into())
        .collect();
    let row_offsets: Vec<i64> = plan.row_offsets[rows.start..=rows.end]
        .iter()
        .map(|&offset| (offset - plan.row_offsets[rows.start]).into())
        .collect();

    let mut offsets = vec![0];
    let mut tokens = Vec::new();
    for (sample, &length) in (0..).zip(lengths) {
        tokens.extend((0..length).map(|token| 1000 * sample + token));
        offsets.push(tokens.len() as i64);
    }

    let options = LayoutOptions::default();
    let layout = Layout::new(tokens.len(), &offsets, &samples, &row_offsets, &options)?;
    let size = layout.rows() * layout.row_len();
    let [mut input_ids, mut labels, mut position_ids] = [(); 3].map(|()| vec![0; size]);
    let mut segment_ids = vec![0; size];
    let out = BatchSlices {
        input_ids: &mut input_ids,
        labels: &mut labels,
        position_ids: &mut position_ids,
        segment_ids: &mut segment_ids,
    };
    layout.fill(&tokens, None::<&[i64]>, 0, true, out, 1)?;
    Ok(Batch {
        samples,
        cu_seqlens: layout.cu_seqlens().to_vec(),
        input_ids,
        position_ids,
    })
}

#[test]
fn both_ranks_get_whole_samples_of_their_own() -> multipack::Result<()> {
    let lengths = [40, 24, 50, 14, 64, 70, 60, 4];
    let config = Config::from_json(SETTINGS)?;
    let plan = plan(&lengths, None, None, &config, 0, Split::Train, 1)?;

    assert_eq!((2, 1), (plan.len(), plan.report.dropped.over_long.count));
    let batches = [0, 1].map(|rank| first_microbatch(&plan, &lengths, rank));
    let mut seen = Vec::new();
    for batch in batches {
        let batch = batch?;
        assert_eq!(Some(&64), batch.cu_seqlens.last());
        let expected = batch.samples.iter().flat_map(|&i| {
            let tokens = 0..lengths[i as usize];
            tokens.map(move |token| (1000 * i + token, token))
        });
        let found = batch.input_ids.into_iter().zip(batch.position_ids);
        assert!(expected.eq(found));
        seen.extend(batch.samples);
    }
    let samples = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(samples, seen.len());
    Ok(())
}

#[test]
fn the_report_names_what_was_dropped() -> multipack::Result<()> {
    let text = report(&[40, 24, 64, 70])?;

    let first = text.lines().next();
    assert_eq!(
        Some("4 samples, 1 dropped; 2 rows, at least 2 are needed; 1 microbatches a rank"),
        first
    );
    assert_eq!(3, text.lines().count());
    Ok(())
}
