//! Writing a batch: every output once, in the order of memory, at the speed of copying.
//!
//! A segment is a contiguous run in each output, so that it is written by whole-slice operations:
//! copies (that widen int32), a count upwards, fills. There is no decision per token. Outputs of
//! more than about 64k tokens are cut between segments into parts for several threads; a part owns
//! its slices of every output, so nothing is shared and the answer is the same for any number.
//!
//! On one core this takes 0.9 to 1.3 times as long as copying finished outputs over (see
//! `benches/batch.rs`, where nothing else is timed): the outputs are 28 bytes per token, and writing
//! them is all that counts. One output after another takes a tenth less than all of them segment by
//! segment (32,768 tokens: 11.2 and 12.4 µs on an EPYC).

use super::layout::Segment;
use super::{IGNORED_LABEL, Layout, PARALLEL_TOKENS};
use crate::{Error, Result, parallel};

/// The outputs of [`Layout::fill`], each of R·L entries in row order. What they held before does
/// not matter: every entry is written.
#[derive(Debug)]
pub struct BatchSlices<'a> {
    /// Token ids; the pad id on padding.
    pub input_ids: &'a mut [i64],
    /// Labels, not shifted; -100 on padding and on what is not supervised.
    pub labels: &'a mut [i64],
    /// Positions, from the start again in every segment.
    pub position_ids: &'a mut [i64],
    /// 1, 2, … within each row; 0 on padding.
    pub segment_ids: &'a mut [i32],
}

/// Where the ids of a batch, or its labels, are read from.
pub(crate) trait Source: Sync {
    /// The ids of all samples.
    fn len(&self) -> usize;

    /// Copies as many ids of a segment's sample as `to` holds, from its first on. Never called for
    /// padding, which has no sample.
    fn read(&self, segment: &Segment, to: &mut [i64]);
}

/// What token ids and labels are stored as: int32 or int64.
pub trait Id: Copy + Sync {
    /// Copies ids.
    ///
    /// # Panics
    ///
    /// If there are not as many as `to` holds.
    fn copy(from: &[Self], to: &mut [i64]);
}

impl Id for i64 {
    fn copy(from: &[i64], to: &mut [i64]) {
        to.copy_from_slice(from);
    }
}

impl Id for i32 {
    fn copy(from: &[i32], to: &mut [i64]) {
        assert_eq!(from.len(), to.len());
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from.into();
        }
    }
}

/// Flat ids.
impl<T: Id> Source for [T] {
    fn len(&self) -> usize {
        self.len()
    }

    fn read(&self, segment: &Segment, to: &mut [i64]) {
        T::copy(&self[segment.source..segment.source + to.len()], to);
    }
}

/// The ids of one sample that has an array of its own.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "torch"), allow(dead_code))] // lists come from torch alone
pub(crate) enum Sample<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl Sample<'_> {
    fn len(&self) -> usize {
        match self {
            Sample::I32(ids) => ids.len(),
            Sample::I64(ids) => ids.len(),
        }
    }
}

/// Samples that are an array each, in the order in which the layout numbers them.
impl Source for [Sample<'_>] {
    fn len(&self) -> usize {
        self.iter().map(Sample::len).sum()
    }

    fn read(&self, segment: &Segment, to: &mut [i64]) {
        match self[segment.sample] {
            Sample::I32(ids) => Id::copy(&ids[..to.len()], to),
            Sample::I64(ids) => Id::copy(&ids[..to.len()], to),
        }
    }
}

impl<'a> BatchSlices<'a> {
    fn split_at(self, tokens: usize) -> (BatchSlices<'a>, BatchSlices<'a>) {
        let (ids, ids_rest) = self.input_ids.split_at_mut(tokens);
        let (labels, labels_rest) = self.labels.split_at_mut(tokens);
        let (positions, positions_rest) = self.position_ids.split_at_mut(tokens);
        let (segments, segments_rest) = self.segment_ids.split_at_mut(tokens);
        (
            BatchSlices {
                input_ids: ids,
                labels,
                position_ids: positions,
                segment_ids: segments,
            },
            BatchSlices {
                input_ids: ids_rest,
                labels: labels_rest,
                position_ids: positions_rest,
                segment_ids: segments_rest,
            },
        )
    }
}

impl Layout {
    /// Writes the batch into `out`.
    ///
    /// `labels` share the offsets of `tokens`; without them every token is its own label. With
    /// `mask_first_label` the first label of each sample becomes -100, so that no sample is
    /// predicted from the one before it. The pad id is only ever written, never searched for: a
    /// sample may contain it.
    ///
    /// # Errors
    ///
    /// Labels of another length than the tokens.
    ///
    /// # Panics
    ///
    /// If `tokens` is not as long as the layout was made for, or an output not R·L long.
    pub fn fill<T, U>(
        &self,
        tokens: &[T],
        labels: Option<&[U]>,
        pad_token_id: i64,
        mask_first_label: bool,
        out: BatchSlices<'_>,
        threads: usize,
    ) -> Result<()>
    where
        T: Id,
        U: Id,
    {
        self.fill_from(tokens, labels, pad_token_id, mask_first_label, out, threads)
    }

