//! A schedule as balancing works on it: sample by sample, with the labels of each microbatch.
//!
//! Places are counted through all rows, one after the other; what a place holds are parallel arrays,
//! since each step of balancing reads one or two of them for many places.

use std::ops::Range;

use super::groups::Unit;
use crate::config::BatchLayout;
use crate::samples::Samples;
use crate::schedule::{Round, Schedule};

/// A schedule sample by sample: all microbatches without repeats.
#[derive(Clone)]
pub(super) struct Work {
    /// Retained sample at each place.
    pub items: Vec<u32>,
    /// Its tokens. Where samples are aligned, equal lengths take up equal slots.
    pub lengths: Vec<u32>,
    /// Its labels.
    pub labels: Vec<u32>,
    /// Whether it loses a label where it is the first of its row; empty where that cannot matter.
    pub leads: Vec<bool>,
    /// The places at which rows begin.
    pub fronts: Vec<u32>,
    /// The microbatch of each place.
    pub batch_of: Vec<u32>,
    /// Labels of each microbatch.
    pub totals: Vec<i64>,
}

impl Work {
    pub fn of(schedule: &Schedule, round: Round, samples: &Samples, layout: BatchLayout) -> Work {
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

    pub fn add_up(&mut self) {
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

    pub fn leads(&self, place: u32) -> bool {
        self.leads.get(place as usize).copied().unwrap_or(false)
    }

    /// The places of a row.
    pub fn row(&self, row: usize) -> Range<u32> {
        let end = self.fronts.get(row + 1);
        self.fronts[row]..end.map_or(self.items.len() as u32, |&next| next)
    }

    /// Labels lost at the fronts of rows.
    pub fn lost(&self) -> usize {
        self.fronts
            .iter()
            .filter(|&&front| self.leads(front))
            .count()
    }

    /// Lets other samples of the rows lead until as many labels are lost as `wanted`, if that can
    /// be.
    pub fn lose(&mut self, wanted: usize) {
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
    pub fn squares(&self) -> i128 {
        self.totals
            .iter()
            .map(|&total| i128::from(total).pow(2))
            .sum()
    }

    /// Samples of one kind can change places without any effect but on labels.
    pub fn kind(&self, place: u32) -> (u32, bool) {
        (self.lengths[place as usize], self.leads(place))
    }

    pub fn unit(&self, place: usize) -> Unit {
        Unit {
            labels: self.labels[place].into(),
            tokens: self.lengths[place].into(),
        }
    }

    pub fn swap(&mut self, one: usize, other: usize) {
        self.items.swap(one, other);
        self.lengths.swap(one, other);
        self.labels.swap(one, other);
        self.leads.swap(one, other);
    }

    /// Puts what stands at these places into rows, as many in each microbatch as there are now.
    pub fn put_rows(&mut self, rows: &[Vec<u32>], rows_per_batch: usize) {
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
    pub fn rearrange(&mut self, start: usize, places: &[u32]) {
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
