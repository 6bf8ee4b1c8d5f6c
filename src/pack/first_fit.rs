//! First fit: each item goes into the earliest row that still has space for it.
//!
//! The right one when rows should be made in the (shuffled) order of arrival, without favouring any
//! length: a row is a nearly random sample of the data. At most 1.7 times the optimal number of
//! rows (Dósa and Sgall, 2013); on the usual long-tailed lengths within half a per cent of the
//! bound.
//!
//! The naive search looks at every open row, which is quadratic when rows stay nearly full. Here
//! the rows are the leaves of a tree whose inner nodes hold the largest free space below them: the
//! first child with enough space leads to the earliest row. With 16 children to a node, which are
//! one line of the cache, five steps are enough for a million rows.

use super::{Bounds, Rows};
use crate::order::Stream;

/// Packs the items of `order`, each of `slots[item]` tokens, in that order; the rows are then
/// shuffled.
///
/// # Panics
///
/// If a slot is 0 or above the capacity, or a row may hold no item.
pub fn pack(slots: &[u32], order: &[u32], bounds: Bounds, stream: &mut Stream) -> Rows {
    let mut tree = Tournament::default();
    let (mut sizes, mut tokens): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
    let mut row_of = Vec::with_capacity(order.len());
    let mut block = Vec::with_capacity(BLOCK);
    for items in order.chunks(BLOCK) {
        // Read ahead: these reads all over the memory overlap, and would be waited for one by one in
        // the search.
        block.clear();
        block.extend(items.iter().map(|&item| slots[item as usize]));
        for slot in block.iter().map(|&slot| bounds.checked(slot)) {
            let row = tree.first_with(slot).unwrap_or_else(|| {
                sizes.push(0);
                tokens.push(0);
                tree.open(bounds.capacity)
            });
            sizes[row] += 1;
            tokens[row] += slot;
            // A row with all the items that it may hold has no space, whatever is left of its tokens.
            let full = sizes[row] == bounds.limit;
            tree.set(
                row,
                if full {
                    0
                } else {
                    bounds.capacity - tokens[row]
                },
            );
            row_of.push(row as u32);
        }
    }
    drop(tree);

    // Items by row, in their order of arrival: most go to one of the latest rows, which lie together
    // as long as the rows are in order. Only then whole rows go to their random places.
    let mut starts = vec![0u32; sizes.len() + 1];
    for (row, &size) in sizes.iter().enumerate() {
        starts[row + 1] = starts[row] + size;
    }
    let mut next = starts.clone();
    let mut items = vec![0; order.len()];
    for (&item, row) in order.iter().zip(row_of) {
        let at = &mut next[row as usize];
        items[*at as usize] = item;
        *at += 1;
    }
    let in_order = Rows {
        items,
        offsets: starts,
        tokens,
    };
    let mut place: Vec<u32> = (0..sizes.len() as u32).collect();
    stream.shuffle(&mut place);
    let mut row_at = vec![0; place.len()];
    for (row, &place) in place.iter().enumerate() {
        row_at[place as usize] = row;
    }
    in_order.reordered(&row_at)
}

/// Items whose sizes are read at once.
const BLOCK: usize = 1 << 10;

/// Children of a node.
const WIDE: usize = 16;

/// Free space of the open rows, as the leaves of a tree of maxima.
#[derive(Default)]
struct Tournament {
    /// The rows, then the largest of each 16 of them, and so on up to a level of at most 16. Each
    /// is filled up with zeros to a multiple of 16, where no item fits.
    levels: Vec<Vec<u32>>,
    rows: usize,
}

impl Tournament {
    /// The earliest row with at least `slot` tokens of space, which are not 0.
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

    fn set(&mut self, row: usize, space: u32) {
        let (mut at, mut largest) = (row, space);
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

    /// Opens a row with so much space, and returns its number.
    fn open(&mut self, space: u32) -> usize {
        let row = self.rows;
        self.rows += 1;
        let mut at = row;
        for level in &mut self.levels {
            if at == level.len() {
                level.resize(at + WIDE, 0);
            }
            at /= WIDE;
        }
        if at > 0 || self.levels.is_empty() {
            // The level on top has grown out of one node.
            let mut top = vec![0; WIDE];
            let below = self.levels.last().map_or(&[][..], |level| level);
            for (largest, children) in top.iter_mut().zip(below.chunks(WIDE)) {
                *largest = children.iter().copied().max().unwrap_or(0);
            }
            self.levels.push(top);
        }
        self.set(row, space);
        row
    }
}