    /// [`fill`](Layout::fill) from whatever can be read sample by sample.
    pub(crate) fn fill_from<S, L>(
        &self,
        tokens: &S,
        labels: Option<&L>,
        pad_token_id: i64,
        mask_first_label: bool,
        out: BatchSlices<'_>,
        threads: usize,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        L: Source + ?Sized,
    {
        assert_eq!(tokens.len(), self.tokens, "not the tokens of this layout");
        match labels {
            Some(labels) if labels.len() != tokens.len() => {
                return Err(Error::LabelTokens {
                    labels: labels.len(),
                    tokens: tokens.len(),
                });
            }
            Some(labels) => {
                self.write(tokens, labels, pad_token_id, mask_first_label, out, threads);
            }
            None => self.write(tokens, tokens, pad_token_id, mask_first_label, out, threads),
        }
        Ok(())
    }

    fn write<S, L>(
        &self,
        tokens: &S,
        labels: &L,
        pad_token_id: i64,
        mask_first_label: bool,
        mut out: BatchSlices<'_>,
        threads: usize,
    ) where
        S: Source + ?Sized,
        L: Source + ?Sized,
    {
        let size = self.rows() * self.row_len();
        assert_eq!(size, out.input_ids.len(), "input_ids");
        assert_eq!(size, out.labels.len(), "labels");
        assert_eq!(size, out.position_ids.len(), "position_ids");
        assert_eq!(size, out.segment_ids.len(), "segment_ids");

        let mut parts = Vec::new();
        for (segments, size) in self.parts(threads) {
            let (part, rest) = out.split_at(size);
            parts.push((segments, part));
            out = rest;
        }
        parallel::for_each(threads, parts, |(segments, out)| {
            each_padded(segments, out.input_ids, pad_token_id, |segment, ids| {
                tokens.read(segment, ids);
            });
            each_padded(segments, out.labels, IGNORED_LABEL, |segment, ids| {
                labels.read(segment, ids);
                if mask_first_label {
                    ids[0] = IGNORED_LABEL;
                }
            });
            each(segments, out.position_ids, |_, positions| {
                count_up(self.position_start, positions);
            });
            each_padded(segments, out.segment_ids, 0, |segment, ids| {
                ids.fill(segment.id);
            });
        });
    }

    /// Lays any other per-token values out like the tokens: `pad` where there is no token.
    ///
    /// # Panics
    ///
    /// If `values` is not as long as the layout was made for, or `out` not R·L long.
    pub fn fill_values<V: Copy + Send + Sync>(
        &self,
        values: &[V],
        pad: V,
        out: &mut [V],
        threads: usize,
    ) {
        assert_eq!(values.len(), self.tokens, "not the values of this layout");
        assert_eq!(self.rows() * self.row_len(), out.len(), "out");
        let mut rest = out;
        let mut parts = Vec::new();
        for (segments, size) in self.parts(threads) {
            let (part, behind) = rest.split_at_mut(size);
            parts.push((segments, part));
            rest = behind;
        }
        parallel::for_each(threads, parts, |(segments, out)| {
            each_padded(segments, out, pad, |segment, real| {
                real.copy_from_slice(&values[segment.source..segment.source + segment.copied]);
            });
        });
    }

    /// The segments in parts of about equal size, each with its number of tokens: a single one for
    /// small batches or one thread.
    fn parts(&self, threads: usize) -> Vec<(&[Segment], usize)> {
        let size = self.rows() * self.row_len();
        let target = if threads > 1 && size >= PARALLEL_TOKENS {
            parallel::chunk_len(size, threads)
        } else {
            size
        };
        let mut parts = Vec::new();
        let mut rest = &self.segments[..];
        while !rest.is_empty() {
            let mut tokens = 0;
            let last = rest.iter().position(|segment| {
                tokens += segment.slot;
                tokens >= target
            });
            let (part, behind) = rest.split_at(last.map_or(rest.len(), |last| last + 1));
            parts.push((part, tokens));
            rest = behind;
        }
        parts
    }
}

/// Calls `write` with each segment and its slot in an output.
fn each<V>(segments: &[Segment], mut out: &mut [V], mut write: impl FnMut(&Segment, &mut [V])) {
    for segment in segments {
        let (slot, rest) = out.split_at_mut(segment.slot);
        write(segment, slot);
        out = rest;
    }
}

/// Calls `write` with each segment of a sample and its part of an output, and pads what is left of the
/// slots.
fn each_padded<V: Copy>(
    segments: &[Segment],
    out: &mut [V],
    pad: V,
    mut write: impl FnMut(&Segment, &mut [V]),
) {
    each(segments, out, |segment, slot| {
        let (real, padding) = slot.split_at_mut(segment.copied);
        if !real.is_empty() {
            write(segment, real);
        }
        padding.fill(pad);
    });
}

/// 0, 1, …: most segments are shorter.
static NUMBERS: [i64; 4096] = {
    let mut numbers = [0; 4096];
    let mut i = 0;
    while i < numbers.len() {
        numbers[i] = i as i64;
        i += 1;
    }
    numbers
};

/// Writes from, from + 1, …; what is in a table is copied, since copying has the longest vectors that
/// the processor has.
fn count_up(from: i64, to: &mut [i64]) {
    let known = NUMBERS.get(from as usize..).unwrap_or_default();
    let (copied, counted) = to.split_at_mut(known.len().min(to.len()));
    copied.copy_from_slice(&known[..copied.len()]);
    for (to, position) in counted.iter_mut().zip(from + copied.len() as i64..) {
        *to = position;
    }
}
