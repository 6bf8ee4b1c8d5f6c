//! Rows as recipes: so many items of this size and so many of that, for so many rows alike.
//!
//! The packers that work on a [`Histogram`] decide on recipes and never look at an item. What
//! remains is to hand the items out, [`Patterns::deal`]: the items of each size, in a seeded random
//! order, go to the rows in streams, with one read position per size. Who shares a row with whom is
//! therefore as random as the sizes allow, and another in each epoch. O(items).

use super::items::{Items, Order, Shuffled};
use super::{Histogram, Rows};
use crate::order::Stream;
use crate::parallel;

/// Items that are copied at once.
const COPY: usize = 8;

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

    /// How many recipes there are.
    pub fn len(&self) -> usize {
        self.rows.len()
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

    /// Fills the recipes with items that have just their sizes. Rows, and the items of equal size,
    /// come in a random order.
    pub fn deal(&self, items: &Items<impl Order>, stream: &mut Stream, threads: usize) -> Rows {
        let family = stream.family();
        let (mut recipe_of_row, mut offsets, mut tokens) = Default::default();
        let dealt = items.sort(threads).shuffle(
            family,
            || {
                recipe_of_row = self.recipe_of_row(stream);
                (offsets, tokens) = self.borders(&recipe_of_row, &items.histogram);
            },
            threads,
        );
        let Shuffled {
            items,
            starts,
            spare,
        } = dealt;
        let mut rows = Rows {
            items: spare,
            offsets,
            tokens,
        };

        // Each part of the rows needs to know where in each class the parts before it have got to:
        // a table of the classes, which must not outgrow the items.
        let mut next = starts;
        let most = (items.len() / next.len()).max(1);
        let chunk = parallel::chunk_len(recipe_of_row.len(), threads)
            .max(recipe_of_row.len().div_ceil(most))
            .max(1);
        let mut parts = Vec::new();
        let (mut rest, mut first) = (&mut rows.items[..], 0);
        for recipes in recipe_of_row.chunks(chunk) {
            let end = rows.offsets[first + recipes.len()];
            let (mine, others) = rest.split_at_mut((end - rows.offsets[first]) as usize);
            rest = others;
            first += recipes.len();
            parts.push((recipes, mine, next.clone()));
            if !rest.is_empty() {
                self.pass(recipes, &mut next);
            }
        }
        parallel::for_each(threads, parts, |(recipes, places, mut next)| {
            let mut to = 0;
            for part in recipes
                .iter()
                .flat_map(|&number| self.parts(number as usize))
            {
                let at = next[part.class as usize] as usize;
                let times = part.times as usize;
                next[part.class as usize] += part.times;
                // Nearly all parts are short. A copy of always as many costs less than a jump that
                // nobody can predict; what is too much is written over by the next part.
                match (items.get(at..at + COPY), places.get_mut(to..to + COPY)) {
                    (Some(from), Some(places)) if times <= COPY => places.copy_from_slice(from),
                    _ => places[to..to + times].copy_from_slice(&items[at..at + times]),
                }
                to += times;
            }
        });
        rows
    }

    /// The recipe of each row, in random order.
    fn recipe_of_row(&self, stream: &mut Stream) -> Vec<u32> {
        let mut recipes = Vec::with_capacity(self.total() as usize);
        for (number, &rows) in self.rows.iter().enumerate() {
            recipes.extend(std::iter::repeat_n(number as u32, rows as usize));
        }
        stream.shuffle(&mut recipes);
        recipes
    }

    /// Where rows of these recipes begin and end, and how many tokens they hold.
    fn borders(&self, recipe_of_row: &[u32], histogram: &Histogram) -> (Vec<u32>, Vec<u32>) {
        let of_recipe = |number: usize| {
            self.parts(number)
                .iter()
                .fold((0, 0), |(items, tokens), part| {
                    let size = histogram.sizes[part.class as usize];
                    (items + part.times, tokens + part.times * size)
                })
        };
        let sums: Vec<(u32, u32)> = (0..self.rows.len()).map(of_recipe).collect();
        let mut offsets = vec![0; recipe_of_row.len() + 1];
        let mut row_tokens = vec![0; recipe_of_row.len()];
        let mut end = 0;
        let places = offsets[1..].iter_mut().zip(&mut row_tokens);
        for (&number, (offset, row_tokens)) in recipe_of_row.iter().zip(places) {
            let (items, tokens) = sums[number as usize];
            end += items;
            *offset = end;
            *row_tokens = tokens;
        }
        (offsets, row_tokens)
    }

    /// Moves the read position of each class on by what rows of these recipes take.
    fn pass(&self, recipe_of_row: &[u32], next: &mut [u32]) {
        let mut rows = vec![0; self.rows.len()];
        for &number in recipe_of_row {
            rows[number as usize] += 1;
        }
        for (number, rows) in rows.into_iter().enumerate() {
            for part in self.parts(number) {
                next[part.class as usize] += part.times * rows;
            }
        }
    }
}
