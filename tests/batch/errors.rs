//! What is refused, in full sentences.

use multipack::ErrorKind;
use multipack::batch::{
    BatchSlices, LayoutOptions, MaskDtype, MaskSlice, PaddedTail, block_mask, boundaries,
    label_counts, mask_len,
};

use crate::naive::Request;
use crate::{collate, error, lay_out, sentence};

/// Three samples of 3, 2 and 4 tokens, in rows of two and one.
fn good() -> Request {
    Request::rows(&[&[3, 2], &[4]])
}

#[track_caller]
fn refused(expected: &str, change: impl FnOnce(&mut Request)) {
    let mut request = good();
    assert!(lay_out(&request).is_ok());
    change(&mut request);
    let error = error(lay_out(&request));
    assert_eq!(expected, error.to_string());
    assert_eq!(ErrorKind::Value, error.kind());
}

#[track_caller]
fn option_refused(expected: &str, change: impl FnOnce(&mut LayoutOptions)) {
    refused(expected, |request| change(&mut request.options));
}

#[test]
fn offsets() {
    refused(
        "offsets is empty, but has one entry more than what it delimits: [0] for nothing",
        |r| {
            r.offsets.clear();
        },
    );
    refused("offsets[0] is -1, but an offset is 0 or more", |r| {
        r.offsets[0] = -1
    });
    refused("offsets[3] is 10, past the end of the 9 tokens", |r| {
        r.offsets[3] = 10
    });
    refused("offsets[1] is 10, past the end of the 9 tokens", |r| {
        r.offsets[1] = 10
    });
    refused(
        "offsets[2] is 2, less than the 3 before it: offsets may not fall",
        |r| {
            r.offsets[2] = 2;
        },
    );
    refused("offsets[1] is -5, but an offset is 0 or more", |r| {
        r.offsets[1] = -5;
    });
    refused("offsets[3] is -9, but an offset is 0 or more", |r| {
        r.offsets[3] = -9;
    });
    refused("offsets[1] is -2, but an offset is 0 or more", |r| {
        (r.offsets[1], r.index[0]) = (-2, 1);
    });
}

#[test]
fn both_ends_of_offsets_count_even_if_unused() {
    refused("offsets[0] is -4, but an offset is 0 or more", |r| {
        (r.offsets[0], r.index[0]) = (-4, 1);
    });
    refused("offsets[0] is 20, past the end of the 9 tokens", |r| {
        r.offsets = vec![20]
    });
    refused("offsets[4] is 12, past the end of the 9 tokens", |r| {
        r.offsets.push(12)
    });
}

#[test]
fn samples_out_of_range() {
    for (bad, expected) in [
        (
            3,
            "index[1] is 3, but samples are numbered from 0 and there are 3",
        ),
        (
            -1,
            "index[1] is -1, but samples are numbered from 0 and there are 3",
        ),
        (
            i64::MAX,
            "index[1] is 9223372036854775807, but samples are numbered from 0 and there are 3",
        ),
    ] {
        let mut request = good();
        request.index[1] = bad;
        let error = error(lay_out(&request));
        assert_eq!(expected, error.to_string());
        assert_eq!(ErrorKind::Index, error.kind());
    }
}

#[test]
fn row_offsets() {
    refused(
        "row_offsets is empty, but has one entry more than what it delimits: [0] for nothing",
        |r| r.row_offsets.clear(),
    );
    refused("row_offsets[0] is 1, but the first row starts at 0", |r| {
        r.row_offsets[0] = 1
    });
    refused(
        "row_offsets ends at 2, but index has 3 entries: the last row ends there",
        |r| {
            r.row_offsets = vec![0, 1, 2];
        },
    );
    refused(
        "row_offsets ends at 4, but index has 3 entries: the last row ends there",
        |r| {
            r.row_offsets = vec![0, 4];
        },
    );
    refused(
        "row_offsets ends at 0, but index has 3 entries: the last row ends there",
        |r| {
            r.row_offsets = vec![0];
        },
    );
    refused(
        "row 1 starts at 2 and ends at 2 of index: every row has at least one sample",
        |r| {
            r.row_offsets = vec![0, 2, 2, 3];
        },
    );
    refused(
        "row 1 starts at 2 and ends at 1 of index: every row has at least one sample",
        |r| {
            r.row_offsets = vec![0, 2, 1, 3];
        },
    );
}

#[test]
fn options_out_of_range() {
    option_refused("row_len is -1, but must be 0 or more", |o| o.row_len = -1);
    option_refused("max_sample_len is -3, but must be 0 or more", |o| {
        o.max_sample_len = -3
    });
    option_refused("pad_to_multiple_of is 0, but must be 1 or more", |o| {
        o.pad_to_multiple_of = 0
    });
    option_refused("align_samples_to is 0, but must be 1 or more", |o| {
        o.align_samples_to = 0
    });
    option_refused("position_start is -1, but must be 0 to 2147483647", |o| {
        o.position_start = -1
    });
    option_refused(
        "position_start is 9223372036854775807, but must be 0 to 2147483647",
        |o| o.position_start = i64::MAX,
    );
}

