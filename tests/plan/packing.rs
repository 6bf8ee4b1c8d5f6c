//! How rows are packed: layouts, strategies and limits.

use crate::{planned, rows};

#[test]
fn exact_fits_and_the_last_sample_are_placed() {
    // An exclusive end that stopped one short lost the last sample of every epoch (C07).
    let all: Vec<u32> = (0..7).collect();

    assert_eq!(vec![all], rows(&planned(&[2; 7], r#""sequence_len": 50"#)));
    assert_eq!(vec![vec![0]], rows(&planned(&[4], r#""sequence_len": 4"#)));
}

#[test]
fn the_layout_decides_the_capacity() {
    // A capacity of one sequence whatever the micro batch size went unnoticed (C12).
    let settings = r#""sequence_len": 8, "micro_batch_size": 4"#;
    let one_row = planned(&[8; 8], settings);
    let real_rows = planned(
        &[8; 8],
        &format!(r#"{settings}, "multipack_real_batches": true"#),
    );

    assert_eq!((2, 2), (one_row.len(), one_row.row_offsets.len() - 1));
    assert_eq!((2, 8), (real_rows.len(), real_rows.row_offsets.len() - 1));
    assert_eq!(vec![0, 4, 8], real_rows.batch_offsets);
}

#[test]
fn sequential_packing_keeps_the_order() {
    let plan = planned(
        &[5, 2, 3, 4, 8],
        r#""sequence_len": 8, "sample_packing_sequentially": true"#,
    );

    assert_eq!(vec![0, 1, 2, 3, 4], plan.index);
    assert_eq!(vec![0, 2, 4, 5], plan.row_offsets);
}

#[test]
fn groups_are_packed_alone() {
    let settings = r#""sequence_len": 8, "sample_packing_group_size": 3"#;
    for algorithm in ["best_fit_decreasing", "tight", "first_fit", "next_fit"] {
        let plan = planned(
            &[4; 7],
            &format!(r#"{settings}, "sample_packing_algorithm": "{algorithm}""#),
        );

        // Three samples of 4 make two rows, three more too, the last one a row of its own.
        assert_eq!(5, rows(&plan).len(), "{algorithm}");
    }
}

#[test]
fn a_limit_of_samples_per_row_holds() {
    let plan = planned(
        &[1; 10],
        r#""sequence_len": 8, "sample_packing_bin_size": 3"#,
    );

    assert_eq!(4, rows(&plan).len());
    assert!(rows(&plan).iter().all(|row| row.len() <= 3));
}

#[test]
fn aligned_samples_take_whole_slots() {
    let settings = r#""sequence_len": 8, "align_samples_to": 4"#;

    // 5 takes 8, 3 takes 4: two rows, although 5 + 3 = 8.
    assert_eq!(vec![vec![0], vec![1]], rows(&planned(&[5, 3], settings)));
    assert_eq!(vec![vec![0, 1]], rows(&planned(&[4, 3], settings)));
}

#[test]
fn samples_above_half_the_capacity_are_planned_in_no_time() {
    // First fit over every open row took minutes to hours on such data (C10); here the bench shows
    // the time.
    for algorithm in ["best_fit_decreasing", "tight", "first_fit", "next_fit"] {
        let plan = planned(
            &vec![6; 100_000],
            &format!(r#""sequence_len": 10, "sample_packing_algorithm": "{algorithm}""#),
        );

        assert_eq!(100_000, plan.len());
    }
}

#[test]
fn totals_above_31_bits_are_exact() {
    let plan = planned(&vec![8192; 300_000], r#""sequence_len": 8192"#);

    assert_eq!(300_000, plan.len());
    assert_eq!(Some(1.0), plan.report.after.efficiency);
    assert_eq!(300_000, plan.report.after.lower_bound);
}
