//! The floor: how even the labels of microbatches could be at best, so that a user sees how much of
//! the unevenness is the data's and not the schedule's.
//!
//! With µ the mean number of labels of a microbatch, two things cannot be evened out. A sample with
//! more than µ labels puts its microbatch above the mean by at least the difference, whoever else is
//! there. And a microbatch that one long sample fills has that sample's labels, above or below; which
//! sample it is may be chosen among those of the same length. The squares of these deviations, and of
//! the shift that they force on the rest, are a lower bound of the sum of squares. O(n log n).

use std::collections::BTreeMap;

use crate::samples::Samples;
use crate::schedule::{Round, Schedule};

/// A standard deviation of the microbatches' labels that no exchange of samples can beat; none for an
/// empty schedule.
pub(crate) fn label_std_floor(schedule: &Schedule, round: Round, samples: &Samples) -> Option<f64> {
    let rows = &schedule.rows;
    let real = rows.items.len() - schedule.repeated_items;
    let batches = (rows.len() - schedule.repeated_rows) / round.rows_per_microbatch;
    if batches == 0 {
        return None;
    }
    let labels: Vec<u32> = rows.items[..real]
        .iter()
        .map(|&item| samples.label_count(item as usize))
        .collect();
    let total: u64 = labels.iter().map(|&labels| u64::from(labels)).sum();
    let mean = total as f64 / batches as f64;

    // By length: how many microbatches a single such sample fills, less those that a sample above
    // the mean can fill, and the samples below.
    let mut lone: BTreeMap<u32, (i64, Vec<f64>)> = BTreeMap::new();
    if round.rows_per_microbatch == 1 && round.items_per_row.is_none() {
        for row in 0..rows.len() {
            let places = rows.places(row);
            if places.len() == 1 && places.end <= real {
                lone.entry(rows.tokens[row]).or_default().0 += 1;
            }
        }
    }
    let (mut squares, mut shift) = (0.0, 0.0);
    for (&item, &labels) in rows.items.iter().zip(&labels) {
        let above = f64::from(labels) - mean;
        if above > 0.0 {
            squares += above * above;
            shift += above;
        }
        if let Some((unfilled, below)) = lone.get_mut(&samples.slots[item as usize]) {
            if above >= 0.0 {
                *unfilled -= 1;
            } else {
                below.push(above);
            }
        }
    }
    for (unfilled, mut below) in lone.into_values() {
        below.sort_by(|a, b| b.total_cmp(a));
        for deviation in below.into_iter().take(unfilled.max(0) as usize) {
            squares += deviation * deviation;
            shift += deviation;
        }
    }
    let batches = batches as f64;
    Some(((squares + shift * shift / batches) / batches).sqrt())
}
