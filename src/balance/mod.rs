//! Balancing: as many supervised tokens in every microbatch and in every optimizer step.
//!
//! Only labels that enter the loss count. Whole samples and whole microbatches are moved; the
//! samples in use, the number of rows, their capacity and their padding stay what they were, and so
//! does the mean. Nothing gets more uneven: neither the labels of microbatches or steps, nor, unless
//! ranks are evened by `attention`, the tokens of steps.
//!
//! 1. Layouts with a fixed number of samples: [`groups`] or, padded, [`padded`] deal the samples to
//!    microbatches anew, even in tokens (and labels).
//! 2. [`level`]: samples of equal length change places, so that the microbatches' labels even out.
//! 3. Packed layouts: [`exchange`] lets sets of samples with equal sums of tokens change rows.
//! 4. [`groups`]: microbatches are put into optimizer steps that are even in labels and tokens.
//! 5. [`arrange`]: inside a step, microbatches are dealt to ranks and microsteps by their cost. Where a
//!    step is one microstep, [`microsteps`] puts it together so that ranks wait no longer, unless
//!    that leaves the labels of steps too uneven.
//! 6. [`steps`]: what one microbatch leaves over in its step is spread over many.
//!
//! Of a handful of samples, [`few`] finds the best schedule instead, by trying all.
//!
//! Packed rows come from a packer that mixes lengths ([`crate::pack::mixed`]): rows of long samples
//! alone could not be evened. (Where every token is a label, they are those of a plan without
//! balancing, so that its steps are not more even by chance.) The whole epoch is balanced at once, which is more than a window of
//! some steps can do. An incomplete last step takes part in 1 to 3, so that its microbatches are not
//! the most uneven ones, and keeps its microbatches. How near all this comes to the best that could
//! be, [`floor`] says.

mod arrange;
mod exchange;
mod few;
mod floor;
mod groups;
mod level;
mod microsteps;
mod padded;
mod steps;

use std::ops::Range;

use crate::config::{BalanceCost, BatchLayout, Config, Split};
use crate::order::Stream;
use crate::pack::{Bounds, Rows};
use crate::samples::Samples;
use crate::schedule::{Round, Schedule};
use arrange::Load;
use exchange::Shape;
pub(crate) use floor::label_std_floor;
use groups::{Unit, even_groups};

/// Microbatches of a fixed number of samples that are dealt together: enough to even out, few enough
/// for who meets whom to stay a matter of chance.
const BLOCK: usize = 2048;

/// Microbatches that are looked through in all rounds of exchanges, and most rounds: the second
/// gains a tenth of what the first does.
const ROUNDS_BATCHES: usize = 1 << 15;
const MOST_ROUNDS: usize = 2;
/// Microbatches in all of the searches that begin elsewhere, and most of these.
const LEAPS_BATCHES: usize = 1 << 10;
const MOST_LEAPS: usize = 64;
/// Samples in all of them, because each looks at every one: rows of thousands would take seconds.
const LEAPS_SAMPLES: usize = 1 << 18;

/// Ranks wait no longer than before if the labels of steps can then be brought to half of their spread,
/// or to twice of what else could be had: a quarter, and four times, of the variance. (Four samples to
/// a padded microbatch, four ranks and no accumulation: the labels of a step vary by 36 % before, by
/// 8.4 % with the waits as they were, by 6.0 % where ranks wait 4 % longer.)
const FOR_WAITS: i128 = 4;

