//! The plan of an epoch: which samples share a row, and which rank runs which rows when.
//!
//! [`plan`] is a pure function of lengths, label counts, settings, epoch and split: it retains,
//! packs and schedules, and reports what it did. The result is three flat arrays, so a plan of
//! millions of samples is cheap to keep, to hash, to save and to hand to a worker. Every rank makes
//! the whole plan by itself and takes its share.

use std::ops::Range;

use serde::Serialize;

use crate::balance;
use crate::config::{BatchLayout, Config, Incomplete, Split};
use crate::digest::Digest;
use crate::error::counted;
use crate::memory;
use crate::order::{Purpose, Stream};
use crate::pack::{self, Bounds, Items, Rows};
use crate::parallel;
use crate::samples::{Dropped, Inputs, Samples, Tally};
use crate::schedule::{Round, Schedule};
use crate::stats::Stats;
use crate::{Error, Result};

/// The version of the algorithms. The same inputs give the same plan in every release with the same
/// number.
pub const PLAN_VERSION: u32 = 1;

/// What planning takes beside its input, at most, for each sample: 88 bytes where each has a row of
/// its own and rows are split, 15 to 50 else. Balancing asks for its own.
const BYTES_OF_A_SAMPLE: usize = 96;

/// A planned epoch. Samples → rows → microbatches, each as offsets into the level below.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Dataset indices, row after row.
    pub index: Vec<u32>,
    /// Where each row begins in `index`; one more entry than rows.
    pub row_offsets: Vec<u32>,
    /// Where each microbatch begins among the rows; one more entry than microbatches. Microbatches
    /// are ordered by microstep and then by rank: number k × world_size + rank is the k-th of that
    /// rank.
    pub batch_offsets: Vec<u32>,
    /// What was planned, left out and measured.
    pub report: Report,
}

/// What a plan says about itself. Its JSON form is what the op `multipack::plan` returns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// Fingerprint of the settings and the three arrays: equal on every rank, or something is
    /// wrong.
    pub digest: String,
    /// Fingerprints of what went in, to find out what differs when two plans do.
    pub inputs: InputDigests,
    /// Training or evaluation.
    pub split: Split,
    /// The epoch that was asked for.
    pub epoch: u64,
    /// How the samples of a microbatch lie in its tensors.
    pub layout: BatchLayout,
    /// Most tokens of a row.
    pub capacity: u64,
    /// Data-parallel ranks.
    pub world_size: u64,
    /// Microbatches per rank and optimizer step; 1 for evaluation.
    pub gradient_accumulation_steps: u64,
    /// Microbatches of each rank.
    pub microbatches_per_rank: u64,
    /// Rows at the end of the plan that hold only repeats.
    pub repeated_rows: u64,
    /// Samples at the end of `index` that are repeats; their labels must all be masked.
    pub repeated_samples: u64,
    /// Rows left out because they do not fill a round.
    pub unused_rows: u64,
    /// Samples left out with them.
    pub unused_samples: u64,
    /// Samples that took part in planning.
    pub retained: u64,
    /// Samples that did not, by reason.
    pub dropped: Dropped,
    /// Samples cut to `sequence_len`.
    pub truncated: Tally,
    /// Sentences that the user should see once.
    pub warnings: Vec<String>,
    /// The schedule before balancing.
    pub before: Stats,
    /// The schedule as it is.
    pub after: Stats,
}

/// Fingerprints of what went into a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InputDigests {
    /// Of the settings.
    pub settings: String,
    /// Of the lengths.
    pub lengths: String,
    /// Of the label counts and starts, if given.
    pub labels: Option<String>,
}

impl Report {
    /// The report as a JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers, strings and maps with string keys")
    }
}

