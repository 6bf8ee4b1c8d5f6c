//! Many samples, long rows, many ranks: how even it gets, and that it stays bounded.

use crate::lengths::{SEED, stream};
use crate::{Samples, balanced, chats};

#[test]
fn long_tailed_samples_come_near_the_floor() {
    let samples = chats(20_000, 4096, SEED);
    for (settings, batch, step) in [
        // Row after row one long sample: most of what is left is the data's.
        ("", 0.24, 0.002),
        (r#", "micro_batch_size": 4"#, 0.06, 0.001),
        (
            r#", "micro_batch_size": 4, "multipack_real_batches": true"#,
            0.01,
            0.001,
        ),
        (r#", "balance_cost": "attention""#, 0.24, 0.005),
        (
            r#", "micro_batch_size": 4, "sample_packing": false, "batch_flattening": true"#,
            0.45,
            0.002,
        ),
        (
            r#", "micro_batch_size": 4, "sample_packing": false"#,
            0.5,
            0.002,
        ),
    ] {
        let settings = format!(
            r#""sequence_len": 4096, "world_size": 4, "gradient_accumulation_steps": 4{settings}"#
        );
        let report = balanced(&samples, &settings).report;
        let (before, after) = (report.before, report.after);
        let mean = after.mean_labels.expect("microbatches");
        let of = |value: Option<f64>| value.expect("steps") / mean;

        assert!(
            of(after.microbatch_label_std) <= batch,
            "{settings}: {after:?}"
        );
        assert!(
            of(after.step_label_std) / 16.0 <= step,
            "{settings}: {after:?}"
        );
        assert!(after.microbatch_label_std >= after.label_std_floor);
        assert!(before.microbatch_label_std > after.microbatch_label_std);
        assert!(after.padding_tokens <= before.padding_tokens);
        assert_eq!(before.mean_labels, after.mean_labels);
        if settings.contains("attention") {
            assert!(before.rank_cost_imbalance > Some(1.5));
            assert!(after.rank_cost_imbalance < Some(1.05), "{after:?}");
        }
    }
}

#[test]
fn the_longest_rows_that_can_be_are_balanced_without_overflow() {
    // The squares of a step's labels are beyond 64 bits; the products were, too.
    let mut stream = stream(SEED);
    let longest = i64::from(i32::MAX);
    let samples: Samples = (0..400)
        .map(|_| {
            let length = longest - i64::from(stream.below(4));
            let labels = [1, length][stream.below(2) as usize];
            (length, labels)
        })
        .collect();
    for settings in [
        r#""world_size": 100, "sample_packing": false"#,
        r#""world_size": 32"#,
        r#""gradient_accumulation_steps": 64"#,
        r#""world_size": 8, "gradient_accumulation_steps": 8"#,
    ] {
        let settings =
            format!(r#""sequence_len": {longest}, "mask_first_label": false, {settings}"#);
        let report = balanced(&samples, &settings).report;
        let (before, after) = (report.before, report.after);

        assert!(
            after.step_label_std < before.step_label_std.map(|std| 0.3 * std),
            "{settings}: {before:?} {after:?}"
        );
    }
}

#[test]
fn a_few_samples_for_very_many_ranks_take_no_longer() {
    // Each of the thousands of schedules that are tried was judged with all the repeats: minutes.
    let samples: Samples = vec![(10, 5); 8];
    let ranks = 1 << 19;
    let settings = format!(
        r#""sequence_len": 30, "world_size": {ranks}, "incomplete_batches": "fill", "mask_first_label": false"#
    );
    let plan = balanced(&samples, &settings);

    assert_eq!(ranks + 1, plan.batch_offsets.len());
}
