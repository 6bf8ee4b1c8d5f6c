//! Arrange: which rank runs which microbatch when.
//!
//! Ranks wait for one another after every microbatch, so those that run at the same time should
//! cost the same. Inside a step the microbatches are sorted by cost, and every `world` neighbours
//! make a microstep: no other division has a smaller sum of the largest costs. The microsteps of
//! one step go up in size and those of the next go down, so that a rank's next microbatch is close
//! to its last. Where the costs are the same to a hundredth, the rank with the fewest labels so far
//! gets the microbatch with the most, as long as the sizes of a rank's microbatches change no more
//! in all than in the order that was there; elsewhere the ranks change sides at random. So none is
//! the heavy one. O(n log n).

use super::groups::{Unit, even_groups};
use super::{microsteps, units};
use crate::config::{BatchLayout, Config};
use crate::order::Stream;

/// What a microbatch weighs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub unit: Unit,
    pub cost: f64,
    /// Positions in its rows, with padding.
    pub size: i64,
}

impl Load {
    /// Of a microbatch with so many labels and positions, and samples of these lengths.
    pub fn of(
        labels: i64,
        size: u64,
        lengths: &[u32],
        layout: BatchLayout,
        config: &Config,
    ) -> Load {
        let tokens: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
        let square = |&length: &u32| f64::from(length).powi(2);
        let squares = || lengths.iter().map(square).sum();
        Load {
            unit: Unit { labels, tokens },
            cost: config.work(layout, tokens as f64, squares, size as f64),
            size: size as i64,
        }
    }
}

/// What an order has to go by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    /// Data-parallel ranks.
    pub world: usize,
    /// Microbatches of a step.
    pub step: usize,
    /// The jumps that there were before, of which there are not to be more.
    pub most_jumps: i64,
}

/// Puts microbatches into steps, even in labels and tokens, and orders each for the ranks.
pub(super) fn by_labels(loads: &[Load], frame: Frame, stream: &mut Stream) -> Vec<u32> {
    let mut order = even_groups(&units(loads), frame.step, stream);
    inside_steps(&mut order, loads, frame, stream);
    order
}

/// As [`by_labels`], for steps of one microstep: who is in a step decides how long ranks wait there,
/// so they are put together for that too.
pub(super) fn by_waits(
    loads: &[Load],
    frame: Frame,
    token_spread: i128,
    waits: f64,
    stream: &mut Stream,
) -> Vec<u32> {
    let mut order = microsteps::even_labels(loads, frame.world, token_spread, waits, stream);
    inside_steps(&mut order, loads, frame, stream);
    order
}

/// The largest cost of a microstep over its mean, on average over all whole ones.
pub(super) fn waits(order: &[u32], loads: &[Load], world: usize) -> f64 {
    let mut sum = 0.0;
    for microstep in order.chunks_exact(world) {
        let costs = microstep.iter().map(|&batch| loads[batch as usize].cost);
        let (largest, all) = costs.fold((0.0, 0.0), |(largest, all), cost| {
            (f64::max(largest, cost), all + cost)
        });
        if all > 0.0 {
            sum += largest * world as f64 / all;
        }
    }
    sum / (order.len() / world).max(1) as f64
}

/// Orders the microbatches of each step for the ranks. They do not wait longer than in the order
/// that was given, and the sizes of their microbatches do not change more.
pub(super) fn inside_steps(order: &mut [u32], loads: &[Load], frame: Frame, stream: &mut Stream) {
    let Frame { world, step, .. } = frame;
    let given = order.to_vec();
    let cost = |batch: &u32| loads[*batch as usize].cost;
    let mut falling = stream.below(2) == 1;
    for members in order.chunks_mut(step) {
        members.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
        if falling {
            members.reverse();
        }
        falling = !falling;
        if stream.below(2) == 1 {
            members.chunks_mut(world).for_each(<[u32]>::reverse);
        }
    }
    // Chance may have done better where there are few microbatches. To the last bit: where nothing
    // but rounding tells the two apart, the given order is as good.
    let given_jumps = jumps(&given, loads, world);
    if waits(order, loads, world) > waits(&given, loads, world)
        || jumps(order, loads, world) > given_jumps
    {
        order.copy_from_slice(&given);
    }
    turn(order, loads, frame);
    even_ranks(order, loads, frame, given_jumps);
}

/// Lets the steps begin after the largest jump from one to the next, which is none then, where there
/// are more than before. A single row with little in it is enough for that.
fn turn(order: &mut [u32], loads: &[Load], frame: Frame) {
    let Frame { world, step, .. } = frame;
    let jump = |end: usize| between(&order[end - world..end], &order[end..], loads);
    let ends = (step..order.len()).step_by(step);
    let Some(largest) = ends.max_by_key(|&end| jump(end)) else {
        return; // a single step
    };
    let seam = between(&order[order.len() - world..], order, loads);
    if jumps(order, loads, world) > frame.most_jumps && jump(largest) > seam {
        order.rotate_left(largest);
    }
}

/// The change of size from a rank's microbatch to its next, summed up.
pub(super) fn jumps(order: &[u32], loads: &[Load], world: usize) -> i64 {
    let nexts = order.get(world..).unwrap_or_default();
    between(order, nexts, loads)
}

/// The difference in size of those that stand at the same places, summed up.
fn between(ones: &[u32], nexts: &[u32], loads: &[Load]) -> i64 {
    let size = |&batch: &u32| loads[batch as usize].size;
    let jump = |(one, next)| (size(one) - size(next)).abs();
    ones.iter().zip(nexts).map(jump).sum()
}

