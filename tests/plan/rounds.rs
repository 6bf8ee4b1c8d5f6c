//! What fills no round of all ranks, and evaluations, which leave nothing out.

use crate::{config, planned, refused, rows};
use multipack::{ErrorKind, Split, plan};

#[test]
fn rows_that_fill_no_round_are_left_out_others_each_epoch() {
    let settings = config(r#""sequence_len": 5, "world_size": 4"#);
    let mut used = [false; 10];
    for epoch in 0..20 {
        let plan = plan(&[5; 10], None, None, &settings, epoch, Split::Train, 1).expect("a plan");

        assert_eq!((2, 2), (plan.len(), plan.report.unused_rows));
        assert_eq!(8, plan.index.len());
        plan.index.iter().for_each(|&i| used[i as usize] = true);
    }
    assert_eq!([true; 10], used);
}

#[test]
fn repeats_fill_a_round_and_are_marked() {
    // Fillers that were counted as left over were trained on again (C29).
    let plan = planned(
        &[5; 5],
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "fill""#,
    );

    assert_eq!((2, 3), (plan.len(), plan.report.repeated_rows));
    assert_eq!(3, plan.report.repeated_samples);
    let mut first: Vec<u32> = plan.index[..5].to_vec();
    first.sort_unstable();
    assert_eq!(vec![0, 1, 2, 3, 4], first);
    assert_eq!(plan.index[..3], plan.index[5..]);
    // The repeats bring neither tokens nor labels, but take up space.
    assert_eq!(Some(25.0 / 40.0), plan.report.after.efficiency);
}

#[test]
fn the_fullest_rows_are_split_until_a_round_is_full() {
    let plan = planned(
        &[2, 2, 3, 3, 1],
        r#""sequence_len": 10, "world_size": 4, "incomplete_batches": "split""#,
    );

    // 10 + 1 tokens in two rows; of the full one two splits make three.
    assert_eq!(4, rows(&plan).len());
    assert_eq!(5, plan.index.len());
    assert_eq!(0, plan.report.repeated_samples + plan.report.unused_samples);
    refused(
        &[5; 3],
        None,
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "split""#,
        ErrorKind::Value,
        "3 samples cannot be split over 4 rows, the next multiple of the 4 rows of a round of all \
         ranks; use fewer ranks or a smaller micro_batch_size, or set incomplete_batches to drop or \
         fill",
    );
}

#[test]
fn splitting_keeps_the_order_of_sequential_packing() {
    let plan = planned(
        &[2; 6],
        r#""sequence_len": 4, "world_size": 2, "sample_packing_sequentially": true,
           "incomplete_batches": "split""#,
    );

    assert_eq!(vec![0, 1, 2, 3, 4, 5], plan.index);
    assert_eq!(4, plan.row_offsets.len() - 1);
}

#[test]
fn fewer_microbatches_than_ranks_are_an_error_with_both_numbers() {
    // A rank without work hung or crashed the job (C14).
    refused(
        &[5; 3],
        None,
        r#""sequence_len": 5, "world_size": 4"#,
        ErrorKind::Value,
        "3 complete microbatches for 4 ranks: at least one each is needed; lower micro_batch_size or sequence_len, \
         use fewer ranks, or set incomplete_batches to fill",
    );
}

#[test]
fn one_rank_without_a_complete_microbatch_has_an_empty_plan_and_a_warning() {
    // Reading the last batch after dropping it crashed (C16).
    let settings = r#""sequence_len": 10, "micro_batch_size": 2, "multipack_real_batches": true"#;
    let full = planned(&[9; 5], settings);

    assert_eq!((2, 1), (full.len(), full.report.unused_rows));
    assert_eq!(
        (4, Some(0.9)),
        (full.report.after.rows, full.report.after.efficiency)
    );
    let lone = planned(&[9], settings);
    assert!(lone.is_empty());
    assert_eq!(None, lone.report.after.efficiency);
    assert_eq!(
        vec![
            "no complete microbatch, so the plan is empty: 1 row, but a microbatch needs 2; incomplete_batches: \
             fill or split keeps them"
        ],
        lone.report.warnings
    );
    let unpacked = planned(
        &[9],
        r#""sequence_len": 10, "micro_batch_size": 2, "sample_packing": false"#,
    );
    assert_eq!(
        vec![
            "no complete microbatch, so the plan is empty: 1 sample, but a microbatch needs 2; incomplete_batches: \
             fill or split keeps them"
        ],
        unpacked.report.warnings
    );
}

#[test]
fn an_evaluation_smaller_than_a_row_is_one_batch_on_every_rank() {
    // An estimated length came out as 0 for it (C15).
    for world_size in [1, 2] {
        let settings = config(&format!(
            r#""sequence_len": 64, "world_size": {world_size}"#
        ));
        let plan = plan(&[3, 3], None, None, &settings, 7, Split::Eval, 1).expect("a plan");

        assert_eq!(1, plan.len());
        assert_eq!(world_size - 1, plan.report.repeated_rows);
        assert_eq!(1, plan.report.gradient_accumulation_steps);
    }
}

#[test]
fn evaluation_has_its_own_batch_size_and_no_epochs() {
    let settings = config(
        r#""sequence_len": 8, "micro_batch_size": 4, "eval_batch_size": 2, "incomplete_batches": "drop""#,
    );
    let at = |epoch| plan(&[8; 8], None, None, &settings, epoch, Split::Eval, 1).expect("a plan");

    assert_eq!(4, at(0).len());
    assert_eq!(at(0).index, at(5).index);
    assert_eq!(at(0).report.digest, at(5).report.digest);
}

#[test]
fn fixed_numbers_of_samples() {
    let settings = r#""sequence_len": 8, "micro_batch_size": 4, "sample_packing": false"#;
    for incomplete in ["drop", "split", "fill"] {
        let plan = planned(
            &[1, 2, 3, 4, 5, 6, 7, 8, 1, 2],
            &format!(r#"{settings}, "incomplete_batches": "{incomplete}""#),
        );
        let sizes: Vec<usize> = (0..plan.row_offsets.len() - 1)
            .map(|row| plan.row(row).len())
            .collect();

        match incomplete {
            "drop" => assert_eq!((vec![4, 4], 2), (sizes, plan.report.unused_samples)),
            "split" => assert_eq!((vec![4, 4, 2], 0), (sizes, plan.report.repeated_samples)),
            _ => assert_eq!((vec![4, 4, 4], 2), (sizes, plan.report.repeated_samples)),
        }
    }
}
