//! First fit: each item goes into the earliest row that still has space for it.
//!
//! The right one when rows should be made in the (shuffled) order of arrival, without favouring any
//! length: a row is a nearly random sample of the data. At most 1.7 times the optimal number of
//! rows (Dósa and Sgall, 2013); on the usual long-tailed lengths within half a per cent of the
//! bound.
//!
//! The naive search looks at every open row, which is quadratic when rows stay nearly full. Here
//! the rows are the leaves of a tournament tree whose inner nodes hold the largest free space below
//! them: going down to the left wherever the left half has space finds the earliest row in O(log
//! rows).

use super::{Bounds, Rows};
use crate::order::Stream;

/// Packs the items of `order`, each of `slots[item]` tokens, in that order; the rows are then
/// shuffled.
///
/// # Panics
///
/// If a slot is 0 or above the capacity, or a row may hold no item.
pub fn pack(slots: &[u32], order: &[u32], bounds: Bounds, stream: &mut Stream) -> Rows {
    let mut tree = Tournament::new(bounds.capacity);
    let mut counts: Vec<u32> = Vec::new();
    let mut row_of = Vec::with_capacity(order.len());
    for &item in order {
        let slot = bounds.checked(slots[item as usize]);
        let row = tree.first_with(slot);
        if row == counts.len() {
            counts.push(0);
        }
        counts[row] += 1;
        let free = tree.free(row) - slot;
        // A row with all the items that it may hold has no space, whatever is left of its tokens.
        tree.set(row, if counts[row] == bounds.limit { 0 } else { free });
        row_of.push(row as u32);
    }

    drop(tree);

    // Counting sort by the shuffled number of the row; items keep their order of arrival inside it.
    let mut number: Vec<u32> = (0..counts.len() as u32).collect();
    stream.shuffle(&mut number);
    let mut offsets = vec![0u32; counts.len() + 1];
    for (row, &count) in counts.iter().enumerate() {
        offsets[number[row] as usize + 1] = count;
    }
    for row in 1..offsets.len() {
        offsets[row] += offsets[row - 1];
    }
    let mut next = offsets.clone();
    let mut rows = Rows {
        items: vec![0; order.len()],
        offsets,
        tokens: vec![0; counts.len()],
    };
    for (&item, &row) in order.iter().zip(&row_of) {
        let row = number[row as usize] as usize;
        let at = &mut next[row];
        rows.items[*at as usize] = item;
        rows.tokens[row] += slots[item as usize];
        *at += 1;
    }
    rows
}

/// Free space of the rows, as the leaves of a complete binary tree of maxima. Rows that were never
/// opened are empty.
struct Tournament {
    /// Node 1 is the root, node `i` has the children `2i` and `2i + 1`; the leaves start at
    /// `leaves`.
    nodes: Vec<u32>,
    leaves: usize,
    capacity: u32,
}

impl Tournament {
    fn new(capacity: u32) -> Tournament {
        let leaves = 64;
        Tournament {
            nodes: vec![capacity; 2 * leaves],
            leaves,
            capacity,
        }
    }

    /// The earliest row with at least `slot` tokens of space. Opens more rows when all are too
    /// full.
    fn first_with(&mut self, slot: u32) -> usize {
        if self.nodes[1] < slot {
            self.double();
        }
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            node += usize::from(self.nodes[node] < slot);
        }
        node - self.leaves
    }

    fn free(&self, row: usize) -> u32 {
        self.nodes[self.leaves + row]
    }

    fn set(&mut self, row: usize, free: u32) {
        let mut node = self.leaves + row;
        self.nodes[node] = free;
        while node > 1 {
            let largest = self.nodes[node].max(self.nodes[node ^ 1]);
            node /= 2;
            if self.nodes[node] == largest {
                break;
            }
            self.nodes[node] = largest;
        }
    }

    /// Twice as many leaves: the old tree becomes the left half.
    fn double(&mut self) {
        let mut nodes = vec![self.capacity; 4 * self.leaves];
        let mut width = 1;
        while width <= self.leaves {
            nodes[2 * width..3 * width].copy_from_slice(&self.nodes[width..2 * width]);
            width *= 2;
        }
        self.nodes = nodes;
        self.leaves *= 2;
    }
}
