//! Steps: the last differences between optimizer steps are spread over their microbatches.
//!
//! Once microbatches are even, a single one that cannot be (a row that one long sample fills, a last
//! row with little in it) leaves its whole step too high or too low, and no other microbatch is
//! there to make up for it. Then the highest step and the lowest, the next to these, and so on
//! exchange samples of equal length, each time the two that lower the sum of squares most, in which
//! a step counts as much as all its microbatches. So the difference goes in small parts to many
//! microbatches: of 2,700 labels that one of 16 lacks, the others take 180 each.
//!
//! Tokens stay where they are. O(n log n) for each of [`ROUNDS`] at most, and only for steps that
//! are more than a [`TOLERANCE`]th of the mean apart.

use super::change;
use super::work::Work;

/// Times that all steps are paired.
const ROUNDS: usize = 8;
/// Exchanges of a pair in each round.
const EXCHANGES: usize = 16;
/// Samples of one length that are tried in each step.
const MOST_ALIKE: usize = 8;
/// Steps nearer than one part in so many are left as they are.
const TOLERANCE: i64 = 2_000;

/// Evens out the labels of steps of `step` microbatches each, in the order in which they run.
pub(super) fn even_steps(work: &mut Work, order: &[u32], step: usize) {
    let mut starts = vec![0u32; work.totals.len() + 1];
    for &batch in &work.batch_of {
        starts[batch as usize + 1] += 1;
    }
    for batch in 1..starts.len() {
        starts[batch] += starts[batch - 1];
    }
    let mut steps: Vec<Step> = order
        .chunks_exact(step)
        .map(|batches| Step {
            labels: batches.iter().map(|&b| work.totals[b as usize]).sum(),
            batches,
            places: Vec::new(),
        })
        .collect();
    let mean = steps.iter().map(|step| step.labels).sum::<i64>() / steps.len().max(1) as i64;
    let mut idle = 0;
    for round in 0..ROUNDS {
        steps.sort_by_key(|step| step.labels);
        let half = steps.len() / 2;
        let (low, high) = steps.split_at_mut(half);
        let mut changed = false;
        // Another partner each time: two steps need not have lengths in common.
        low.rotate_left(round.min(half));
        for (low, high) in low.iter_mut().zip(high.iter_mut().rev()) {
            // Steps of millions of microbatches of 2³¹ labels go beyond the numbers: far apart.
            if (high.labels - low.labels).saturating_mul(TOLERANCE) <= mean {
                continue;
            }
            // What stands at a place is of one kind from the beginning to the end.
            for step in [&mut *low, &mut *high] {
                if step.places.is_empty() {
                    step.places = step.places(work, &starts);
                }
            }
            changed |= exchange(work, low, high);
        }
        idle = if changed { 0 } else { idle + 1 };
        if idle == 2 {
            return;
        }
    }
}

/// A step, and the labels of its microbatches.
struct Step<'a> {
    labels: i64,
    batches: &'a [u32],
    /// Its places, those of one kind side by side, and not too many of them; once they are needed.
    places: Vec<Place>,
}

/// A place, and the kind of what stands there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    kind: (u32, bool),
    place: u32,
}

impl Step<'_> {
    fn places(&self, work: &Work, starts: &[u32]) -> Vec<Place> {
        let of_batch = |&batch: &u32| starts[batch as usize]..starts[batch as usize + 1];
        let all = self.batches.iter().flat_map(of_batch);
        let mut places: Vec<Place> = all
            .map(|place| Place {
                kind: work.kind(place),
                place,
            })
            .collect();
        places.sort_unstable();
        places
            .chunk_by(|a, b| a.kind == b.kind)
            .flat_map(|alike| alike.iter().step_by(alike.len().div_ceil(MOST_ALIKE)))
            .copied()
            .collect()
    }
}

/// Lets two steps exchange samples while that lowers the sum of squares; returns whether it did.
fn exchange(work: &mut Work, low: &mut Step, high: &mut Step) -> bool {
    let same = |a: &Place, b: &Place| a.kind == b.kind;
    let mut pairs: Vec<(u32, u32)> = Vec::new();
    let mut theirs = high.places.chunk_by(same).peekable();
    for ours in low.places.chunk_by(same) {
        let kind = ours[0].kind;
        while theirs.next_if(|other| other[0].kind < kind).is_some() {}
        if let Some(theirs) = theirs.next_if(|other| other[0].kind == kind) {
            for one in ours {
                pairs.extend(theirs.iter().map(|other| (one.place, other.place)));
            }
        }
    }
    let weight = low.batches.len() as i64;
    for exchanges in 0..EXCHANGES {
        let of_pair = |&(one, other): &(u32, u32)| {
            let gain =
                i64::from(work.labels[other as usize]) - i64::from(work.labels[one as usize]);
            let total = |place: u32| work.totals[work.batch_of[place as usize] as usize];
            let of_steps = change(gain, low.labels - high.labels);
            let of_batches = change(gain, total(one) - total(other));
            weight.saturating_mul(of_steps).saturating_add(of_batches)
        };
        let best = pairs.iter().min_by_key(|pair| of_pair(pair));
        let Some(&(one, other)) = best.filter(|pair| of_pair(pair) < 0) else {
            return exchanges > 0;
        };
        let (one, other) = (one as usize, other as usize);
        let gain = i64::from(work.labels[other]) - i64::from(work.labels[one]);
        low.labels += gain;
        high.labels -= gain;
        work.totals[work.batch_of[one] as usize] += gain;
        work.totals[work.batch_of[other] as usize] -= gain;
        work.items.swap(one, other);
        work.labels.swap(one, other);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_whose_labels_fill_the_numbers_are_evened_too() {
        // Two million microbatches of 2³¹ labels in a step: the difference times the tolerance
        // overflowed.
        let labels = 1 << 52;
        let mut work = Work {
            items: vec![0, 1],
            lengths: vec![9, 9],
            labels: vec![7, 1],
            leads: Vec::new(),
            fronts: vec![0, 1],
            batch_of: vec![0, 1],
            totals: vec![2 * labels, labels],
        };

        even_steps(&mut work, &[0, 1], 1);

        assert_eq!(vec![1, 0], work.items);
        assert_eq!(vec![2 * labels - 6, labels + 6], work.totals);
    }
}
