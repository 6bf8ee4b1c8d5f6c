//! First fit: each item goes into the earliest row that still has space for it.
//!
//! The right one when rows should be made in the (shuffled) order of arrival, without favouring any
//! length: a row is a nearly random sample of the data. At most 1.7 times the optimal number of
//! rows (Dósa and Sgall, 2013); on the usual long-tailed lengths within half a per cent of the
//! bound. The table in [`super`] has it beside the others.
//!
//! The naive search looks at every open row, which is quadratic when rows stay nearly full. Here
//! the rows are the leaves of a tree whose inner nodes hold the largest free space below them: the
//! first child with enough space leads to the earliest row. With 16 children to a node, which are
//! one line of the cache, five steps are enough for a million rows. Rows without space for the
//! smallest item are closed, and leave the tree when it is full: where large items fill the rows, it
//! stays small however many there are. O(n log open rows).

use super::{Arrival, Bounds, Rows, Span};
use crate::order::Stream;

/// Packs items, each with its size, in the order in which they come; the rows are then shuffled. In
/// the end each arrival holds the item's row in place of its size, which saves memory.
///
/// # Panics
///
/// If a size is 0 or above the capacity, or a row may hold no item.
pub fn pack(arrivals: &mut [Arrival], bounds: Bounds, stream: &mut Stream) -> Rows {
    let smallest = arrivals.iter().map(|&(_, slot)| slot).min();
    let smallest = smallest.map_or(1, |slot| bounds.checked(slot));
    let mut open = OpenRows::default();
    let mut rows: Vec<Span> = Vec::new();
    for (_, slot) in arrivals.iter_mut() {
        let size = bounds.checked(*slot);
        let leaf = open.first_with(size);
        let number = leaf.map_or(rows.len(), |leaf| open.rows[leaf] as usize);
        if leaf.is_none() {
            rows.push((0, 0, 0));
        }
        let (_, items, tokens) = &mut rows[number];
        *items += 1;
        *tokens += size;
        *slot = number as u32;
        let space = match bounds.capacity - *tokens {
            space if space >= smallest && *items < bounds.limit => space,
            _ => 0,
        };
        match leaf {
            Some(leaf) => open.set(leaf, space),
            None if space > 0 => open.push(number as u32, space),
            None => {}
        }
    }
    drop(open);

    // Items by row, in their order of arrival: most go to one of the latest rows, which lie together
    // as long as the rows are in order. Only then whole rows go to their random places.
    let mut end = 0;
    for (start, items, _) in &mut rows {
        *start = end;
        end += *items;
    }
    let mut items = vec![0; arrivals.len()];
    for &mut (item, row) in arrivals {
        let (next, ..) = &mut rows[row as usize];
        items[*next as usize] = item;
        *next += 1;
    }
    let mut in_place = vec![(0, 0, 0); rows.len()];
    let places = stream.shuffled(0..rows.len() as u32);
    for ((end, items, tokens), place) in rows.into_iter().zip(places) {
        in_place[place as usize] = (end - items, items, tokens);
    }
    Rows::of(&items, &in_place)
}

/// Children of a node.
const WIDE: usize = 16;

/// The rows that may still take items, in order, and their free space as the leaves of a tree of
/// maxima.
#[derive(Default)]
struct OpenRows {
    /// The row of each leaf in use.
    rows: Vec<u32>,
    /// Space of the leaves, 0 where a row is closed or there is none yet; then the largest of each
    /// 16 of them, and so on up to a level of 16. No level before the first row is open.
    levels: Vec<Vec<u32>>,
}

impl OpenRows {
    /// The leaf of the earliest row with at least `slot` tokens of space, which are not 0.
    fn first_with(&self, slot: u32) -> Option<usize> {
        let mut node = 0;
        for level in self.levels.iter().rev() {
            let children = &level[node * WIDE..(node + 1) * WIDE];
            // Compares all children, which is quicker than to stop at the first.
            let fits = children
                .iter()
                .rev()
                .fold(0u32, |fits, &space| 2 * fits + u32::from(space >= slot));
            if fits == 0 {
                return None;
            }
            node = node * WIDE + fits.trailing_zeros() as usize;
        }
        (!self.levels.is_empty()).then_some(node)
    }

    fn set(&mut self, leaf: usize, space: u32) {
        let (mut at, mut largest) = (leaf, space);
        for level in &mut self.levels {
            if level[at] == largest {
                return;
            }
            level[at] = largest;
            at /= WIDE;
            let children = &level[at * WIDE..(at + 1) * WIDE];
            largest = children
                .iter()
                .fold(0, |largest, &space| largest.max(space));
        }
    }

    /// Adds a row after all others.
    fn push(&mut self, row: u32, space: u32) {
        if self.rows.len() == self.levels.first().map_or(0, Vec::len) {
            self.make_space();
        }
        self.rows.push(row);
        self.set(self.rows.len() - 1, space);
    }

    /// Lets closed rows go, and makes at least as many leaves free as are in use then.
    fn make_space(&mut self) {
        let spaces = self.levels.first().map_or(&[][..], |leaves| leaves);
        let mut leaves: Vec<u32> = spaces.iter().copied().filter(|&space| space > 0).collect();
        let mut spaces = spaces.iter();
        self.rows
            .retain(|_| spaces.next().is_some_and(|&space| space > 0));
        leaves.resize((2 * leaves.len()).next_multiple_of(WIDE).max(WIDE), 0);
        self.levels = vec![leaves];
        while let Some(level) = self.levels.last().filter(|level| level.len() > WIDE) {
            let largest = |children: &[u32]| children.iter().copied().max().unwrap_or(0);
            let mut above: Vec<u32> = level.chunks(WIDE).map(largest).collect();
            above.resize(above.len().next_multiple_of(WIDE), 0);
            self.levels.push(above);
        }
    }
}
