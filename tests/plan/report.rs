//! What a plan reports of itself: statistics and digests.

use crate::{config, plan_with_labels, planned};
use multipack::{Split, plan};

#[test]
fn statistics_of_a_padded_batch() {
    let plan = plan_with_labels(
        &[4, 2],
        &[3, 1],
        r#""sequence_len": 8, "micro_batch_size": 2, "sample_packing": false"#,
    );
    let stats = &plan.report.after;

    assert_eq!((2, 2), (stats.rows, stats.padding_tokens));
    assert_eq!(Some(6.0), stats.mean_unpadded_length);
    assert_eq!(Some(6.0 / 8.0), stats.efficiency);
    assert_eq!(Some(4.0), stats.mean_labels);
    assert_eq!(Some(0.0), stats.microbatch_label_std);
}

#[test]
fn statistics_of_steps_leave_out_the_incomplete_last_one() {
    // Seven microbatches, three in a step: two complete steps (C28).
    let lengths = [8, 8, 8, 8, 8, 8, 8];
    let labels = [1, 2, 3, 4, 5, 6, 7];
    let at = |steps: u32| {
        plan_with_labels(
            &lengths,
            &labels,
            &format!(
                r#""sequence_len": 8, "sample_packing_sequentially": true, "gradient_accumulation_steps": {steps}"#
            ),
        )
    };

    assert_eq!(7, at(3).len());
    // Steps of 1 + 2 + 3 = 6 and 4 + 5 + 6 = 15 labels: 4.5 from their mean.
    assert_eq!(Some(4.5), at(3).report.after.step_label_std);
    assert_eq!(Some(0.0), at(3).report.after.step_token_std);
    assert_eq!(Some(2.0), at(3).report.after.microbatch_label_std);
    assert_eq!(None, at(8).report.after.step_label_std);
}

#[test]
fn the_first_sample_of_a_row_loses_its_first_label_when_it_is_not_masked() {
    let settings = config(r#""sequence_len": 5, "mask_first_label": false"#);
    let labels = |starts: Option<&[bool]>, counts: Option<&[i64]>| {
        let plan = plan(&[3, 2], counts, starts, &settings, 0, Split::Train, 1).expect("a plan");
        assert_eq!(1, plan.len());
        plan.report.after.mean_labels
    };

    // Every token supervised: 5 labels, of which the row's first has nothing to predict it.
    assert_eq!(Some(4.0), labels(None, None));
    assert_eq!(Some(4.0), labels(Some(&[true, true]), Some(&[3, 2])));
    assert_eq!(Some(3.0), labels(Some(&[false, false]), Some(&[2, 1])));
}

#[test]
fn labels_of_pretraining_samples_leave_out_each_first_one() {
    // One row of 3 and 2 tokens, all supervised: 2 + 1 enter the loss (C22).
    let plan = planned(&[3, 2], r#""sequence_len": 5"#);

    assert_eq!(Some(3.0), plan.report.after.mean_labels);
}

#[test]
fn costs_of_ranks_are_compared_at_each_microstep() {
    let plan = planned(
        &[8, 4],
        r#""sequence_len": 8, "world_size": 2, "sample_packing_sequentially": true,
           "sample_packing_bin_size": 1"#,
    );
    assert_eq!(Some(8.0 / 6.0), plan.report.after.rank_cost_imbalance);

    let squares = planned(
        &[8, 4],
        r#""sequence_len": 8, "world_size": 2, "sample_packing_sequentially": true,
           "sample_packing_bin_size": 1, "balance_cost": "attention""#,
    );
    assert_eq!(Some(64.0 / 40.0), squares.report.after.rank_cost_imbalance);
}

#[test]
fn the_digest_follows_settings_lengths_and_labels() {
    // Plans that were kept under one name for two settings were mixed up (C84).
    let lengths = [3, 4, 5, 6];
    let base = planned(&lengths, r#""sequence_len": 8"#).report;
    let other = |settings| planned(&lengths, settings).report;

    assert_eq!(base.digest, other(r#""sequence_len": 8"#).digest);
    for settings in [
        r#""sequence_len": 16"#,
        r#""sequence_len": 8, "pad_to_multiple_of": 8"#,
        r#""sequence_len": 8, "seed": 1"#,
    ] {
        assert_ne!(base.digest, other(settings).digest, "{settings}");
        assert_ne!(base.inputs.settings, other(settings).inputs.settings);
        assert_eq!(base.inputs.lengths, other(settings).inputs.lengths);
    }
    let longer = planned(&[3, 4, 5, 7], r#""sequence_len": 8"#).report;
    assert_ne!(base.inputs.lengths, longer.inputs.lengths);
    assert_eq!(base.inputs.settings, longer.inputs.settings);
}