/// Balances a training schedule.
pub(crate) fn balance(
    schedule: &mut Schedule,
    round: Round,
    samples: &Samples,
    config: &Config,
    bounds: Bounds,
    stream: &mut Stream,
    threads: usize,
) {
    let layout = config.layout(Split::Train);
    let shape = Shape {
        bounds,
        align: config.align_samples_to as u32,
        multiple: match config.pad_to_sequence_len {
            true => bounds.capacity,
            false => config.pad_to_multiple_of as u32,
        },
    };
    let given = Work::of(schedule, round, samples, layout);
    let step = round.world_size * config.accumulation(Split::Train) as usize;
    let complete = given.totals.len() / step * step;
    let rest = rest_of(schedule, given.items.len(), round, samples, layout);
    let units = |loads: &[Load]| loads.iter().map(|load| load.unit).collect::<Vec<Unit>>();
    let given_loads = loads(&given, shape, layout, config);
    let before = Unevenness::of([units(&given_loads), rest.clone()], step);
    // A last step with repeats may be far from the others, and stays so.
    let complete_before = Unevenness::of([units(&given_loads[..complete])], step);
    // Ranks whose costs are the same to a hundredth do not wait.
    let as_given: Vec<u32> = (0..complete as u32).collect();
    let most_waits = arrange::waits(&as_given, &given_loads, round.world_size).max(1.01);
    let frame = arrange::Frame {
        world: round.world_size,
        step,
        most_jumps: arrange::jumps(&as_given, &given_loads, round.world_size),
    };

    let count = config.batch_size(Split::Train) as usize;
    let fixed = !layout.is_packed() && given.items.len() == count * given.totals.len();
    let by_cost = config.balance_cost == BalanceCost::Attention;
    let mut put = |work: &Work, order: &[u32]| {
        let end = work.items.len();
        schedule.rows.items[..end].copy_from_slice(&work.items);
        schedule.rows.offsets[..work.fronts.len()].copy_from_slice(&work.fronts);
        sum_rows(&mut schedule.rows, samples);
        reorder(&mut schedule.rows, order, round.rows_per_microbatch);
    };
    let few = (1..=few::MOST_SAMPLES).contains(&given.items.len());
    if few && rest.len() <= few::MOST_REPEATS {
        let work = few::best(&few::Frame {
            given: &given,
            rest: &rest,
            before: &before,
            shape,
            layout,
            config,
            world: round.world_size,
            step,
        });
        let mut steps: Vec<usize> = (0..complete / step).collect();
        stream.shuffle(&mut steps);
        let batches = |of: usize| (of * step) as u32..((of + 1) * step) as u32;
        let mut order: Vec<u32> = steps.into_iter().flat_map(batches).collect();
        let loads = loads(&work, shape, layout, config);
        arrange::inside_steps(&mut order, &loads, frame, stream);
        put(&work, &order);
        return;
    }

    let finish = |work: &Work, order: Vec<u32>| {
        let mut work = work.clone();
        steps::even_steps(&mut work, &order, step);
        let loads = loads(&work, shape, layout, config);
        let moved: Vec<Unit> = order.iter().map(|&b| loads[b as usize].unit).collect();
        let step_labels = Unevenness::of([moved.clone()], step).step_labels;
        let after = Unevenness::of([moved, units(&loads[complete..]), rest.clone()], step);
        (work.lost() == given.lost() && after.is_within(&before, by_cost)).then_some(Finished {
            work,
            order,
            step_labels,
        })
    };
    // Few samples may come out worse; then less is done, or nothing.
    for bold in [true, false] {
        let mut work = given.clone();
        if bold && fixed {
            regroup(&mut work, layout, count, stream);
            work.lose(given.lost());
        }
        level::equal_lengths(&mut work);
        if bold && layout.is_packed() {
            exchange_sets(&mut work, shape, stream, threads);
        }
        let world = round.world_size;
        let weights = &loads(&work, shape, layout, config)[..complete];
        // Steps for cost may be too uneven in labels; then those for labels, if ranks wait no longer.
        let composed_for: &[bool] = if by_cost { &[true, false] } else { &[false] };
        for &for_cost in composed_for {
            let arranged = match for_cost {
                true => arrange::by_cost(weights, frame, stream),
                false => arrange::by_labels(weights, frame, stream),
            };
            let no_longer = |order: &[u32]| arrange::waits(order, weights, world) <= most_waits;
            let arranged_waits_no_longer = no_longer(&arranged);
            if world == step && !arranged_waits_no_longer {
                let most_tokens = complete_before.step_tokens;
                let order = arrange::by_waits(weights, frame, most_tokens, most_waits, stream);
                let waiting = Some(order).filter(|order| no_longer(order));
                if let Some(other) = waiting.and_then(|order| finish(&work, order)) {
                    let enough = |labels: i128| FOR_WAITS * other.step_labels <= labels;
                    let near = |best: Finished| other.step_labels <= FOR_WAITS * best.step_labels;
                    if by_cost
                        || enough(complete_before.step_labels)
                        || finish(&work, arranged.clone()).is_none_or(near)
                    {
                        return put(&other.work, &other.order);
                    }
                }
            }
            if (arranged_waits_no_longer || !by_cost)
                && let Some(finished) = finish(&work, arranged)
            {
                return put(&finished.work, &finished.order);
            }
        }
    }
}

