//! Rows as recipes: so many items of this size and so many of that, for so many rows alike.
//!
//! The packers that work on a [`Histogram`] decide on recipes and never look at an item. What
//! remains is to hand the items out, [`Patterns::deal`]: the items of each size, in a seeded random
//! order, go to the rows in streams, with one read position per size. Who shares a row with whom is
//! therefore as random as the sizes allow, and another in each epoch. O(items).

use super::{Histogram, Rows};
use crate::order::Stream;
use crate::parallel;

/// So many items of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// The size, by its number in the histogram.
    pub class: u32,
    /// How many items.
    pub times: u32,
}

/// Recipes, each with the number of rows that are made by it.
#[derive(Debug, Clone, Default)]
pub(super) struct Patterns {
    parts: Vec<Part>,
    /// Where each recipe ends in `parts`.
    ends: Vec<u32>,
    rows: Vec<u32>,
    total: u64,
}

impl Patterns {
    /// Adds a recipe for `rows` rows.
    pub fn push(&mut self, parts: impl IntoIterator<Item = Part>, rows: u32) {
        self.parts.extend(parts);
        self.ends.push(self.parts.len() as u32);
        self.rows.push(rows);
        self.total += u64::from(rows);
    }

    /// The recipes, each with its number of rows.
    pub fn iter(&self) -> impl Iterator<Item = (&[Part], u32)> {
        (0..self.rows.len()).map(|number| (self.parts(number), self.rows[number]))
    }

    /// Rows in all.
    pub fn total(&self) -> u64 {
        self.total
    }

    fn parts(&self, number: usize) -> &[Part] {
        let start = match number {
            0 => 0,
            _ => self.ends[number - 1],
        };
        &self.parts[start as usize..self.ends[number] as usize]
    }

    /// Fills the recipes with the items of `order`, of which `histogram` is the count, by pieces. Rows, and
    /// the items of equal size, come in a random order.
    pub fn deal(
        &self,
        slots: &[u32],
        order: impl ExactSizeIterator<Item = u32> + Clone + Send + Sync,
        (histogram, pieces): &(Histogram, Vec<Vec<u32>>),
        stream: &mut Stream,
        threads: usize,
    ) -> Rows {
        let sorted = sort_by_class(slots, order, histogram, pieces, threads);
        let (items, starts, spare) = shuffle_classes(sorted, stream, threads);

        let mut recipe_of_row = Vec::with_capacity(self.total() as usize);
        for (number, &rows) in self.rows.iter().enumerate() {
            recipe_of_row.extend(std::iter::repeat_n(number as u32, rows as usize));
        }
        stream.shuffle(&mut recipe_of_row);

        // Items and tokens of a row of each recipe.
        let sums: Vec<(u32, u32)> = (0..self.rows.len())
            .map(|number| {
                self.parts(number)
                    .iter()
                    .fold((0, 0), |(items, tokens), part| {
                        let size = histogram.sizes[part.class as usize];
                        (items + part.times, tokens + part.times * size)
                    })
            })
            .collect();
        let mut rows = Rows {
            items: spare,
            offsets: Vec::with_capacity(recipe_of_row.len() + 1),
            tokens: Vec::with_capacity(recipe_of_row.len()),
        };
        rows.offsets.push(0);
        let mut end = 0;
        for &number in &recipe_of_row {
            let (items, tokens) = sums[number as usize];
            end += items;
            rows.offsets.push(end);
            rows.tokens.push(tokens);
        }

        // Each part of the rows needs to know where in each class the parts before it have got to:
        // a table of the classes, which must not outgrow the items.
        let mut next = starts;
        let most = (items.len() / next.len()).max(1);
        let chunk = chunk_len(recipe_of_row.len(), threads).max(recipe_of_row.len().div_ceil(most));
        let mut parts = Vec::new();
        let mut rest = &mut rows.items[..];
        for recipes in recipe_of_row.chunks(chunk.max(1)) {
            let taken: u32 = recipes.iter().map(|&number| sums[number as usize].0).sum();
            let (mine, others) = rest.split_at_mut(taken as usize);
            rest = others;
            parts.push((recipes, mine, next.clone()));
            if !rest.is_empty() {
                for part in recipes
                    .iter()
                    .flat_map(|&number| self.parts(number as usize))
                {
                    next[part.class as usize] += part.times;
                }
            }
        }
        parallel::for_each(threads, parts, |(recipes, places, mut next)| {
            let mut to = 0;
            for part in recipes
                .iter()
                .flat_map(|&number| self.parts(number as usize))
            {
                let at = &mut next[part.class as usize];
                // One item at a time: parts are of one or two, for which a copy of a slice costs
                // more.
                for _ in 0..part.times {
                    places[to] = items[*at as usize];
                    *at += 1;
                    to += 1;
                }
            }
        });
        rows
    }
}

