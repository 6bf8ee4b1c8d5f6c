//! Which samples are planned: the one definition of *retained*.
//!
//! The planner, the length of an epoch and the statistics all work on what [`Samples::retain`]
//! returns, so they cannot disagree about a sample that is empty, over-long or without labels. Each
//! sample that is left out is counted under its reason, with the first index and, for over-long
//! ones, the longest length; nothing is cut unless the settings say `truncate`. O(n) time; 8 bytes
//! for each retained sample.

use serde::Serialize;

use crate::config::{Config, ExcessLength};
use crate::{Error, Result};

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
    /// Samples left out in all.
    pub fn count(&self) -> u64 {
        self.too_short.count + self.over_long.count + self.unlabelled.count
    }
}

/// The retained samples of a dataset.
#[derive(Debug, Clone)]
pub struct Samples<'a> {
    inputs: Inputs<'a>,
    /// Dataset indices, rising.
    pub index: Vec<u32>,
    /// Tokens that each retained sample takes up in a row: its length, rounded up to
    /// `align_samples_to`.
    pub slots: Vec<u32>,
    /// What was left out.
    pub dropped: Dropped,
    /// What was cut to `sequence_len`.
    pub truncated: Tally,
    sequence_len: i64,
    mask_first_label: bool,
}

impl<'a> Samples<'a> {
    /// Applies the policies for short, over-long and unlabelled samples.
    ///
    /// # Errors
    ///
    /// [`Error::NegativeLength`], [`Error::LabelCount`] and [`Error::OverLong`] name the first
    /// offending sample; [`Error::SampleCount`] an array with the wrong number of entries.
    pub fn retain(inputs: Inputs<'a>, config: &Config) -> Result<Samples<'a>> {
        let n = inputs.lengths.len();
        check_entries("label_counts", inputs.label_counts.map(<[i64]>::len), n)?;
        check_entries("label_starts", inputs.label_starts.map(<[bool]>::len), n)?;
        if n > u32::MAX as usize {
            return Err(Error::TooManySamples { found: n });
        }
        let sequence_len = config.require_sequence_len()? as i64;
        let align = config.align_samples_to;
        let mut samples = Samples {
            inputs,
            index: Vec::with_capacity(n),
            slots: Vec::with_capacity(n),
            dropped: Dropped::default(),
            truncated: Tally::default(),
            sequence_len,
            mask_first_label: config.mask_first_label,
        };
        for (sample, &length) in inputs.lengths.iter().enumerate() {
            if length < 0 {
                return Err(Error::NegativeLength { sample, length });
            }
            if length < config.min_sample_len as i64 {
                samples.dropped.too_short.add(sample, length);
                continue;
            }
            let mut kept = length;
            if length > sequence_len {
                match config.excess_length_strategy {
                    ExcessLength::Drop => {
                        samples.dropped.over_long.add(sample, length);
                        continue;
                    }
                    ExcessLength::Truncate => {
                        samples.truncated.add(sample, length);
                        kept = sequence_len;
                    }
                    ExcessLength::Raise => {
                        return Err(Error::OverLong {
                            sample,
                            length,
                            bound: sequence_len,
                        });
                    }
                }
            }
            if let Some(counts) = inputs.label_counts {
                let count = counts[sample];
                if count < 0 || count > kept {
                    return Err(Error::LabelCount {
                        sample,
                        count,
                        length: kept,
                    });
                }
                if count == 0 && config.drop_unlabelled {
                    samples.dropped.unlabelled.add(sample, length);
                    continue;
                }
            }
            samples.index.push(sample as u32);
            samples
                .slots
                .push((kept as u64).next_multiple_of(align) as u32);
        }
        Ok(samples)
    }

    /// How many samples are retained.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Dataset indices of retained samples given by number.
    pub fn to_dataset_index(&self, items: &[u32]) -> Vec<i64> {
        if self.len() == self.inputs.lengths.len() {
            // Nothing was dropped, so the numbers are the indices.
            return items.iter().map(|&item| i64::from(item)).collect();
        }
        let index = |&item: &u32| i64::from(self.index[item as usize]);
        items.iter().map(index).collect()
    }

    /// Tokens of the retained sample number `item`, after truncation.
    pub fn length(&self, item: usize) -> u64 {
        self.inputs.lengths[self.index[item] as usize].min(self.sequence_len) as u64
    }

    /// Supervised tokens of the retained sample number `item` of `length` tokens, where it is not
    /// the first of its row.
    pub fn labels(&self, item: usize, length: u64) -> i64 {
        match self.inputs.label_counts {
            Some(counts) => counts[self.index[item] as usize],
            None => length as i64 - i64::from(self.mask_first_label),
        }
    }

    /// Labels that a retained sample loses by standing first in its row: the causal shift leaves
    /// nothing that predicts its first token. 0 where `mask_first_label` has removed that label
    /// everywhere.
    pub fn lead_loss(&self, item: usize) -> i64 {
        if self.mask_first_label {
            return 0;
        }
        i64::from(match (self.inputs.label_starts, self.inputs.label_counts) {
            (Some(starts), _) => starts[self.index[item] as usize],
            (None, None) => true,
            (None, Some(_)) => false,
        })
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
