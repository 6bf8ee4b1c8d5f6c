//! Exact batches: the worked examples, and cases that went wrong in other packages.

use multipack::batch::PaddedTail;

use crate::naive::Request;
use crate::{collate, lay_out};

const FIGURE: [usize; 12] = [11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3];

#[test]
fn three_and_two_in_a_row_of_eight() {
    let request = Request::of(&[3, 2]).with(|o| o.row_len = 8);

    let own = collate(&request, 1).unwrap();
    assert_eq!([11, 12, 13, 21, 22, 0, 0, 0], *own.input_ids);
    assert_eq!([-100, 12, 13, -100, 22, -100, -100, -100], *own.labels);
    assert_eq!([0, 1, 2, 0, 1, 0, 1, 2], *own.position_ids);
    assert_eq!([1, 1, 1, 2, 2, 0, 0, 0], *own.segment_ids);
    assert_eq!([0, 3, 5, 8], *own.cu_seqlens);
    assert_eq!([0, 3, 5, 8], *own.cu_seqlens_padded);
    assert_eq!(3, own.max_seqlen);

    let last = collate(
        &request.clone().with(|o| o.padded_tail = PaddedTail::Last),
        1,
    )
    .unwrap();
    assert_eq!([0, 1, 2, 0, 1, 2, 3, 4], *last.position_ids);
    assert_eq!([1, 1, 1, 2, 2, 0, 0, 0], *last.segment_ids);
    assert_eq!([0, 3, 8], *last.cu_seqlens);
    assert_eq!(5, last.max_seqlen);

    let none = collate(&request.with(|o| o.padded_tail = PaddedTail::None), 1).unwrap();
    assert_eq!([0, 1, 2, 0, 1, 0, 1, 2], *none.position_ids);
    assert_eq!([0, 3, 5], *none.cu_seqlens);
    assert_eq!([0, 3, 5], *none.cu_seqlens_padded);
    assert_eq!(3, none.max_seqlen);

    // The tail changes cu_seqlens and positions, nothing else.
    assert_eq!(
        (&own.input_ids, &own.labels),
        (&last.input_ids, &last.labels)
    );
    assert_eq!(
        (&own.input_ids, &own.labels),
        (&none.input_ids, &none.labels)
    );
}

#[test]
fn the_figure_of_twelve_samples_in_sixty_four() {
    let request = Request::of(&FIGURE).with(|o| o.row_len = 64);
    let samples = [0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60];

    let own = lay_out(&request).unwrap();
    assert_eq!([&samples[..], &[63, 64]].concat(), own.cu_seqlens());
    assert_eq!(11, own.max_seqlen());

    let last = lay_out(&request.clone().with(|o| o.padded_tail = PaddedTail::Last)).unwrap();
    assert_eq!([&samples[..], &[64]].concat(), last.cu_seqlens());
    assert_eq!(11, last.max_seqlen());

    let none = lay_out(&request.with(|o| o.padded_tail = PaddedTail::None)).unwrap();
    assert_eq!([&samples[..], &[63]].concat(), none.cu_seqlens());
    assert_eq!(11, none.max_seqlen());
}

#[test]
fn a_long_tail_is_cut_where_a_sample_would_be() {
    let request = Request::of(&[3, 2]).with(|o| (o.row_len, o.max_sample_len) = (16, 4));

    let own = collate(&request, 1).unwrap();
    assert_eq!([0, 3, 5, 9, 13, 16], *own.cu_seqlens);
    assert_eq!(4, own.max_seqlen);
    assert_eq!(
        [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2],
        *own.position_ids
    );

    let last = collate(
        &request.clone().with(|o| o.padded_tail = PaddedTail::Last),
        1,
    )
    .unwrap();
    assert_eq!([0, 3, 7, 11, 15, 16], *last.cu_seqlens);
    assert_eq!(
        [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0],
        *last.position_ids
    );

    let none = collate(&request.with(|o| o.padded_tail = PaddedTail::None), 1).unwrap();
    assert_eq!([0, 3, 5], *none.cu_seqlens);
    assert_eq!(own.position_ids, none.position_ids);
}