/// Items sorted by class, the largest sizes first, inside each of some pieces.
struct Pieces {
    /// The pieces, one after the other.
    items: Vec<u32>,
    /// Items of a piece; the last one may have fewer.
    len: usize,
    /// For each piece, where each class begins in it; one more entry than classes.
    starts: Vec<Vec<u32>>,
}

impl Pieces {
    /// The items of a class in a piece.
    fn class(&self, piece: usize, class: usize) -> &[u32] {
        let starts = &self.starts[piece];
        let first = piece * self.len;
        &self.items[first + starts[class] as usize..first + starts[class + 1] as usize]
    }
}

/// A counting sort of each piece, of which the counts are known. Items of a class keep their order.
fn sort_by_class(
    slots: &[u32],
    order: impl ExactSizeIterator<Item = u32> + Clone + Send + Sync,
    histogram: &Histogram,
    counts: &[Vec<u32>],
    threads: usize,
) -> Pieces {
    let class_of = histogram.lookup();
    let mut pieces = Pieces {
        items: vec![0; order.len()],
        len: order.len().div_ceil(counts.len()).max(1),
        starts: counts.iter().map(|counts| sums_before(counts)).collect(),
    };
    let places = pieces.items.chunks_mut(pieces.len);
    let parts = places.zip(&pieces.starts).enumerate().collect();
    parallel::for_each(
        threads,
        parts,
        |(piece, (places, starts)): (usize, (&mut [u32], _))| {
            let mut next: Vec<u32> = Vec::clone(starts);
            for item in order.clone().skip(piece * pieces.len).take(pieces.len) {
                let at = &mut next[class_of(slots[item as usize]) as usize];
                places[*at as usize] = item;
                *at += 1;
            }
        },
    );
    pieces
}

/// 0 and the running sums: for 2, 3 these are 0, 2, 5.
fn sums_before(counts: &[u32]) -> Vec<u32> {
    let mut sums = Vec::with_capacity(counts.len() + 1);
    sums.push(0);
    for &count in counts {
        sums.push(sums[sums.len() - 1] + count);
    }
    sums
}

/// Joins the pieces and shuffles the items of each class. Every class has a random stream of its own,
/// so that it does not matter which thread shuffles it.
///
/// Returns the items by class, where each class begins, and memory for as many items: fresh memory
/// costs as much as what is written to it here.
fn shuffle_classes(
    mut pieces: Pieces,
    stream: &mut Stream,
    threads: usize,
) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let family = stream.family();
    let mut starts = vec![0u32; pieces.starts[0].len()];
    for of_piece in &pieces.starts {
        for (start, of_piece) in starts.iter_mut().zip(of_piece) {
            *start += of_piece;
        }
    }
    let classes = starts.len() - 1;
    let joined = pieces.starts.len() == 1;
    let mut items = vec![0; pieces.items.len()];
    if joined {
        std::mem::swap(&mut items, &mut pieces.items);
    }
    // Parts of about as many items; the short sizes have most of them.
    let chunk = chunk_len(items.len(), threads) as u32;
    let mut parts = Vec::new();
    let (mut rest, mut first) = (&mut items[..], 0);
    for end in 1..=classes {
        if starts[end] - starts[first] >= chunk || end == classes {
            let (mine, others) = rest.split_at_mut((starts[end] - starts[first]) as usize);
            rest = others;
            parts.push((first..end, mine));
            first = end;
        }
    }
    parallel::for_each(threads, parts, |(classes, mut rest)| {
        for class in classes {
            let len = (starts[class + 1] - starts[class]) as usize;
            let (mine, others) = rest.split_at_mut(len);
            rest = others;
            if !joined {
                let mut to = 0;
                for piece in 0..pieces.starts.len() {
                    let from = pieces.class(piece, class);
                    mine[to..to + from.len()].copy_from_slice(from);
                    to += from.len();
                }
            }
            family.stream(class as u64).shuffle(mine);
        }
    });
    (items, starts, pieces.items)
}

/// How much of `len` goes to one part of the work: a few parts for each thread, so that none waits
/// long for the last.
fn chunk_len(len: usize, threads: usize) -> usize {
    len.div_ceil(4 * threads.max(1)).max(1)
}