/// A schedule that is nowhere more uneven than the given one, and the variance of the labels of its
/// complete steps.
struct Finished {
    work: Work,
    order: Vec<u32>,
    step_labels: i128,
}

/// Exchanges sets of samples between rows, as often as that pays. Where there are few microbatches
/// the search may end in a hollow; then it goes on from places near it and keeps the best.
fn exchange_sets(work: &mut Work, shape: Shape, stream: &mut Stream, threads: usize) {
    let batches = work.totals.len().max(1);
    let descend = |work: &mut Work| {
        for _ in 0..(ROUNDS_BATCHES / batches).clamp(1, MOST_ROUNDS) {
            if exchange::equal_sums(work, shape, threads) == 0 {
                break;
            }
            level::equal_lengths(work);
        }
    };
    descend(work);
    for _ in 0..leaps(batches, work.items.len()) {
        let mut other = work.clone();
        for _ in 0..=stream.below(2) {
            exchange::at_random(&mut other, shape, stream);
        }
        descend(&mut other);
        if other.squares() < work.squares() {
            *work = other;
        }
    }
}

/// How often the search begins elsewhere.
fn leaps(batches: usize, samples: usize) -> usize {
    (LEAPS_BATCHES / batches)
        .min(LEAPS_SAMPLES / samples.max(1))
        .min(MOST_LEAPS)
}

/// How uneven a schedule is: the variance of each quantity times the square of the count, exactly.
#[derive(Debug, PartialEq, Eq)]
struct Unevenness {
    batch_labels: i128,
    step_labels: i128,
    step_tokens: i128,
}

impl Unevenness {
    fn of<const N: usize>(parts: [Vec<Unit>; N], step: usize) -> Unevenness {
        let units = parts.concat();
        let steps = units
            .chunks_exact(step)
            .map(|step| Unit::sum(step.iter().copied()));
        let steps: Vec<Unit> = steps.collect();
        Unevenness {
            batch_labels: spread(units.iter().map(|unit| unit.labels)),
            step_labels: spread(steps.iter().map(|unit| unit.labels)),
            step_tokens: spread(steps.iter().map(|unit| unit.tokens)),
        }
    }

    /// Whether nothing is more uneven than in `other`; tokens may be, by a few, where steps are
    /// composed for cost.
    fn is_within(&self, other: &Unevenness, by_cost: bool) -> bool {
        self.batch_labels <= other.batch_labels
            && self.step_labels <= other.step_labels
            && (by_cost || self.step_tokens <= other.step_tokens)
    }
}

/// Half of how much the squares of two sums a and b change, a − b = `gap`, if the first grows by `gain`
/// and the other falls by it: (a + g)² + (b − g)² − a² − b² = 2 g (a − b + g). As near to that as there
/// are numbers: rows of 2³¹ tokens, 64 in a step, may go beyond them.
fn change(gain: i64, gap: i64) -> i64 {
    gain.saturating_mul(gap + gain)
}

/// n Σx² − (Σx)².
fn spread(values: impl Iterator<Item = i64>) -> i128 {
    let (mut count, mut sum, mut squares) = (0, 0, 0);
    for value in values.map(i128::from) {
        count += 1;
        sum += value;
        squares += value * value;
    }
    count * squares - sum * sum
}

/// The microbatches that hold repeats: what their other samples, from place `start` on, bring in.
fn rest_of(
    schedule: &Schedule,
    start: usize,
    round: Round,
    samples: &Samples,
    layout: BatchLayout,
) -> Vec<Unit> {
    let rows = &schedule.rows;
    let real = rows.items.len() - schedule.repeated_items;
    let sum_of_row = |row: usize| {
        let places = rows.places(row);
        Unit::sum((places.start..places.end.min(real)).map(|place| {
            let item = rows.items[place] as usize;
            let leads = layout == BatchLayout::Padded || place == places.start;
            let lost = leads && samples.leads_differ() && samples.loses_first_label(item);
            Unit {
                labels: i64::from(samples.label_count(item)) - i64::from(lost),
                tokens: samples.length(item) as i64,
            }
        }))
    };
    let mut units = Vec::new();
    for first in (0..rows.len()).step_by(round.rows_per_microbatch) {
        if rows.places(first).start >= start {
            let rows = first..first + round.rows_per_microbatch;
            units.push(Unit::sum(rows.map(sum_of_row)));
        }
    }
    units
}

