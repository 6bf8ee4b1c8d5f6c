//! Batches of any offsets, rows and options, against the twin of the tests that lays them out token
//! by token; and what is wrong with them is an error. Overflow checks are on.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use multipack::batch::{BatchSlices, Layout, PaddedTail};

#[path = "../../tests/support/batch.rs"]
#[allow(dead_code)] // it is the twin of more than batches
mod twin;

/// More tokens than the twin should have to lay out.
const MOST: usize = 1 << 12;

#[derive(Debug)]
struct Case(twin::Request);

impl<'a> Arbitrary<'a> for Case {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        /// Mostly one of these, now and then anything.
        fn number(u: &mut Unstructured<'_>, usual: &[i64]) -> arbitrary::Result<i64> {
            Ok(match u.int_in_range(0..=15)? {
                0 => u.arbitrary()?,
                _ => *u.choose(usual)?,
            })
        }
        let mut offsets = vec![number(u, &[0, 0, 3])?];
        for _ in 0..u.int_in_range(0..=6)? {
            let step = number(u, &[0, 1, 2, 3, 5, 8, 13])?;
            offsets.push(offsets[offsets.len() - 1].wrapping_add(step));
        }
        let samples = offsets.len() as i64 - 1;
        let tokens = offsets[samples as usize].clamp(0, 200) as usize + u.int_in_range(0..=2)?;
        let (mut index, mut row_offsets) = (vec![], vec![0]);
        for _ in 0..u.int_in_range(0..=3)? {
            for _ in 0..u.int_in_range(0..=4)? {
                index.push(number(u, &[0, 1, 2, 3, samples - 1])?);
            }
            row_offsets.push(index.len() as i64);
        }
        let tokens: Vec<i64> = (0..tokens)
            .map(|_| u.arbitrary())
            .collect::<Result<_, _>>()?;
        let labels = match u.arbitrary()? {
            true => Some(tokens.iter().map(|token| token ^ 1).collect()),
            false => None,
        };
        let mut request = twin::Request::of(&[]);
        request.tokens = tokens;
        request.labels = labels;
        request.offsets = offsets;
        request.index = index;
        request.row_offsets = row_offsets;
        request.pad_token_id = u.arbitrary()?;
        request.mask_first_label = u.arbitrary()?;
        let options = &mut request.options;
        options.row_len = number(u, &[0, 0, 16, 64])?;
        options.max_sample_len = number(u, &[0, 0, 1, 3, 8])?;
        options.pad_to_multiple_of = number(u, &[1, 1, 4, 10])?;
        options.align_samples_to = number(u, &[1, 1, 2, 4])?;
        options.position_start = number(u, &[0, 0, 2])?;
        options.padded_tail = *u.choose(&[PaddedTail::Own, PaddedTail::Last, PaddedTail::None])?;
        options.causal = u.ratio(3, 4)?;
        Ok(Case(request))
    }
}

fuzz_target!(|case: Case| {
    let request = &case.0;
    // A tail of billions of tokens in pieces of a few is a list of gigabytes.
    let options = &request.options;
    let longest = options.row_len.max(options.pad_to_multiple_of);
    if (1..longest / MOST as i64).contains(&options.max_sample_len) {
        return;
    }
    let Ok(layout) = Layout::new(
        request.tokens.len(),
        &request.offsets,
        &request.index,
        &request.row_offsets,
        &request.options,
    ) else {
        return;
    };
    let size = layout.rows() * layout.row_len();
    // The twin counts up to the alignment.
    if size > MOST || request.options.align_samples_to > MOST as i64 {
        return;
    }
    let (mut ids, mut labels, mut positions) = (vec![-7; size], vec![-7; size], vec![-7; size]);
    let mut segments = vec![-7; size];
    let out = BatchSlices {
        input_ids: &mut ids,
        labels: &mut labels,
        position_ids: &mut positions,
        segment_ids: &mut segments,
    };
    let (pad, masked) = (request.pad_token_id, request.mask_first_label);
    layout
        .fill(
            &request.tokens,
            request.labels.as_deref(),
            pad,
            masked,
            out,
            1,
        )
        .expect("labels are as many as tokens");
    let expected = twin::collate(request);
    assert_eq!(expected.row_len, layout.row_len());
    assert_eq!(expected.input_ids, ids);
    assert_eq!(expected.labels, labels);
    assert_eq!(expected.position_ids, positions);
    assert_eq!(expected.segment_ids, segments);
    assert_eq!(expected.cu_seqlens, layout.cu_seqlens());
    assert_eq!(expected.cu_seqlens_padded, layout.cu_seqlens_padded());
    assert_eq!(expected.max_seqlen, layout.max_seqlen());
});
