//! What a schedule is like, in numbers: density, padding, and how even the supervised tokens are.
//!
//! Standard deviations are those of the population. Values per optimizer step leave out an
//! incomplete last step. What cannot be said (no complete step, one microbatch) is none, never a
//! made-up zero. Repeated rows take up space, but bring neither tokens nor labels. O(n), in the
//! order of the plan, so that every machine adds up the same.

use std::ops::Range;

use serde::Serialize;

use crate::config::{BalanceCost, BatchLayout, Config, Split};
use crate::pack::Bounds;
use crate::parallel;
use crate::samples::Samples;
use crate::schedule::{Round, Schedule};

/// Statistics of a schedule. Counts are of the whole epoch over all ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Rows in the plan; padded samples count one by one.
    pub rows: u64,
    /// Rows that no packing of the samples in the plan can beat.
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
    /// What `microbatch_label_std` could be at best, however these samples were packed into as many
    /// microbatches; none without label counts.
    pub label_std_floor: Option<f64>,
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
    labels: u64,
    /// Rows × row length.
    size: u64,
    /// Σ length² of the samples, where attention is what counts.
    squares: u64,
    /// Mean length of the samples; none without one.
    mean: Option<f64>,
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
        let measure = Measure {
            schedule,
            round,
            samples,
            config,
            layout: config.layout(split),
            bounds,
            step: round.world_size * config.accumulation(split) as usize,
        };
        // The cuts do not depend on the threads, and sums of floats are taken in order.
        let microbatches = schedule.rows.len() / round.rows_per_microbatch;
        let cut = measure.step * 4096usize.div_ceil(measure.step);
        let mut sums = vec![Sums::default(); microbatches.div_ceil(cut)];
        let parts = sums.iter_mut().enumerate().collect();
        parallel::for_each(threads, parts, |(part, sums): (usize, &mut Sums)| {
            let end = microbatches.min((part + 1) * cut);
            *sums = measure.sums(part * cut..end, microbatches);
        });
        let sums = sums.iter().fold(Sums::default(), Sums::add);
        sums.to_stats(&measure)
    }
}

/// Sum and sum of squares of integers: exact, so that they can be added up in any order.
#[derive(Debug, Clone, Copy, Default)]
struct Moments {
    count: u64,
    sum: u64,
    squares: u128,
}

impl Moments {
    fn push(&mut self, value: u64) {
        self.count += 1;
        self.sum += value;
        self.squares += u128::from(value) * u128::from(value);
    }

    fn add(&self, other: &Moments) -> Moments {
        Moments {
            count: self.count + other.count,
            sum: self.sum + other.sum,
            squares: self.squares + other.squares,
        }
    }

    fn mean(&self) -> Option<f64> {
        ratio(self.sum as f64, self.count as f64)
    }

    /// The standard deviation: √(n Σx² − (Σx)²) / n.
    fn deviation(&self) -> Option<f64> {
        let (count, sum) = (u128::from(self.count), u128::from(self.sum));
        let spread = count * self.squares - sum * sum;
        ratio((spread as f64).sqrt(), self.count as f64)
    }
}

/// Sums of numbers that are no integers, and how many they are.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    count: u64,
    sum: f64,
}

impl Mean {
    fn push(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
    }

    fn add(&self, other: &Mean) -> Mean {
        Mean {
            count: self.count + other.count,
            sum: self.sum + other.sum,
        }
    }

    fn get(&self) -> Option<f64> {
        ratio(self.sum, self.count as f64)
    }
}

/// What is added up over the microbatches.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    rows: u64,
    size: u64,
    tokens: Moments,
    labels: Moments,
    step_tokens: Moments,
    step_labels: Moments,
    /// Max over mean of the ranks' costs, by microstep.
    imbalance: Mean,
    /// Change of size from a rank's microbatch to its next.
    jump: Mean,
    /// Of the pairs of neighbours: the mean sample lengths x and y, and their products.
    x: Mean,
    y: Mean,
    xx: Mean,
    yy: Mean,
    xy: Mean,
}

impl Sums {
    fn add(self, other: &Sums) -> Sums {
        Sums {
            rows: self.rows + other.rows,
            size: self.size + other.size,
            tokens: self.tokens.add(&other.tokens),
            labels: self.labels.add(&other.labels),
            step_tokens: self.step_tokens.add(&other.step_tokens),
            step_labels: self.step_labels.add(&other.step_labels),
            imbalance: self.imbalance.add(&other.imbalance),
            jump: self.jump.add(&other.jump),
            x: self.x.add(&other.x),
            y: self.y.add(&other.y),
            xx: self.xx.add(&other.xx),
            yy: self.yy.add(&other.yy),
            xy: self.xy.add(&other.xy),
        }
    }

    /// Adds a pair of neighbours. `center` is near the mean of both, so that little is lost when
    /// large squares are taken from one another.
    fn pair(&mut self, one: &Load, next: &Load, center: f64) {
        if let (Some(x), Some(y)) = (one.mean, next.mean) {
            let (x, y) = (x - center, y - center);
            self.x.push(x);
            self.y.push(y);
            self.xx.push(x * x);
            self.yy.push(y * y);
            self.xy.push(x * y);
        }
    }

