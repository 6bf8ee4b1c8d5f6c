//! Best fit decreasing: the longest sample first, each into the fullest row that still has space
//! for it.
//!
//! The right one for almost everything: on long-tailed lengths it meets the lower bound to the row.
//! Without a limit of samples it needs at most 11/9 of the fewest rows possible, and a constant
//! (Johnson, 1974). It is weak where no small samples are left to fill gaps, for example when every
//! length is between a quarter and a half of the capacity. The table in
//! [`super`] has it beside the others.
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
//! the samples are dealt to the rows: O(n).
//!
//! Where rows may hold only so many samples, sorted order is poor, and `even_fill` takes over.

use std::collections::BTreeMap;

use super::items::{Items, Order};
use super::patterns::{Part, Patterns};
use super::{Bounds, Histogram, Rows, even_fill};
use crate::order::Stream;

/// Packs the items of `order`, each of `slots[item]` tokens; rows and the items of equal size are
/// shuffled.
///
/// # Panics
///
/// If a slot is 0 or above the capacity, or a row may hold no item.
pub fn pack(
    slots: &[u32],
    order: impl ExactSizeIterator<Item = u32> + Clone + Send + Sync,
    bounds: Bounds,
    stream: &mut Stream,
    threads: usize,
) -> Rows {
    let items = Items::count(slots, order, bounds, threads);
    pack_items(&items, bounds, stream, threads)
}

/// Packs items that are already counted.
pub(super) fn pack_items(
    items: &Items<impl Order>,
    bounds: Bounds,
    stream: &mut Stream,
    threads: usize,
) -> Rows {
    fit_within_limit(&items.histogram, bounds).deal(items, stream, threads)
}

/// The rows of best fit, or of even fill where a limit of items makes these fewer.
pub(super) fn fit_within_limit(histogram: &Histogram, bounds: Bounds) -> Patterns {
    let best = fit(histogram, bounds);
    if bounds.limit == u32::MAX || best.total() <= histogram.lower_bound(bounds) {
        return best;
    }
    let even = even_fill::fit(histogram, bounds);
    if even.total() < best.total() {
        even
    } else {
        best
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

/// The rows of best fit decreasing, as recipes.
fn fit(histogram: &Histogram, bounds: Bounds) -> Patterns {
    let mut groups = vec![Group {
        parent: EMPTY,
        class: 0,
        times: 0,
        items: 0,
        rows: u32::MAX,
    }];
    // Remaining space → groups. A row that may take no more items is in no list.
    let mut open: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (class, (&size, &count)) in histogram.sizes.iter().zip(&histogram.counts).enumerate() {
        let mut left = count;
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
    let chain = |number: u32| {
        let links =
            std::iter::successors(Some(number), |&number| Some(groups[number as usize].parent));
        links
            .take_while(|&number| number != EMPTY)
            .map(|number| Part {
                class: groups[number as usize].class,
                times: groups[number as usize].times,
            })
    };
    let mut patterns = Patterns::default();
    for (number, group) in groups.iter().enumerate().skip(1) {
        if group.rows > 0 {
            patterns.push(chain(number as u32), group.rows);
        }
    }
    patterns
}
