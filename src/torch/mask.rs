//! `block_mask` and `boundaries`: what attention needs, from segment ids or positions alone.

use tch::Tensor;

use super::handle::{Fresh, vector};
use super::{args, dtype, threads};
use crate::batch::{self, MaskDtype, MaskSlice, mask_len};
use crate::{Error, Result};

/// The dense attention mask (R, 1, L, L) of `segment_ids`, (R, L) or (L,) integers.
///
/// Query `i` may attend to key `j` of the same row if both have the same segment id, `j <= i` where
/// `causal`, and they are near enough for `window`. See [`batch::block_mask`].
///
/// # Errors
///
/// An argument of the wrong dtype, rank or device, a window below 1, and masks of more than 8 GiB.
pub fn block_mask(
    segment_ids: &Tensor,
    causal: bool,
    window: Option<i64>,
    dtype: MaskDtype,
) -> Result<Tensor> {
    let (ids, rows, row_len) = args::integer_rows("segment_ids", segment_ids)?;
    let ids = ids.as_slice::<i64>()?;
    check(rows, row_len, window, dtype)?;
    allocate_and_fill(ids, rows, row_len, causal, window, dtype)
}

/// The `cu_seqlens` (S + 1,) int32 of `position_ids`, (R, L) or (L,) integers that start anew in
/// every segment.
///
/// See [`batch::boundaries`].
///
/// # Errors
///
/// An argument of the wrong dtype, rank or device.
pub fn boundaries(position_ids: &Tensor) -> Result<Tensor> {
    let (positions, rows, row_len) = args::integer_rows("position_ids", position_ids)?;
    vector(
        &batch::boundaries(positions.as_slice()?, rows, row_len)?,
        dtype::INT32,
    )
}

/// Refuses masks that are too large, and windows without a key.
///
/// Asked before anything is allocated, and by the kernel for other devices as well.
pub(super) fn check(
    rows: usize,
    row_len: usize,
    window: Option<i64>,
    dtype: MaskDtype,
) -> Result<()> {
    check_window(window)?;
    mask_len(rows, row_len, dtype)?;
    Ok(())
}

/// Refuses windows without a key.
pub(super) fn check_window(window: Option<i64>) -> Result<()> {
    match window {
        Some(found @ ..1) => Err(Error::BatchOption {
            name: "window",
            found,
            expected: "1 or more",
        }),
        _ => Ok(()),
    }
}

/// A new mask of the segment ids of `rows` rows, of a size that is known to be allowed.
pub(super) fn allocate_and_fill<I: Copy + Ord + Sync>(
    segment_ids: &[I],
    rows: usize,
    row_len: usize,
    causal: bool,
    window: Option<i64>,
    dtype: MaskDtype,
) -> Result<Tensor> {
    let threads = threads()?;
    let size = [rows as i64, 1, row_len as i64, row_len as i64];
    let fill = |out: MaskSlice<'_>| {
        batch::block_mask(segment_ids, rows, row_len, causal, window, out, threads)
    };
    match dtype {
        MaskDtype::Bool => {
            let mut mask = Fresh::new(&size, dtype::BOOL)?;
            fill(MaskSlice::Bool(mask.as_mut_slice()))?;
            Ok(mask.into_tensor())
        }
        MaskDtype::Float32 => {
            let mut mask = Fresh::new(&size, dtype::FLOAT32)?;
            fill(MaskSlice::Float32(mask.as_mut_slice()))?;
            Ok(mask.into_tensor())
        }
        MaskDtype::BFloat16 => {
            let mut mask = Fresh::new(&size, dtype::BFLOAT16)?;
            fill(MaskSlice::BFloat16(mask.as_mut_slice()))?;
            Ok(mask.into_tensor())
        }
        MaskDtype::Float16 => {
            let mut mask = Fresh::new(&size, dtype::FLOAT16)?;
            fill(MaskSlice::Float16(mask.as_mut_slice()))?;
            Ok(mask.into_tensor())
        }
    }
}
