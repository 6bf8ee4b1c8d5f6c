//! The public functions of `multipack::batch`: exact answers on small inputs, whole error texts,
//! and the dull twins on random ones.

#[path = "../support/batch.rs"]
mod naive;

mod boundaries;
mod errors;
mod labels;
mod layout;
mod mask;
mod properties;

use multipack::batch::{BatchSlices, Layout};
use multipack::{Error, Result};
use naive::{Batch, Request};

/// Lays a request out with the crate, into memory full of rubbish.
fn collate(request: &Request, threads: usize) -> Result<Batch> {
    let layout = lay_out(request)?;
    let size = layout.rows() * layout.row_len();
    let mut batch = Batch {
        rows: layout.rows(),
        row_len: layout.row_len(),
        input_ids: vec![-7777; size],
        labels: vec![-7777; size],
        position_ids: vec![-7777; size],
        segment_ids: vec![-7777; size],
        cu_seqlens: layout.cu_seqlens().to_vec(),
        cu_seqlens_padded: layout.cu_seqlens_padded().to_vec(),
        max_seqlen: layout.max_seqlen(),
    };
    let out = BatchSlices {
        input_ids: &mut batch.input_ids,
        labels: &mut batch.labels,
        position_ids: &mut batch.position_ids,
        segment_ids: &mut batch.segment_ids,
    };
    layout.fill(
        &request.tokens,
        request.labels.as_deref(),
        request.pad_token_id,
        request.mask_first_label,
        out,
        threads,
    )?;
    Ok(batch)
}

fn lay_out(request: &Request) -> Result<Layout> {
    Layout::new(
        request.tokens.len(),
        &request.offsets,
        &request.index,
        &request.row_offsets,
        &request.options,
    )
}

/// The sentence of an error.
#[track_caller]
fn sentence<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

#[track_caller]
fn error<T: std::fmt::Debug>(result: Result<T>) -> Error {
    result.unwrap_err()
}
