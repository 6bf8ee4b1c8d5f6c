//! Items that are still to be placed, by size, for packers that fill one row after the other.
//!
//! A row under way holds its items back from the stock; once it is complete, [`Stock::make`] makes
//! as many rows like it as there are items for. Classes whose items are gone are passed over by
//! links that are shortened on the way, so that finding the next size costs next to nothing however
//! many are gone, and items of one class are added all at once: a row costs about as many steps as
//! it has distinct sizes.

use super::patterns::{Part, Patterns};
use super::{Bounds, Histogram};

/// A row under way.
#[derive(Debug)]
pub(super) struct Row {
    parts: Vec<Part>,
    pub items: u32,
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

    /// The largest class that has items left; none if none has.
    pub fn largest(&mut self) -> Option<u32> {
        let class = self.first_from(0);
        (class < self.end).then_some(class)
    }

    /// The smallest class that has items left; there must be one.
    pub fn smallest(&self) -> u32 {
        self.end - 1
    }

    /// Tokens of an item of the class.
    pub fn size(&self, class: u32) -> u32 {
        self.sizes[class as usize]
    }

    /// Items left of the class.
    pub fn left(&self, class: u32) -> u32 {
        self.left[class as usize]
    }

    /// One past the smallest class that has items left.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// The largest class with items left that is not above `size`; [`Self::end`] if there is none.
    pub fn at_most(&mut self, size: u32) -> u32 {
        self.first_from((self.lookup)(size))
    }

    /// The first class from `class` on that has items left; [`Self::end`] if there is none.
    pub fn first_from(&mut self, mut class: u32) -> u32 {
        // Path halving: each link on the way is made to skip one more.
        while self.next[class as usize] != class {
            let next = self.next[class as usize];
            self.next[class as usize] = self.next[next as usize];
            class = next;
        }
        class.min(self.end)
    }

    /// A row of these classes, which must have the items.
    pub fn row(&mut self, classes: &[u32]) -> Row {
        let mut row = Row {
            parts: Vec::new(),
            items: 0,
            space: self.bounds.capacity,
        };
        for &class in classes {
            self.add(class, 1, &mut row);
        }
        row
    }

    /// Puts so many items of a class into a row.
    pub fn add(&mut self, class: u32, times: u32, row: &mut Row) {
        row.space -= times * self.size(class);
        row.items += times;
        match row.parts.last_mut() {
            Some(part) if part.class == class => part.times += times,
            _ => row.parts.push(Part { class, times }),
        }
        self.take(class, times);
    }

    /// Adds the largest items that fit until none does.
    pub fn top_up(&mut self, row: &mut Row) {
        while row.items < self.bounds.limit {
            let class = self.at_most(row.space);
            if class == self.end {
                return;
            }
            let most = (row.space / self.size(class)).min(self.bounds.limit - row.items);
            self.add(class, most.min(self.left(class)), row);
        }
    }

    /// Makes rows like this one: as many as there are items for, divided by `pace`, at least one.
    pub fn make(&mut self, row: Row, pace: u32, patterns: &mut Patterns) {
        let mut parts = row.parts;
        parts.sort_unstable_by_key(|part| part.class);
        parts.dedup_by(|later, earlier| {
            let same = later.class == earlier.class;
            earlier.times += if same { later.times } else { 0 };
            same
        });
        let more = parts.iter().map(|part| self.left(part.class) / part.times);
        let more = ((more.min().unwrap_or(0) + 1) / pace).max(1) - 1;
        for part in &parts {
            self.take(part.class, more * part.times);
        }
        patterns.push(parts, more + 1);
    }

    fn take(&mut self, class: u32, items: u32) {
        let left = &mut self.left[class as usize];
        *left -= items;
        if *left > 0 {
            return;
        }
        self.next[class as usize] = class + 1;
        while self.end > 0 && self.left[self.end as usize - 1] == 0 {
            self.end -= 1;
        }
    }
}
