//! Arrange: which rank runs which microbatch when.
//!
//! Ranks wait for one another after every microbatch, so those that run at the same time should cost
//! the same. Inside a step the microbatches are sorted by cost, and every `world` neighbours make a
//! microstep: no other division has a smaller sum of the largest costs. The microsteps of one step
//! go up in size and those of the next go down, so that a rank's next microbatch is close to its
//! last. Where the costs are the same to a hundredth, the rank with the fewest labels so far gets the
//! microbatch with the most; elsewhere the ranks change sides at random. So none is the heavy one.
//! O(n log n).

use super::groups::{Unit, even_groups};
use super::microsteps;
use crate::config::{BalanceCost, BatchLayout, Config};
use crate::order::Stream;

/// What a microbatch weighs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub unit: Unit,
    pub cost: f64,
}

impl Load {
    /// Of a microbatch with so many labels, and samples of these lengths.
    pub fn of(labels: i64, lengths: &[u32], layout: BatchLayout, config: &Config) -> Load {
        let tokens: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
        let square = |&length: &u32| f64::from(length).powi(2);
        let cost = match (config.balance_cost, layout) {
            (BalanceCost::Attention, _) => {
                let squares: f64 = lengths.iter().map(square).sum();
                config.balance_cost_linear * tokens as f64 + squares
            }
            (BalanceCost::Padded | BalanceCost::Auto, BatchLayout::Padded) => {
                f64::from(lengths.iter().copied().max().unwrap_or(0))
            }
            _ => tokens as f64,
        };
        Load {
            unit: Unit { labels, tokens },
            cost,
        }
    }
}

/// Puts microbatches into steps of `step`, even in labels and tokens, and orders each for `world`
/// ranks.
pub(super) fn by_labels(
    loads: &[Load],
    world: usize,
    step: usize,
    stream: &mut Stream,
) -> Vec<u32> {
    let units: Vec<Unit> = loads.iter().map(|load| load.unit).collect();
    let mut order = even_groups(&units, step, stream);
    inside_steps(&mut order, loads, world, step, stream);
    order
}

/// As [`by_labels`], for steps of one microstep: who is in a step decides how long ranks wait there,
/// so they are put together for that too.
pub(super) fn by_waits(
    loads: &[Load],
    world: usize,
    token_spread: i128,
    waits: f64,
    stream: &mut Stream,
) -> Vec<u32> {
    let mut order = microsteps::even_labels(loads, world, token_spread, waits, stream);
    inside_steps(&mut order, loads, world, world, stream);
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

/// Orders the microbatches of each step for `world` ranks. Ranks do not wait longer than in the order
/// that was there, and the sizes of their microbatches do not change more, but by a hundredth.
pub(super) fn inside_steps(
    order: &mut [u32],
    loads: &[Load],
    world: usize,
    step: usize,
    stream: &mut Stream,
) {
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
    // Chance may have done better where there are few microbatches.
    if waits(order, loads, world) > waits(&given, loads, world)
        || jumps(order, loads, world) > jumps(&given, loads, world)
    {
        order.copy_from_slice(&given);
    }
    even_ranks(order, loads, world);
}

/// The change of cost from a rank's microbatch to its next, summed up.
fn jumps(order: &[u32], loads: &[Load], world: usize) -> f64 {
    let cost = |batch: u32| loads[batch as usize].cost;
    let nexts = order.iter().skip(world);
    let jump = |(&one, &next): (&u32, &u32)| (cost(one) - cost(next)).abs();
    order.iter().zip(nexts).map(jump).sum()
}

/// Deals the microbatches of each microstep that cost the same to the ranks, those with the most
/// labels to the ranks that have had the fewest.
fn even_ranks(order: &mut [u32], loads: &[Load], world: usize) {
    if order.is_empty() {
        return; // and there may be more ranks than memory
    }
    let mut had = vec![0i64; world];
    let mut ranks: Vec<usize> = (0..world).collect();
    for microstep in order.chunks_mut(world) {
        let costs = microstep.iter().map(|&batch| loads[batch as usize].cost);
        let (least, most) = costs.fold((f64::MAX, 0.0), |(least, most), cost| {
            (f64::min(least, cost), f64::max(most, cost))
        });
        let labels = |batch: u32| loads[batch as usize].unit.labels;
        if most <= 1.01 * least {
            let mut batches = microstep.to_vec();
            batches.sort_by_key(|&batch| std::cmp::Reverse(labels(batch)));
            ranks.sort_by_key(|&rank| had[rank]);
            for (&rank, batch) in ranks.iter().zip(batches) {
                microstep[rank] = batch;
            }
        }
        for (had, &batch) in had.iter_mut().zip(&*microstep) {
            *had += labels(batch);
        }
    }
}

/// As [`by_labels`], but what ranks do at the same time costs the same to begin with: sorted by cost
/// over the whole epoch, every `world` neighbours make a microstep, and steps are made of these.
pub(super) fn by_cost(loads: &[Load], world: usize, step: usize, stream: &mut Stream) -> Vec<u32> {
    let mut order: Vec<u32> = (0..loads.len() as u32).collect();
    stream.shuffle(&mut order);
    order.sort_by(|&a, &b| loads[a as usize].cost.total_cmp(&loads[b as usize].cost));
    let microsteps: Vec<Unit> = order
        .chunks_mut(world)
        .map(|microstep| {
            stream.shuffle(microstep);
            Unit::sum(microstep.iter().map(|&batch| loads[batch as usize].unit))
        })
        .collect();
    let mut order: Vec<u32> = even_groups(&microsteps, step / world, stream)
        .into_iter()
        .flat_map(|microstep| &order[microstep as usize * world..][..world])
        .copied()
        .collect();
    even_ranks(&mut order, loads, world);
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Purpose;

    #[test]
    fn neither_waits_nor_jumps_are_longer_than_in_the_given_order() {
        let mut stream = Stream::new(20261130, 0, Purpose::Balance);
        let mut shorter = 0;
        for case in 0..500 {
            let (world, accumulation) = (1 + case % 4, 1 + case / 4 % 5);
            let steps = 1 + stream.below(6) as usize;
            let loads: Vec<Load> = (0..world * accumulation * steps)
                .map(|_| Load {
                    unit: Unit::default(),
                    cost: f64::from(1 + stream.below(1 << 20)).powi(2),
                })
                .collect();
            let given: Vec<u32> = (0..loads.len() as u32).collect();
            let mut order = given.clone();
            inside_steps(&mut order, &loads, world, world * accumulation, &mut stream);

            let counts = |order: &[u32]| (waits(order, &loads, world), jumps(order, &loads, world));
            let (before, after) = (counts(&given), counts(&order));
            assert!(after.0 <= before.0, "case {case}: {before:?} {after:?}");
            assert!(
                after.1 <= 1.01 * before.1,
                "case {case}: {before:?} {after:?}"
            );
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
        assert!(shorter > 250, "{shorter}");
    }
}