/// Deals the microbatches of each microstep that cost the same to the ranks, those with the most
/// labels to the ranks that have had the fewest, unless the jumps would then be more in all than
/// those of the order that was given; nor more than before, if they are not.
fn even_ranks(order: &mut [u32], loads: &[Load], frame: Frame, given_jumps: i64) {
    let world = frame.world;
    if order.is_empty() {
        return; // and there may be more ranks than memory
    }
    let mut had = vec![0i64; world];
    let mut ranks: Vec<usize> = (0..world).collect();
    let jumps = jumps(order, loads, world);
    let most_jumps = match jumps <= frame.most_jumps {
        true => given_jumps.min(frame.most_jumps),
        false => given_jumps,
    };
    let mut spare = most_jumps - jumps;
    let labels = |batch: u32| loads[batch as usize].unit.labels;
    for start in (0..order.len()).step_by(world) {
        let (done, left) = order.split_at_mut(start);
        let (microstep, nexts) = left.split_at_mut(world.min(left.len()));
        let costs = microstep.iter().map(|&batch| loads[batch as usize].cost);
        let (least, most) = costs.fold((f64::MAX, 0.0), |(least, most), cost| {
            (f64::min(least, cost), f64::max(most, cost))
        });
        if most <= 1.01 * least {
            let mut batches = microstep.to_vec();
            batches.sort_by_key(|&batch| std::cmp::Reverse(labels(batch)));
            ranks.sort_by_key(|&rank| had[rank]);
            let mut dealt = batches.clone();
            for (&rank, batch) in ranks.iter().zip(batches) {
                dealt[rank] = batch;
            }
            let last = &done[start.saturating_sub(world)..];
            let around = |microstep: &[u32]| {
                between(last, microstep, loads) + between(microstep, nexts, loads)
            };
            let more = around(&dealt) - around(microstep);
            if more <= spare {
                spare -= more;
                microstep.copy_from_slice(&dealt);
            }
        }
        for (had, &batch) in had.iter_mut().zip(&*microstep) {
            *had += labels(batch);
        }
    }
}

/// As [`by_labels`], but what ranks do at the same time costs the same to begin with: sorted by
/// cost over the whole epoch, every `world` neighbours make a microstep, and steps are made of
/// these. Their order is left to chance, and where that makes the sizes of a rank's microbatches
/// change more than before, it is that of their costs, up in one step and down in the next.
pub(super) fn by_cost(loads: &[Load], frame: Frame, stream: &mut Stream) -> Vec<u32> {
    let Frame { world, step, .. } = frame;
    let mut order: Vec<u32> = (0..loads.len() as u32).collect();
    stream.shuffle(&mut order);
    order.sort_by(|&a, &b| loads[a as usize].cost.total_cmp(&loads[b as usize].cost));
    let units: Vec<Unit> = order
        .chunks_mut(world)
        .map(|microstep| {
            stream.shuffle(microstep);
            Unit::sum(microstep.iter().map(|&batch| loads[batch as usize].unit))
        })
        .collect();
    let members = |microsteps: &[u32]| -> Vec<u32> {
        let places = microsteps
            .iter()
            .map(|&microstep| microstep as usize * world);
        places
            .flat_map(|place| &order[place..place + world])
            .copied()
            .collect()
    };
    let mut microsteps = even_groups(&units, step / world, stream);
    let mut arranged = members(&microsteps);
    if jumps(&arranged, loads, world) > frame.most_jumps {
        for (number, step) in microsteps.chunks_mut(step / world).enumerate() {
            step.sort_unstable();
            if number % 2 == 1 {
                step.reverse();
            }
        }
        arranged = members(&microsteps);
    }
    let jumps = jumps(&arranged, loads, world);
    turn(&mut arranged, loads, frame);
    even_ranks(&mut arranged, loads, frame, jumps);
    arranged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Purpose;

    #[test]
    fn neither_waits_nor_jumps_are_longer_than_in_the_given_order() {
        let mut stream = Stream::new(20261130, 0, Purpose::Balance);
        let mut shorter = 0;
        let cases = if cfg!(miri) { 20 } else { 500 };
        for case in 0..cases {
            let (world, accumulation) = (1 + case % 4, 1 + case / 4 % 5);
            let steps = 1 + stream.below(6) as usize;
            let loads: Vec<Load> = (0..world * accumulation * steps)
                .map(|_| {
                    // Near one another in half of the cases: then the labels are dealt, too.
                    let cost = match case % 2 {
                        0 => i64::from(1 + stream.below(1 << 20)).pow(2),
                        _ => i64::from(1000 + stream.below(11)),
                    };
                    let labels = stream.below(1000).into();
                    Load {
                        unit: Unit { labels, tokens: 0 },
                        cost: cost as f64,
                        size: cost,
                    }
                })
                .collect();
            let given: Vec<u32> = (0..loads.len() as u32).collect();
            let mut order = given.clone();
            let frame = Frame {
                world,
                step: world * accumulation,
                most_jumps: i64::MAX,
            };
            inside_steps(&mut order, &loads, frame, &mut stream);

            let counts = |order: &[u32]| (waits(order, &loads, world), jumps(order, &loads, world));
            let (before, after) = (counts(&given), counts(&order));
            assert!(after.0 <= before.0, "case {case}: {before:?} {after:?}");
            assert!(after.1 <= before.1, "case {case}: {before:?} {after:?}");
            shorter += usize::from(after.1 < before.1);
            for (one, other) in given
                .chunks(world * accumulation)
                .zip(order.chunks(world * accumulation))
            {
                let mut other = other.to_vec();
                other.sort_unstable();
                assert_eq!(one, other, "case {case}: a step's microbatches stay in it");
            }
        }
        assert!(2 * shorter > cases, "{shorter}");
    }
}
