//! Where each sample of a microbatch goes: the arithmetic of rows, slots and padded tails.
//!
//! A row is a run of *slots*, one per sample that is not empty, and a padded tail:
//!
//! ```text
//! row_len 12, lengths 5 and 2, align_samples_to 4
//!
//!   token     A A A A A · · · B B · ·
//!   slot      ───────1─────── ───2───        cu_seqlens 0 5 7, padded 0 8 12
//! ```
//!
//! A slot is the sample's length rounded up to `align_samples_to`. What is left of the row is its
//! tail. For lengths 3 and 2 in a row of 16, with `max_sample_len` 4, [`PaddedTail`] makes of it:
//!
//! ```text
//!   token     A A A B B · · · · · · · · · · ·
//!   Own       0 1 2 0 1 0 1 2 3 0 1 2 3 0 1 2    cu_seqlens 0 3 5 9 13 16
//!   Last      0 1 2 0 1 2 3 0 1 2 3 0 1 2 3 0    cu_seqlens 0 3 7 11 15 16
//!   None      0 1 2 0 1 0 1 2 3 0 1 2 3 0 1 2    cu_seqlens 0 3 5
//! ```
//!
//! The tail is cut so that no attention kernel sees a segment longer than `max_sample_len` and no
//! position is larger than the model was built for. With alignment the cuts are multiples of it
//! too, as far as that allows.
//!
//! The result is a list of segments that covers the flattened rows from end to end, without gaps.
//! That is all that the writers in `fill.rs` need: they never look at a row again.
//!
//! Time and memory are in proportion to the samples and rows of the microbatch; no token is
//! touched, and of the offsets only those of the samples asked for.

use super::{MOST_TOKENS, PaddedTail, at_least, limit, sample, sample_count};
use crate::memory::reserved;
use crate::{Error, Result};

/// How rows are laid out. The numbers are signed because they come from outside; [`Layout::new`]
/// refuses those out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutOptions {
    /// Tokens of each row; 0: those of the longest row, rounded up to `pad_to_multiple_of`.
    pub row_len: i64,
    /// Longer samples are cut to so many tokens; 0: no limit.
    pub max_sample_len: i64,
    /// What the length of the rows is a multiple of where `row_len` is 0; 1 or more.
    pub pad_to_multiple_of: i64,
    /// What the slot of each sample is a multiple of; 1 or more. A row whose length is not a
    /// multiple of it ends in a shorter slot of padding.
    pub align_samples_to: i64,
    /// What becomes of the padding at the end of a row.
    pub padded_tail: PaddedTail,
    /// The position of the first token of every segment; 0 or more.
    pub position_start: i64,
    /// Whether attention is causal; [`PaddedTail::Last`] asks for it.
    pub causal: bool,
}

impl Default for LayoutOptions {
    /// Rows as long as the longest, nothing cut, rounded or aligned, positions from 0, causal.
    fn default() -> Self {
        LayoutOptions {
            row_len: 0,
            max_sample_len: 0,
            pad_to_multiple_of: 1,
            align_samples_to: 1,
            padded_tail: PaddedTail::Own,
            position_start: 0,
            causal: true,
        }
    }
}

/// A run of tokens whose positions count up without a break: a sample in its slot, or padding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    /// Which sample it is; 0 for padding, which is no sample and must not be looked up.
    pub sample: usize,
    /// Where the sample begins in the flat tokens; 0 for padding.
    pub source: usize,
    /// Tokens taken from there; 0 for padding.
    pub copied: usize,
    /// Tokens that the segment takes in its row, padding included.
    pub slot: usize,
    /// 1, 2, … within the row; 0 for padding.
    pub id: i32,
}

