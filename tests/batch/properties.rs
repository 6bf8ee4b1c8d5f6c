//! Random microbatches against the dull twins, for 1, 2 and 8 threads.
//!
//! Each case has a seed of its own, which a failure prints. `MULTIPACK_CASES` sets how many are
//! run.

use multipack::batch::{
    LayoutOptions, MaskDtype, MaskSlice, PaddedTail, block_mask, boundaries, label_counts, mask_len,
};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use crate::naive::{self, Request};
use crate::{collate, lay_out};

/// Runs `check` on many seeds.
fn cases(check: impl Fn(&mut Xoshiro256PlusPlus)) {
    let count = std::env::var("MULTIPACK_CASES").map_or(2000, |count| count.parse().unwrap());
    for seed in 0..count {
        let seed: u64 = seed;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            check(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
        }));
        if let Err(panic) = outcome {
            eprintln!("the case of seed {seed} failed");
            std::panic::resume_unwind(panic);
        }
    }
}

/// A valid request: up to 12 samples of up to 9 tokens, some empty, in up to 4 rows, with every
/// option at work.
fn request(rng: &mut Xoshiro256PlusPlus) -> Request {
    let first = rng.random_range(0..4);
    let mut offsets = vec![first];
    for _ in 0..rng.random_range(1..=12) {
        let length = rng.random_range(-2..=9).max(0);
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    let samples = offsets.len() as i64 - 1;
    let size = offsets[offsets.len() - 1] + rng.random_range(0..4);
    let values =
        |rng: &mut Xoshiro256PlusPlus| (0..size).map(|_| rng.random_range(-100..=9)).collect();
    let mut index = vec![];
    let mut row_offsets = vec![0];
    for _ in 0..rng.random_range(0..=4) {
        for _ in 0..rng.random_range(1..=4) {
            index.push(rng.random_range(0..samples));
        }
        row_offsets.push(index.len() as i64);
    }
    let one_row = row_offsets.len() <= 2;
    let tails = [PaddedTail::Own, PaddedTail::Last, PaddedTail::None];
    let mut request = Request {
        tokens: values(rng),
        labels: if rng.random() {
            Some(values(rng))
        } else {
            None
        },
        offsets,
        index,
        row_offsets,
        options: LayoutOptions {
            row_len: 0,
            max_sample_len: rng.random_range(-3i64..=8).max(0),
            pad_to_multiple_of: rng.random_range(1..=8),
            align_samples_to: rng.random_range(1..=5),
            padded_tail: tails[rng.random_range(0..if one_row { 3 } else { 2 })],
            position_start: rng.random_range(0..=2),
            causal: true,
        },
        pad_token_id: rng.random_range(-1..=3),
        mask_first_label: rng.random(),
    };
    if rng.random() {
        let longest = naive::collate(&request).row_len;
        request.options.row_len = (longest + rng.random_range(0..30)) as i64;
    }
    request
}

#[test]
fn batches_equal_those_made_token_by_token() {
    cases(|rng| {
        let request = request(rng);

        assert_eq!(
            naive::collate(&request),
            collate(&request, 1).unwrap(),
            "{request:?}"
        );
    });
}

#[test]
fn what_every_batch_keeps() {
    cases(|rng| {
        let request = request(rng);
        let batch = collate(&request, 1).unwrap();
        let options = &request.options;

        assert_eq!(0, batch.cu_seqlens[0]);
        assert!(batch.cu_seqlens.is_sorted_by(|a, b| a < b), "{batch:?}");
        let size = (batch.rows * batch.row_len) as i32;
        let last = *batch.cu_seqlens_padded.last().unwrap();
        assert!(last == size || options.padded_tail == PaddedTail::None);
        if options.max_sample_len > 0 {
            assert!(i64::from(batch.max_seqlen) <= options.max_sample_len);
        }
        if options.align_samples_to == 1 {
            assert_eq!(batch.cu_seqlens, batch.cu_seqlens_padded);
        }
        // A reader of positions alone finds the same segments. A batch whose tail is left out has
        // more of them at its end.
        if size > 0 {
            let found = boundaries(&batch.position_ids, batch.rows, batch.row_len).unwrap();
            assert_eq!(
                batch.cu_seqlens_padded,
                found[..batch.cu_seqlens_padded.len()]
            );
        }
    });
}

#[test]
fn values_go_where_the_tokens_go() {
    cases(|rng| {
        let request = request(rng);
        let layout = lay_out(&request).unwrap();
        let expected = naive::collate(&request).input_ids;

        let mut out = vec![7777; expected.len()];
        layout.fill_values(&request.tokens, request.pad_token_id, &mut out, 1);
        assert_eq!(expected, out, "{request:?}");
    });
}

#[test]
fn masks_equal_those_made_pair_by_pair() {
    cases(|rng| {
        let (rows, len) = (rng.random_range(1..=3), rng.random_range(1..=12));
        // Few ids, so that they often return after others.
        let ids: Vec<i32> = (0..rows * len).map(|_| rng.random_range(-1..=2)).collect();
        let causal = rng.random();
        let window = if rng.random() {
            Some(rng.random_range(1..=14))
        } else {
            None
        };

        let expected = naive::block_mask(&ids, len, causal, window);
        let mut mask = vec![7; mask_len(rows, len, MaskDtype::Bool).unwrap()];
        let out = MaskSlice::Bool(&mut mask);
        block_mask(&ids, rows, len, causal, window.map(|w| w as i64), out, 1).unwrap();
        assert_eq!(
            expected
                .iter()
                .map(|&may| u8::from(may))
                .collect::<Vec<_>>(),
            mask,
            "{ids:?} in rows of {len}, causal {causal}, window {window:?}"
        );
        for query in 0..rows * len {
            assert_eq!(1, mask[query * len + query % len], "a query sees itself");
        }
    });
}

#[test]
fn boundaries_equal_those_found_one_by_one() {
    cases(|rng| {
        let (rows, len) = (rng.random_range(1..=4), rng.random_range(1..=9));
        let positions: Vec<i64> = (0..rows * len).map(|_| rng.random_range(0..=3)).collect();

        let expected = naive::boundaries(&positions, len);
        assert_eq!(
            expected,
            boundaries(&positions, rows, len).unwrap(),
            "{positions:?}"
        );
    });
}

#[test]
fn label_counts_equal_those_counted_one_by_one() {
    cases(|rng| {
        let request = request(rng);
        let labels = request.labels.unwrap_or(request.tokens);
        let (most, first) = (request.options.max_sample_len, request.mask_first_label);

        let expected = naive::label_counts(&labels, &request.offsets, most as usize, first);
        assert_eq!(
            expected,
            label_counts(&labels, &request.offsets, most, first, 1).unwrap()
        );
    });
}

/// Large enough for threads: 400 samples of up to 999 tokens, in 7 rows.
fn large(rng: &mut Xoshiro256PlusPlus) -> Request {
    let mut offsets = vec![0];
    for _ in 0..400 {
        offsets.push(offsets[offsets.len() - 1] + rng.random_range(0..1000));
    }
    let size = offsets[400];
    Request {
        tokens: (0..size).map(|_| rng.random_range(-100..50_000)).collect(),
        labels: Some((0..size).map(|_| rng.random_range(-101..-98)).collect()),
        index: (0..400).rev().collect(),
        row_offsets: vec![0, 1, 100, 101, 200, 300, 399, 400],
        offsets,
        options: LayoutOptions {
            max_sample_len: 777,
            align_samples_to: 16,
            padded_tail: PaddedTail::Last,
            ..Default::default()
        },
        pad_token_id: 9,
        mask_first_label: true,
    }
}

#[test]
fn large_batches_are_the_same_for_any_number_of_threads() {
    let request = large(&mut Xoshiro256PlusPlus::seed_from_u64(1));
    let expected = naive::collate(&request);
    assert!(expected.input_ids.len() > 1 << 18);

    let layout = lay_out(&request).unwrap();
    for threads in [1, 2, 8] {
        assert!(
            expected == collate(&request, threads).unwrap(),
            "{threads} threads"
        );

        let mut values = vec![7777; expected.input_ids.len()];
        layout.fill_values(&request.tokens, 9, &mut values, threads);
        assert!(expected.input_ids == values, "{threads} threads");
    }
}

#[test]
fn large_label_counts_are_the_same_for_any_number_of_threads() {
    let Request {
        labels, offsets, ..
    } = large(&mut Xoshiro256PlusPlus::seed_from_u64(2));
    let labels = labels.unwrap();
    let expected = naive::label_counts(&labels, &offsets, 500, true);

    for threads in [1, 2, 8] {
        assert_eq!(
            expected,
            label_counts(&labels, &offsets, 500, true, threads).unwrap()
        );
    }
}

#[test]
fn large_masks_are_the_same_for_any_number_of_threads() {
    // Rows of a length that the blocks of queries do not divide.
    let (rows, len) = (3, 1501);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
    let ids: Vec<i32> = (0..rows * len)
        .map(|i| (i / 97 + rng.random_range(0..2)) as i32)
        .collect();

    for (causal, window) in [(true, None), (false, Some(64))] {
        let expected: Vec<u8> = naive::block_mask(&ids, len, causal, window)
            .into_iter()
            .map(u8::from)
            .collect();
        for threads in [1, 2, 8] {
            let mut mask = vec![7; mask_len(rows, len, MaskDtype::Bool).unwrap()];
            let (out, window) = (MaskSlice::Bool(&mut mask), window.map(|w| w as i64));
            block_mask(&ids, rows, len, causal, window, out, threads).unwrap();
            assert!(expected == mask, "{threads} threads");
        }
    }
}
