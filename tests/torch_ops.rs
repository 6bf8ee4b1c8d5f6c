//! The functions on tch tensors, as a Rust program calls them.
//!
//! What the batches hold is tested on slices (tests/batch) and against plain torch (tests/python);
//! here it is the door: dtypes, memory that is not contiguous, refusals, and who owns what.

use multipack::batch::{LayoutOptions, MaskDtype, PaddedTail};
use multipack::torch::{
    CollateOptions, block_mask, boundaries, collate, collate_list, label_counts, microbatch,
    pack_values, plan,
};
use multipack::{Config, Error, ErrorKind, Result, Split};
use tch::{Kind, Tensor};

#[track_caller]
fn assert_holds(expected: &[i64], tensor: &Tensor) {
    let found = Vec::<i64>::try_from(tensor.to_kind(Kind::Int64).flatten(0, -1)).unwrap();
    assert_eq!(expected, found);
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(kind: ErrorKind, text: &str, result: Result<T>) {
    let error = result.unwrap_err();
    assert_eq!((kind, text), (error.kind(), error.to_string().as_str()));
}

fn tokens() -> Tensor {
    Tensor::from_slice(&[11i64, 12, 13, 21, 22])
}

fn offsets() -> Tensor {
    Tensor::from_slice(&[0i64, 3, 5])
}

fn index() -> Tensor {
    Tensor::from_slice(&[0i64, 1])
}

fn rows() -> Tensor {
    Tensor::from_slice(&[0i64, 2])
}

fn in_a_row_of(row_len: i64) -> LayoutOptions {
    LayoutOptions {
        row_len,
        ..LayoutOptions::default()
    }
}

#[test]
fn collate_gives_all_eight_tensors() {
    let options = CollateOptions {
        layout: in_a_row_of(8),
        pad_token_id: 7,
        attention_mask: Some(MaskDtype::Bool),
        window: Some(2),
        ..CollateOptions::default()
    };

    let batch = collate(&tokens(), &offsets(), &index(), &rows(), None, &options).unwrap();

    assert_eq!(vec![1, 8], batch.input_ids.size());
    assert_holds(&[11, 12, 13, 21, 22, 7, 7, 7], &batch.input_ids);
    assert_holds(&[-100, 12, 13, -100, 22, -100, -100, -100], &batch.labels);
    assert_holds(&[0, 1, 2, 0, 1, 0, 1, 2], &batch.position_ids);
    assert_holds(&[1, 1, 1, 2, 2, 0, 0, 0], &batch.segment_ids);
    assert_holds(&[0, 3, 5, 8], &batch.cu_seqlens);
    assert_holds(&[0, 3, 5, 8], &batch.cu_seqlens_padded);
    assert_eq!(Vec::<i64>::new(), batch.max_seqlen.size());
    assert_holds(&[3], &batch.max_seqlen);
    assert_eq!(vec![1, 1, 8, 8], batch.attention_mask.size());
    assert_holds(
        &[0, 1, 1, 0, 0, 0, 0, 0],
        &batch.attention_mask.select(2, 2).flatten(0, -1),
    );
    let kinds = [
        &batch.input_ids,
        &batch.segment_ids,
        &batch.max_seqlen,
        &batch.attention_mask,
    ]
    .map(Tensor::kind);
    assert_eq!([Kind::Int64, Kind::Int, Kind::Int, Kind::Bool], kinds);
}

#[test]
fn every_pair_of_token_and_label_dtypes_gives_the_same() {
    let labels = tokens() + 1;
    for kinds in [Kind::Int, Kind::Int64]
        .map(|a| [Kind::Int, Kind::Int64].map(|b| (a, b)))
        .concat()
    {
        let batch = collate(
            &tokens().to_kind(kinds.0),
            &offsets().to_kind(Kind::Int),
            &index().to_kind(Kind::Uint8),
            &rows().to_kind(Kind::Int16),
            Some(&labels.to_kind(kinds.1)),
            &CollateOptions::default(),
        )
        .unwrap();

        assert_holds(&[11, 12, 13, 21, 22], &batch.input_ids);
        assert_holds(&[-100, 13, 14, -100, 23], &batch.labels);
    }
}

#[test]
fn strided_and_expanded_inputs_are_read_by_their_strides() {
    let strided =
        Tensor::from_slice2(&[[11i64, 0], [12, 0], [13, 0], [21, 0], [22, 0]]).select(1, 0);
    let expanded = Tensor::from_slice(&[1i64]).expand([2], false);
    assert!(!strided.is_contiguous() && !expanded.is_contiguous());

    let batch = collate(
        &strided,
        &offsets(),
        &expanded,
        &rows(),
        None,
        &CollateOptions::default(),
    );

    assert_holds(&[21, 22, 21, 22], &batch.unwrap().input_ids);
}

#[test]
fn a_list_of_samples_gives_what_the_flat_form_gives() {
    let samples = [
        Tensor::from_slice(&[11i64, 12, 13]),
        Tensor::from_slice(&[21i32, 22]),
    ];
    let samples: Vec<&Tensor> = samples.iter().collect();

    let batch = collate_list(
        &samples,
        &rows(),
        Some(&samples),
        &CollateOptions::default(),
    )
    .unwrap();

    assert_holds(&[11, 12, 13, 21, 22], &batch.input_ids);
    assert_holds(&[-100, 12, 13, -100, 22], &batch.labels);
    assert_refused(
        ErrorKind::Value,
        "labels[0] has 2 entries, but input_ids[0] has 3: give one label per token, -100 where it \
         is not supervised",
        collate_list(
            &samples,
            &rows(),
            Some(&[samples[1], samples[0]]),
            &CollateOptions::default(),
        ),
    );
}

#[test]
fn values_are_moved_whatever_their_dtype() {
    for kind in [
        Kind::Bool,
        Kind::Half,
        Kind::Int,
        Kind::Double,
        Kind::ComplexDouble,
    ] {
        let values = Tensor::from_slice(&[1i64, 0, 1, 0, 1]).to_kind(kind);
        let pad = Tensor::from(1i64).to_kind(kind);

        let packed = pack_values(
            &values,
            &offsets(),
            &index(),
            &rows(),
            &pad,
            &in_a_row_of(7),
        )
        .unwrap();

        assert_eq!(kind, packed.kind());
        assert_holds(
            &[1, 0, 1, 0, 1, 1, 1],
            &packed.to_kind(Kind::ComplexDouble).real(),
        );
    }
    assert_refused(
        ErrorKind::Type,
        "pad has dtype torch.float32, but must be that of the values",
        pack_values(
            &tokens(),
            &offsets(),
            &index(),
            &rows(),
            &Tensor::from(0.5f32),
            &in_a_row_of(7),
        ),
    );
}

#[test]
fn additive_masks_hold_zero_and_the_minimum() {
    for (dtype, kind, least) in [
        (MaskDtype::Float32, Kind::Float, f64::from(f32::MIN)),
        (MaskDtype::BFloat16, Kind::BFloat16, -3.3895313892515355e38),
        (MaskDtype::Float16, Kind::Half, -65504.0),
    ] {
        let mask = block_mask(&Tensor::from_slice(&[1i32, 2]), true, None, dtype).unwrap();

        assert_eq!((vec![1, 1, 2, 2], kind), (mask.size(), mask.kind()));
        let found = Vec::<f64>::try_from(mask.to_kind(Kind::Double).flatten(0, -1)).unwrap();
        assert_eq!(vec![0.0, least, least, 0.0], found);
    }
}

#[test]
fn boundaries_of_rows_and_of_one_row() {
    let rows = Tensor::from_slice2(&[[0i32, 1, 2], [0, 0, 1]]);

    assert_holds(&[0, 3, 4, 6], &boundaries(&rows).unwrap());
    assert_holds(&[0, 3], &boundaries(&rows.get(0)).unwrap());
    assert_refused(
        ErrorKind::Value,
        "position_ids has shape [], but must be (length,) or (rows, length)",
        boundaries(&Tensor::from(1i64)),
    );
}

#[test]
fn counts_go_into_a_plan_and_its_microbatches_come_out() {
    let labels = Tensor::from_slice(&[-100i64, 12, 13, 21, 22]);
    let (counts, starts) = label_counts(&labels, &offsets(), 0, true).unwrap();
    assert_holds(&[2, 1], &counts);
    assert_holds(&[0, 1], &starts);

    let config = Config::from_json(r#"{"sequence_len": 3}"#).unwrap();
    let lengths = Tensor::from_slice(&[3i32, 2]);
    let plan = plan(
        &lengths,
        Some(&counts),
        Some(&starts),
        &config,
        0,
        Split::Train,
    )
    .unwrap();

    let seen: Vec<i64> = (0..2)
        .flat_map(|k| {
            let (samples, row_offsets) =
                microbatch(&plan.index, &plan.row_offsets, &plan.batch_offsets, 1, 0, k).unwrap();
            assert_holds(&[0, 1], &row_offsets);
            Vec::<i64>::try_from(samples).unwrap()
        })
        .collect();
    assert_eq!(2, seen.len());
    assert_ne!(seen[0], seen[1]);
    let report: Vec<u8> = Vec::try_from(&plan.report).unwrap();
    assert_eq!((b'{', Some(&b'}')), (report[0], report.last()));
}

#[test]
fn arguments_are_refused_by_name() {
    let options = CollateOptions::default();
    let with_tokens =
        |tokens: &Tensor| collate(tokens, &offsets(), &index(), &rows(), None, &options);

    assert_refused(
        ErrorKind::Type,
        "tokens has dtype torch.float64, but must be torch.int32 or torch.int64",
        with_tokens(&tokens().to_kind(Kind::Double)),
    );
    assert_refused(
        ErrorKind::Value,
        "tokens has shape [1, 5], but must be one-dimensional",
        with_tokens(&tokens().unsqueeze(0)),
    );
    assert_refused(
        ErrorKind::Index,
        "index[0] is 2, but samples are numbered from 0 and there are 2",
        collate(
            &tokens(),
            &offsets(),
            &Tensor::from_slice(&[2i64, 0]),
            &rows(),
            None,
            &options,
        ),
    );
    let last = CollateOptions {
        layout: LayoutOptions {
            padded_tail: PaddedTail::Last,
            causal: false,
            ..LayoutOptions::default()
        },
        ..options
    };
    let merged = collate(&tokens(), &offsets(), &index(), &rows(), None, &last);
    assert_eq!(Error::TailMerged, merged.unwrap_err());
}
