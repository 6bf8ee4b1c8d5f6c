//! Dense attention masks from segment ids, for attention that cannot read `cu_seqlens`.
//!
//! A token may attend to the tokens of its own row with its own segment id. Padding carries id 0,
//! so that it attends to padding and real tokens never do. Every query may attend at least to
//! itself, and so no row of a mask is empty: some attention kernels answer NaN to an empty row.
//!
//! The keys of one query are runs of memory. Equal ids are usually one run, but padding inside
//! aligned slots makes several with id 0, and ids from elsewhere may come in any order; so each row
//! is first cut into runs, sorted by id. A mask row is then written from left to right as
//! forbidden, allowed, forbidden, … each a `fill`. Each entry is written once; that is memory
//! speed, and the L² entries are the whole cost. Rows are shared out between threads in blocks.
//!
//! When to use it: never, if the model can take `cu_seqlens`. A mask of L = 4096 is 16 MiB as bool
//! per row, and every layer reads it.

use std::ops::Range;

use super::at_least;
use crate::{Error, Result, memory, parallel};

/// The most bytes of a mask, 8 GiB. Larger ones are a misunderstanding more often than a wish, and
/// on Linux they would be granted and then end the process.
const MOST_BYTES: u128 = 8 << 30;

/// Bytes per part of a parallel run. Twice a huge page, so that few are written first by two
/// threads.
const PART_BYTES: usize = 4 << 20;

/// What a run takes where it is a row of its own: lists, and what the allocator adds to each.
const BYTES_OF_A_RUN: usize = 256;

/// What a mask is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskDtype {
    /// One byte, 1: may attend, 0: may not.
    Bool,
    /// Added to the scores: 0, or the smallest finite number of the type.
    Float32,
    /// The same in bfloat16.
    BFloat16,
    /// The same in float16.
    Float16,
}

impl MaskDtype {
    fn bytes(self) -> u128 {
        match self {
            MaskDtype::Bool => 1,
            MaskDtype::BFloat16 | MaskDtype::Float16 => 2,
            MaskDtype::Float32 => 4,
        }
    }
}

