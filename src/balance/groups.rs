//! Groups of a fixed number of units, even in labels and in tokens.
//!
//! Microbatches are put into optimizer steps this way, and, where a microbatch is a fixed number of
//! samples without padding, samples into microbatches.
//!
//! First each unit, most labels first, goes to the group with the fewest labels that has a place
//! left: longest processing time first (Graham, 1969) with a bound on the number. Then the highest
//! group and the lowest, the next to these, and so on inwards, swap the two units that bring both
//! nearest to the mean, in labels and in tokens at once, each measured by its spread over the
//! units. The rounds go in turn by labels and by tokens. On 100,000 samples the steps differ by a
//! few labels after ten rounds, in a hundred thousand.
//!
//! The sum of squares over the groups never grows, neither that of labels nor that of tokens: where
//! the new groups are worse in one of them than the ones that were there, which happens for a
//! handful of units only, those are kept, and only swaps that harm neither are made.
//!
//! O(n log n), and for each round O(n × units of a group), of which [`MOST_UNITS`] at most are
//! tried.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::change;
use crate::order::Stream;

/// Rounds of swaps.
const ROUNDS: usize = 24;
/// Units of a group that are tried in a swap, evenly taken from all.
const MOST_UNITS: usize = 48;

/// What a unit brings into its group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unit {
    pub labels: i64,
    pub tokens: i64,
}

impl Unit {
    pub fn sum(units: impl Iterator<Item = Unit>) -> Unit {
        units.fold(Unit::default(), |sum, unit| Unit {
            labels: sum.labels + unit.labels,
            tokens: sum.tokens + unit.tokens,
        })
    }

    pub fn minus(self, other: Unit) -> Unit {
        Unit {
            labels: self.labels - other.labels,
            tokens: self.tokens - other.tokens,
        }
    }
}

/// Puts the units into groups of `size`, and returns them group by group, groups and their members
/// in a random order. The number of units is a multiple of `size`.
pub(super) fn even_groups(units: &[Unit], size: usize, stream: &mut Stream) -> Vec<u32> {
    let given: Vec<u32> = (0..units.len() as u32).collect();
    let scale = Scale::of(units);
    let mut groups = longest_first(units, size, stream);
    refine(&mut groups, units, scale, |_| true);
    if !no_worse(&groups, &to_groups(&given, units, size)) {
        groups = to_groups(&given, units, size);
        refine(&mut groups, units, scale, |change| {
            change.labels <= 0 && change.tokens <= 0
        });
    }
    let mut groups = stream.shuffled(groups.into_iter());
    for group in &mut groups {
        stream.shuffle(&mut group.members);
    }
    groups.into_iter().flat_map(|group| group.members).collect()
}

/// A group, and what its members bring in all.
#[derive(Clone, Default)]
struct Group {
    sum: Unit,
    members: Vec<u32>,
}

fn to_groups(order: &[u32], units: &[Unit], size: usize) -> Vec<Group> {
    let group = |members: &[u32]| Group {
        sum: Unit::sum(members.iter().map(|&unit| units[unit as usize])),
        members: members.to_vec(),
    };
    order.chunks(size).map(group).collect()
}

/// Whether `new` groups have no larger sum of squares than the `old` ones, in labels and in tokens.
fn no_worse(new: &[Group], old: &[Group]) -> bool {
    let squares = |groups: &[Group], of: fn(&Unit) -> i64| -> i128 {
        groups
            .iter()
            .map(|group| i128::from(of(&group.sum)).pow(2))
            .sum()
    };
    [|unit: &Unit| unit.labels, |unit: &Unit| unit.tokens]
        .into_iter()
        .all(|of| squares(new, of) <= squares(old, of))
}

fn longest_first(units: &[Unit], size: usize, stream: &mut Stream) -> Vec<Group> {
    let mut order: Vec<u32> = (0..units.len() as u32).collect();
    // Shuffled first, so that chance decides between equal ones.
    stream.shuffle(&mut order);
    order.sort_by_key(|&unit| Reverse(units[unit as usize].labels));
    let count = units.len() / size;
    // Made one by one: a step may be larger than memory where there is not one of them.
    let mut members: Vec<Vec<u32>> = (0..count).map(|_| Vec::with_capacity(size)).collect();
    let mut open: BinaryHeap<Reverse<(i64, u32)>> =
        (0..count as u32).map(|group| Reverse((0, group))).collect();
    for unit in order {
        let Some(Reverse((labels, group))) = open.pop() else {
            break; // all units are placed
        };
        let members = &mut members[group as usize];
        members.push(unit);
        if members.len() < size {
            open.push(Reverse((labels + units[unit as usize].labels, group)));
        }
    }
    to_groups(&members.concat(), units, size)
}

/// Swaps units between the highest and the lowest groups, if `allowed` says so of how the squares of
/// the two groups change.
fn refine(groups: &mut [Group], units: &[Unit], scale: Scale, allowed: fn(Change) -> bool) {
    let mut idle = 0;
    for round in 0..ROUNDS {
        match round % 2 {
            0 => groups.sort_by_key(|group| group.sum.labels),
            _ => groups.sort_by_key(|group| group.sum.tokens),
        }
        let (low, high) = groups.split_at_mut(groups.len() / 2);
        let mut swaps = 0;
        for (low, high) in low.iter_mut().zip(high.iter_mut().rev()) {
            swaps += usize::from(swap_best(low, high, units, scale, allowed));
        }
        idle = if swaps == 0 { idle + 1 } else { 0 };
        if idle == 2 {
            return;
        }
    }
}

/// One over the variance of each quantity, so that both weigh the same; 0 for one that does not
/// vary.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    pub labels: f64,
    pub tokens: f64,
}

impl Scale {
    pub fn of(units: &[Unit]) -> Scale {
        let inverse = |of: fn(&Unit) -> i64| {
            let n = units.len() as f64;
            let mean = units.iter().map(|unit| of(unit) as f64).sum::<f64>() / n;
            let square = |unit: &Unit| (of(unit) as f64 - mean).powi(2);
            let variance = units.iter().map(square).sum::<f64>() / n;
            if variance > 0.0 { 1.0 / variance } else { 0.0 }
        };
        Scale {
            labels: inverse(|unit| unit.labels),
            tokens: inverse(|unit| unit.tokens),
        }
    }
}

/// Half of how much the squares of two groups change.
#[derive(Clone, Copy)]
struct Change {
    labels: i64,
    tokens: i64,
}

/// Swaps the two units of these groups that lower the sum of squares most, if any do.
fn swap_best(
    one: &mut Group,
    other: &mut Group,
    units: &[Unit],
    scale: Scale,
    allowed: fn(Change) -> bool,
) -> bool {
    let gap = one.sum.minus(other.sum);
    let stride = one.members.len().div_ceil(MOST_UNITS);
    let mut best = (0.0, None);
    for i in (0..one.members.len()).step_by(stride) {
        for j in (0..other.members.len()).step_by(stride) {
            let gain = units[other.members[j] as usize].minus(units[one.members[i] as usize]);
            let change = Change {
                labels: change(gain.labels, gap.labels),
                tokens: change(gain.tokens, gap.tokens),
            };
            let total = change.labels as f64 * scale.labels + change.tokens as f64 * scale.tokens;
            if total < best.0 && allowed(change) {
                best = (total, Some((i, j, gain)));
            }
        }
    }
    let Some((i, j, gain)) = best.1 else {
        return false;
    };
    one.sum = Unit::sum([one.sum, gain].into_iter());
    other.sum = other.sum.minus(gain);
    std::mem::swap(&mut one.members[i], &mut other.members[j]);
    true
}
