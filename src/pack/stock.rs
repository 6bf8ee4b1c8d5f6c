//! Items that are still to be placed, by size, for packers that fill one row after the other.
//!
//! A row is put together from classes of the histogram without taking anything away; once it is
//! complete, [`Stock::make`] makes as many rows like it as there are items for. Classes whose items
//! are gone are passed over by links that are shortened on the way, so that finding the next size
//! costs next to nothing however many are gone.

use super::patterns::{Part, Patterns};
use super::{Bounds, Histogram};

/// The classes of a row's items, and the space that they leave.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub classes: Vec<u32>,
    pub space: u32,
}

/// What is left of each class.
pub(super) struct Stock<'a> {
    sizes: &'a [u32],
    bounds: Bounds,
    /// From a size to the largest class that is not above it.
    lookup: Box<dyn Fn(u32) -> u32 + 'a>,
    left: Vec<u32>,
    /// A class at or after each one that has items left, found by following the links.
    next: Vec<u32>,
    /// One past the smallest class that has items left.
    end: u32,
}

impl<'a> Stock<'a> {
    pub fn new(histogram: &'a Histogram, bounds: Bounds) -> Stock<'a> {
        let classes = histogram.len() as u32;
        Stock {
            sizes: &histogram.sizes,
            bounds,
            lookup: Box::new(histogram.lookup()),
            left: histogram.counts.clone(),
            next: (0..=classes).collect(),
            end: classes,
        }
    }

    /// A row with one item of the largest size left; none if nothing is.
    pub fn start_row(&mut self) -> Option<Row> {
        let largest = self.first_from(0);
        if largest as usize == self.sizes.len() {
            return None;
        }
        Some(Row {
            classes: vec![largest],
            space: self.bounds.capacity - self.sizes[largest as usize],
        })
    }

    /// The smallest size left.
    pub fn smallest(&self) -> u32 {
        self.sizes[self.end as usize - 1]
    }

    /// One past the smallest class that has items left.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// The largest class with items left that is not above `size`; [`Self::end`] if there is none.
    pub fn at_most(&mut self, size: u32) -> u32 {
        self.first_from((self.lookup)(size)).min(self.end)
    }

    /// The first class from `class` on that has items left, or the number of classes.
    pub fn first_from(&mut self, mut class: u32) -> u32 {
        // Path halving: each link on the way is made to skip one more.
        while self.next[class as usize] != class {
            let next = self.next[class as usize];
            self.next[class as usize] = self.next[next as usize];
            class = next;
        }
        class
    }

    /// Whether an item of `class` is left beside those in the row.
    pub fn has(&self, class: u32, row: &Row) -> bool {
        let used = row.classes.iter().filter(|&&other| other == class).count();
        class < self.end && self.left[class as usize] as usize > used
    }

    /// The largest class that is not above `size` and of which an item is left beside the row's.
    pub fn largest_within(&mut self, size: u32, row: &Row) -> Option<u32> {
        let mut class = self.at_most(size);
        while class < self.end {
            if self.has(class, row) {
                return Some(class);
            }
            class = self.first_from(class + 1);
        }
        None
    }

    /// Adds an item to a row.
    pub fn put(&self, class: u32, row: &mut Row) {
        row.space -= self.sizes[class as usize];
        row.classes.push(class);
    }

    /// Adds the largest item that fits until none does.
    pub fn top_up(&mut self, row: &mut Row) {
        while (row.classes.len() as u32) < self.bounds.limit {
            match self.largest_within(row.space, row) {
                Some(class) => self.put(class, row),
                None => return,
            }
        }
    }

    /// Makes rows like this one: as many as there are items for, divided by `pace`, at least one.
    pub fn make(&mut self, mut row: Row, pace: u32, patterns: &mut Patterns) {
        row.classes.sort_unstable();
        let parts = || {
            row.classes.chunk_by(|a, b| a == b).map(|equal| Part {
                class: equal[0],
                times: equal.len() as u32,
            })
        };
        let most = parts()
            .map(|part| self.left[part.class as usize] / part.times)
            .min();
        let rows = (most.unwrap_or(1) / pace).max(1);
        for part in parts() {
            let left = &mut self.left[part.class as usize];
            *left -= rows * part.times;
            if *left == 0 {
                self.next[part.class as usize] = part.class + 1;
            }
        }
        while self.end > 0 && self.left[self.end as usize - 1] == 0 {
            self.end -= 1;
        }
        patterns.push(parts(), rows);
    }
}
