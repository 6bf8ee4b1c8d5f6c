//! Which samples are kept, dropped or cut, and what is said of it.

use crate::{none, plan_with_labels, planned, refused, rows};
use multipack::ErrorKind;

#[test]
fn an_over_long_sample_is_dropped_whole_and_reported() {
    // A sampler that kept what its collator threw away ended in an empty batch (case C02).
    let plan = planned(&[6, 11, 2], r#""sequence_len": 8"#);

    assert_eq!(vec![vec![0, 2]], rows(&plan));
    assert_eq!(1, plan.report.dropped.over_long.count);
    assert_eq!(Some(1), plan.report.dropped.over_long.first);
    assert_eq!(Some(11), plan.report.dropped.over_long.longest);
    assert_eq!(2, plan.report.retained);
    assert_eq!(
        vec!["of 3 samples 1 dropped as longer than sequence_len 8 (first: 1, longest: 11 tokens)"],
        plan.report.warnings
    );
}

#[test]
fn the_other_samples_survive_complete() {
    // Cutting every sample to the capacity lost most tokens of a set of long ones (C03).
    let plan = planned(&[5, 2, 3, 1], r#""sequence_len": 4"#);

    assert_eq!(vec![vec![1], vec![2, 3]], rows(&plan));
}

#[test]
fn several_over_long_samples_give_one_warning() {
    let plan = planned(&[5, 9, 9], r#""sequence_len": 8"#);

    assert_eq!(1, plan.report.retained);
    assert_eq!(2, plan.report.dropped.over_long.count);
    assert_eq!(1, plan.report.warnings.len());
}

#[test]
fn over_long_samples_can_be_cut_or_refused() {
    let cut = planned(
        &[6, 11, 2],
        r#""sequence_len": 8, "excess_length_strategy": "truncate""#,
    );

    assert_eq!(vec![vec![0, 2], vec![1]], rows(&cut));
    assert_eq!(1, cut.report.truncated.count);
    assert_eq!(
        vec!["of 3 samples 1 cut to sequence_len 8 (first: 1, longest: 11 tokens)"],
        cut.report.warnings
    );
    refused(
        &[6, 11, 2],
        None,
        r#""sequence_len": 8, "excess_length_strategy": "raise""#,
        ErrorKind::Value,
        "sample 1 has 11 tokens, more than sequence_len 8; raise sequence_len, or set excess_length_strategy to \
         drop or truncate",
    );
}

#[test]
fn nothing_but_over_long_samples_ends_at_once() {
    // An allocator that waited for a full row never returned (C01).
    for (lengths, expected) in [
        (vec![3], vec![vec![0]]),
        (vec![], none()),
        (vec![9], none()),
    ] {
        let plan = planned(&lengths, r#""sequence_len": 8"#);

        assert_eq!(expected, rows(&plan));
        assert_eq!(expected.is_empty(), plan.is_empty());
        assert_eq!(usize::from(expected.is_empty()), plan.report.warnings.len());
    }
    assert_eq!(
        vec![
            "no sample is retained, so the plan is empty: of 1 samples 1 dropped as longer than sequence_len 8 \
             (first: 0, longest: 9 tokens)"
        ],
        planned(&[9], r#""sequence_len": 8"#).report.warnings
    );
}

#[test]
fn empty_samples_are_never_placed() {
    // Reading the first token of a row that tokenised to nothing crashed (C13).
    let plan = planned(&[0, 2, 0], r#""sequence_len": 8"#);

    assert_eq!(vec![vec![1]], rows(&plan));
    assert_eq!(2, plan.report.dropped.too_short.count);
    let empty = planned(&[0, 0], r#""sequence_len": 8"#);
    assert!(empty.is_empty());
    assert_eq!(None, empty.report.after.efficiency);
}

#[test]
fn short_and_unlabelled_samples_have_policies() {
    let plan = planned(&[1, 2, 3], r#""sequence_len": 8, "min_sample_len": 3"#);
    assert_eq!(vec![vec![2]], rows(&plan));

    let labelled = |settings: &str| plan_with_labels(&[4, 4, 4], &[0, 3, 0], settings);
    assert_eq!(vec![vec![1]], rows(&labelled(r#""sequence_len": 4"#)));
    assert_eq!(
        2,
        labelled(r#""sequence_len": 4"#)
            .report
            .dropped
            .unlabelled
            .count
    );
    assert_eq!(
        3,
        labelled(r#""sequence_len": 4, "drop_unlabelled": false"#).len()
    );
}

#[test]
fn a_data_set_without_labels_says_so() {
    // Training on it 'succeeded' at loss 0 elsewhere (C25).
    let plan = plan_with_labels(&[4; 10], &[0; 10], r#""sequence_len": 8"#);

    assert!(plan.is_empty());
    assert_eq!(
        vec![
            "no sample is retained, so the plan is empty: of 10 samples 10 dropped as having no supervised token \
             (first: 0, longest: 4 tokens)"
        ],
        plan.report.warnings
    );
}