    /// Pearson's correlation of each mean sample length with the next; none for fewer than two
    /// pairs or lengths that do not vary.
    fn correlation(&self) -> Option<f64> {
        let (x, y) = (self.x.get()?, self.y.get()?);
        let covariance = self.xy.get()? - x * y;
        let (var_x, var_y) = (self.xx.get()? - x * x, self.yy.get()? - y * y);
        let varies = var_x > 1e-9 * self.xx.get()? && var_y > 1e-9 * self.yy.get()?;
        if varies {
            Some(covariance / (var_x * var_y).sqrt())
        } else {
            None
        }
    }

    fn to_stats(self, measure: &Measure) -> Stats {
        let packed = measure.layout.is_packed();
        let space = match packed {
            true => self.rows * u64::from(measure.bounds.capacity),
            false => self.size,
        };
        Stats {
            rows: self.rows,
            // The planner works out the bound of packed rows, and the floor.
            lower_bound: self.rows,
            label_std_floor: None,
            efficiency: ratio(self.tokens.sum as f64, space as f64),
            mean_unpadded_length: self.tokens.mean(),
            padding_tokens: self.size - self.tokens.sum,
            mean_labels: self.labels.mean(),
            microbatch_label_std: self.labels.deviation(),
            step_label_std: self.step_labels.deviation(),
            step_token_std: self.step_tokens.deviation(),
            rank_cost_imbalance: self.imbalance.get(),
            rank_size_jump: self.jump.get(),
            length_correlation: self.correlation(),
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
    /// Microbatches of an optimizer step.
    step: usize,
}

impl Measure<'_> {
    /// Adds up these microbatches of all `microbatches`. The range begins with a step; the pairs
    /// that reach over its end belong to it.
    fn sums(&self, range: Range<usize>, microbatches: usize) -> Sums {
        let world = self.round.world_size;
        let after = microbatches.min(range.end + world);
        let loads: Vec<Load> = (range.start..after).map(|batch| self.load(batch)).collect();
        let (mine, mut sums) = (&loads[..range.len()], Sums::default());
        for load in mine {
            sums.rows += load.rows;
            sums.size += load.size;
            sums.tokens.push(load.tokens);
            sums.labels.push(load.labels);
        }
        for step in mine.chunks_exact(self.step) {
            sums.step_tokens
                .push(step.iter().map(|load| load.tokens).sum());
            sums.step_labels
                .push(step.iter().map(|load| load.labels).sum());
        }
        for microstep in mine.chunks_exact(world) {
            let costs = microstep.iter().map(|load| self.cost(load));
            let (largest, sum) = costs.fold((0.0, 0.0), |(largest, sum), cost| {
                (f64::max(largest, cost), sum + cost)
            });
            if sum > 0.0 {
                sums.imbalance.push(largest * world as f64 / sum);
            }
        }
        for (one, later) in mine.iter().zip(loads.iter().skip(world)) {
            sums.jump.push(one.size.abs_diff(later.size) as f64);
        }
        let center = self.samples.slots.first().map_or(0.0, |&slot| slot.into());
        for (one, next) in mine.iter().zip(loads.iter().skip(1)) {
            sums.pair(one, next, center);
        }
        sums
    }

    /// The work of a microbatch.
    fn cost(&self, load: &Load) -> f64 {
        let squares = || load.squares as f64;
        self.config
            .work(self.layout, load.tokens as f64, squares, load.size as f64)
    }

    /// What microbatch `batch` amounts to.
    fn load(&self, batch: usize) -> Load {
        let rows = &self.schedule.rows;
        let first_row = batch * self.round.rows_per_microbatch;
        let mut load = Load::default();
        let mut longest = 0;
        for row in first_row..first_row + self.round.rows_per_microbatch {
            let (places, used) = (rows.places(row), rows.tokens[row]);
            if self.layout == BatchLayout::Padded {
                for place in places {
                    let slot = self.samples.slots[rows.items[place] as usize];
                    longest = longest.max(slot);
                    self.add_row(place..place + 1, slot, &mut load);
                }
            } else {
                longest = longest.max(used);
                self.add_row(places, used, &mut load);
            }
        }
        let longest = u64::from(longest);
        let row_len = if self.config.pad_to_sequence_len {
            u64::from(self.bounds.capacity)
        } else {
            longest.next_multiple_of(self.config.pad_to_multiple_of)
        };
        load.size = load.rows * row_len;
        load.mean = ratio(load.tokens as f64, load.samples as f64);
        load
    }

    /// Adds the row of these places, of which `used` tokens are taken up, to `load`.
    fn add_row(&self, places: Range<usize>, used: u32, load: &mut Load) {
        let rows = &self.schedule.rows;
        let end = rows.items.len() - self.schedule.repeated_items;
        let real = places.start.min(end)..places.end.min(end);
        let items = &rows.items[real.clone()];
        let lengths = || items.iter().map(|&item| self.samples.length(item as usize));
        let tokens = match self.config.align_samples_to {
            1 if real == places => used.into(),
            _ => lengths().sum(),
        };
        if self.config.balance_cost == BalanceCost::Attention {
            load.squares += lengths().map(|length| length * length).sum::<u64>();
        }
        load.rows += 1;
        load.samples += items.len() as u64;
        load.tokens += tokens;
        load.labels += self.samples.labels(items, tokens);
    }
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}