/// A microbatch, checked and laid out: the shape of the batch, its `cu_seqlens`, and what
/// [`fill`](Layout::fill) needs to write it.
///
/// # Examples
///
/// Two samples of 3 and 2 tokens in one row of 8:
///
/// ```
/// use multipack::batch::{BatchSlices, Layout, LayoutOptions};
///
/// let tokens = [11, 12, 13, 21, 22];
/// let options = LayoutOptions { row_len: 8, ..Default::default() };
/// let layout = Layout::new(tokens.len(), &[0, 3, 5], &[0, 1], &[0, 2], &options)?;
/// assert_eq!((layout.rows(), layout.row_len()), (1, 8));
/// assert_eq!(layout.cu_seqlens(), [0, 3, 5, 8]);
/// assert_eq!(layout.max_seqlen(), 3);
///
/// let (mut ids, mut labels, mut positions, mut segments) = ([0; 8], [0; 8], [0; 8], [0; 8]);
/// let out = BatchSlices {
///     input_ids: &mut ids,
///     labels: &mut labels,
///     position_ids: &mut positions,
///     segment_ids: &mut segments,
/// };
/// layout.fill(&tokens, None::<&[i64]>, 0, true, out, 1)?;
/// assert_eq!(ids, [11, 12, 13, 21, 22, 0, 0, 0]);
/// assert_eq!(labels, [-100, 12, 13, -100, 22, -100, -100, -100]);
/// assert_eq!(positions, [0, 1, 2, 0, 1, 0, 1, 2]);
/// assert_eq!(segments, [1, 1, 1, 2, 2, 0, 0, 0]);
/// # Ok::<(), multipack::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Layout {
    pub(super) tokens: usize,
    pub(super) segments: Vec<Segment>,
    pub(super) position_start: i64,
    rows: usize,
    row_len: usize,
    cu_seqlens: Vec<i32>,
    cu_seqlens_padded: Vec<i32>,
    max_seqlen: i32,
}

impl Layout {
    /// Lays out a microbatch of samples taken from flat arrays of `tokens` entries.
    ///
    /// - `offsets` (N + 1): sample `i` is `offsets[i]..offsets[i + 1]`; any start from 0 on, not
    ///   falling, end at most `tokens`. Entries between the first and the last are looked at only
    ///   where a sample is used.
    /// - `index` (M): the samples of the microbatch, in order; one may come several times.
    /// - `row_offsets` (R + 1): row `r` holds `index[row_offsets[r]..row_offsets[r + 1]]`, at least
    ///   one sample; from 0 to M. An empty sample takes no room and has no segment.
    ///
    /// # Errors
    ///
    /// Whatever breaks the rules above or those of [`LayoutOptions`]; a row longer than a given
    /// `row_len`; a batch of more than 2³¹ − 1 tokens; a `padded_tail` that does not go with the
    /// number of rows or with attention. An entry of `index` out of range is of the kind
    /// [`Index`](crate::ErrorKind::Index), everything else of the kind
    /// [`Value`](crate::ErrorKind::Value).
    pub fn new(
        tokens: usize,
        offsets: &[i64],
        index: &[i64],
        row_offsets: &[i64],
        options: &LayoutOptions,
    ) -> Result<Layout> {
        let bounds = Bounds::check(options)?;
        let samples = sample_count(offsets, tokens)?;
        let rows = check_rows(row_offsets, index.len())?;
        if options.padded_tail == PaddedTail::None && rows > 1 {
            return Err(Error::TailLeftOut { rows });
        }
        if options.padded_tail == PaddedTail::Last && !options.causal {
            return Err(Error::TailMerged);
        }

        let needs = Needs::of(tokens, offsets, samples, index, row_offsets, &bounds)?;
        let row_len = match bounds.row_len {
            0 => needs.longest().next_multiple_of(bounds.pad_to_multiple_of),
            given => given,
        };
        if let Some(row) = needs.rows.iter().position(|row| row.tokens > row_len) {
            let tokens = needs.rows[row].tokens;
            return Err(Error::RowTooLong {
                row,
                tokens,
                row_len,
            });
        }
        // A batch without rows must have a row length that fits as well.
        let size = row_len.checked_mul(rows.max(1));
        if size.is_none_or(|size| size > MOST_TOKENS) {
            return Err(Error::BatchTooLong { rows, row_len });
        }

        let pieces = |row: &Need| (row_len - row.tokens).div_ceil(bounds.longest_tail);
        let tails: usize = needs.rows.iter().map(pieces).sum();
        let mut builder = Builder::new(needs.slots.len() + tails, bounds.max_sample_len)?;
        let mut first = 0;
        for Need { tokens, end } in needs.rows {
            let mut tail = row_len - tokens;
            for (i, &slot) in (first..end).zip(&needs.slots[first..end]) {
                let merged = if options.padded_tail == PaddedTail::Last && i + 1 == end {
                    tail.min(bounds.longest_tail.saturating_sub(slot.slot))
                } else {
                    0
                };
                builder.push_sample(slot, merged);
                tail -= merged;
            }
            while tail > 0 {
                let slot = tail.min(bounds.longest_tail);
                builder.push_padding(slot, options.padded_tail != PaddedTail::None);
                tail -= slot;
            }
            first = end;
        }
        Ok(Layout {
            tokens,
            segments: builder.segments,
            position_start: options.position_start,
            rows,
            row_len,
            cu_seqlens: builder.cu_seqlens,
            cu_seqlens_padded: builder.cu_seqlens_padded,
            max_seqlen: builder.max_seqlen,
        })
    }