/// Deals samples anew to microbatches of `count`.
fn regroup(work: &mut Work, layout: BatchLayout, count: usize, stream: &mut Stream) {
    let block = BLOCK * count;
    for start in (0..work.items.len()).step_by(block) {
        let end = work.items.len().min(start + block);
        if layout == BatchLayout::Padded {
            padded::even_tokens(work, start, end, count);
        } else {
            let units: Vec<Unit> = (start..end).map(|place| work.unit(place)).collect();
            let order = even_groups(&units, count, stream);
            let places: Vec<u32> = order.iter().map(|&unit| start as u32 + unit).collect();
            work.rearrange(start, &places);
        }
    }
    work.add_up();
}

/// A schedule sample by sample: all microbatches without repeats.
#[derive(Clone)]
struct Work {
    /// Retained sample at each place.
    items: Vec<u32>,
    /// Its tokens. Where samples are aligned, equal lengths take up equal slots.
    lengths: Vec<u32>,
    /// Its labels.
    labels: Vec<u32>,
    /// Whether it loses a label where it is the first of its row; empty where that cannot matter.
    leads: Vec<bool>,
    /// The places at which rows begin.
    fronts: Vec<u32>,
    /// The microbatch of each place.
    batch_of: Vec<u32>,
    /// Labels of each microbatch.
    totals: Vec<i64>,
}

impl Work {
    fn of(schedule: &Schedule, round: Round, samples: &Samples, layout: BatchLayout) -> Work {
        let rows = &schedule.rows;
        let real = rows.items.len() - schedule.repeated_items;
        let ends = rows.offsets.iter().skip(round.rows_per_microbatch);
        let ends = ends.step_by(round.rows_per_microbatch);
        let mut batch_of = Vec::with_capacity(real);
        let mut batches = 0;
        for &end in ends.take_while(|&&end| end as usize <= real) {
            batch_of.resize(end as usize, batches);
            batches += 1;
        }
        let items = rows.items[..batch_of.len()].to_vec();
        let loses = |&item: &u32| samples.loses_first_label(item as usize);
        let mut work = Work {
            lengths: items
                .iter()
                .map(|&item| samples.length(item as usize) as u32)
                .collect(),
            labels: items
                .iter()
                .map(|&item| samples.label_count(item as usize))
                .collect(),
            leads: match samples.leads_differ() {
                true => items.iter().map(loses).collect(),
                false => Vec::new(),
            },
            fronts: rows.offsets[..batches as usize * round.rows_per_microbatch].to_vec(),
            items,
            batch_of,
            totals: vec![0; batches as usize],
        };
        if layout == BatchLayout::Padded {
            // Each sample is the first of a row of its own.
            for (labels, lead) in work.labels.iter_mut().zip(work.leads.drain(..)) {
                *labels -= u32::from(lead);
            }
        }
        work.add_up();
        work
    }

    fn add_up(&mut self) {
        self.totals.fill(0);
        for (&batch, &labels) in self.batch_of.iter().zip(&self.labels) {
            self.totals[batch as usize] += i64::from(labels);
        }
        for at in 0..self.fronts.len() {
            let front = self.fronts[at];
            if self.leads(front) {
                self.totals[self.batch_of[front as usize] as usize] -= 1;
            }
        }
    }

    fn leads(&self, place: u32) -> bool {
        self.leads.get(place as usize).copied().unwrap_or(false)
    }

    /// The places of a row.
    fn row(&self, row: usize) -> Range<u32> {
        let end = self.fronts.get(row + 1);
        self.fronts[row]..end.map_or(self.items.len() as u32, |&next| next)
    }

    /// Labels lost at the fronts of rows.
    fn lost(&self) -> usize {
        self.fronts
            .iter()
            .filter(|&&front| self.leads(front))
            .count()
    }

    /// Lets other samples of the rows lead until as many labels are lost as `wanted`, if that can be.
    fn lose(&mut self, wanted: usize) {
        let mut lost = self.lost();
        for at in 0..self.fronts.len() {
            if lost == wanted {
                break;
            }
            let front = self.fronts[at];
            let right = |place: &u32| self.leads(*place) == (lost < wanted);
            if right(&front) {
                continue;
            }
            if let Some(other) = self.row(at).find(right) {
                self.swap(front as usize, other as usize);
                lost = if lost < wanted { lost + 1 } else { lost - 1 };
            }
        }
        self.add_up();
    }

