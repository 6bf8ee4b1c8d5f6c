//! Which samples are planned: the one definition of *retained*.
//!
//! The planner, the length of an epoch and the statistics all work on what [`Samples::retain`]
//! returns, so they cannot disagree about a sample that is empty, over-long or without labels. Each
//! sample that is left out is counted under its reason, with the first index and, for over-long
//! ones, the longest length; nothing is cut unless the settings say `truncate`. O(n) time; 4 bytes
//! for each sample, and 4 more for each retained one where not all are.

use std::ops::Range;

use serde::Serialize;

use crate::config::{Config, ExcessLength};
use crate::{Error, Result, parallel};

/// The per-sample inputs of a plan, as given.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Tokens of each sample.
    pub lengths: &'a [i64],
    /// Supervised tokens of each sample; none: every token is supervised.
    pub label_counts: Option<&'a [i64]>,
    /// Whether each sample's first label is supervised; matters only when `mask_first_label` is
    /// off.
    pub label_starts: Option<&'a [bool]>,
}

/// Samples that share a fate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// The index of the first of them.
    pub first: Option<u64>,
    /// The length of the longest of them, in tokens.
    pub longest: Option<u64>,
}

impl Tally {
    fn add(&mut self, sample: usize, length: i64) {
        self.count += 1;
        self.first.get_or_insert(sample as u64);
        self.longest = self.longest.max(Some(length as u64));
    }

    /// Adds samples that come later in the dataset.
    fn merge(&mut self, later: &Tally) {
        self.count += later.count;
        self.first = self.first.or(later.first);
        self.longest = self.longest.max(later.longest);
    }
}

/// What was left out, by reason; a sample counts under the first that applies, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Dropped {
    /// Empty, or shorter than `min_sample_len`.
    pub too_short: Tally,
    /// Longer than `sequence_len`, under the policy `drop`.
    pub over_long: Tally,
    /// Without a supervised token, when `drop_unlabelled` is on.
    pub unlabelled: Tally,
}

impl Dropped {
    fn merge(&mut self, later: &Dropped) {
        self.too_short.merge(&later.too_short);
        self.over_long.merge(&later.over_long);
        self.unlabelled.merge(&later.unlabelled);
    }

    /// Samples left out in all.
    pub fn count(&self) -> u64 {
        self.too_short.count + self.over_long.count + self.unlabelled.count
    }
}

/// The retained samples of a dataset, numbered in its order.
#[derive(Debug, Clone)]
pub struct Samples<'a> {
    inputs: Inputs<'a>,
    /// Tokens that each retained sample takes up in a row: its length, rounded up to
    /// `align_samples_to`.
    pub slots: Vec<u32>,
    /// Their dataset indices, rising; none where all samples are retained.
    index: Option<Vec<u32>>,
    /// What was left out.
    pub dropped: Dropped,
    /// What was cut to `sequence_len`.
    pub truncated: Tally,
    sequence_len: i64,
    mask_first_label: bool,
}

/// What becomes of one sample.
enum Fate {
    Kept,
    Truncated,
    TooShort,
    OverLong,
    Unlabelled,
}

/// The policies for short, over-long and unlabelled samples.
struct Policy<'a> {
    inputs: Inputs<'a>,
    min_sample_len: i64,
    sequence_len: i64,
    excess: ExcessLength,
    drop_unlabelled: bool,
    /// `label_starts`, where first labels count.
    starts: Option<&'a [bool]>,
}