    /// The rows of the batch, R.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The tokens of each row, L.
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Where the segments begin, by their true lengths: (S + 1,), from 0, strictly increasing.
    ///
    /// Without alignment these are offsets into the flattened rows and the last is R·L, or the
    /// number of real tokens with [`PaddedTail::None`]. For lengths 5, 7 and 3 aligned to 4: 0 5 12
    /// 15.
    pub fn cu_seqlens(&self) -> &[i32] {
        &self.cu_seqlens
    }

    /// Where the slots of the segments begin in the flattened rows: (S + 1,).
    ///
    /// Equal to [`cu_seqlens`](Layout::cu_seqlens) without alignment. For lengths 5, 7 and 3
    /// aligned to 4: 0 8 16 20.
    pub fn cu_seqlens_padded(&self) -> &[i32] {
        &self.cu_seqlens_padded
    }

    /// The largest difference in [`cu_seqlens`](Layout::cu_seqlens); 0 without segments.
    pub fn max_seqlen(&self) -> i32 {
        self.max_seqlen
    }
}

/// The options as numbers to calculate with. Each fits i64, so that rounding a length up to one of
/// them stays within usize.
struct Bounds {
    row_len: usize,
    /// `usize::MAX` for no limit.
    max_sample_len: usize,
    /// The longest slot of padding: aligned, and if possible not longer than `max_sample_len`.
    longest_tail: usize,
    pad_to_multiple_of: usize,
    align: usize,
}

impl Bounds {
    fn check(options: &LayoutOptions) -> Result<Bounds> {
        let align = at_least(1, "align_samples_to", options.align_samples_to)?;
        let max_sample_len = limit("max_sample_len", options.max_sample_len)?;
        // The bound of cu_seqlens again, so that no position can overflow.
        if !(0..=i64::from(i32::MAX)).contains(&options.position_start) {
            return Err(Error::BatchOption {
                name: "position_start",
                found: options.position_start,
                expected: "0 to 2147483647",
            });
        }
        Ok(Bounds {
            row_len: at_least(0, "row_len", options.row_len)?,
            max_sample_len,
            longest_tail: align.max(max_sample_len / align * align),
            pad_to_multiple_of: at_least(1, "pad_to_multiple_of", options.pad_to_multiple_of)?,
            align,
        })
    }
}

/// The slots of all samples, and where each row ends among them: what can be said before the length
/// of the rows, and with it their tails, is known.
struct Needs {
    slots: Vec<Segment>,
    rows: Vec<Need>,
}

struct Need {
    /// The tokens of the row's slots.
    tokens: usize,
    /// The end of the row in `slots`.
    end: usize,
}

