//! Exact borders.

use multipack::batch::boundaries;

#[test]
fn a_segment_begins_where_positions_do_not_go_on() {
    assert_eq!([0, 3, 5], *boundaries(&[0, 1, 2, 0, 1], 1, 5).unwrap());
    assert_eq!([0, 2, 4], *boundaries(&[3, 4, 6, 7], 1, 4).unwrap());
}

#[test]
fn a_segment_begins_with_each_row() {
    assert_eq!(
        [0, 3, 4, 6],
        *boundaries(&[0, 1, 2, 0, 0, 1], 2, 3).unwrap()
    );
    // The second row goes on from the first by chance.
    assert_eq!([0, 2, 4], *boundaries(&[0, 1, 2, 3], 2, 2).unwrap());
}

#[test]
fn the_first_position_may_be_any() {
    assert_eq!([0, 3, 5], *boundaries(&[2, 3, 4, 2, 3], 1, 5).unwrap());
    let (least, most) = (i64::MIN, i64::MAX);
    assert_eq!(
        [0, 1, 3],
        *boundaries(&[most, least, least + 1], 1, 3).unwrap()
    );
}

#[test]
fn a_counting_tail_is_one_segment_and_zeros_are_many() {
    let row = [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    assert_eq!([0, 3, 5, 16], *boundaries(&row, 1, 16).unwrap());
    assert_eq!([0, 2, 3, 4], *boundaries(&[0, 1, 0, 0], 1, 4).unwrap());
}

#[test]
fn nothing_has_no_segment() {
    assert_eq!([0], *boundaries(&[], 0, 3).unwrap());
    assert_eq!([0], *boundaries(&[], 3, 0).unwrap());
}