/// The memory of a mask, (R, L, L). What it held before does not matter: every entry is written.
#[derive(Debug)]
pub enum MaskSlice<'a> {
    /// Bytes of 0 and 1.
    Bool(&'a mut [u8]),
    /// 0 and -3.4028235e38.
    Float32(&'a mut [f32]),
    /// The bits of 0 and -3.3895314e38.
    BFloat16(&'a mut [u16]),
    /// The bits of 0 and -65504.
    Float16(&'a mut [u16]),
}

/// The entries of a mask over `rows` rows of `row_len` tokens: `rows * row_len * row_len`.
///
/// # Errors
///
/// More than 8 GiB. Ask before the memory is allocated.
pub fn mask_len(rows: usize, row_len: usize, dtype: MaskDtype) -> Result<usize> {
    let (r, l) = (rows as u128, row_len as u128);
    // L² of two 64-bit numbers fits 128 bits; only the factors after it can overflow.
    let bytes = (l * l)
        .checked_mul(r)
        .and_then(|n| n.checked_mul(dtype.bytes()));
    match bytes {
        Some(bytes) if bytes <= MOST_BYTES => Ok((bytes / dtype.bytes()) as usize),
        _ => Err(Error::MaskTooLarge {
            rows,
            row_len,
            bytes: bytes.unwrap_or(u128::MAX),
            limit: MOST_BYTES,
        }),
    }
}

/// Writes the mask of `rows` rows of `row_len` segment ids into `out`. Ids of any type will do, for
/// they are only compared.
///
/// Query `i` may attend to key `j` of the same row if both have the same segment id, `j ≤ i` where
/// `causal`, and they are near enough: with a `window` of W, `i - j < W` where causal (W keys, the
/// query's own among them) and `|i - j| < W` otherwise.
///
/// # Errors
///
/// A window below 1, and too little memory.
///
/// # Panics
///
/// If the lengths of `segment_ids` and `out` do not fit the shape.
///
/// # Examples
///
/// ```
/// use multipack::batch::{MaskSlice, block_mask};
///
/// let mut mask = [0; 9];
/// block_mask(&[1, 1, 0], 1, 3, true, None, MaskSlice::Bool(&mut mask), 1)?;
/// assert_eq!(mask, [
///     1, 0, 0,
///     1, 1, 0,
///     0, 0, 1,
/// ]);
/// # Ok::<(), multipack::Error>(())
/// ```
pub fn block_mask<I: Copy + Ord + Sync>(
    segment_ids: &[I],
    rows: usize,
    row_len: usize,
    causal: bool,
    window: Option<i64>,
    out: MaskSlice<'_>,
    threads: usize,
) -> Result<()> {
    let window = match window {
        Some(window) => at_least(1, "window", window)?,
        None => usize::MAX,
    };
    memory::ensure(segment_ids.len(), BYTES_OF_A_RUN)?;
    assert_eq!(
        Some(segment_ids.len()),
        rows.checked_mul(row_len),
        "segment_ids"
    );
    let mask = Mask {
        segment_ids,
        row_len,
        causal,
        window,
        threads,
    };
    match out {
        MaskSlice::Bool(out) => mask.write(1, 0, out),
        MaskSlice::Float32(out) => mask.write(0.0, f32::MIN, out),
        MaskSlice::BFloat16(out) => mask.write(0, 0xff7f, out),
        MaskSlice::Float16(out) => mask.write(0, 0xfbff, out),
    }
    Ok(())
}

struct Mask<'a, I> {
    segment_ids: &'a [I],
    row_len: usize,
    causal: bool,
    window: usize,
    threads: usize,
}

impl<I: Copy + Ord + Sync> Mask<'_, I> {
    fn write<T: Copy + Send + Sync>(&self, allowed: T, forbidden: T, out: &mut [T]) {
        let len = self.row_len;
        assert_eq!(
            Some(out.len()),
            self.segment_ids.len().checked_mul(len),
            "out"
        );
        if len == 0 {
            return;
        }
        let rows: Vec<Runs> = self.segment_ids.chunks_exact(len).map(Runs::new).collect();
        let queries = if self.threads > 1 {
            (PART_BYTES / size_of::<T>() / len).clamp(1, len)
        } else {
            len
        };
        let parts = rows
            .iter()
            .zip(out.chunks_exact_mut(len * len))
            .flat_map(|(runs, mask)| {
                let blocks = mask.chunks_mut(queries * len).enumerate();
                blocks.map(move |(block, mask)| (runs, block * queries, mask))
            })
            .collect();
        parallel::for_each(
            self.threads,
            parts,
            |(runs, first, mask): (&Runs, usize, &mut [T])| {
                for (query, mask) in (first..).zip(mask.chunks_exact_mut(len)) {
                    let near = self.near(query);
                    let mut written = 0;
                    for run in runs.keys(query) {
                        let start = run.start.max(near.start);
                        let end = run.end.min(near.end);
                        if start < end {
                            mask[written..start].fill(forbidden);
                            mask[start..end].fill(allowed);
                            written = end;
                        }
                    }
                    mask[written..].fill(forbidden);
                }
            },
        );
    }

    /// The keys that `query` may see if they are of its segment.
    fn near(&self, query: usize) -> Range<usize> {
        let start = query.saturating_sub(self.window - 1);
        let reach = if self.causal { 1 } else { self.window };
        start..query.saturating_add(reach).min(self.row_len)
    }
}

/// The runs of equal ids of one row.
struct Runs {
    /// Sorted by id and then by place, so that those of one id stand together.
    runs: Vec<Range<usize>>,
    /// Of each run in the order of the row: where it ends, and its id's part of `runs`.
    groups: Vec<(usize, Range<usize>)>,
}

impl Runs {
    fn new<I: Copy + Ord>(ids: &[I]) -> Runs {
        let mut start = 0;
        let mut sorted: Vec<(I, Range<usize>)> = ids
            .chunk_by(|a, b| a == b)
            .map(|run| {
                let range = start..start + run.len();
                start = range.end;
                (run[0], range)
            })
            .collect();
        // Stable: the runs of one id stay in the order of the row.
        sorted.sort_by_key(|(id, _)| *id);
        let mut groups = Vec::with_capacity(sorted.len());
        for group in sorted.chunk_by(|a, b| a.0 == b.0) {
            let first = groups.len();
            let members = first..first + group.len();
            groups.extend(group.iter().map(|(_, run)| (run.end, members.clone())));
        }
        groups.sort_by_key(|(end, _)| *end);
        Runs {
            runs: sorted.into_iter().map(|(_, run)| run).collect(),
            groups,
        }
    }

    /// The runs that have the id of the token at `query`.
    fn keys(&self, query: usize) -> &[Range<usize>] {
        let run = self.groups.partition_point(|(end, _)| *end <= query);
        &self.runs[self.groups[run].1.clone()]
    }
}
