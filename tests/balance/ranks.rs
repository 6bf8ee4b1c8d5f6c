//! Which rank runs what when: nobody waits longer, no place in a step is special.

use multipack::{Split, plan};

use crate::lengths::{SEED, lognormal};
use crate::{Samples, balanced, batch_labels, chats, config};

#[test]
fn no_rank_is_the_heavy_one() {
    // Ties that always went to the lowest rank made its total grow (C21).
    let alike: Samples = (0..400).map(|i| (10, 10 - i % 4)).collect();
    for (samples, row, accumulation, share) in [
        (alike, 10, 1, 50),
        (chats(8_000, 2048, SEED), 2048, 1, 500),
        (chats(8_000, 2048, SEED), 2048, 4, 500),
    ] {
        let settings = format!(
            r#""sequence_len": {row}, "world_size": 4, "gradient_accumulation_steps": {accumulation}"#
        );
        let plan = balanced(&samples, &settings);
        let mut ranks = [0i64; 4];
        for (batch, labels) in batch_labels(&plan, &samples).into_iter().enumerate() {
            ranks[batch % 4] += labels;
        }

        let mean = ranks.iter().sum::<i64>() / 4;
        for labels in ranks {
            assert!(
                (labels - mean).abs() * share <= mean,
                "{settings}: {ranks:?}"
            );
        }
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
fn waits_stay_where_that_leaves_the_labels_of_steps_even() {
    // One or two long samples decide how long a step takes, and labels alone made it 3 to 17 %
    // longer.
    let samples = chats(8_000, 4096, SEED);
    for count in [1, 2, 4, 8] {
        for ranks in [2, 3, 4, 8] {
            let settings = format!(
                r#""sequence_len": 4096, "world_size": {ranks}, "sample_packing": false,
                   "micro_batch_size": {count}"#
            );
            let report = balanced(&samples, &settings).report;
            let (before, after) = (report.before, report.after);

            assert!(
                after.rank_cost_imbalance <= before.rank_cost_imbalance,
                "{settings}: {before:?} {after:?}"
            );
            let share = if ranks * count >= 16 { 0.5 } else { 0.9 };
            assert!(
                after.step_label_std <= before.step_label_std.map(|std| share * std),
                "{settings}: {before:?} {after:?}"
            );
        }
    }
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

/// Ranks from 0 on; equal values share the mean of theirs.
fn ranks(values: &[i64]) -> Vec<f64> {
    let count = |wanted: fn(i64, i64) -> bool, value: i64| {
        values.iter().filter(|&&other| wanted(other, value)).count() as f64
    };
    let less = |value| count(|other, value| other < value, value);
    let equal = |value| count(|other, value| other == value, value);
    let rank = |&value: &i64| less(value) + (equal(value) - 1.0) / 2.0;
    values.iter().map(rank).collect()
}

/// Spearman's correlation of values with their places; none where all are equal.
fn rank_correlation(values: &[i64]) -> Option<f64> {
    let middle = (values.len() as f64 - 1.0) / 2.0;
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for (place, rank) in ranks(values).into_iter().enumerate() {
        let (x, y) = (place as f64 - middle, rank - middle);
        (xy, xx, yy) = (xy + x * y, xx + x * x, yy + y * y);
    }
    (yy > 0.0).then(|| xy / (xx * yy).sqrt())
}

#[test]
fn labels_do_not_depend_on_the_place_in_a_step() {
    assert_eq!(Some(1.0), rank_correlation(&[1, 20, 21, 400]));
    assert_eq!(Some(-1.0), rank_correlation(&[4, 3, 2, 1]));
    assert_eq!(Some(0.0), rank_correlation(&[7, 3, 3, 7]));
    assert_eq!(None, rank_correlation(&[5, 5]));

    let samples = chats(30_000, 1024, SEED);
    for layout in [
        "",
        r#", "balance_cost": "attention""#,
        r#", "micro_batch_size": 2, "multipack_real_batches": true"#,
        r#", "micro_batch_size": 2, "sample_packing": false"#,
    ] {
        let settings = format!(
            r#""sequence_len": 1024, "world_size": 2, "gradient_accumulation_steps": 8{layout}"#
        );
        let plan = balanced(&samples, &settings);
        let labels = batch_labels(&plan, &samples);
        let steps = labels.chunks_exact(16).filter_map(rank_correlation);
        let found: Vec<f64> = steps.collect();
        let mean = found.iter().sum::<f64>() / found.len() as f64;

        // In a random order the correlation of n places has the variance 1 / (n - 1).
        let deviation = 1.0 / (15.0 * found.len() as f64).sqrt();
        assert!(found.len() > 300, "{layout}: {} steps", found.len());
        assert!(
            mean.abs() <= 4.0 * deviation,
            "{layout}: {mean}, {deviation}"
        );
    }
}

#[test]
fn ranks_do_not_wait_longer_and_sizes_do_not_jump_more_than_before() {
    let samples = chats(8_000, 4096, SEED);
    let padded = r#", "micro_batch_size": 4, "sample_packing": false"#;
    let flattened = format!(r#"{padded}, "batch_flattening": true"#);
    for layout in [
        "",
        r#", "micro_batch_size": 4"#,
        r#", "micro_batch_size": 4, "multipack_real_batches": true"#,
        padded,
        &flattened,
    ] {
        for cost in ["auto", "attention"] {
            for (ranks, accumulation) in [(4, 1), (4, 4), (8, 2), (16, 1)] {
                let settings = format!(
                    r#""sequence_len": 4096, "world_size": {ranks}, "balance_cost": "{cost}",
                       "gradient_accumulation_steps": {accumulation}{layout}"#
                );
                let report = balanced(&samples, &settings).report;
                let (before, after) = (report.before, report.after);

                // Full rows hardly differ: then all of it is the few with space left.
                let wait = before.rank_cost_imbalance.map(|wait| wait + 1e-4);
                assert!(
                    after.rank_cost_imbalance <= wait,
                    "{settings}: {before:?} {after:?}"
                );
                let hardly = 2e-3 * before.mean_unpadded_length.expect("microbatches");
                let jump = before.rank_size_jump.map(|jump| jump + hardly);
                assert!(
                    after.rank_size_jump <= jump,
                    "{settings}: {before:?} {after:?}"
                );
                let labels = before.step_label_std.map(|std| 0.9 * std);
                assert!(
                    after.step_label_std <= labels,
                    "{settings}: {before:?} {after:?}"
                );
            }
        }
    }
}

#[test]
fn where_every_token_is_a_label_steps_are_no_less_even_than_without_balancing() {
    // Rows that mix lengths once had their space in fewer rows than those of a plan that is not
    // balanced, and steps with 1.7 times the spread.
    for seed in 1..4 {
        let lengths: Vec<i64> = lognormal(30_000, 4096, seed)
            .into_iter()
            .map(i64::from)
            .collect();
        let less_one: Vec<i64> = lengths.iter().map(|length| (length - 1).max(1)).collect();
        for counts in [None, Some(&less_one[..])] {
            let stats = |balance: bool| {
                let config = config(&format!(
                    r#""sequence_len": 4096, "world_size": 4, "gradient_accumulation_steps": 4,
                       "balance_labels": {balance}"#
                ));
                let plan = plan(&lengths, counts, None, &config, 0, Split::Train, 1);
                plan.expect("a plan").report.after
            };
            let (without, with) = (stats(false), stats(true));
            assert_eq!(without.rows, with.rows);
            assert!(
                with.microbatch_label_std <= without.microbatch_label_std
                    && with.step_label_std < without.step_label_std,
                "{without:?} {with:?}"
            );
        }
    }
}
