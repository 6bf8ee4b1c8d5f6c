//! Microsteps: steps of one microbatch a rank, even in labels while ranks wait no longer.
//!
//! Without accumulation a step has no order that could be chosen: who is in it decides how long its
//! ranks wait for the largest. And steps with the same tokens are those that have a large microbatch
//! beside small ones. The variance of microbatches is that between steps and that inside them, so
//! what [`super::groups`] takes away between them is more inside: up to 1 / (world − 1) of what was
//! there. With four samples in a padded microbatch and eight ranks the largest was 2.23 times the
//! mean before, and 2.39 times after.
//!
//! So where that happens steps begin as chance puts them together, and those with the most and the
//! fewest labels swap microbatches, as in groups, as long as ranks do not wait longer and the tokens
//! of steps are not more uneven than in the given schedule. [`super::steps`] does the rest, because
//! samples of the same length may go from step to step.
//!
//! O(n log n) for each of [`ROUNDS`], and O(n × ranks), of which [`MOST_TRIED`] at most are tried.

use super::arrange::{self, Load};
use super::groups::{Scale, Unit};
use super::{change, spread, units};
use crate::order::Stream;

/// Times that all steps are paired.
const ROUNDS: usize = 32;
/// Microbatches of a step that are tried in a swap, evenly taken from all.
const MOST_TRIED: usize = 16;

struct Step {
    sum: Unit,
    cost: f64,
    members: Vec<u32>,
}

/// How much more of something there may be; where it is negative, there is too much.
#[derive(Clone, Copy)]
struct Spare {
    /// Half of the squares of the steps' tokens, summed up.
    tokens: i128,
    /// The largest cost of a step over its mean, summed up.
    waits: f64,
}

/// Puts microbatches into steps of one for each of `world` ranks. `token_spread` is n Σx² − (Σx)² of
/// the steps' tokens, and `waits` the largest cost of a step over its mean, on average; there may
/// not be more of either.
pub(super) fn even_labels(
    loads: &[Load],
    world: usize,
    token_spread: i128,
    waits: f64,
    stream: &mut Stream,
) -> Vec<u32> {
    let mut order: Vec<u32> = (0..loads.len() as u32).collect();
    stream.shuffle(&mut order);
    let load = |&batch: &u32| loads[batch as usize];
    let mut steps: Vec<Step> = order
        .chunks(world)
        .map(|members| Step {
            sum: Unit::sum(members.iter().map(|batch| load(batch).unit)),
            cost: members.iter().map(|batch| load(batch).cost).sum(),
            members: members.to_vec(),
        })
        .collect();
    let count = steps.len();
    let spread = spread(steps.iter().map(|step| step.sum.tokens));
    let mut spare = Spare {
        tokens: (token_spread - spread) / (2 * count.max(1) as i128),
        waits: (waits - arrange::waits(&order, loads, world)) * count as f64,
    };
    let scale = Scale::of(&units(loads));
    for _ in 0..ROUNDS {
        steps.sort_by_key(|step| step.sum.labels);
        let (low, high) = steps.split_at_mut(count / 2);
        let mut swaps = 0;
        for (low, high) in low.iter_mut().zip(high.iter_mut().rev()) {
            swaps += usize::from(swap_best(low, high, loads, scale, &mut spare));
        }
        if swaps == 0 {
            break;
        }
    }
    let mut places: Vec<u32> = (0..count as u32).collect();
    stream.shuffle(&mut places);
    let members = |place: u32| &steps[place as usize].members;
    places.into_iter().flat_map(members).copied().collect()
}

/// Swaps the two microbatches that make the labels of these steps most even, and what there is too
/// much of less; returns whether there are such.
fn swap_best(
    one: &mut Step,
    other: &mut Step,
    loads: &[Load],
    scale: Scale,
    spare: &mut Spare,
) -> bool {
    let gap = one.sum.minus(other.sum);
    let load = |batch: u32| loads[batch as usize];
    let (ours, theirs) = (Largest::of(one, loads), Largest::of(other, loads));
    let world = one.members.len() as f64;
    let stride = one.members.len().div_ceil(MOST_TRIED);
    let mut best = (0.0, None);
    for i in (0..one.members.len()).step_by(stride) {
        for j in (0..other.members.len()).step_by(stride) {
            let (a, b) = (load(one.members[i]), load(other.members[j]));
            let gain = b.unit.minus(a.unit);
            let labels = change(gain.labels, gap.labels);
            let tokens = change(gain.tokens, gap.tokens);
            let more = b.cost - a.cost;
            let waits = world
                * (ours.without(i).max(b.cost) / (one.cost + more)
                    + theirs.without(j).max(a.cost) / (other.cost - more)
                    - ours.most / one.cost
                    - theirs.most / other.cost);
            let mut total = labels as f64 * scale.labels;
            if spare.tokens < 0 {
                total += tokens as f64 * scale.tokens;
            }
            if spare.waits < 0.0 {
                total += waits;
            }
            if total < best.0
                && i128::from(tokens) <= spare.tokens.max(0)
                && waits <= spare.waits.max(0.0)
            {
                best = (total, Some((i, j, gain, more, tokens, waits)));
            }
        }
    }
    let Some((i, j, gain, more, tokens, waits)) = best.1 else {
        return false;
    };
    spare.tokens -= i128::from(tokens);
    spare.waits -= waits;
    one.sum = Unit::sum([one.sum, gain].into_iter());
    other.sum = other.sum.minus(gain);
    one.cost += more;
    other.cost -= more;
    std::mem::swap(&mut one.members[i], &mut other.members[j]);
    true
}

/// The largest cost of a step, and the largest without one of its members.
struct Largest {
    at: usize,
    most: f64,
    second: f64,
}

impl Largest {
    fn of(step: &Step, loads: &[Load]) -> Largest {
        let mut found = Largest {
            at: 0,
            most: 0.0,
            second: 0.0,
        };
        for (at, &batch) in step.members.iter().enumerate() {
            let cost = loads[batch as usize].cost;
            if cost > found.most {
                (found.at, found.second, found.most) = (at, found.most, cost);
            } else {
                found.second = found.second.max(cost);
            }
        }
        found
    }

    fn without(&self, at: usize) -> f64 {
        if at == self.at {
            self.second
        } else {
            self.most
        }
    }
}
