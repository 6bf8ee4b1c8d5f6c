//! One microbatch out of the arrays of a plan.

use crate::planned;
use multipack::{Error, ErrorKind, plan::microbatch};

#[test]
fn a_microbatch_is_found_by_rank_and_number() {
    let plan = planned(
        &[5; 8],
        r#""sequence_len": 5, "world_size": 2, "micro_batch_size": 2, "multipack_real_batches": true"#,
    );
    let wide = |values: &[u32]| {
        values
            .iter()
            .map(|&value| value.into())
            .collect::<Vec<i64>>()
    };
    let index = wide(&plan.index);
    let (rows, batches) = (wide(&plan.row_offsets), wide(&plan.batch_offsets));
    let at = |rank, k| microbatch(&index, &rows, &batches, 2, rank, k);

    let (samples, offsets) = at(1, 1).expect("the last microbatch");
    assert_eq!(index[6..], samples);
    assert_eq!(vec![0, 1, 2], offsets);
    for (rank, k, text) in [
        (2, 0, "rank is 2, but must be from 0 to 1"),
        (-1, 0, "rank is -1, but must be from 0 to 1"),
        (0, 2, "k is 2, but must be from 0 to 1"),
    ] {
        let error = at(rank, k).expect_err("must be refused");
        assert_eq!(text, error.to_string());
        assert_eq!(ErrorKind::Index, error.kind());
    }
}

#[test]
fn arrays_that_are_no_plan_are_refused() {
    let broken = |index: &[i64], rows: &[i64], batches: &[i64], world| {
        let error = microbatch(index, rows, batches, world, 0, 0).expect_err("must be refused");
        assert!(matches!(error, Error::BrokenPlan { .. }), "{error}");
    };

    broken(&[0], &[0, 1], &[0, 1], 0);
    broken(&[0], &[0, 1], &[], 1);
    broken(&[0], &[0, 1], &[0, 1, 1], 3);
    broken(&[0], &[0, 2], &[0, 1], 1);
    broken(&[0], &[0, 1], &[0, 2], 1);
    broken(&[0], &[1, 0], &[0, 1], 1);
    broken(&[0], &[0, 1], &[-1, 1], 1);
}