#[test]
fn a_full_last_sample_takes_nothing_of_the_tail() {
    let request = Request::of(&[4]).with(|o| {
        (o.row_len, o.max_sample_len, o.padded_tail) = (6, 4, PaddedTail::Last);
    });

    assert_eq!([0, 4, 6], lay_out(&request).unwrap().cu_seqlens());
}

#[test]
fn slots_are_aligned() {
    let request = Request::of(&[5, 7, 3]).with(|o| o.align_samples_to = 4);

    let batch = collate(&request, 1).unwrap();
    assert_eq!(20, batch.row_len);
    assert_eq!([0, 5, 12, 15], *batch.cu_seqlens);
    assert_eq!([0, 8, 16, 20], *batch.cu_seqlens_padded);
    assert_eq!(7, batch.max_seqlen);
    assert_eq!([11, 12, 13, 14, 15, 0, 0, 0, 21, 22], batch.input_ids[..10]);
    assert_eq!(
        [-100, 12, 13, 14, 15, -100, -100, -100, -100, 22],
        batch.labels[..10]
    );
    // Positions go on through the padding of a slot.
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], batch.position_ids[..10]);
    assert_eq!(
        [1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 0],
        batch.segment_ids[..16]
    );
}

#[test]
fn an_aligned_row_has_an_aligned_tail() {
    let request = Request::of(&[5]).with(|o| {
        (o.row_len, o.align_samples_to, o.max_sample_len) = (24, 4, 6);
    });

    // Slots of 4, the largest multiple of the alignment that 6 tokens allow.
    let own = lay_out(&request).unwrap();
    assert_eq!([0, 5, 9, 13, 17, 21], own.cu_seqlens());
    assert_eq!([0, 8, 12, 16, 20, 24], own.cu_seqlens_padded());

    // With the tail in the last sample's segment, the rest of its slot is part of it as well.
    let last = request.with(|o| (o.max_sample_len, o.padded_tail) = (16, PaddedTail::Last));
    let last = lay_out(&last).unwrap();
    assert_eq!([0, 16, 24], last.cu_seqlens());
    assert_eq!([0, 16, 24], last.cu_seqlens_padded());
}

#[test]
fn an_aligned_length_is_not_rounded_further() {
    let request = Request::of(&[16, 17, 1]).with(|o| o.align_samples_to = 16);

    let batch = collate(&request, 1).unwrap();
    assert_eq!([0, 16, 48, 64], *batch.cu_seqlens_padded);
    assert_eq!(26, batch.labels[15], "the last label of a sample of 16");
}

#[test]
fn rounding_the_row_up_lengthens_every_output() {
    let request = Request::of(&[3, 2]).with(|o| o.pad_to_multiple_of = 8);

    let batch = collate(&request, 1).unwrap();
    assert_eq!(8, batch.row_len);
    assert_eq!(collate(&request.with(|o| o.row_len = 8), 1).unwrap(), batch);
}

#[test]
fn a_given_row_length_wins_over_rounding() {
    let request = Request::of(&[3, 2]).with(|o| (o.row_len, o.pad_to_multiple_of) = (10, 8));

    let batch = collate(&request, 1).unwrap();
    assert_eq!(10, batch.row_len);
    assert_eq!([-100; 5], batch.labels[5..]);
}

#[test]
fn rows_with_different_numbers_of_samples() {
    let layout = lay_out(&Request::rows(&[&[2, 2, 2], &[6]])).unwrap();

    assert_eq!((2, 6), (layout.rows(), layout.row_len()));
    assert_eq!([0, 2, 4, 6, 12], layout.cu_seqlens());
    assert_eq!(6, layout.max_seqlen());
}

