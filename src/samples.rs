//! Which samples are planned: the one definition of *retained*.
//!
//! The planner, the length of an epoch and the statistics all work on what [`Samples::retain`]
//! returns, so they cannot disagree about a sample that is empty, over-long or without labels. Each
//! sample that is left out is counted under its reason, with the first index and, for over-long
//! ones, the longest length; nothing is cut unless the settings say `truncate`. O(n) time; 8 bytes
//! for each retained sample.

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

    /// How many of these samples are retained; the others are tallied.
    fn count(&self, samples: Range<usize>) -> Result<Share> {
        let mut share = Share::default();
        if self.inputs.label_counts.is_none() {
            // Mostly nothing is wrong, which is seen in a tenth of the time.
            let lengths = &self.inputs.lengths[samples.clone()];
            let usual = self.min_sample_len..=self.sequence_len;
            if lengths.iter().all(|length| usual.contains(length)) {
                share.kept = lengths.len();
                return Ok(share);
            }
        }
        for sample in samples {
            let tally = match self.fate(sample)? {
                Fate::Kept => {
                    share.kept += 1;
                    continue;
                }
                Fate::Truncated => {
                    share.kept += 1;
                    &mut share.truncated
                }
                Fate::TooShort => &mut share.dropped.too_short,
                Fate::OverLong => &mut share.dropped.over_long,
                Fate::Unlabelled => &mut share.dropped.unlabelled,
            };
            tally.add(sample, self.inputs.lengths[sample]);
        }
        Ok(share)
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
    /// [`Error::NegativeLength`], [`Error::LabelCount`] and [`Error::OverLong`] name the first
    /// offending sample; [`Error::SampleCount`] an array with the wrong number of entries.
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

        // Twice over the input: to count, and to write where the counts say.
        let chunk = n.div_ceil(4 * threads.max(1)).max(1);
        let ranges = || {
            (0..n)
                .step_by(chunk)
                .map(|start| start..n.min(start + chunk))
        };
        let mut shares: Vec<Result<Share>> = Vec::new();
        shares.resize_with(ranges().len(), || Ok(Share::default()));
        parallel::for_each(
            threads,
            ranges().zip(&mut shares).collect(),
            |(range, share)| *share = policy.count(range),
        );
        let mut samples = Samples {
            inputs,
            slots: Vec::new(),
            index: None,
            dropped: Dropped::default(),
            truncated: Tally::default(),
            sequence_len: policy.sequence_len,
            mask_first_label: config.mask_first_label,
        };
        let mut kept = Vec::with_capacity(shares.len());
        for share in shares {
            let share = share?;
            kept.push(share.kept);
            samples.dropped.merge(&share.dropped);
            samples.truncated.merge(&share.truncated);
        }
        let all: usize = kept.iter().sum();
        samples.slots = vec![0; all];
        let mut index = vec![0u32; if all < n { all } else { 0 }];
        let align = config.align_samples_to;
        let (mut slots, mut indices) = (&mut samples.slots[..], &mut index[..]);
        let mut parts = Vec::with_capacity(kept.len());
        for (range, kept) in ranges().zip(kept) {
            let (my_slots, rest) = slots.split_at_mut(kept);
            slots = rest;
            let (my_indices, rest) = indices.split_at_mut(kept.min(indices.len()));
            indices = rest;
            parts.push((range, my_slots, my_indices));
        }
        parallel::for_each(threads, parts, |(range, slots, indices)| {
            let slot_of = |length: i64| match align {
                1 => length.min(policy.sequence_len) as u32,
                _ => (length.min(policy.sequence_len) as u64).next_multiple_of(align) as u32,
            };
            let kept =
                |&sample: &usize| matches!(policy.fate(sample), Ok(Fate::Kept | Fate::Truncated));
            if range.len() == slots.len() {
                for (slot, &length) in slots.iter_mut().zip(&inputs.lengths[range.clone()]) {
                    *slot = slot_of(length);
                }
            } else {
                for (slot, sample) in slots.iter_mut().zip(range.clone().filter(kept)) {
                    *slot = slot_of(inputs.lengths[sample]);
                }
            }
            for (index, sample) in indices.iter_mut().zip(range.filter(kept)) {
                *index = sample as u32;
            }
        });
        samples.index = (all < n).then_some(index);
        Ok(samples)
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