    /// Sum of the squares of the microbatches' labels.
    fn squares(&self) -> i128 {
        self.totals
            .iter()
            .map(|&total| i128::from(total).pow(2))
            .sum()
    }

    /// Samples of one kind can change places without any effect but on labels.
    fn kind(&self, place: u32) -> (u32, bool) {
        (self.lengths[place as usize], self.leads(place))
    }

    fn unit(&self, place: usize) -> Unit {
        Unit {
            labels: self.labels[place].into(),
            tokens: self.lengths[place].into(),
        }
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.items.swap(one, other);
        self.lengths.swap(one, other);
        self.labels.swap(one, other);
        self.leads.swap(one, other);
    }

    /// Puts what stands at these places into rows, as many in each microbatch as there are now.
    fn put_rows(&mut self, rows: &[Vec<u32>], rows_per_batch: usize) {
        self.fronts.clear();
        self.batch_of.clear();
        let mut end = 0;
        for (row, places) in rows.iter().enumerate() {
            self.fronts.push(end);
            end += places.len() as u32;
            self.batch_of
                .resize(end as usize, (row / rows_per_batch) as u32);
        }
        self.rearrange(0, &rows.concat());
        self.add_up();
    }

    /// Puts what stands at `places` to the places from `start` on.
    fn rearrange(&mut self, start: usize, places: &[u32]) {
        fn pick<T: Copy>(values: &mut [T], start: usize, places: &[u32]) {
            let picked: Vec<T> = places.iter().map(|&place| values[place as usize]).collect();
            values[start..start + picked.len()].copy_from_slice(&picked);
        }
        pick(&mut self.items, start, places);
        pick(&mut self.lengths, start, places);
        pick(&mut self.labels, start, places);
        if !self.leads.is_empty() {
            pick(&mut self.leads, start, places);
        }
    }
}

/// What each microbatch weighs.
fn loads(work: &Work, shape: Shape, layout: BatchLayout, config: &Config) -> Vec<Load> {
    let mut loads = Vec::with_capacity(work.totals.len());
    let rows_per_batch = work.fronts.len() / work.totals.len().max(1);
    let slots = |places: Range<u32>| {
        let lengths = &work.lengths[places.start as usize..places.end as usize];
        lengths.iter().map(|&length| shape.slot(length))
    };
    let mut at = 0;
    for places in work.batch_of.chunk_by(|a, b| a == b) {
        let lengths = &work.lengths[at..at + places.len()];
        at += places.len();
        let first = loads.len() * rows_per_batch;
        let rows = first..first + rows_per_batch;
        let (count, longest) = match layout {
            BatchLayout::Padded => (places.len(), slots(work.row(first)).max()),
            _ => (rows.len(), rows.map(|row| slots(work.row(row)).sum()).max()),
        };
        let size = shape.size(count, longest.unwrap_or(0));
        let labels = work.totals[loads.len()];
        loads.push(Load::of(labels, size, lengths, layout, config));
    }
    loads
}

/// Adds up the tokens of every row, after samples have changed rows.
fn sum_rows(rows: &mut Rows, samples: &Samples) {
    for row in 0..rows.len() {
        let items = &rows.items[rows.places(row)];
        rows.tokens[row] = items.iter().map(|&item| samples.slots[item as usize]).sum();
    }
}

/// Puts the first microbatches of the schedule into this order; the others stay where they are.
fn reorder(rows: &mut Rows, order: &[u32], rows_per_microbatch: usize) {
    let mut ordered = Rows::new();
    let moved = order.iter().map(|&batch| batch as usize);
    let all = rows.len() / rows_per_microbatch;
    for batch in moved.chain(order.len()..all) {
        for row in batch * rows_per_microbatch..(batch + 1) * rows_per_microbatch {
            ordered.push_from(rows, row);
        }
    }
    *rows = ordered;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaps_look_at_a_bounded_number_of_samples() {
        // Sixteen rows of ten thousand samples each once took 64 leaps, and twelve seconds.
        for batches in [1, 16, 100, 5000] {
            for samples in [0, 1, 9, 160_000, 1 << 30] {
                let leaps = leaps(batches, samples);
                assert!(leaps * samples <= LEAPS_SAMPLES && leaps * batches <= LEAPS_BATCHES);
                assert!(leaps <= MOST_LEAPS);
            }
        }
        assert_eq!(
            (64, 64, 10),
            (leaps(1, 9), leaps(16, 4096), leaps(100, 4000))
        );
    }
}
