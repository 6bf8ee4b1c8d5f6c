//! Exact label counts.

use multipack::batch::label_counts;

#[track_caller]
fn counts(
    labels: &[i64],
    offsets: &[i64],
    max_sample_len: i64,
    mask_first_label: bool,
) -> Vec<i64> {
    label_counts(labels, offsets, max_sample_len, mask_first_label, 1)
        .unwrap()
        .0
}

#[test]
fn the_first_label_of_each_sample_does_not_enter_the_loss() {
    assert_eq!([2, 1], *counts(&[1; 5], &[0, 3, 5], 0, true));
    assert_eq!([3, 2], *counts(&[1; 5], &[0, 3, 5], 0, false));
}

#[test]
fn a_first_label_that_is_not_supervised_takes_nothing_away() {
    assert_eq!([4], *counts(&[-100, 2, 3, 4, 5], &[0, 5], 0, true));
}

#[test]
fn whether_a_sample_starts_supervised_is_told_either_way() {
    for mask_first_label in [true, false] {
        let labels = [1, -100, 2];
        let (_, starts) = label_counts(&labels, &[0, 1, 1, 3], 0, mask_first_label, 1).unwrap();
        assert_eq!([true, false, false], *starts);
    }
}

#[test]
fn labels_behind_the_cut_do_not_count() {
    assert_eq!([1, 1], *counts(&[1, 2, 3, 4, -100, 5], &[0, 4, 6], 2, true));
    assert_eq!([0], *counts(&[-100, -100, 3], &[0, 3], 2, true));
}

#[test]
fn unlabelled_and_empty_samples_count_zero() {
    assert_eq!([0, 0], *counts(&[-100, -100], &[0, 2, 2], 0, true));
    assert_eq!([0; 0], *counts(&[], &[0], 0, true));
}

#[test]
fn offsets_may_start_anywhere() {
    assert_eq!([1], *counts(&[1, 1, 1, 1, 1], &[2, 4], 0, true));
}

#[test]
fn int32_labels_count_alike() {
    let (counts, starts) = label_counts(&[1i32, -100, 3], &[0, 3], 0, true, 1).unwrap();
    assert_eq!((vec![1], vec![true]), (counts, starts));
}
