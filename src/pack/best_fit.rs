//! Best fit decreasing: the longest sample first, each into the fullest row that still has space
//! for it.
//!
//! The right one for almost everything: on long-tailed lengths it meets the lower bound to the row.
//! Its guarantee is 11/9 of the optimum plus 6/9 of a row (Dósa, 2007, for first fit decreasing;
//! the same bound holds here). It is weak where no small samples are left to fill gaps, for example
//! when every length is between a quarter and a half of the capacity.
//!
//! Lengths are small integers with a huge multiplicity, so nothing is done sample by sample until
//! the very end:
//!
//! ```text
//! groups of rows with equal contents so far, kept by remaining space
//! for each distinct length, longest first, with its number of samples left:
//!     take the smallest remaining space ≥ length, and a group g of rows there (or new, empty rows)
//!     one row of g takes q = min(space / length, limit − items) samples in a row: after the first it
//!         is the fullest row with space, so best fit goes on with it until the length no longer fits
//!     as many rows of g as there are samples for become the group (g, q × length), one space down;
//!     what is left of the samples, less than q, makes one more row
//! ```
//!
//! A group remembers the group it came from and what was added, so a row's contents are a chain of
//! such links. This fills rows exactly as the itemwise algorithm does (tests compare the two) in
//! O(distinct lengths × groups touched), a few ten thousand steps for any number of samples. Then
//! the samples of each length, in a seeded random order, are dealt to the rows in streams: O(n),
//! with one read position per length. Who shares a row with whom is therefore as random as the
//! lengths allow, and another in each epoch.

use std::collections::BTreeMap;

use super::{Bounds, Histogram, Rows};
use crate::order::Stream;

/// Packs the items of `order`, each of `slots[item]` tokens; rows and the items of equal size are
/// shuffled.
pub fn pack(slots: &[u32], order: &[u32], bounds: Bounds, stream: &mut Stream) -> Rows {
    let mut classes = Classes::sort(slots, order);
    let groups = fit(&classes, bounds);
    for class in 0..classes.len() {
        stream.shuffle(classes.items_mut(class));
    }
    deal(&classes, &groups, stream)
}

/// Items sorted by size, largest first, equal ones together.
struct Classes {
    items: Vec<u32>,
    /// The distinct sizes, falling.
    sizes: Vec<u32>,
    /// Where each class begins in `items`; one more entry than classes.
    starts: Vec<u32>,
}

impl Classes {
    /// A counting sort; items of equal size keep their order.
    fn sort(slots: &[u32], order: &[u32]) -> Classes {
        let size_of = |&item: &u32| slots[item as usize];
        let histogram = Histogram::of(order.iter().map(size_of));
        let class_of = histogram.lookup();
        let mut starts = vec![0u32];
        for &count in &histogram.counts {
            starts.push(starts[starts.len() - 1] + count);
        }
        let mut next = starts.clone();
        let mut items = vec![0u32; order.len()];
        for item in order {
            let at = &mut next[class_of(size_of(item))];
            items[*at as usize] = *item;
            *at += 1;
        }
        drop(class_of);
        Classes {
            items,
            sizes: histogram.sizes,
            starts,
        }
    }

    fn len(&self) -> usize {
        self.sizes.len()
    }

    fn count(&self, class: usize) -> u32 {
        self.starts[class + 1] - self.starts[class]
    }

    fn items_mut(&mut self, class: usize) -> &mut [u32] {
        &mut self.items[self.starts[class] as usize..self.starts[class + 1] as usize]
    }
}

/// Rows with equal contents: those of `parent`, and then `times` items of `class`.
struct Group {
    parent: u32,
    class: u32,
    times: u32,
    /// Items of such a row in all.
    items: u32,
    /// Rows that are still like this; the others have become children.
    rows: u32,
}

/// The group of all empty rows, from which new rows come.
const EMPTY: u32 = 0;

/// Places the classes, largest first. The groups with `rows` above 0, [`EMPTY`] aside, are the
/// result.
fn fit(classes: &Classes, bounds: Bounds) -> Vec<Group> {
    let mut groups = vec![Group {
        parent: EMPTY,
        class: 0,
        times: 0,
        items: 0,
        rows: u32::MAX,
    }];
    // Remaining space → groups. A row that may take no more items is in no list.
    let mut open: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for class in 0..classes.len() {
        let size = classes.sizes[class];
        let mut left = classes.count(class);
        while left > 0 {
            let (space, from) = match open.range_mut(size..).next() {
                Some((&space, list)) => (space, list.pop().unwrap_or(EMPTY)),
                None => (bounds.capacity, EMPTY),
            };
            let most = (space / size).min(bounds.limit - groups[from as usize].items);
            let rows = groups[from as usize].rows;
            let full = (left / most).min(rows);
            let partial = if full < rows { left - full * most } else { 0 };
            for (times, rows) in [(most, full), (partial, 1)] {
                if times * rows == 0 {
                    continue;
                }
                left -= times * rows;
                let parent = &mut groups[from as usize];
                if from != EMPTY {
                    parent.rows -= rows;
                }
                let items = parent.items + times;
                groups.push(Group {
                    parent: from,
                    class: class as u32,
                    times,
                    items,
                    rows,
                });
                let space = space - times * size;
                if space > 0 && items < bounds.limit {
                    open.entry(space).or_default().push(groups.len() as u32 - 1);
                }
            }
            if let Some(list) = open.get_mut(&space) {
                if from != EMPTY && groups[from as usize].rows > 0 {
                    list.push(from);
                } else if list.is_empty() {
                    open.remove(&space);
                }
            }
        }
    }
    groups
}

/// Hands the items of each class out to the rows, which come in a random order.
fn deal(classes: &Classes, groups: &[Group], stream: &mut Stream) -> Rows {
    let mut group_of_row = Vec::new();
    for (number, group) in groups.iter().enumerate().skip(1) {
        group_of_row.extend(std::iter::repeat_n(number as u32, group.rows as usize));
    }
    stream.shuffle(&mut group_of_row);

    let mut next = classes.starts.clone();
    let mut rows = Rows {
        items: Vec::with_capacity(classes.items.len()),
        offsets: Vec::with_capacity(group_of_row.len() + 1),
    };
    rows.offsets.push(0);
    for &number in &group_of_row {
        let mut number = number;
        while number != EMPTY {
            let group = &groups[number as usize];
            let at = &mut next[group.class as usize];
            let end = *at + group.times;
            rows.items
                .extend_from_slice(&classes.items[*at as usize..end as usize]);
            *at = end;
            number = group.parent;
        }
        rows.offsets.push(rows.items.len() as u32);
    }
    rows
}
