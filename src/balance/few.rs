//! Few: of a handful of samples every schedule is tried, and the best one taken.
//!
//! The other parts move samples as long as that lowers a sum of squares. Thousands of samples leave
//! hardly anything over in that way, but eight may well end in a hollow. There are not many ways to
//! deal eight, though: branch and bound, sample by sample, the one with the most labels first.
//!
//! ```text
//! put the next sample into each row that has space; of rows, microbatches and steps that are still
//! empty and alike, only into the first
//! go back where the labels left over, poured in like water, could not make the sum of squares small
//! ```
//!
//! The best schedule is the one whose microbatches are most even in labels; of several, the one
//! whose steps are; of these, the one in which ranks wait least. All of them have the rows, the
//! capacity, the limit on samples (or, not packed, their number) and no more padding than the given
//! one, and none whose steps are more uneven in labels or in tokens counts. (So where a little less
//! spread over microbatches would cost the steps any, it is not taken.) The given schedule is one
//! of them. With `balance_cost: attention`, waiting comes before the labels of steps, and their
//! tokens are free.
//!
//! With eight samples that takes less than a millisecond as a rule. Where many schedules are equally
//! good and it matters which sample comes first in a row, there are up to 100,000: 0.07 s.

use std::cmp::{Ordering, Reverse};

use super::arrange::Load;
use super::groups::Unit;
use super::work::Work;
use super::{Given, Unevenness};
use crate::config::BatchLayout;

/// Most samples for which every schedule is tried.
pub(super) const MOST_SAMPLES: usize = 8;
/// Most microbatches of repeats beside them, which are looked at with every schedule: a step of very
/// many ranks has millions.
pub(super) const MOST_REPEATS: usize = 1 << 8;

/// The best schedule of the given samples, its microbatches in the order of their steps.
pub(super) fn best(given: &Given) -> Work {
    let first = &given.work;
    let batches = first.totals.len();
    let rows = first.fronts.len();
    let mut order: Vec<u32> = (0..first.items.len() as u32).collect();
    order.sort_by_key(|&place| Reverse(first.labels[place as usize]));
    let row_as_given = |row| {
        let mut places = first.row(row);
        let leads = !first.leads.is_empty();
        Row {
            front: leads.then(|| places.next()).flatten(),
            others: places.collect(),
        }
    };
    let mut search = Search {
        given,
        rows_per_batch: rows / batches.max(1),
        order,
        rows: (0..rows).map(row_as_given).collect(),
        size: u64::MAX,
        best: None,
    };
    search.size = search.sizes();
    search.look(); // the given one is the first to beat
    search.rows.fill(Row::default());
    search.put(0);
    let mut work = first.clone();
    if let Some((_, rows)) = search.best {
        let rows = rows.iter().map(|row| row.places().collect());
        work.put_rows(&rows.collect::<Vec<_>>(), search.rows_per_batch);
    }
    work
}

/// The places whose samples stand in a row.
#[derive(Clone, Default)]
struct Row {
    /// The first one, where that matters.
    front: Option<u32>,
    others: Vec<u32>,
}

impl Row {
    fn places(&self) -> impl Iterator<Item = u32> {
        self.front.into_iter().chain(self.others.iter().copied())
    }

    fn is_empty(&self) -> bool {
        self.front.is_none() && self.others.is_empty()
    }
}

/// What a schedule is judged by: the less, the better, the first that differs.
struct Score {
    unevenness: Unevenness,
    /// The largest costs of the microsteps of complete steps, summed up.
    waits: f64,
}

impl Score {
    /// Where steps may be composed for cost, that goes before the labels of steps.
    fn compare(&self, other: &Score, by_cost: bool) -> Ordering {
        let (mine, theirs) = (&self.unevenness, &other.unevenness);
        let waits = self.waits.total_cmp(&other.waits);
        let steps = mine.step_labels.cmp(&theirs.step_labels);
        let batches = mine.batch_labels.cmp(&theirs.batch_labels);
        let next = if by_cost {
            waits.then(steps)
        } else {
            steps.then(waits)
        };
        batches.then(next)
    }
}

struct Search<'a> {
    given: &'a Given<'a>,
    rows_per_batch: usize,
    /// The places in the order in which their samples are dealt.
    order: Vec<u32>,
    rows: Vec<Row>,
    /// Positions in all batches, of which there may not be more.
    size: u64,
    best: Option<(Score, Vec<Row>)>,
}