/// Plans an epoch.
///
/// ```
/// use multipack::{Config, Split, plan};
///
/// let config = Config::from_json(r#"{"sequence_len": 8}"#)?;
/// let plan = plan(&[6, 11, 2], None, None, &config, 0, Split::Train, 1)?;
/// assert_eq!(plan.len(), 1); // 6 + 2 fill one row exactly
/// assert_eq!(plan.report.dropped.over_long.count, 1); // 11 tokens do not fit in 8
/// # Ok::<(), multipack::Error>(())
/// ```
///
/// # Arguments
///
/// `lengths` are the tokens of each sample; `label_counts` their supervised tokens (none: all of
/// them), without the first one when `mask_first_label` is on; `label_starts` whether a sample's
/// first label is supervised, which matters only when it is off. Evaluation is planned with its own
/// batch size, the same way in every epoch, and filled up.
///
/// # Errors
///
/// A negative length, a label count outside its (retained) sample, arrays of different lengths, an
/// over-long sample under `raise`, settings that are out of range, exclude one another or lack a
/// `sequence_len`, more samples than 32 bits can number, and too little memory. A last round that
/// cannot be made complete: fewer complete microbatches than ranks, fewer samples than rows to
/// split into, or millions of repeats to fill it.
///
/// # Complexity
///
/// O(n) and what the packing algorithm costs; 15 to 90 bytes for each sample beside the input, and
/// 75 to 400 where labels are balanced, most for rows of few samples. `threads` is the most threads
/// to use; the plan does not depend on it.
pub fn plan(
    lengths: &[i64],
    label_counts: Option<&[i64]>,
    label_starts: Option<&[bool]>,
    config: &Config,
    epoch: u64,
    split: Split,
    threads: usize,
) -> Result<Plan> {
    config.check()?;
    let layout = config.layout(split);
    let capacity = config.capacity(split)?;
    let batch_size = config.batch_size(split) as usize;
    let inputs = Inputs {
        lengths,
        label_counts,
        label_starts,
    };
    memory::ensure(lengths.len(), BYTES_OF_A_SAMPLE)?;
    let samples = Samples::retain(inputs, config, threads)?;

    let bounds = bounds(config, split)?;
    let count = || Items::count(&samples.slots, 0..samples.len() as u32, bounds, threads);
    let all = layout.is_packed().then(count);
    let rows = lay_rows(
        all.as_ref(),
        &samples,
        bounds,
        config,
        epoch,
        split,
        threads,
    );
    let round = Round {
        rows_per_microbatch: if layout == BatchLayout::RealRows {
            batch_size
        } else {
            1
        },
        world_size: config.world_size as usize,
        items_per_row: (!layout.is_packed()).then_some(batch_size),
        incomplete: match split {
            Split::Train => config.incomplete_batches,
            Split::Eval => Incomplete::Fill,
        },
    };
    let all_rows = rows.len();
    let mut schedule = Schedule::complete(rows, &samples.slots, round)?;
    let mut warnings = warnings(&samples, &schedule, round, all_rows);
    if config.balance_labels && split == Split::Train && label_counts.is_none() {
        warnings.push(
            "balance_labels has no label counts to go by, so every token counts as supervised; \
             give label_counts where prompts are masked"
                .into(),
        );
    }
    let measure =
        |schedule: &Schedule| Stats::of(schedule, round, &samples, config, split, bounds, threads);
    let mut before = measure(&schedule);
    let mut after = before.clone();
    if config.balance_labels && split == Split::Train {
        let mut stream = Stream::new(config.planning_seed(), epoch, Purpose::Balance);
        balance::balance(
            &mut schedule,
            round,
            &samples,
            config,
            bounds,
            &mut stream,
            threads,
        )?;
        after = measure(&schedule);
    }
    let floor = label_counts.and(after.mean_labels).and_then(|mean| {
        balance::label_std_floor(&schedule, round, &samples, bounds.capacity, mean)
    });
    (before.label_std_floor, after.label_std_floor) = (floor, floor);
    let Schedule {
        rows,
        repeated_items,
        repeated_rows,
        unused_rows,
        unused_items,
    } = schedule;
    let microbatches = rows.len() / round.rows_per_microbatch;
    let index = samples.to_dataset_index(rows.items);
    let row_offsets = rows.offsets;
    let batch_offsets: Vec<u32> = (0..=microbatches)
        .map(|batch| (batch * round.rows_per_microbatch) as u32)
        .collect();
    let settings = config.to_short_json();
    let has_labels = label_counts.is_some() || label_starts.is_some();
    let [mut of_plan, mut of_lengths, mut of_labels] = [const { String::new() }; 3];
    let jobs: Vec<Box<dyn FnOnce() + Send>> = vec![
        Box::new(|| {
            let digest = Digest::new().ints(&[PLAN_VERSION]).text(&settings);
            let digest = digest.ints(&index).ints(&row_offsets);
            of_plan = digest.ints(&batch_offsets).finish();
        }),
        Box::new(|| of_lengths = Digest::new().longs(lengths).finish()),
        Box::new(|| {
            let digest = Digest::new().longs(label_counts.unwrap_or_default());
            of_labels = digest.flags(label_starts.unwrap_or_default()).finish();
        }),
        Box::new(|| {
            if let Some(all) = &all {
                after.lower_bound = all.lower_bound_without(&unused_items, bounds);
                before.lower_bound = after.lower_bound;
            }
        }),
    ];
    parallel::for_each(threads, jobs, |job| job());
    let report = Report {
        version: PLAN_VERSION,
        digest: of_plan,
        inputs: InputDigests {
            settings: Digest::new().text(&settings).finish(),
            lengths: of_lengths,
            labels: has_labels.then_some(of_labels),
        },
        split,
        epoch,
        layout,
        capacity,
        world_size: config.world_size,
        gradient_accumulation_steps: config.accumulation(split),
        microbatches_per_rank: microbatches as u64 / config.world_size,
        repeated_rows: repeated_rows as u64,
        repeated_samples: repeated_items as u64,
        unused_rows: unused_rows as u64,
        unused_samples: unused_items.len() as u64,
        retained: samples.len() as u64,
        dropped: samples.dropped.clone(),
        truncated: samples.truncated.clone(),
        warnings,
        before,
        after,
    };
    Ok(Plan {
        index,
        row_offsets,
        batch_offsets,
        report,
    })
}

