//! What a schedule is like, in numbers: density, padding, and how even the supervised tokens are.
//!
//! Standard deviations are those of the population. Values per optimizer step leave out an
//! incomplete last step. What cannot be said (no complete step, one microbatch) is none, never a
//! made-up zero. Repeated rows take up space, but bring neither tokens nor labels. O(n), in the
//! order of the plan, so that every machine adds up the same.

use std::ops::Range;

use serde::Serialize;

use crate::config::{BalanceCost, BatchLayout, Config, Split};
use crate::pack::{self, Bounds};
use crate::parallel;
use crate::samples::Samples;
use crate::schedule::{Round, Schedule};

/// Statistics of a schedule. Counts are of the whole epoch over all ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Rows in the plan; padded samples count one by one.
    pub rows: u64,
    /// Rows that no packing of the retained samples can beat.
    pub lower_bound: u64,
    /// Real tokens as a share of the space: of rows × capacity when packed, else of the padded
    /// batches.
    pub efficiency: Option<f64>,
    /// Real tokens of a microbatch, on average.
    pub mean_unpadded_length: Option<f64>,
    /// Positions of the batches that hold no real token.
    pub padding_tokens: u64,
    /// Labels of a microbatch, on average.
    pub mean_labels: Option<f64>,
    /// Standard deviation of the labels of a microbatch.
    pub microbatch_label_std: Option<f64>,
    /// Standard deviation of the labels of a complete optimizer step.
    pub step_label_std: Option<f64>,
    /// Standard deviation of the real tokens of a complete optimizer step.
    pub step_token_std: Option<f64>,
    /// The heaviest rank's cost over the mean cost at a microstep, on average: 1 is even.
    pub rank_cost_imbalance: Option<f64>,
    /// Difference in size between consecutive microbatches of a rank, in tokens, on average.
    pub rank_size_jump: Option<f64>,
    /// Correlation of the mean sample length of neighbouring microbatches: near 0 is well mixed.
    pub length_correlation: Option<f64>,
}

/// What one microbatch amounts to.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    rows: u64,
    samples: u64,
    tokens: u64,
    labels: i64,
    /// Rows × row length.
    size: u64,
    /// Σ length² of the samples.
    squares: u64,
}

impl Stats {
    /// Measures a schedule.
    pub(crate) fn of(
        schedule: &Schedule,
        round: Round,
        samples: &Samples,
        config: &Config,
        split: Split,
        bounds: Bounds,
        threads: usize,
    ) -> Stats {
        let layout = config.layout(split);
        let mut loads = vec![Load::default(); schedule.rows.len() / round.rows_per_microbatch];
        let chunk = loads.len().div_ceil(4 * threads.max(1)).max(1);
        let parts = loads.chunks_mut(chunk).enumerate().collect();
        parallel::for_each(threads, parts, |(number, loads): (usize, &mut [Load])| {
            let measure = Measure {
                schedule,
                round,
                samples,
                config,
                layout,
                bounds,
            };
            for (batch, load) in (number * chunk..).zip(loads) {
                *load = measure.load(batch);
            }
        });
        let total = |part: fn(&Load) -> u64| loads.iter().map(part).sum::<u64>();
        let (rows, tokens, size) = (total(|l| l.rows), total(|l| l.tokens), total(|l| l.size));
        let space = if layout.is_packed() {
            rows * u64::from(bounds.capacity)
        } else {
            size
        };
        let labels = loads.iter().map(|load| load.labels as f64);
        let lengths = loads.iter().map(|load| load.tokens as f64);
        let steps = loads.chunks_exact(round.world_size * config.accumulation(split) as usize);
        let of_steps = |part: fn(&Load) -> f64| {
            let sums = steps.clone().map(move |step| step.iter().map(part).sum());
            deviation(sums)
        };
        let means: Vec<f64> = loads
            .iter()
            .filter(|load| load.samples > 0)
            .map(|load| load.tokens as f64 / load.samples as f64)
            .collect();
        Stats {
            rows,
            lower_bound: if layout.is_packed() {
                pack::lower_bound(&samples.slots, bounds)
            } else {
                rows
            },
            efficiency: ratio(tokens as f64, space as f64),
            mean_unpadded_length: mean(lengths),
            padding_tokens: size - tokens,
            mean_labels: mean(labels.clone()),
            microbatch_label_std: deviation(labels),
            step_label_std: of_steps(|load| load.labels as f64),
            step_token_std: of_steps(|load| load.tokens as f64),
            rank_cost_imbalance: imbalance(&loads, round.world_size, layout, config),
            rank_size_jump: size_jump(&loads, round.world_size),
            length_correlation: correlation_of_neighbours(&means),
        }
    }
}

