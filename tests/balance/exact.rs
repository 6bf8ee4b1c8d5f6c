//! Exact answers on small inputs, most of them a public failure of another program.

use multipack::{Split, plan};

use crate::lengths::SEED;
use crate::{Samples, balanced, batch_labels, chats, config, plan_of};

#[test]
fn samples_of_equal_length_are_dealt_out_evenly() {
    // Rows of 20 hold two samples of 10: 1 + 9 and 1 + 9 labels (case C26).
    let samples = vec![(10, 1), (10, 1), (10, 9), (10, 9)];
    let plan = balanced(&samples, r#""sequence_len": 20"#);

    assert_eq!(vec![10, 10], batch_labels(&plan, &samples));
    assert_eq!(Some(0.0), plan.report.after.microbatch_label_std);
}

#[test]
fn no_row_goes_over_its_capacity_to_even_out_labels() {
    // A partitioner without a cap made the training run out of memory (C17). No exchange fits here.
    let samples = vec![(8, 1), (2, 2), (5, 5), (5, 5)];
    let plan = balanced(&samples, r#""sequence_len": 10"#);
    let mut labels = batch_labels(&plan, &samples);
    labels.sort_unstable();

    assert_eq!(vec![3, 10], labels);
    assert_eq!(0, plan.report.after.padding_tokens);
}

#[test]
fn steps_of_ranks_get_as_many_labels_as_they_can() {
    // One row each for 1, 9, 1, 9 labels: two ranks learn from 10 in each step (C27).
    let samples = vec![(10, 1), (10, 1), (10, 9), (10, 9)];
    let plan = balanced(&samples, r#""sequence_len": 10, "world_size": 2"#);
    let labels = batch_labels(&plan, &samples);

    assert_eq!(10, labels[0] + labels[1]);
    assert_eq!(10, labels[2] + labels[3]);
    assert_eq!(Some(0.0), plan.report.after.step_label_std);
}

#[test]
fn every_rank_gets_as_many_microbatches_as_the_others() {
    // Shares of ⌈n / ranks⌉ left the last rank without any (C19): 11 rows for 4 ranks are 2 each.
    let plan = balanced(
        &vec![(5, 3); 11],
        r#""sequence_len": 5, "world_size": 4, "gradient_accumulation_steps": 2"#,
    );
    assert_eq!((2, 3), (plan.len(), plan.report.unused_rows));

    let filled = balanced(
        &vec![(5, 3); 11],
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "fill""#,
    );
    assert_eq!((3, 1), (filled.len(), filled.report.repeated_rows));
}

#[test]
fn numbers_that_do_not_divide_are_no_reason_to_stop() {
    // A partitioner that wanted groups of equal size stopped the training (C20).
    let samples = chats(10, 8, SEED);
    let plan = balanced(&samples, r#""sequence_len": 8, "world_size": 4"#);
    assert_eq!(4 * plan.len(), plan.batch_offsets.len() - 1);
    assert_eq!(10, plan.index.len() as u64 + plan.report.unused_samples);

    let settings = r#""sequence_len": 8, "world_size": 4, "balance_labels": true"#;
    let too_few = plan_of(&[(4, 2)], settings).expect_err("one row for four ranks");
    assert_eq!(
        "1 complete microbatch for 4 ranks: at least one each is needed; lower micro_batch_size or \
         sequence_len, use fewer ranks, or set incomplete_batches to fill",
        too_few.to_string()
    );
}

#[test]
fn a_microbatch_without_labels_is_made_up_for_in_its_step() {
    // The mean over no labels ruined the weights (C23). One row each: the step has 3 labels.
    let samples = vec![(4, 0), (4, 3)];
    let keep = r#""drop_unlabelled": false, "gradient_accumulation_steps": 2"#;
    let alone = balanced(&samples, &format!(r#""sequence_len": 4, {keep}"#));
    let mut labels = batch_labels(&alone, &samples);
    labels.sort_unstable();
    assert_eq!(vec![0, 3], labels);
    assert_eq!(Some(0.0), alone.report.after.step_label_std);

    // Where both fit into one row, they share it.
    let together = balanced(&samples, &format!(r#""sequence_len": 8, {keep}"#));
    assert_eq!(vec![3], batch_labels(&together, &samples));
}

#[test]
fn samples_without_any_label_do_no_harm() {
    // Training at loss 0 looked like success (C25): left out, the plan says so; kept, all is 0.
    let samples = vec![(4, 0); 10];
    let left_out = balanced(&samples, r#""sequence_len": 8"#);
    assert!(left_out.is_empty());
    assert!(left_out.report.warnings[0].contains("10 dropped as having no supervised token"));

    let kept = balanced(&samples, r#""sequence_len": 8, "drop_unlabelled": false"#);
    assert_eq!(Some(0.0), kept.report.after.microbatch_label_std);
    assert_eq!(Some(0.0), kept.report.after.step_label_std);
    assert_eq!(Some(0.0), kept.report.after.label_std_floor);
}

#[test]
fn an_incomplete_last_step_stays() {
    // Seven microbatches, three in a step (C28): two complete steps, and one microbatch more.
    let samples: Samples = (1..=7).map(|labels| (8, labels)).collect();
    let at = |steps: u32| {
        let settings = format!(r#""sequence_len": 8, "gradient_accumulation_steps": {steps}"#);
        balanced(&samples, &settings)
    };
    let labels = batch_labels(&at(3), &samples);
    assert_eq!(7, labels.len());
    let steps: Vec<i64> = labels[..6]
        .chunks(3)
        .map(|step| step.iter().sum())
        .collect();
    let even = (28 - labels[6]).rem_euclid(2);
    assert_eq!(even, (steps[0] - steps[1]).abs(), "{labels:?}");

    assert_eq!((7, None), (at(8).len(), at(8).report.after.step_label_std));
}

#[test]
fn repeats_bring_no_labels_and_stay_marked() {
    // Five rows for four ranks (C29): three repeats, none of them twice, and every row once.
    let samples: Samples = (1..=5).map(|labels| (5, labels)).collect();
    let plan = balanced(
        &samples,
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "fill""#,
    );
    assert_eq!((2, 3), (plan.len(), plan.report.repeated_samples));
    let mut once = plan.index[..5].to_vec();
    once.sort_unstable();
    assert_eq!(vec![0, 1, 2, 3, 4], once);
    let mut repeats = plan.index[5..].to_vec();
    repeats.sort_unstable();
    repeats.dedup();
    assert_eq!(3, repeats.len());
    assert_eq!(Some(15.0 / 8.0), plan.report.after.mean_labels);
}

#[test]
fn balancing_without_label_counts_is_not_silent() {
    let warnings = |settings: &str| {
        let config = config(&format!(r#""sequence_len": 8, {settings}"#));
        let plan = plan(&[5, 3, 6], None, None, &config, 0, Split::Train, 1);
        plan.expect("a plan").report.warnings
    };

    assert_eq!(
        vec![
            "balance_labels has no label counts to go by, so every token counts as supervised; give \
             label_counts where prompts are masked"
        ],
        warnings(r#""balance_labels": true"#)
    );
    assert!(warnings(r#""balance_labels": false"#).is_empty());
}

#[test]
fn evaluation_is_never_balanced() {
    let samples = chats(500, 256, SEED);
    let (lengths, labels): (Vec<i64>, Vec<i64>) = samples.iter().copied().unzip();
    let index = |settings: &str| {
        let config = config(settings);
        let plan = plan(&lengths, Some(&labels), None, &config, 0, Split::Eval, 1);
        plan.expect("a plan").index
    };

    assert_eq!(
        index(r#""sequence_len": 256"#),
        index(r#""sequence_len": 256, "balance_labels": true"#)
    );
}
