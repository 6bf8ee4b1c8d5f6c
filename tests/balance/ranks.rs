//! Which rank runs what when: nobody waits longer, no place in a step is special.

use crate::lengths::SEED;
use crate::{Samples, balanced, batch_labels, chats};

#[test]
fn no_rank_is_the_heavy_one() {
    // Ties that always went to the lowest rank made its total grow (C21).
    let samples: Samples = (0..400).map(|i| (10, 10 - i % 4)).collect();
    let plan = balanced(&samples, r#""sequence_len": 10, "world_size": 4"#);
    let mut ranks = [0i64; 4];
    for (batch, labels) in batch_labels(&plan, &samples).into_iter().enumerate() {
        ranks[batch % 4] += labels;
    }

    let mean = ranks.iter().sum::<i64>() / 4;
    for labels in ranks {
        assert!((labels - mean).abs() * 50 <= mean, "{ranks:?}");
    }
}

#[test]
fn many_ranks_are_even_at_each_microstep() {
    // 64 ranks, 16 microsteps: no assignment is searched, the costs are sorted.
    let samples = chats(30_000, 512, SEED);
    let report = balanced(
        &samples,
        r#""sequence_len": 512, "world_size": 64, "gradient_accumulation_steps": 16,
           "sample_packing": false, "batch_flattening": true, "micro_batch_size": 4"#,
    )
    .report;

    assert!(report.before.rank_cost_imbalance > Some(1.4), "{report:?}");
    assert!(report.after.rank_cost_imbalance < Some(1.02), "{report:?}");
}

#[test]
fn ranks_do_not_wait_longer_where_a_step_is_one_microstep() {
    // Steps with the same tokens were those with a large microbatch beside seven small ones.
    // And where the last step had repeats, it alone made all others look uneven in labels.
    for (n, incomplete, share) in [(8_000, "drop", 0.1), (2_010, "fill", 0.7)] {
        let samples = chats(n, 4096, SEED);
        let report = balanced(
            &samples,
            &format!(
                r#""sequence_len": 4096, "world_size": 8, "sample_packing": false,
                   "micro_batch_size": 4, "incomplete_batches": "{incomplete}""#
            ),
        )
        .report;
        let (before, after) = (report.before, report.after);

        assert!(before.rank_cost_imbalance > Some(2.0), "{before:?}");
        assert!(
            after.rank_cost_imbalance <= before.rank_cost_imbalance,
            "{before:?} {after:?}"
        );
        assert!(
            after.step_label_std < before.step_label_std.map(|std| share * std),
            "{before:?} {after:?}"
        );
        assert!(
            after.step_token_std <= before.step_token_std,
            "{before:?} {after:?}"
        );
    }
}

#[test]
fn labels_do_not_depend_on_the_place_in_a_step() {
    let samples = chats(30_000, 2048, SEED);
    let plan = balanced(
        &samples,
        r#""sequence_len": 2048, "world_size": 2, "gradient_accumulation_steps": 8"#,
    );
    let labels = batch_labels(&plan, &samples);
    let steps: Vec<&[i64]> = labels.chunks_exact(16).collect();
    let pairs: Vec<(f64, f64)> = steps
        .iter()
        .flat_map(|step| step.iter().enumerate())
        .map(|(place, &labels)| (place as f64, labels as f64))
        .collect();
    let n = pairs.len() as f64;
    let mean = pairs
        .iter()
        .fold((0.0, 0.0), |(x, y), pair| (x + pair.0 / n, y + pair.1 / n));
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in pairs {
        let (x, y) = (x - mean.0, y - mean.1);
        (xy, xx, yy) = (xy + x * y, xx + x * x, yy + y * y);
    }

    let correlation = xy / (xx * yy).sqrt();
    assert!(correlation.abs() <= 3.0 / n.sqrt(), "{correlation}");
}