/// What a load is measured by.
struct Measure<'a> {
    schedule: &'a Schedule,
    round: Round,
    samples: &'a Samples<'a>,
    config: &'a Config,
    layout: BatchLayout,
    bounds: Bounds,
}

impl Measure<'_> {
    /// What microbatch `batch` amounts to.
    fn load(&self, batch: usize) -> Load {
        let rows = &self.schedule.rows;
        let first_row = batch * self.round.rows_per_microbatch;
        let mut load = Load::default();
        let mut longest = 0;
        for row in first_row..first_row + self.round.rows_per_microbatch {
            let places = rows.places(row);
            if self.layout == BatchLayout::Padded {
                for place in places {
                    longest = longest.max(self.add_row(place..place + 1, &mut load));
                }
            } else {
                longest = longest.max(self.add_row(places, &mut load));
            }
        }
        let row_len = if self.config.pad_to_sequence_len {
            u64::from(self.bounds.capacity)
        } else {
            longest.next_multiple_of(self.config.pad_to_multiple_of)
        };
        load.size = load.rows * row_len;
        load
    }

    /// Adds the row of these places to `load`, and returns how many tokens it takes up.
    fn add_row(&self, places: Range<usize>, load: &mut Load) -> u64 {
        let rows = &self.schedule.rows;
        let end = rows.items.len() - self.schedule.repeated_items;
        let real = places.start.min(end)..places.end.min(end);
        let items = &rows.items[real.clone()];
        let mut add_lengths = |lengths: &mut dyn Iterator<Item = u64>| {
            lengths.fold(0, |tokens, length| {
                load.squares += length * length;
                tokens + length
            })
        };
        // Without alignment the slots are the lengths, and they are here already.
        let tokens = match self.config.align_samples_to {
            1 => add_lengths(&mut rows.slots[real].iter().map(|&slot| slot.into())),
            _ => add_lengths(&mut items.iter().map(|&item| self.samples.length(item as usize))),
        };
        load.rows += 1;
        load.samples += items.len() as u64;
        load.tokens += tokens;
        load.labels += self.samples.labels(items, tokens);
        if let Some(&first) = items.first() {
            load.labels -= self.samples.lead_loss(first as usize);
        }
        rows.slots[places].iter().map(|&slot| u64::from(slot)).sum()
    }
}

/// The heaviest rank over the mean of the ranks, averaged over the microsteps.
fn imbalance(loads: &[Load], world: usize, layout: BatchLayout, config: &Config) -> Option<f64> {
    let cost = |load: &Load| match (config.balance_cost, layout) {
        (BalanceCost::Attention, _) => {
            config.balance_cost_linear * load.tokens as f64 + load.squares as f64
        }
        (BalanceCost::Padded, _) | (BalanceCost::Auto, BatchLayout::Padded) => load.size as f64,
        (BalanceCost::Tokens | BalanceCost::Auto, _) => load.tokens as f64,
    };
    let ratios = loads.chunks_exact(world).filter_map(|microstep| {
        let costs = microstep.iter().map(cost);
        ratio(costs.clone().fold(0.0, f64::max), mean(costs)?)
    });
    mean(ratios)
}

/// How much a rank's batch size changes from one microbatch to the next, on average.
fn size_jump(loads: &[Load], world: usize) -> Option<f64> {
    let later = loads.get(world..).unwrap_or_default();
    let pairs = loads.iter().zip(later);
    mean(pairs.map(|(one, next)| one.size.abs_diff(next.size) as f64))
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    ratio(sum, count)
}

fn deviation(values: impl Iterator<Item = f64> + Clone) -> Option<f64> {
    let center = mean(values.clone())?;
    mean(values.map(|value| (value - center).powi(2))).map(f64::sqrt)
}

/// Pearson's correlation of each value with the next; none for fewer than two pairs or values that
/// do not vary.
fn correlation_of_neighbours(values: &[f64]) -> Option<f64> {
    let earlier = values.iter().take(values.len().saturating_sub(1)).copied();
    let later = values.iter().skip(1).copied();
    let (mean_earlier, mean_later) = (mean(earlier.clone())?, mean(later.clone())?);
    let pairs = earlier.clone().zip(later.clone());
    let products = pairs.map(|(one, next)| (one - mean_earlier) * (next - mean_later));
    ratio(mean(products)?, deviation(earlier)? * deviation(later)?)
}