#[test]
fn every_row_has_its_borders() {
    let batch = collate(&Request::rows(&[&[3, 1], &[2, 2]]), 1).unwrap();

    assert_eq!([0, 3, 4, 6, 8], *batch.cu_seqlens);
    assert_eq!(3, batch.max_seqlen);
    assert_eq!([1, 1, 1, 2, 1, 1, 2, 2], *batch.segment_ids);
}

#[test]
fn every_row_has_its_tail() {
    let request = Request::rows(&[&[3, 1], &[1], &[2]]).with(|o| o.row_len = 5);

    let batch = collate(&request, 1).unwrap();
    assert_eq!([0, 3, 4, 5, 6, 10, 12, 15], *batch.cu_seqlens);
    assert_eq!(
        [0, 1, 2, 0, 0, 0, 0, 1, 2, 3, 0, 1, 0, 1, 2],
        *batch.position_ids
    );
    let last = lay_out(&request.with(|o| o.padded_tail = PaddedTail::Last)).unwrap();
    assert_eq!([0, 3, 5, 10, 15], last.cu_seqlens());
}

#[test]
fn empty_samples_take_no_room() {
    let batch = collate(&Request::of(&[0, 1, 0, 1]), 1).unwrap();

    assert_eq!([0, 1, 2], *batch.cu_seqlens);
    assert_eq!(1, batch.max_seqlen);
    assert_eq!([21, 41], *batch.input_ids);
    assert_eq!([1, 2], *batch.segment_ids);
}

#[test]
fn a_row_of_empty_samples_is_all_tail() {
    let request = Request::of(&[0, 0]).with(|o| o.row_len = 3);

    for tail in [PaddedTail::Own, PaddedTail::Last] {
        let batch = collate(&request.clone().with(|o| o.padded_tail = tail), 1).unwrap();
        assert_eq!([0, 3], *batch.cu_seqlens, "{tail:?}");
        assert_eq!([0, 0, 0], *batch.segment_ids);
        assert_eq!([0, 1, 2], *batch.position_ids);
    }
    let none = lay_out(&request.with(|o| o.padded_tail = PaddedTail::None)).unwrap();
    assert_eq!([0], none.cu_seqlens());
    assert_eq!(0, none.max_seqlen());
}

#[test]
fn nothing_makes_an_empty_batch() {
    let no_rows = collate(&Request::rows(&[]).with(|o| o.row_len = 4), 1).unwrap();
    assert_eq!((0, 4), (no_rows.rows, no_rows.row_len));
    assert_eq!([0], *no_rows.cu_seqlens);

    let no_tokens = collate(&Request::of(&[0]), 1).unwrap();
    assert_eq!((1, 0), (no_tokens.rows, no_tokens.row_len));
    assert_eq!([0], *no_tokens.cu_seqlens);
    assert_eq!(0, no_tokens.max_seqlen);
}

#[test]
fn positions_may_start_elsewhere() {
    let request = Request::of(&[3, 2]).with(|o| (o.row_len, o.position_start) = (7, 2));

    assert_eq!(
        [2, 3, 4, 2, 3, 2, 3],
        *collate(&request, 1).unwrap().position_ids
    );
}

#[test]
fn samples_come_in_any_order_and_again() {
    let mut request = Request::of(&[2, 1, 3]);
    (request.index, request.row_offsets) = (vec![2, 0, 2], vec![0, 3]);

    let batch = collate(&request, 1).unwrap();
    assert_eq!([31, 32, 33, 11, 12, 31, 32, 33], *batch.input_ids);
    assert_eq!([0, 3, 5, 8], *batch.cu_seqlens);
}

#[test]
fn offsets_may_start_anywhere() {
    // A sliced Arrow array keeps the offsets of the whole one.
    let mut request = Request::of(&[2, 1, 3]);
    request.offsets = request.offsets[1..].to_vec();
    (request.index, request.row_offsets) = (vec![0, 1], vec![0, 2]);

    assert_eq!([21, 31, 32, 33], *collate(&request, 1).unwrap().input_ids);
}

