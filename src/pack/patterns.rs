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
        let Sorted { items, starts } = shuffle_classes(sorted, stream, threads);

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
            items: vec![0; items.len()],
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

/// Items by class, the largest sizes first.
#[derive(Clone, Default)]
struct Sorted {
    items: Vec<u32>,
    /// Where each class begins in `items`; one more entry than classes.
    starts: Vec<u32>,
}

impl Sorted {
    /// Sorts items into classes of these counts; inside a class they keep their order.
    fn fill(
        slots: &[u32],
        order: impl ExactSizeIterator<Item = u32>,
        class_of: &impl Fn(u32) -> u32,
        counts: &[u32],
    ) -> Sorted {
        let mut starts = Vec::with_capacity(counts.len() + 1);
        starts.push(0);
        for &count in counts {
            starts.push(starts[starts.len() - 1] + count);
        }
        let mut next = starts.clone();
        let mut items = vec![0u32; order.len()];
        for item in order {
            let at = &mut next[class_of(slots[item as usize]) as usize];
            items[*at as usize] = item;
            *at += 1;
        }
        Sorted { items, starts }
    }

    fn class(&self, class: usize) -> &[u32] {
        &self.items[self.starts[class] as usize..self.starts[class + 1] as usize]
    }
}

/// A counting sort in pieces, of which the counts are known.
fn sort_by_class(
    slots: &[u32],
    order: impl ExactSizeIterator<Item = u32> + Clone + Send + Sync,
    histogram: &Histogram,
    pieces: &[Vec<u32>],
    threads: usize,
) -> Vec<Sorted> {
    let class_of = histogram.lookup();
    let piece = order.len().div_ceil(pieces.len());
    let mut sorted = vec![Sorted::default(); pieces.len()];
    let parts = sorted.iter_mut().zip(pieces).enumerate().collect();
    let sort = |(number, (sorted, counts)): (usize, (&mut Sorted, &Vec<u32>))| {
        let order = order.clone().skip(number * piece).take(piece);
        *sorted = Sorted::fill(slots, order, &class_of, counts);
    };
    parallel::for_each(threads, parts, sort);
    sorted
}

/// Joins the pieces and shuffles the items of each class. Every class has a random stream of its own,
/// so that it does not matter which thread shuffles it.
fn shuffle_classes(mut pieces: Vec<Sorted>, stream: &mut Stream, threads: usize) -> Sorted {
    let family = stream.family();
    let classes = pieces[0].starts.len() - 1;
    let mut starts = vec![0u32; classes + 1];
    for piece in &pieces {
        for (start, of_piece) in starts.iter_mut().zip(&piece.starts) {
            *start += of_piece;
        }
    }
    let mut items = match &mut pieces[..] {
        [only] => std::mem::take(&mut only.items),
        _ => vec![0; starts[classes] as usize],
    };
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
            if pieces.len() > 1 {
                let mut to = 0;
                for from in pieces.iter().map(|piece| piece.class(class)) {
                    mine[to..to + from.len()].copy_from_slice(from);
                    to += from.len();
                }
            }
            family.stream(class as u64).shuffle(mine);
        }
    });
    Sorted { items, starts }
}

/// How much of `len` goes to one part of the work: a few parts for each thread, so that none waits
/// long for the last.
fn chunk_len(len: usize, threads: usize) -> usize {
    len.div_ceil(4 * threads.max(1)).max(1)
}
