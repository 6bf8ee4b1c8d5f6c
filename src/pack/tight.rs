//! Tight packing: rows filled to the last token by random search, then the rest taken apart again.
//!
//! The right one where best fit is poor: lengths without small samples to fill gaps, long
//! documents, rows of few samples. Never more rows than best fit, since it starts from them. On
//! long-tailed lengths there is nothing to gain, and it takes longer.
//!
//! | 100,000 lengths, capacity 4096 | best fit, over the bound | tight | time |
//! |---|---|---|---|
//! | triplets that fill every row exactly | 12.53 % | 0.012 % | 0.1 s |
//! | uniform from 0.2 to 0.6 of the capacity | 1.62 % | 0.010 % | 0.1 s |
//! | lognormal | 0.007 % | 0.007 % | as best fit |
//!
//! (`cargo bench --bench plan -- hard`, two cores.) A few thousand samples of many lengths leave
//! fewer choices: ten thousand uniform ones stay at the 1.6 % of best fit.
//!
//! The idea: with many samples of many lengths nearly every gap can be filled exactly by two or
//! three of them, in many ways. Which way does not matter for that row, but for the rows to come: a
//! rule that always takes the largest (or the smallest) that fit uses these up and leaves what does
//! not combine. Drawing the partners at random keeps the mix of what is left like the mix of the
//! whole, so that exact fills go on nearly to the end. The few rows that fail can be mended: taken
//! apart together with some full rows they get another chance (ruin and recreate, Schrimpf and
//! others, 2000; the exact fills are in the spirit of minimum bin slack, Gupta and Ho, 1999).
//!
//! ```text
//! best := the rows of best fit
//! for each appetite: fill all; keep what has fewer rows
//! up to ROUNDS times, while not close to the lower bound and tries are left:
//!     take apart every row with space, and SHARE times as many full rows
//!     fill their items again with another appetite; keep unless there are more rows
//!
//! fill: while items are left:
//!     start a row with the largest; with k further items (few first, or by chance many first,
//!     as the appetite says) try some random choices of k − 1 of them, and for the last the largest
//!     that fits; take the first that leaves no space, else the best seen
//!     make as many rows alike as there are items for, divided by the pace
//! ```
//!
//! All of it works on the histogram, so that time depends on the number of distinct lengths and of
//! rows that are hard to fill, not on n. The tries are counted and bounded, in all by
//! `FIXED_TRIES`, and up to `TRIES_PER_ITEM` for each sample; a million samples take up to a second.
//! The search ends where one row in `CLOSE` is above the bound: 8,192 rows for one.

use super::items::{Items, Order};
use super::patterns::{Part, Patterns};
use super::stock::Stock;
use super::{Bounds, Histogram, Rows, best_fit};
use crate::order::Stream;

/// How often rows are taken apart at most. With these the cases above end at the bound.
const ROUNDS: u32 = 200;
/// Full rows taken apart for each row with space. One alone leaves too little to choose from, ten
/// cost more than they bring.
const SHARE: u64 = 3;
/// Random choices for each number of partners. 16 gave twice the rows with space, 256 hardly fewer.
const TRIES: u32 = 64;
/// Most partners of a row's first item that are drawn; more are only added where they fit.
const MOST_PARTNERS: usize = 5;
/// How often many partners are tried before few, in 1/16. What serves depends on the lengths: up to
/// a quarter for uniform ones, none for a long tail.
const APPETITES: [u32; 6] = [0, 1, 2, 3, 4, 5];
/// Divisors of the rows made alike: one is quick, many keep the mix.
const PACES: [u32; 3] = [1, 4, u32::MAX];
/// Rows in which one above the bound is close enough: what is left to gain is not worth the search.
const CLOSE: u64 = 1 << 13;
/// Items for which one row in one more of those that could be alike is made, to begin with.
const ITEMS_PER_PACE: u64 = 1 << 16;
/// Recipes that take as long to look through as one try, from so many on.
const RECIPES_PER_TRY: u64 = 2;
const FEW_RECIPES: usize = 1 << 11;
/// Tries in all, whatever the number of items.
const FIXED_TRIES: u64 = 1 << 21;
/// Further tries for each of this many items, and for each of those beyond.
const TRIES_PER_ITEM: u64 = 32;
const MANY_ITEMS: usize = 1 << 17;
const TRIES_BEYOND: u64 = 8;