impl Search<'_> {
    /// Puts the samples from `next` on into rows, in every way.
    fn put(&mut self, next: usize) {
        let Some(&place) = self.order.get(next) else {
            return self.look();
        };
        let empty = self.rows.iter().filter(|row| row.is_empty());
        if empty.count() > self.order.len() - next || self.is_hopeless() {
            return;
        }
        for row in 0..self.rows.len() {
            if !self.has_space(row, place) {
                continue;
            }
            if !self.given.work.leads.is_empty() && self.rows[row].front.is_none() {
                self.rows[row].front = Some(place);
                self.put(next + 1);
                self.rows[row].front = None;
            }
            self.rows[row].others.push(place);
            self.put(next + 1);
            self.rows[row].others.pop();
        }
    }

    fn has_space(&self, row: usize, place: u32) -> bool {
        let bounds = self.given.shape.bounds;
        let count = self.rows[row].places().count();
        let has_space = match self.given.layout.is_packed() {
            true => {
                count < bounds.limit as usize
                    && self.used(&self.rows[row]) + self.slot(place) <= bounds.capacity
            }
            false => count < self.given.work.row(row).len(),
        };
        if !has_space {
            return false;
        }
        // Of rows, microbatches and steps that are empty and alike, the first one will do.
        let per_step = self.rows_per_batch * self.given.step;
        [
            (1, self.rows_per_batch),
            (self.rows_per_batch, per_step),
            (per_step, usize::MAX),
        ]
        .into_iter()
        .all(|(size, whole)| {
            let start = row / size * size;
            let alike = start % whole >= size
                && start + size <= self.rows.len()
                && (start..start + size).all(|row| self.are_alike(row - size, row));
            !alike
                || !self.rows[start - size..start + size]
                    .iter()
                    .all(Row::is_empty)
        })
    }

    /// Whether two rows can hold the same samples.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        let count = |row| self.given.work.row(row).len();
        self.given.layout.is_packed() || count(one) == count(other)
    }

    /// Whether no way of dealing the other samples can be as even in labels as the best schedule.
    fn is_hopeless(&self) -> bool {
        let Some((best, _)) = &self.best else {
            return false;
        };
        let given = &self.given.work;
        let rest = || self.given.rest.iter().map(|unit| unit.labels as f64);
        let mut totals: Vec<f64> = (self.rows.chunks(self.rows_per_batch))
            .map(|rows| rows.iter().map(|row| self.least_labels(row)).sum::<i64>() as f64)
            .collect();
        totals.sort_by(f64::total_cmp);
        // The labels left over, poured in like water: no way to deal them has a smaller sum.
        let sum = given.totals.iter().sum::<i64>() as f64;
        let mut level = f64::INFINITY;
        let mut water = sum - totals.iter().sum::<f64>();
        for (count, &total) in (1..).zip(&totals) {
            water += total;
            level = level.min(water / f64::from(count));
        }
        let squares = totals
            .iter()
            .map(|total| total.max(level).powi(2))
            .sum::<f64>()
            + rest().map(|labels| labels * labels).sum::<f64>();
        let count = (totals.len() + self.given.rest.len()) as f64;
        let least = count * squares - (sum + rest().sum::<f64>()).powi(2);
        least > best.unevenness.batch_labels as f64 + 1e-9 * count * squares
    }

    /// The labels of a row, if whoever will lead it loses one where that can be.
    fn least_labels(&self, row: &Row) -> i64 {
        let given = &self.given.work;
        let labels = |place| i64::from(given.labels[place as usize]);
        let loses = match row.front {
            Some(front) => given.leads(front),
            None => !given.leads.is_empty(),
        };
        row.places().map(labels).sum::<i64>() - i64::from(loses)
    }

    fn slot(&self, place: u32) -> u32 {
        let length = self.given.work.lengths[place as usize];
        self.given.shape.slot(length)
    }

    fn used(&self, row: &Row) -> u32 {
        row.places().map(|place| self.slot(place)).sum()
    }

    /// Positions in all batches.
    fn sizes(&self) -> u64 {
        let batches = self.rows.chunks(self.rows_per_batch);
        batches.map(|rows| self.size(rows)).sum()
    }

    /// Positions in the batch of these rows.
    fn size(&self, rows: &[Row]) -> u64 {
        let (count, longest) = match self.given.layout {
            BatchLayout::Padded => {
                let slots = rows[0].places().map(|place| self.slot(place));
                (rows[0].places().count(), slots.max())
            }
            _ => (rows.len(), rows.iter().map(|row| self.used(row)).max()),
        };
        self.given.shape.size(count, longest.unwrap_or(0))
    }

    /// Keeps the schedule in which all samples stand in rows, if it is better than the best so far.
    fn look(&mut self) {
        let given = self.given;
        let first = &given.work;
        let leads = !first.leads.is_empty();
        if self
            .rows
            .iter()
            .any(|row| row.is_empty() || leads != row.front.is_some())
            || self.sizes() > self.size
        {
            return;
        }
        let mut loads = Vec::with_capacity(first.totals.len());
        for rows in self.rows.chunks(self.rows_per_batch) {
            let labels = rows.iter().map(|row| self.least_labels(row)).sum();
            let places = rows.iter().flat_map(Row::places);
            let lengths: Vec<u32> = places.map(|place| first.lengths[place as usize]).collect();
            let (size, layout) = (self.size(rows), given.layout);
            loads.push(Load::of(labels, size, &lengths, layout, given.config));
        }
        let units: Vec<Unit> = loads.iter().map(|load| load.unit).collect();
        if Unit::sum(units.iter().copied()).labels != first.totals.iter().sum::<i64>() {
            return; // another number of first labels is lost
        }
        let unevenness = Unevenness::of([units, given.rest.to_vec()], given.step);
        let by_cost = given.by_cost();
        if !unevenness.is_within(&given.before, by_cost) {
            return;
        }
        let waits = loads.chunks_exact_mut(given.step).map(|step| {
            step.sort_by(|a, b| a.cost.total_cmp(&b.cost));
            let largest = step
                .chunks(given.world)
                .map(|microstep| microstep[given.world - 1].cost);
            largest.sum::<f64>()
        });
        let score = Score {
            waits: waits.sum(),
            unevenness,
        };
        let better = |best: &(Score, Vec<Row>)| score.compare(&best.0, by_cost).is_lt();
        if self.best.as_ref().is_none_or(better) {
            self.best = Some((score, self.rows.clone()));
        }
    }
}
