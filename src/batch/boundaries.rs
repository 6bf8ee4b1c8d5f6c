//! `cu_seqlens` from `position_ids`, for batches that were packed elsewhere.
//!
//! A segment begins with each row, and wherever a position is not one more than the one before it.
//! The value it begins with does not matter, so that models that number positions from 2 are read
//! the same way. One pass, a comparison per token.

use super::MOST_TOKENS;
use crate::{Error, Result, memory};

/// The borders of the segments of `rows` rows of `row_len` positions each, in row order.
///
/// Returns (S + 1,) offsets into the flattened rows, from 0 to `rows * row_len`, strictly
/// increasing; `[0]` for no tokens.
///
/// # Errors
///
/// More than 2³¹ − 1 positions, and too little memory.
///
/// # Panics
///
/// If `position_ids` does not have `rows * row_len` entries.
///
/// # Examples
///
/// ```
/// use multipack::batch::boundaries;
///
/// assert_eq!(boundaries(&[0, 1, 2, 0, 0, 1], 2, 3)?, [0, 3, 4, 6]);
/// assert_eq!(boundaries(&[2, 3, 4, 2, 3], 1, 5)?, [0, 3, 5]);
/// # Ok::<(), multipack::Error>(())
/// ```
pub fn boundaries(position_ids: &[i64], rows: usize, row_len: usize) -> Result<Vec<i32>> {
    if position_ids.len() > MOST_TOKENS {
        return Err(Error::BatchTooLong { rows, row_len });
    }
    assert_eq!(
        Some(position_ids.len()),
        rows.checked_mul(row_len),
        "position_ids"
    );
    // A list that grows is for a moment there twice.
    memory::ensure(position_ids.len(), 3 * size_of::<i32>())?;
    let mut borders = vec![0];
    if position_ids.is_empty() {
        return Ok(borders);
    }
    for (r, row) in position_ids.chunks_exact(row_len).enumerate() {
        let start = r * row_len;
        for (i, pair) in row.windows(2).enumerate() {
            if pair[0].checked_add(1) != Some(pair[1]) {
                borders.push((start + i + 1) as i32);
            }
        }
        borders.push((start + row_len) as i32);
    }
    Ok(borders)
}