impl Policy<'_> {
    fn fate(&self, sample: usize) -> Result<Fate> {
        let length = self.inputs.lengths[sample];
        if length < self.min_sample_len {
            return match length {
                ..0 => Err(Error::NegativeLength { sample, length }),
                _ => Ok(Fate::TooShort),
            };
        }
        let mut fate = Fate::Kept;
        if length > self.sequence_len {
            fate = match self.excess {
                ExcessLength::Drop => return Ok(Fate::OverLong),
                ExcessLength::Truncate => Fate::Truncated,
                ExcessLength::Raise => {
                    return Err(Error::OverLong {
                        sample,
                        length,
                        bound: self.sequence_len,
                    });
                }
            };
        }
        if let Some(counts) = self.inputs.label_counts {
            let (count, length) = (counts[sample], length.min(self.sequence_len));
            if count < 0 || count > length {
                return Err(Error::LabelCount {
                    sample,
                    count,
                    length,
                });
            }
            if let Some(starts) = self.starts {
                let start = starts[sample];
                if count < i64::from(start) || count + i64::from(!start) > length {
                    return Err(Error::LabelStart {
                        sample,
                        count,
                        length,
                        start,
                    });
                }
            }
            if count == 0 && self.drop_unlabelled {
                return Ok(Fate::Unlabelled);
            }
        }
        Ok(fate)
    }

    /// Writes the slots of those of these samples that are retained to the front of `slots`, and
    /// tallies the others.
    fn retain(&self, samples: Range<usize>, slots: &mut [u32], align: u64) -> Result<Share> {
        let slot_of = |length: i64| match align {
            1 => length as u32,
            _ => (length.max(0) as u64).next_multiple_of(align) as u32,
        };
        let mut share = Share::default();
        if self.inputs.label_counts.is_none() {
            // Mostly nothing is wrong, which is seen in a tenth of the time.
            let usual = self.min_sample_len..=self.sequence_len;
            let mut all_usual = true;
            let lengths = &self.inputs.lengths[samples.clone()];
            for (slot, length) in slots.iter_mut().zip(lengths) {
                all_usual &= usual.contains(length);
                *slot = slot_of(*length);
            }
            if all_usual {
                share.kept = lengths.len();
                return Ok(share);
            }
        }
        for sample in samples {
            let length = self.inputs.lengths[sample];
            let fate = self.fate(sample)?;
            if matches!(fate, Fate::Kept | Fate::Truncated) {
                slots[share.kept] = slot_of(length.min(self.sequence_len));
                share.kept += 1;
            }
            let tally = match fate {
                Fate::Kept => continue,
                Fate::Truncated => &mut share.truncated,
                Fate::TooShort => &mut share.dropped.too_short,
                Fate::OverLong => &mut share.dropped.over_long,
                Fate::Unlabelled => &mut share.dropped.unlabelled,
            };
            tally.add(sample, length);
        }
        Ok(share)
    }

    /// The dataset indices of the retained ones among these samples, written to `index`, which has
    /// just as many places.
    fn name(&self, samples: Range<usize>, index: &mut [u32]) {
        if samples.len() == index.len() {
            for (place, sample) in index.iter_mut().zip(samples) {
                *place = sample as u32;
            }
            return;
        }
        let kept = |&sample: &usize| matches!(self.fate(sample), Ok(Fate::Kept | Fate::Truncated));
        for (place, sample) in index.iter_mut().zip(samples.filter(kept)) {
            *place = sample as u32;
        }
    }
}

/// What became of some samples.
#[derive(Default)]
struct Share {
    kept: usize,
    dropped: Dropped,
    truncated: Tally,
}