/// Packs the items of `order`, each of `slots[item]` tokens; rows and the items of equal size are
/// shuffled. `tries` is what is left of [`tries_for`] so many items.
///
/// # Panics
///
/// As for [`best_fit::pack`].
pub fn pack(
    slots: &[u32],
    order: impl ExactSizeIterator<Item = u32> + Clone + Send + Sync,
    bounds: Bounds,
    stream: &mut Stream,
    threads: usize,
    tries: &mut u64,
) -> Rows {
    let items = Items::count(slots, order, bounds, threads);
    pack_items(&items, bounds, stream, threads, tries)
}

/// Packs items that are already counted.
pub(super) fn pack_items(
    items: &Items<impl Order>,
    bounds: Bounds,
    stream: &mut Stream,
    threads: usize,
    tries: &mut u64,
) -> Rows {
    fit(&items.histogram, bounds, stream, tries).deal(items, stream, threads)
}

/// How many tries so many items are worth.
pub fn tries_for(items: usize) -> u64 {
    let (many, beyond) = (items.min(MANY_ITEMS), items.saturating_sub(MANY_ITEMS));
    FIXED_TRIES + TRIES_PER_ITEM * many as u64 + TRIES_BEYOND * beyond as u64
}

fn fit(histogram: &Histogram, bounds: Bounds, stream: &mut Stream, tries: &mut u64) -> Patterns {
    let bound = histogram.lower_bound(bounds);
    let enough = bound + bound / CLOSE;
    let items: u64 = histogram.counts.iter().map(|&count| u64::from(count)).sum();
    // With many items of each size, rows alike would use up whole sizes one after the other.
    let pace = (items / ITEMS_PER_PACE).max(1) as u32;
    let mut best = best_fit::fit_within_limit(histogram, bounds);
    for appetite in APPETITES {
        if best.total() <= enough || *tries == 0 {
            return best;
        }
        let made = Filling::new(histogram, bounds, stream, tries).fill(appetite, pace);
        if made.total() < best.total() {
            best = made;
        }
    }
    for round in 0..ROUNDS {
        if best.total() <= enough || *tries == 0 {
            break;
        }
        // Many recipes take longer to look through than a round has tries.
        let looked_at = best.len().saturating_sub(FEW_RECIPES) as u64;
        *tries = tries.saturating_sub(looked_at / RECIPES_PER_TRY);
        let (kept, opened) = take_apart(&best, histogram, bounds, stream);
        let appetite = APPETITES[stream.below(APPETITES.len() as u32) as usize];
        let pace = PACES[round as usize % PACES.len()];
        let part = histogram_of(&opened, histogram);
        let made = Filling::new(&part.histogram, bounds, stream, tries).fill(appetite, pace);
        // As many rows are welcome too: the search moves on.
        if made.total() <= opened.total() {
            best = kept;
            for (parts, rows) in made.iter() {
                let named = parts.iter().map(|part_of| Part {
                    class: part.classes[part_of.class as usize],
                    times: part_of.times,
                });
                best.push(named, rows);
            }
        }
    }
    best
}

/// Divides the rows into those that stay, and those to be filled again: all with space, and a
/// random part of the full ones.
fn take_apart(
    patterns: &Patterns,
    histogram: &Histogram,
    bounds: Bounds,
    stream: &mut Stream,
) -> (Patterns, Patterns) {
    let is_full = |parts: &[Part]| {
        let tokens = parts
            .iter()
            .map(|part| histogram.sizes[part.class as usize] * part.times);
        tokens.sum::<u32>() == bounds.capacity
    };
    let open: u64 = patterns
        .iter()
        .filter(|(parts, _)| !is_full(parts))
        .map(|(_, rows)| u64::from(rows))
        .sum();
    let full = patterns.total() - open;
    let wanted = (SHARE * open).min(full);
    let (mut kept, mut opened) = (Patterns::default(), Patterns::default());
    for (parts, rows) in patterns.iter() {
        let taken = if is_full(parts) {
            // The expected number, rounded up or down by chance.
            let chance = u64::from(stream.below(u32::MAX));
            ((u64::from(rows) * wanted + chance * full / u64::from(u32::MAX)) / full) as u32
        } else {
            rows
        };
        for (pile, rows) in [(&mut opened, taken), (&mut kept, rows - taken)] {
            if rows > 0 {
                pile.push(parts.iter().copied(), rows);
            }
        }
    }
    (kept, opened)
}

/// The items of some rows, and which classes of the whole their classes are.
struct PartOfHistogram {
    histogram: Histogram,
    classes: Vec<u32>,
}