#[test]
fn rows_that_do_not_fit() {
    option_refused(
        "row 0 needs 5 tokens, more than row_len 4; raise row_len, or put fewer samples in the row",
        |o| o.row_len = 4,
    );
    option_refused(
        "row 0 needs 8 tokens, more than row_len 7; raise row_len, or put fewer samples in the row",
        |o| (o.row_len, o.align_samples_to) = (7, 4),
    );
}

#[test]
fn batches_that_int32_cannot_count() {
    let too_long = |shape: &str| {
        format!(
            "a batch of shape {shape} has more tokens than the 2147483647 that int32 offsets can \
             count; use fewer or shorter rows"
        )
    };
    option_refused(&too_long("(2, 1073741824)"), |o| o.row_len = 1 << 30);
    option_refused(&too_long("(2, 9223372036854775807)"), |o| {
        o.row_len = i64::MAX
    });
    option_refused(&too_long("(2, 4611686018427387904)"), |o| {
        o.pad_to_multiple_of = 1 << 62
    });
    option_refused(&too_long("(2, 9223372036854775807)"), |o| {
        o.align_samples_to = i64::MAX
    });
    refused(&too_long("(0, 2147483648)"), |r| {
        (r.index, r.row_offsets) = (vec![], vec![0]);
        r.options.row_len = 1 << 31;
    });
    // One sample of 2³⁰ tokens, three times: no memory of that size is needed to say no.
    let huge = 1 << 30;
    let options = LayoutOptions::default();
    let layout = multipack::batch::Layout::new(huge, &[0, 1 << 30], &[0; 3], &[0, 3], &options);
    assert_eq!(too_long("(1, 2147483648)"), sentence(layout));
}

#[test]
fn a_sample_too_long_for_int32_is_not_cut() {
    let options = LayoutOptions::default();
    let length = 1 << 31;

    let layout =
        multipack::batch::Layout::new(length, &[0, length as i64], &[0], &[0, 1], &options);
    assert_eq!(
        "a batch of shape (1, 2147483648) has more tokens than the 2147483647 that int32 offsets \
         can count; use fewer or shorter rows",
        sentence(layout)
    );
}

#[test]
fn tails_that_would_mislead() {
    option_refused(
        "padded_tail 'none' needs a batch of one row, but there are 2: cu_seqlens could not say \
         where the next row begins; use 'own'",
        |o| o.padded_tail = PaddedTail::None,
    );
    option_refused(
        "padded_tail 'last' needs causal attention: without it the last sample attends to its \
         padding; use 'own'",
        |o| (o.padded_tail, o.causal) = (PaddedTail::Last, false),
    );
}

#[test]
fn labels_of_another_length() {
    let mut request = good();
    request.labels = Some(vec![1; 8]);

    let error = error(collate(&request, 1));
    assert_eq!(
        "labels has 8 entries, but tokens has 9: they share offsets, so give one per token",
        error.to_string()
    );
    assert_eq!(ErrorKind::Value, error.kind());
}

#[test]
fn label_counts_of_broken_offsets() {
    let counts = |offsets: &[i64]| sentence(label_counts(&[1, 2, 3], offsets, 0, true, 1));

    assert_eq!(
        "offsets[2] is 4, past the end of the 3 tokens",
        counts(&[0, 2, 4])
    );
    assert_eq!(
        "offsets[2] is 1, less than the 2 before it: offsets may not fall",
        counts(&[0, 2, 1, 3])
    );
    assert_eq!(
        "max_sample_len is -1, but must be 0 or more",
        sentence(label_counts(&[1, 2, 3], &[0, 3], -1, true, 1))
    );
}

#[test]
fn windows() {
    for window in [0, -1, i64::MIN] {
        let result = block_mask(&[1], 1, 1, true, Some(window), MaskSlice::Bool(&mut [0]), 1);
        assert_eq!(
            format!("window is {window}, but must be 1 or more"),
            sentence(result)
        );
    }
}

#[test]
fn masks_too_large_to_allocate() {
    assert_eq!(
        "a mask of shape (1, 1, 131072, 131072) takes 17179869184 bytes, more than the 8589934592 \
         that a mask may take; use attention that reads cu_seqlens, or fewer or shorter rows",
        sentence(mask_len(1, 131_072, MaskDtype::Bool))
    );
    let limit = 65_536;
    assert!(mask_len(2, limit, MaskDtype::Bool).is_ok());
    assert!(mask_len(2, limit, MaskDtype::BFloat16).is_err());
    assert!(mask_len(usize::MAX, usize::MAX, MaskDtype::Float32).is_err());
}

#[test]
#[should_panic(expected = "position_ids")]
fn positions_of_another_shape_are_our_own_fault() {
    _ = boundaries(&[0, 1, 2], 2, 2);
}

#[test]
#[should_panic(expected = "not the tokens of this layout")]
fn tokens_of_another_layout_are_our_own_fault() {
    let out = BatchSlices {
        input_ids: &mut [],
        labels: &mut [],
        position_ids: &mut [],
        segment_ids: &mut [],
    };
    _ = lay_out(&good())
        .unwrap()
        .fill(&[1i64], None::<&[i64]>, 0, true, out, 1);
}
