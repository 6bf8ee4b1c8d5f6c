//! Batches: from flat tokens and a list of samples to the arrays that a trainer feeds to its model.
//!
//! Everything here works on plain slices. Tokens are flat: sample `i` is
//! `tokens[offsets[i]..offsets[i + 1]]`. A microbatch is a list of samples (`index`) cut into rows
//! (`row_offsets`). [`Layout`] checks these once and decides where everything goes;
//! [`Layout::fill`] then writes ids, labels, positions and segment ids in one pass over memory that
//! the caller owns. [`block_mask`] turns segment ids into a dense attention mask, for attention
//! that has nothing better; [`boundaries`] recovers `cu_seqlens` from positions; [`label_counts`]
//! counts what the planner needs.
//!
//! For lengths 3 and 2 in a row of 8 tokens:
//!
//! | | |
//! |---|---|
//! | `position_ids` | 0 1 2 0 1 0 1 2 |
//! | `segment_ids` | 1 1 1 2 2 0 0 0 |
//! | `cu_seqlens` | 0 3 5 8 |
//!
//! The parts do not know torch. Whoever calls them owns every array, so outputs are slices that are
//! written completely, whatever was in them before.

mod boundaries;
mod fill;
mod labels;
mod layout;
mod mask;

pub use boundaries::boundaries;
pub use fill::{BatchSlices, Id};
#[cfg(feature = "torch")]
pub(crate) use fill::{Sample, Source};
pub use labels::label_counts;
pub use layout::{Layout, LayoutOptions};
pub use mask::{MaskDtype, MaskSlice, block_mask, mask_len};

pub use crate::config::PaddedTail;
use crate::{Error, Result};

/// The label of a token that does not enter the loss.
pub const IGNORED_LABEL: i64 = -100;

/// The most tokens of a batch: `cu_seqlens` counts them in int32.
const MOST_TOKENS: usize = i32::MAX as usize;

/// Below this, threads cost more than they save (about 100 µs of copying).
const PARALLEL_TOKENS: usize = 1 << 16;

/// The number of samples that `offsets` delimits, after a look at its two ends.
///
/// The entries between are checked by [`sample`] as they are used: a batch of a thousand samples
/// must not cost a walk over the offsets of ten million.
fn sample_count(offsets: &[i64], tokens: usize) -> Result<usize> {
    let Some(samples) = offsets.len().checked_sub(1) else {
        return Err(Error::EmptyOffsets { name: "offsets" });
    };
    offset(offsets, 0, tokens)?;
    offset(offsets, samples, tokens)?;
    Ok(samples)
}

/// Where sample `i` of those that `offsets` delimits begins, and its length.
fn sample(offsets: &[i64], i: usize, tokens: usize) -> Result<(usize, usize)> {
    let (start, end) = (offset(offsets, i, tokens)?, offset(offsets, i + 1, tokens)?);
    match end.checked_sub(start) {
        Some(length) => Ok((start, length)),
        None => Err(Error::FallingOffsets {
            entry: i + 1,
            offset: offsets[i + 1],
            before: offsets[i],
        }),
    }
}

fn offset(offsets: &[i64], entry: usize, tokens: usize) -> Result<usize> {
    let offset = offsets[entry];
    match usize::try_from(offset) {
        Ok(offset) if offset <= tokens => Ok(offset),
        Ok(_) => Err(Error::OffsetPastTokens {
            entry,
            offset,
            tokens,
        }),
        Err(_) => Err(Error::NegativeOffset { entry, offset }),
    }
}

/// An option that counts from `least` (0 or 1) on.
fn at_least(least: i64, name: &'static str, value: i64) -> Result<usize> {
    match usize::try_from(value) {
        Ok(count) if value >= least => Ok(count),
        _ => Err(Error::BatchOption {
            name,
            found: value,
            expected: if least == 0 { "0 or more" } else { "1 or more" },
        }),
    }
}

/// An option whose 0 means that there is no limit, which becomes `usize::MAX`.
fn limit(name: &'static str, value: i64) -> Result<usize> {
    Ok(match at_least(0, name, value)? {
        0 => usize::MAX,
        limit => limit,
    })
}