impl Needs {
    fn of(
        tokens: usize,
        offsets: &[i64],
        samples: usize,
        index: &[i64],
        row_offsets: &[i64],
        bounds: &Bounds,
    ) -> Result<Needs> {
        let mut slots = reserved(index.len())?;
        let mut rows = reserved(row_offsets.len() - 1)?;
        for row in row_offsets.windows(2) {
            let (from, to) = (row[0] as usize, row[1] as usize);
            let (mut used, mut id) = (0, 0);
            for (entry, &i) in (from..to).zip(&index[from..to]) {
                let i =
                    usize::try_from(i)
                        .ok()
                        .filter(|&i| i < samples)
                        .ok_or(Error::SampleIndex {
                            entry,
                            sample: i,
                            samples,
                        })?;
                let (source, length) = sample(offsets, i, tokens)?;
                let copied = length.min(bounds.max_sample_len);
                if copied == 0 {
                    continue;
                }
                let slot = copied.next_multiple_of(bounds.align);
                id += 1;
                slots.push(Segment {
                    sample: i,
                    source,
                    copied,
                    slot,
                    id,
                });
                used += slot;
                // Here and not after the row, so that no sum can overflow.
                if used > MOST_TOKENS {
                    return Err(Error::BatchTooLong {
                        rows: row_offsets.len() - 1,
                        row_len: used,
                    });
                }
            }
            rows.push(Need {
                tokens: used,
                end: slots.len(),
            });
        }
        Ok(Needs { slots, rows })
    }

    fn longest(&self) -> usize {
        self.rows.iter().map(|row| row.tokens).max().unwrap_or(0)
    }
}

/// The number of rows, after a look at every entry.
fn check_rows(row_offsets: &[i64], samples: usize) -> Result<usize> {
    let (&[first, ..], &[.., last]) = (row_offsets, row_offsets) else {
        return Err(Error::EmptyOffsets {
            name: "row_offsets",
        });
    };
    if first != 0 {
        return Err(Error::RowsStart { found: first });
    }
    if let Some(row) = row_offsets.windows(2).position(|row| row[1] <= row[0]) {
        return Err(Error::EmptyRow {
            row,
            start: row_offsets[row],
            end: row_offsets[row + 1],
        });
    }
    if usize::try_from(last) != Ok(samples) {
        return Err(Error::RowsEnd {
            found: last,
            samples,
        });
    }
    Ok(row_offsets.len() - 1)
}

/// The segments in the order of memory, with the two running sums.
struct Builder {
    segments: Vec<Segment>,
    cu_seqlens: Vec<i32>,
    cu_seqlens_padded: Vec<i32>,
    max_seqlen: i32,
    max_sample_len: usize,
}

impl Builder {
    fn new(segments: usize, max_sample_len: usize) -> Result<Builder> {
        let start = || -> Result<Vec<i32>> {
            let mut sums = reserved(segments + 1)?;
            sums.push(0);
            Ok(sums)
        };
        Ok(Builder {
            segments: reserved(segments)?,
            cu_seqlens: start()?,
            cu_seqlens_padded: start()?,
            max_seqlen: 0,
            max_sample_len,
        })
    }

    /// A sample in its slot, with `merged` tokens of the tail behind it.
    fn push_sample(&mut self, sample: Segment, merged: usize) {
        let slot = sample.slot + merged;
        // What is merged makes everything before it part of the segment, the rest of an aligned
        // slot as well; it was cut so that this is not longer than a sample may be.
        let length = if merged > 0 { slot } else { sample.copied };
        self.count(length, slot);
        self.segments.push(Segment { slot, ..sample });
    }

    fn push_padding(&mut self, slot: usize, counted: bool) {
        if counted {
            self.count(slot.min(self.max_sample_len), slot);
        }
        self.segments.push(Segment {
            sample: 0,
            source: 0,
            copied: 0,
            slot,
            id: 0,
        });
    }

    /// Both sums stay below R·L, which was found to fit.
    fn count(&mut self, length: usize, slot: usize) {
        let (length, slot) = (length as i32, slot as i32);
        self.cu_seqlens
            .push(self.cu_seqlens[self.cu_seqlens.len() - 1] + length);
        self.cu_seqlens_padded
            .push(self.cu_seqlens_padded[self.cu_seqlens_padded.len() - 1] + slot);
        self.max_seqlen = self.max_seqlen.max(length);
    }
}