#[test]
fn offsets_that_no_sample_uses_are_not_read() {
    let mut request = Request::of(&[2, 3]);
    request.offsets = vec![0, 2, 5, -1, 9, 5];

    assert_eq!([0, 2, 5], lay_out(&request).unwrap().cu_seqlens());
}

#[test]
fn truncated_samples_keep_their_first_tokens() {
    let request = Request::of(&[5, 2]).with(|o| o.max_sample_len = 3);

    let batch = collate(&request, 1).unwrap();
    assert_eq!([11, 12, 13, 21, 22], *batch.input_ids);
    assert_eq!([0, 3, 5], *batch.cu_seqlens);
}

#[test]
fn a_limit_above_every_sample_changes_nothing() {
    let request = Request::of(&[5, 2]);

    let limited = request.clone().with(|o| o.max_sample_len = i64::MAX);
    assert_eq!(collate(&request, 1).unwrap(), collate(&limited, 1).unwrap());
}

#[test]
fn labels_stay_with_their_tokens() {
    // Supervised spans 3..5 of five tokens and 2..4 of four.
    let mut request = Request::of(&[5, 4]);
    request.labels = Some(vec![-100, -100, -100, 14, 15, -100, -100, 23, 24]);

    let labels = collate(&request, 1).unwrap().labels;
    let supervised: Vec<usize> = (0..9).filter(|&i| labels[i] != -100).collect();
    assert_eq!([3, 4, 7, 8], *supervised);
}

#[test]
fn the_first_label_is_kept_on_request() {
    let mut request = Request::of(&[2, 2]);
    assert_eq!([-100, 12, -100, 22], *collate(&request, 1).unwrap().labels);

    request.mask_first_label = false;
    assert_eq!([11, 12, 21, 22], *collate(&request, 1).unwrap().labels);
}

#[test]
fn a_real_token_may_equal_the_pad_id() {
    let mut request = Request::of(&[2]).with(|o| o.row_len = 4);
    (request.tokens, request.pad_token_id) = (vec![5, 2], 2);

    let batch = collate(&request, 1).unwrap();
    assert_eq!([5, 2, 2, 2], *batch.input_ids);
    assert_eq!([-100, 2, -100, -100], *batch.labels);
}

#[test]
fn int32_tokens_and_labels_become_int64() {
    let request = Request::of(&[3, 2]).with(|o| o.row_len = 8);
    let wide = collate(&request, 1).unwrap();
    let narrow: Vec<i32> = request.tokens.iter().map(|&t| t as i32).collect();

    let (mut ids, mut labels) = ([-7777; 8], [-7777; 8]);
    let (mut positions, mut segments) = ([-7777; 8], [-7777; 8]);
    let out = multipack::batch::BatchSlices {
        input_ids: &mut ids,
        labels: &mut labels,
        position_ids: &mut positions,
        segment_ids: &mut segments,
    };
    lay_out(&request)
        .unwrap()
        .fill(&narrow, Some(&narrow), 0, true, out, 1)
        .unwrap();
    assert_eq!((&*wide.input_ids, &*wide.labels), (&ids[..], &labels[..]));
    assert_eq!(
        (&*wide.position_ids, &*wide.segment_ids),
        (&positions[..], &segments[..])
    );
}

#[test]
fn values_of_any_size_are_laid_out_like_tokens() {
    let request = Request::rows(&[&[3, 2], &[1]]).with(|o| o.align_samples_to = 2);
    let layout = lay_out(&request).unwrap();

    let mut bytes = [99; 12];
    layout.fill_values(&[1u8, 2, 3, 4, 5, 6], 0, &mut bytes, 1);
    assert_eq!([1, 2, 3, 0, 4, 5, 6, 0, 0, 0, 0, 0], bytes);

    let mut pairs = [[99; 2]; 12];
    let values = [1, 2, 3, 4, 5, 6].map(|v: u64| [v, v + 10]);
    layout.fill_values(&values, [7, 7], &mut pairs, 1);
    assert_eq!(
        [[1, 11], [2, 12], [3, 13], [7, 7], [4, 14], [5, 15]],
        pairs[..6]
    );
}
