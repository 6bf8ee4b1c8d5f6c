//! Exact masks.

use multipack::batch::{MaskDtype, MaskSlice, block_mask, mask_len};

#[track_caller]
fn bools(ids: &[i32], rows: usize, causal: bool, window: Option<i64>) -> Vec<u8> {
    let len = ids.len() / rows;
    let mut mask = vec![7; mask_len(rows, len, MaskDtype::Bool).unwrap()];
    block_mask(
        ids,
        rows,
        len,
        causal,
        window,
        MaskSlice::Bool(&mut mask),
        1,
    )
    .unwrap();
    mask
}

#[rustfmt::skip]
#[test]
fn two_samples_and_a_tail() {
    assert_eq!(
        [
            1, 0, 0, 0, 0, 0, 0,
            1, 1, 0, 0, 0, 0, 0,
            1, 1, 1, 0, 0, 0, 0,
            0, 0, 0, 1, 0, 0, 0,
            0, 0, 0, 1, 1, 0, 0,
            0, 0, 0, 0, 0, 1, 0,
            0, 0, 0, 0, 0, 1, 1,
        ],
        *bools(&[1, 1, 1, 2, 2, 0, 0], 1, true, None)
    );
    assert_eq!(
        [
            1, 1, 1, 0, 0, 0, 0,
            1, 1, 1, 0, 0, 0, 0,
            1, 1, 1, 0, 0, 0, 0,
            0, 0, 0, 1, 1, 0, 0,
            0, 0, 0, 1, 1, 0, 0,
            0, 0, 0, 0, 0, 1, 1,
            0, 0, 0, 0, 0, 1, 1,
        ],
        *bools(&[1, 1, 1, 2, 2, 0, 0], 1, false, None)
    );
}

#[rustfmt::skip]
#[test]
fn a_window_counts_the_query_itself() {
    assert_eq!(
        [
            1, 0, 0, 0,
            1, 1, 0, 0,
            0, 1, 1, 0,
            0, 0, 1, 1,
        ],
        *bools(&[1; 4], 1, true, Some(2))
    );
    assert_eq!(
        [
            1, 1, 0, 0,
            1, 1, 1, 0,
            0, 1, 1, 1,
            0, 0, 1, 1,
        ],
        *bools(&[1; 4], 1, false, Some(2))
    );
}

#[test]
fn a_window_wider_than_the_row_is_none() {
    let ids = [1, 1, 1, 2, 2, 0];
    for window in [6, i64::MAX] {
        for causal in [true, false] {
            assert_eq!(
                bools(&ids, 1, causal, None),
                bools(&ids, 1, causal, Some(window))
            );
        }
    }
}

#[rustfmt::skip]
#[test]
fn padding_inside_slots_is_one_with_the_tail() {
    assert_eq!(
        [
            1, 0, 0, 0, 0,
            0, 1, 0, 0, 0,
            0, 0, 1, 0, 0,
            0, 1, 0, 1, 0,
            0, 1, 0, 1, 1,
        ],
        *bools(&[1, 0, 2, 0, 0], 1, true, None)
    );
}

#[test]
fn rows_do_not_see_one_another() {
    assert_eq!(
        [1, 1, 1, 1, 1, 0, 0, 1],
        *bools(&[1, 1, 1, 2], 2, false, None)
    );
}

#[test]
fn additive_masks_hold_zero_and_the_smallest_finite_number() {
    // >>> [torch.finfo(d).min for d in (torch.float32, torch.bfloat16, torch.float16)]
    // [-3.4028234663852886e+38, -3.3895313892515355e+38, -65504.0]
    // >>> [torch.tensor(torch.finfo(d).min, dtype=d).view(torch.uint16).item()
    // ...  for d in (torch.bfloat16, torch.float16)]
    // [65407, 64511]
    let ids = [1, 1, 2];
    let allowed = bools(&ids, 1, true, None);

    let mut single = [7.0; 9];
    block_mask(&ids, 1, 3, true, None, MaskSlice::Float32(&mut single), 1).unwrap();
    let expected = allowed
        .iter()
        .map(|&a| if a == 1 { 0.0 } else { -3.4028235e38 });
    assert_eq!(expected.collect::<Vec<f32>>(), single);
    assert!(
        single.iter().all(|v| !v.is_sign_negative() || *v != 0.0),
        "no -0"
    );

    let mut half = [7; 9];
    block_mask(&ids, 1, 3, true, None, MaskSlice::BFloat16(&mut half), 1).unwrap();
    let expected = allowed.iter().map(|&a| if a == 1 { 0 } else { 65407 });
    assert_eq!(expected.collect::<Vec<u16>>(), half);

    block_mask(&ids, 1, 3, true, None, MaskSlice::Float16(&mut half), 1).unwrap();
    let expected = allowed.iter().map(|&a| if a == 1 { 0 } else { 64511 });
    assert_eq!(expected.collect::<Vec<u16>>(), half);
}

#[test]
fn nothing_has_an_empty_mask() {
    assert_eq!(Ok(0), mask_len(0, 5, MaskDtype::Bool));
    assert_eq!(Ok(0), mask_len(3, 0, MaskDtype::Bool));
    block_mask::<i32>(&[], 0, 5, true, None, MaskSlice::Bool(&mut []), 2).unwrap();
    block_mask::<i32>(&[], 3, 0, true, None, MaskSlice::Bool(&mut []), 2).unwrap();
}

#[test]
fn sizes_are_counted_in_64_bits() {
    // 46341² is the first square above 2³¹ − 1.
    assert_eq!(Ok(2_147_488_281), mask_len(1, 46_341, MaskDtype::Bool));
}
