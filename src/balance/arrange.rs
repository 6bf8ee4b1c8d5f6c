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

/// Orders the microbatches of each step for `world` ranks.
pub(super) fn inside_steps(
    order: &mut [u32],
    loads: &[Load],
    world: usize,
    step: usize,
    stream: &mut Stream,
) {
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
    even_ranks(order, loads, world);
}

/// Deals the microbatches of each microstep that cost the same to the ranks, those with the most
/// labels to the ranks that have had the fewest.
fn even_ranks(order: &mut [u32], loads: &[Load], world: usize) {
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
