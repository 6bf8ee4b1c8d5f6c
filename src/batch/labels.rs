//! Counting supervised tokens, so that the planner can even them out.
//!
//! The count is of the labels that enter the loss once the sample stands in a batch: those other
//! than -100, within the tokens that truncation keeps, without the first one where batches mask it.
//! One pass over the labels, in parallel over samples when there are many.

use super::{IGNORED_LABEL, PARALLEL_TOKENS, limit, sample, sample_count};
use crate::{Result, memory, parallel};

/// Supervised tokens of each sample, and whether its first label is one.
///
/// Sample `i` is `labels[offsets[i]..offsets[i + 1]]`, cut to `max_sample_len` tokens (0: no
/// limit). With `mask_first_label` the first label does not count; whether it is supervised in the
/// data is reported all the same. An empty sample has 0 and `false`.
///
/// # Errors
///
/// Offsets that are missing, negative, fall, or end past the labels; a negative `max_sample_len`;
/// and too little memory.
///
/// # Examples
///
/// ```
/// use multipack::batch::label_counts;
///
/// let labels = [11, 12, 13, -100, 22];
/// let (counts, starts) = label_counts(&labels, &[0, 3, 5], 0, true, 1)?;
/// assert_eq!(counts, [2, 1]);
/// assert_eq!(starts, [true, false]);
/// # Ok::<(), multipack::Error>(())
/// ```
pub fn label_counts<T: Copy + Into<i64> + Sync>(
    labels: &[T],
    offsets: &[i64],
    max_sample_len: i64,
    mask_first_label: bool,
    threads: usize,
) -> Result<(Vec<i64>, Vec<bool>)> {
    let limit = limit("max_sample_len", max_sample_len)?;
    let samples = sample_count(offsets, labels.len())?;
    for i in 0..samples {
        sample(offsets, i, labels.len())?;
    }

    memory::ensure(samples, size_of::<i64>() + size_of::<bool>())?;
    let mut counts = vec![0; samples];
    let mut starts = vec![false; samples];
    let size = if threads > 1 && labels.len() >= PARALLEL_TOKENS {
        samples.div_ceil(8 * threads)
    } else {
        samples
    };
    let parts = counts
        .chunks_mut(size.max(1))
        .zip(starts.chunks_mut(size.max(1)))
        .enumerate()
        .map(|(part, (counts, starts))| (&offsets[part * size..], counts, starts))
        .collect();
    parallel::for_each(
        threads,
        parts,
        |(offsets, counts, starts): (&[i64], &mut [i64], &mut [bool])| {
            for ((span, count), start) in offsets.windows(2).zip(counts).zip(starts) {
                let all = &labels[span[0] as usize..span[1] as usize];
                let kept = &all[..all.len().min(limit)];
                *start = kept
                    .first()
                    .is_some_and(|&label| label.into() != IGNORED_LABEL);
                *count = kept
                    .iter()
                    .filter(|&&label| label.into() != IGNORED_LABEL)
                    .count() as i64
                    - i64::from(mask_first_label && *start);
            }
        },
    );
    Ok((counts, starts))
}