impl Plan {
    /// Microbatches of each rank.
    pub fn len(&self) -> usize {
        self.report.microbatches_per_rank as usize
    }

    /// Whether no rank has anything to do.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The samples of row `row`.
    pub fn row(&self, row: usize) -> &[u32] {
        &self.index[self.row_offsets[row] as usize..self.row_offsets[row + 1] as usize]
    }

    /// The rows of microbatch `batch`, counted by microstep and then by rank.
    pub fn rows_of(&self, batch: usize) -> Range<usize> {
        self.batch_offsets[batch] as usize..self.batch_offsets[batch + 1] as usize
    }
}

/// Microbatch `k` of a rank out of a plan's arrays: its samples, and where each of its rows begins
/// among them.
///
/// ```
/// use multipack::plan::microbatch;
///
/// // Rows [4, 0], [2], [1], [3, 5]; one row in a microbatch; two ranks.
/// let (index, row_offsets) = ([4, 0, 2, 1, 3, 5], [0, 2, 3, 4, 6]);
/// let (samples, rows) = microbatch(&index, &row_offsets, &[0, 1, 2, 3, 4], 2, 1, 1)?;
/// assert_eq!((samples, rows), (vec![3, 5], vec![0, 2])); // the fourth microbatch
/// # Ok::<(), multipack::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::OutOfRange`] for a rank or a microbatch that does not exist, [`Error::BrokenPlan`] for
/// arrays that are no plan, [`Error::OutOfMemory`] for a microbatch beyond what there is.
pub fn microbatch(
    index: &[i64],
    row_offsets: &[i64],
    batch_offsets: &[i64],
    world_size: i64,
    rank: i64,
    k: i64,
) -> Result<(Vec<i64>, Vec<i64>)> {
    let microbatches = batch_offsets.len() as i64 - 1;
    if world_size < 1 || microbatches < 0 || microbatches % world_size != 0 {
        return Err(Error::BrokenPlan {
            message: format!(
                "batch_offsets has {} entries, which is not one more than a multiple of world_size {world_size}",
                batch_offsets.len()
            ),
        });
    }
    check_range("rank", rank, world_size)?;
    check_range("k", k, microbatches / world_size)?;
    let between = |name: &str, offsets: &[i64], at: i64, end: usize| {
        let pair = usize::try_from(at)
            .ok()
            .and_then(|at| offsets.get(at..at + 2));
        match pair {
            Some(&[from, to]) if 0 <= from && from <= to && to as u64 <= end as u64 => {
                Ok(from as usize..to as usize)
            }
            _ => Err(Error::BrokenPlan {
                message: format!(
                    "{name} is wrong at entry {at}: offsets must not fall or pass the end {end}"
                ),
            }),
        }
    };
    let rows = between(
        "batch_offsets",
        batch_offsets,
        k * world_size + rank,
        row_offsets.len().saturating_sub(1),
    )?;
    let spans = || {
        let row = |row| between("row_offsets", row_offsets, row as i64, index.len());
        rows.clone().map(row)
    };
    let mut count = 0;
    for items in spans() {
        count += items?.len();
    }
    let mut samples = memory::reserved(count)?;
    let mut offsets = memory::reserved(rows.len() + 1)?;
    offsets.push(0);
    for items in spans() {
        samples.extend_from_slice(&index[items?]);
        offsets.push(samples.len() as i64);
    }
    Ok((samples, offsets))
}

