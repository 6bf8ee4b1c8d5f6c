//! The floor: how even the labels of microbatches could be at best, so that a user sees how much of
//! the unevenness is the data's and not the schedule's.
//!
//! It holds for every schedule of these samples in as many microbatches of this capacity, however
//! they are packed. With n microbatches, µ their mean number of labels and C the tokens that one can
//! hold, two kinds of samples cannot be evened out:
//!
//! - *High*: more than µ labels. Its microbatch is above the mean by h = labels − µ or more,
//!   whoever else is there.
//! - *Low*: more than C − µ tokens that are no labels. Whoever fills the rest, its microbatch is
//!   below the mean by l = tokens − labels − (C − µ) or more.
//!
//! A high sample has no place beside a low one: together they would take more than C tokens. Two
//! high ones in one microbatch put it above the mean by h₁ + h₂ + µ or more; some other microbatch,
//! which has neither high nor low samples, is then at most µ below the mean, and two microbatches
//! with the same sum that hold one each are closer to one another, so they have a smaller sum of
//! squares. Two low ones likewise: C − µ takes the place of µ. (Where there are not enough
//! microbatches for each high and low sample to have one, no other may be left; then only (h₁ +
//! h₂)² ≥ h₁² + h₂² is used.) So the best that could be is one of them in each microbatch, at their
//! bounds, and the others at one level, which brings the sum of deviations to zero. Those bounds
//! that the level itself goes beyond are at the level too.
//!
//! For one row of 10 in each of two microbatches and samples of 10 tokens with 2 and 8 labels, µ is
//! 5, the deviations are 3 and −3, and so is the floor. O(n log n).

use crate::samples::Samples;
use crate::schedule::{Round, Schedule};

/// A standard deviation of the microbatches' labels that no schedule can beat, where a row holds
/// `capacity` tokens and the mean number of labels is `mean`; none for an empty schedule.
pub(crate) fn label_std_floor(
    schedule: &Schedule,
    round: Round,
    samples: &Samples,
    capacity: u32,
    mean: f64,
) -> Option<f64> {
    let rows = &schedule.rows;
    let real = rows.items.len() - schedule.repeated_items;
    let batches = rows.len() / round.rows_per_microbatch;
    if batches == 0 {
        return None;
    }
    // With a fixed number of samples there is no capacity to speak of.
    let most = match round.items_per_row {
        None => f64::from(capacity) * round.rows_per_microbatch as f64,
        Some(_) => f64::INFINITY,
    };
    let (mut high, mut low) = (Vec::new(), Vec::new());
    for &item in &rows.items[..real] {
        let labels = f64::from(samples.label_count(item as usize));
        let lost = f64::from(u8::from(samples.loses_first_label(item as usize)));
        let unlabelled = f64::from(samples.slots[item as usize]) - labels;
        if labels - lost > mean {
            high.push(labels - lost - mean);
        } else if unlabelled > most - mean {
            low.push(unlabelled - (most - mean));
        }
    }
    Some((least_squares(high, low, batches) / batches as f64).sqrt())
}

/// The smallest sum of squares of `count` numbers with sum 0, of which one each is at least as large
/// as one of `high`, and one each at most as large as the negative of one of `low`.
fn least_squares(mut high: Vec<f64>, mut low: Vec<f64>, count: usize) -> f64 {
    let squares = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>();
    let Some(mut level_ones) = count.checked_sub(high.len() + low.len()) else {
        return squares(&high) + squares(&low);
    };
    let (above, below) = (high.iter().sum::<f64>(), low.iter().sum::<f64>());
    if above < below {
        std::mem::swap(&mut high, &mut low); // the same, seen in a mirror
    }
    // The others go down by `level` to make up for what the high ones are above; the low ones that
    // are not as far down go with them.
    low.sort_by(f64::total_cmp);
    let mut missing = (above - below).abs();
    let mut passed = 0;
    for &bound in &low {
        if missing <= bound * level_ones as f64 {
            break;
        }
        missing += bound;
        level_ones += 1;
        passed += 1;
    }
    let level = match level_ones {
        0 => 0.0,
        ones => missing / ones as f64,
    };
    squares(&high) + squares(&low[passed..]) + level_ones as f64 * level * level
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries all numbers between bounds, in steps of a half.
    fn search(bounds: &[(i32, i32)], sum: i32, squares: i32, best: &mut i32) {
        let Some((&(least, most), rest)) = bounds.split_first() else {
            if sum == 0 {
                *best = squares.min(*best);
            }
            return;
        };
        for value in least..=most {
            search(rest, sum + value, squares + value * value, best);
        }
    }

    #[test]
    fn the_least_squares_are_those_of_a_search() {
        for (high, low, count) in [
            (vec![], vec![], 3),
            (vec![3.0], vec![3.0], 2),
            (vec![2.0], vec![], 5),
            (vec![4.0], vec![1.0], 4),
            (vec![4.0, 2.0], vec![1.0, 3.0], 4),
            (vec![1.0], vec![2.5, 3.5], 6),
            (vec![5.0], vec![0.5, 4.0], 4),
        ] {
            if cfg!(miri) && count > 4 {
                continue; // the search would take hours
            }
            // In halves, and finer than that the others may not be.
            let twice = |value: f64| (2.0 * value) as i32;
            let mut bounds: Vec<(i32, i32)> = high.iter().map(|&h| (twice(h), 10)).collect();
            bounds.extend(low.iter().map(|&l| (-10, -twice(l))));
            bounds.resize(count, (-10, 10));
            let mut best = i32::MAX;
            search(&bounds, 0, 0, &mut best);

            let found = least_squares(high.clone(), low.clone(), count);
            let best = f64::from(best) / 4.0;
            assert!(
                found <= best + 1e-9,
                "{high:?} {low:?} {count}: {found} {best}"
            );
            assert!(
                best - found <= 0.25,
                "{high:?} {low:?} {count}: {found} {best}"
            );
        }
        // More of them than there are microbatches: they may share one.
        assert_eq!(14.0, least_squares(vec![1.0, 2.0], vec![3.0], 2));
    }
}