fn histogram_of(patterns: &Patterns, whole: &Histogram) -> PartOfHistogram {
    let mut counts = vec![0u32; whole.len()];
    for (parts, rows) in patterns.iter() {
        for part in parts {
            counts[part.class as usize] += part.times * rows;
        }
    }
    let classes: Vec<u32> = (0..whole.len() as u32)
        .filter(|&class| counts[class as usize] > 0)
        .collect();
    let pick = |values: &[u32]| classes.iter().map(|&c| values[c as usize]).collect();
    PartOfHistogram {
        histogram: Histogram {
            sizes: pick(&whole.sizes),
            counts: pick(&counts),
        },
        classes,
    }
}

/// A filling of rows under way.
pub(super) struct Filling<'a> {
    stock: Stock<'a>,
    bounds: Bounds,
    stream: &'a mut Stream,
    tries: &'a mut u64,
}

impl<'a> Filling<'a> {
    pub fn new(
        histogram: &'a Histogram,
        bounds: Bounds,
        stream: &'a mut Stream,
        tries: &'a mut u64,
    ) -> Filling<'a> {
        Filling {
            stock: Stock::new(histogram, bounds),
            bounds,
            stream,
            tries,
        }
    }

    /// Fills rows until no item is left. `appetite` is how often, in 1/16, many partners are tried
    /// before few; of the rows that could be made alike one in `pace` is.
    pub fn fill(mut self, appetite: u32, pace: u32) -> Patterns {
        let mut patterns = Patterns::default();
        while let Some(largest) = self.stock.largest() {
            let many_first = self.stream.below(16) < appetite;
            let draw = self.draw_best(Draw::of(largest, self.bounds, &self.stock), many_first);
            let mut row = self.stock.row(draw.classes());
            self.stock.top_up(&mut row);
            self.stock.make(row, pace, &mut patterns);
        }
        patterns
    }

    /// The draw that leaves the least space, of those that the tries find.
    fn draw_best(&mut self, start: Draw, many_first: bool) -> Draw {
        let smallest = self.stock.size(self.stock.smallest());
        let most = (start.space / smallest)
            .min(self.bounds.limit - 1)
            .min(MOST_PARTNERS as u32);
        let mut best = start;
        for step in 1..=most {
            let partners = if many_first { most + 1 - step } else { step };
            // One partner is the largest that fits: there is nothing to draw.
            for _ in 0..if partners == 1 { 1 } else { TRIES } {
                if *self.tries == 0 {
                    return best;
                }
                *self.tries -= 1;
                let Some(draw) = self.draw(start, partners, smallest) else {
                    continue;
                };
                if draw.space < best.space {
                    best = draw;
                }
                if best.space == 0 {
                    return best;
                }
            }
        }
        best
    }

    /// So many partners for the first item, all but the last at random among those that leave space
    /// for the others, of which none is smaller than `smallest`; none if a draw is in vain.
    fn draw(&mut self, mut draw: Draw, partners: u32, smallest: u32) -> Option<Draw> {
        for others in (1..partners).rev() {
            let most = draw.space.checked_sub(others * smallest)?;
            let from = self.stock.at_most(most);
            let end = self.stock.end();
            if from == end {
                return None;
            }
            let class = self.stock.first_from(from + self.stream.below(end - from));
            if !draw.can_take(class, &self.stock) {
                return None;
            }
            draw.take(class, &self.stock);
        }
        let mut last = self.stock.at_most(draw.space);
        while last < self.stock.end() {
            if draw.can_take(last, &self.stock) {
                draw.take(last, &self.stock);
                return Some(draw);
            }
            last = self.stock.first_from(last + 1);
        }
        None
    }
}

/// A few items that might make a row; nothing is taken from the stock for them.
#[derive(Clone, Copy)]
struct Draw {
    classes: [u32; MOST_PARTNERS + 1],
    len: usize,
    space: u32,
}

impl Draw {
    fn of(class: u32, bounds: Bounds, stock: &Stock) -> Draw {
        let mut draw = Draw {
            classes: [0; MOST_PARTNERS + 1],
            len: 0,
            space: bounds.capacity,
        };
        draw.take(class, stock);
        draw
    }

    fn classes(&self) -> &[u32] {
        &self.classes[..self.len]
    }

    fn take(&mut self, class: u32, stock: &Stock) {
        self.classes[self.len] = class;
        self.len += 1;
        self.space -= stock.size(class);
    }

    /// Whether an item of the class is left beside those of the draw.
    fn can_take(&self, class: u32, stock: &Stock) -> bool {
        let used = self.classes().iter().filter(|&&c| c == class).count();
        class < stock.end() && stock.left(class) as usize > used
    }
}