fn check_range(name: &'static str, found: i64, end: i64) -> Result<()> {
    match (0..end).contains(&found) {
        true => Ok(()),
        false => Err(Error::OutOfRange { name, found, end }),
    }
}

/// What the user should hear once: samples left out or cut, and why a plan is empty.
fn warnings(samples: &Samples, schedule: &Schedule, round: Round, all_rows: usize) -> Vec<String> {
    if samples.is_empty() {
        return vec![samples.why_empty()];
    }
    let mut warnings = Vec::new();
    if samples.dropped.count() + samples.truncated.count > 0 {
        warnings.push(samples.what_is_missing());
    }
    if schedule.rows.is_empty() {
        let (found, needed) = match round.items_per_row {
            Some(items) => (counted(samples.len(), "sample", "samples"), items),
            None => (counted(all_rows, "row", "rows"), round.rows_per_microbatch),
        };
        warnings.push(format!(
            "no complete microbatch, so the plan is empty: {found}, but a microbatch needs \
             {needed}; incomplete_batches: fill or split keeps them"
        ));
    }
    warnings
}

/// What the settings let a row hold.
fn bounds(config: &Config, split: Split) -> Result<Bounds> {
    let limit = match (
        config.layout(split).is_packed(),
        config.sample_packing_bin_size,
    ) {
        (true, Some(limit)) => limit,
        (true, None) => u64::from(u32::MAX),
        (false, _) => config.batch_size(split),
    };
    Ok(Bounds {
        capacity: config.capacity(split)? as u32,
        limit: limit as u32,
    })
}

/// Rows of all samples, by the settings' layout. `counted` are the samples to be packed, if they
/// are.
fn lay_rows(
    counted: Option<&Items<Range<u32>>>,
    samples: &Samples,
    bounds: Bounds,
    config: &Config,
    epoch: u64,
    split: Split,
    threads: usize,
) -> Rows {
    // Evaluation is the same every time.
    let epoch = if split == Split::Eval { 0 } else { epoch };
    let mut stream = Stream::new(config.planning_seed(), epoch, Purpose::Pack);
    if let Some(all) = counted {
        // Where every token is a label, full rows are even already, and mixing only moves the space
        // that is left over: then the rows are those of a plan without balancing.
        let balances = config.balance_labels && split == Split::Train;
        let mix = balances && !samples.are_all_supervised();
        let slots = &samples.slots;
        return pack::pack(slots, all, bounds, config, mix, &mut stream, threads);
    }
    // Next fit with nothing but the limit: so many samples in every row but the last.
    let any = Bounds {
        capacity: u32::MAX,
        ..bounds
    };
    let arrivals = pack::arrivals(&samples.slots);
    if split == Split::Train && !config.sample_packing_sequentially {
        pack::next_fit::pack(stream.shuffled(arrivals).into_iter(), any)
    } else {
        pack::next_fit::pack(arrivals, any)
    }
}