impl<'a> Samples<'a> {
    /// Applies the policies for short, over-long and unlabelled samples.
    ///
    /// # Errors
    ///
    /// [`Error::NegativeLength`], [`Error::OverLong`], [`Error::LabelCount`] and
    /// [`Error::LabelStart`] name the first offending sample; [`Error::SampleCount`] an array with
    /// the wrong number of entries; [`Error::TooManySamples`] says how many 32 bits can number.
    pub fn retain(inputs: Inputs<'a>, config: &Config, threads: usize) -> Result<Samples<'a>> {
        let n = inputs.lengths.len();
        check_entries("label_counts", inputs.label_counts.map(<[i64]>::len), n)?;
        check_entries("label_starts", inputs.label_starts.map(<[bool]>::len), n)?;
        if n > u32::MAX as usize {
            return Err(Error::TooManySamples { found: n });
        }
        let policy = Policy {
            inputs,
            min_sample_len: config.min_sample_len as i64,
            sequence_len: config.require_sequence_len()? as i64,
            excess: config.excess_length_strategy,
            drop_unlabelled: config.drop_unlabelled,
            starts: inputs.label_starts.filter(|_| !config.mask_first_label),
        };

        let chunk = parallel::chunk_len(n, threads);
        let mut slots = vec![0; n];
        let mut shares: Vec<Result<Share>> = Vec::new();
        shares.resize_with(n.div_ceil(chunk), || Ok(Share::default()));
        let range = |part: usize| part * chunk..n.min((part + 1) * chunk);
        let parts = slots.chunks_mut(chunk).zip(&mut shares).enumerate();
        parallel::for_each(
            threads,
            parts.collect(),
            |(part, (slots, share)): (usize, (&mut [u32], &mut Result<Share>))| {
                *share = policy.retain(range(part), slots, config.align_samples_to);
            },
        );
        let (mut dropped, mut truncated) = (Dropped::default(), Tally::default());
        let mut kept = Vec::with_capacity(shares.len());
        for share in shares {
            let share = share?;
            kept.push(share.kept);
            dropped.merge(&share.dropped);
            truncated.merge(&share.truncated);
        }
        let all: usize = kept.iter().sum();
        let mut index = None;
        if all < n {
            // Close the gaps that the samples left out have made, and write down who is left.
            let mut end = 0;
            for (part, &kept) in kept.iter().enumerate() {
                slots.copy_within(part * chunk..part * chunk + kept, end);
                end += kept;
            }
            slots.truncate(all);
            let mut names = vec![0; all];
            let mut rest = &mut names[..];
            let mut parts = Vec::with_capacity(kept.len());
            for (part, &kept) in kept.iter().enumerate() {
                let (mine, others) = rest.split_at_mut(kept);
                rest = others;
                parts.push((range(part), mine));
            }
            parallel::for_each(threads, parts, |(range, index)| policy.name(range, index));
            index = Some(names);
        }
        Ok(Samples {
            inputs,
            slots,
            index,
            dropped,
            truncated,
            sequence_len: policy.sequence_len,
            mask_first_label: config.mask_first_label,
        })
    }

    /// How many samples are retained.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Turns numbers of retained samples into dataset indices.
    pub fn to_dataset_index(&self, mut items: Vec<u32>) -> Vec<u32> {
        if let Some(index) = &self.index {
            items
                .iter_mut()
                .for_each(|item| *item = index[*item as usize]);
        }
        items
    }

    /// The dataset index of the retained sample number `item`.
    fn sample(&self, item: usize) -> usize {
        self.index
            .as_ref()
            .map_or(item, |index| index[item] as usize)
    }

    /// Tokens of the retained sample number `item`, after truncation.
    pub fn length(&self, item: usize) -> u64 {
        self.inputs.lengths[self.sample(item)].min(self.sequence_len) as u64
    }

    /// Supervised tokens of a row of these retained samples, `tokens` long together.
    pub fn labels(&self, row: &[u32], tokens: u64) -> u64 {
        let Some(&first) = row.first() else { return 0 };
        let all: u64 = match self.inputs.label_counts {
            Some(counts) => row
                .iter()
                .map(|&item| counts[self.sample(item as usize)] as u64)
                .sum(),
            None if self.mask_first_label => tokens - row.len() as u64,
            None => tokens,
        };
        all - u64::from(self.loses_first_label(first as usize))
    }

    /// Supervised tokens of a retained sample that is not the first of its row.
    pub fn label_count(&self, item: usize) -> u32 {
        match self.inputs.label_counts {
            Some(counts) => counts[self.sample(item)] as u32,
            None => self.length(item) as u32 - u32::from(self.mask_first_label),
        }
    }

    /// Whether labels follow from lengths: every token is one, but perhaps the first of a sample.
    pub fn are_all_supervised(&self) -> bool {
        (0..self.len()).all(|item| u64::from(self.label_count(item)) + 1 >= self.length(item))
    }

    /// Whether samples differ in what they lose by standing first in a row.
    pub fn leads_differ(&self) -> bool {
        !self.mask_first_label && self.inputs.label_starts.is_some()
    }

    /// Whether a retained sample loses a label by standing first in its row: the causal shift
    /// leaves nothing that predicts its first token. Not where `mask_first_label` has removed that
    /// label everywhere.
    pub fn loses_first_label(&self, item: usize) -> bool {
        if self.mask_first_label {
            return false;
        }
        match (self.inputs.label_starts, self.inputs.label_counts) {
            (Some(starts), _) => starts[self.sample(item)],
            (None, None) => true,
            (None, Some(_)) => false,
        }
    }

    /// The sentence for a plan without any sample.
    pub fn why_empty(&self) -> String {
        match self.inputs.lengths.len() {
            0 => "no samples were given, so the plan is empty".into(),
            n => format!(
                "no sample is retained, so the plan is empty: of {n} samples {}",
                self.fates()
            ),
        }
    }

    /// The sentence for a plan that lacks some samples or parts of them.
    pub fn what_is_missing(&self) -> String {
        format!("of {} samples {}", self.inputs.lengths.len(), self.fates())
    }

    /// What became of the samples that are not there as they were, for instance `3 dropped as empty
    /// (first: 17)`.
    fn fates(&self) -> String {
        let sequence_len = self.sequence_len;
        [
            (
                &self.dropped.too_short,
                "dropped as shorter than min_sample_len".to_string(),
            ),
            (
                &self.dropped.over_long,
                format!("dropped as longer than sequence_len {sequence_len}"),
            ),
            (
                &self.dropped.unlabelled,
                "dropped as having no supervised token".to_string(),
            ),
            (
                &self.truncated,
                format!("cut to sequence_len {sequence_len}"),
            ),
        ]
        .iter()
        .filter_map(|(tally, what)| {
            let (first, longest) = (tally.first?, tally.longest?);
            Some(format!(
                "{} {what} (first: {first}, longest: {longest} tokens)",
                tally.count
            ))
        })
        .collect::<Vec<_>>()
        .join(", ")
    }
}

fn check_entries(name: &'static str, found: Option<usize>, expected: usize) -> Result<()> {
    match found {
        Some(found) if found != expected => Err(Error::SampleCount {
            name,
            found,
            expected,
        }),
        _ => Ok(()),
    }
}
