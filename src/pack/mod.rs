//! Packing: samples into rows of a fixed capacity.
//!
//! Packing is one-dimensional bin packing with integer sizes. Each algorithm has a file of its own
//! and can be run alone; they know nothing of labels, ranks or steps. All of them keep three
//! promises: every item is in exactly one row, no row holds more than `capacity` tokens or `limit`
//! items, and the answer depends on nothing but the arguments.
//!
//! | algorithm | rows over the bound: lognormal / uniform (0.2 to 0.6 of the capacity) / triplets | cost | when |
//! |---|---|---|---|
//! | [`best_fit`] | 0.0 % / 1.6 % / 12.5 % | O(n + distinct lengths × groups) | the default: dense on a long tail |
//! | [`tight`] | 0.0 % / 0.0 % / 0.0 % | the same, and a bounded search | no small samples to fill gaps |
//! | [`first_fit`] | 0.2 % / 8.4 % / 9.8 % | O(n log rows) | rows made in arrival order, so that no length is favoured |
//! | [`next_fit`] | 17.7 % / 28 % / 22 % | O(n) | the dataset's order has to be kept |

pub mod best_fit;
mod even_fill;
pub mod first_fit;
mod histogram;
mod items;
mod mixed;
pub mod next_fit;
mod patterns;
mod stock;
pub mod tight;

pub use histogram::Histogram;
pub(crate) use items::Items;

use std::ops::Range;

use crate::config::{Algorithm, Config};
use crate::order::Stream;

/// Rows of items: row `r` holds `items[offsets[r]..offsets[r + 1]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Item numbers, row after row.
    pub items: Vec<u32>,
    /// Where each row begins; one more entry than rows.
    pub offsets: Vec<u32>,
    /// Tokens of each row, known from packing: looking the items up again would be the dearest part
    /// of a plan, millions of reads all over the memory.
    pub tokens: Vec<u32>,
}

impl Rows {
    /// No rows.
    pub fn new() -> Rows {
        Rows {
            items: Vec::new(),
            offsets: vec![0],
            tokens: Vec::new(),
        }
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the items of a row stand.
    pub fn places(&self, row: usize) -> Range<usize> {
        self.offsets[row] as usize..self.offsets[row + 1] as usize
    }

    /// The items of each row in turn.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|row| &self.items[self.places(row)])
    }

    /// Appends a row.
    pub fn push(&mut self, items: &[u32], tokens: u32) {
        self.items.extend_from_slice(items);
        self.offsets.push(self.items.len() as u32);
        self.tokens.push(tokens);
    }

    /// Appends row `row` of `other`.
    pub fn push_from(&mut self, other: &Rows, row: usize) {
        self.push(&other.items[other.places(row)], other.tokens[row]);
    }

    /// Leaves out the rows from `rows` on.
    pub fn truncate(&mut self, rows: usize) {
        self.items.truncate(self.offsets[rows] as usize);
        self.offsets.truncate(rows + 1);
        self.tokens.truncate(rows);
    }

    /// The rows whose items `spans` names among `items`.
    fn of(items: &[u32], spans: &[Span]) -> Rows {
        let mut rows = Rows {
            items: Vec::with_capacity(items.len()),
            offsets: Vec::with_capacity(spans.len() + 1),
            tokens: Vec::with_capacity(spans.len()),
        };
        rows.offsets.push(0);
        for &(start, len, tokens) in spans {
            match &items[start as usize..][..len as usize] {
                // Copying slices costs a call, more than the item.
                &[item] => rows.items.push(item),
                items => rows.items.extend_from_slice(items),
            }
            rows.offsets.push(rows.items.len() as u32);
            rows.tokens.push(tokens);
        }
        rows
    }

    /// The same rows in a random order.
    ///
    /// What is known of a row is shuffled as a whole, so that of each row only its items have to be
    /// fetched from anywhere in memory.
    fn shuffled(&self, stream: &mut Stream) -> Rows {
        let ends = self.offsets.windows(2);
        let spans = ends.zip(&self.tokens).map(|(ends, &tokens)| {
            let [start, end] = [ends[0], ends[1]];
            (start, end - start, tokens)
        });
        Rows::of(&self.items, &stream.shuffled(spans))
    }
}

/// Of a row its first place, its number of items and its tokens.
type Span = (u32, u32, u32);

impl Default for Rows {
    fn default() -> Self {
        Rows::new()
    }
}

/// What a row can take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Most tokens of a row.
    pub capacity: u32,
    /// Most items of a row.
    pub limit: u32,
}

impl Bounds {
    /// The slot itself, which must fit into an empty row. The planner sees to that; whoever calls a
    /// packer alone learns here of a slot that would never be placed.
    fn checked(self, slot: u32) -> u32 {
        assert!(
            0 < slot && slot <= self.capacity && self.limit > 0,
            "a slot of {slot} tokens in rows of {self:?}"
        );
        slot
    }
}

/// Packs the samples `all`, of `slots[i]` tokens each, by the algorithm of the settings. Every slot
/// is from 1 to the capacity.
///
/// The rows come in a random order, except for sequential packing, where items and rows keep
/// theirs.
pub(crate) fn pack(
    slots: &[u32],
    all: &Items<Range<u32>>,
    bounds: Bounds,
    config: &Config,
    mix: bool,
    stream: &mut Stream,
    threads: usize,
) -> Rows {
    let mut tries = tight::tries_for(slots.len());
    let group = config.sample_packing_group_size.unwrap_or(u64::MAX) as usize;
    match config.sample_packing_algorithm {
        _ if config.sample_packing_sequentially => {
            return next_fit::pack(arrivals(slots), bounds);
        }
        // These deal the items of each length at random; in one group that is shuffling enough.
        Algorithm::BestFitDecreasing if mix && group >= slots.len() => {
            return mixed::pack_items(all, bounds, stream, threads);
        }
        Algorithm::BestFitDecreasing if group >= slots.len() => {
            return best_fit::pack_items(all, bounds, stream, threads);
        }
        Algorithm::Tight if group >= slots.len() => {
            return tight::pack_items(all, bounds, stream, threads, &mut tries);
        }
        _ => {}
    }
    let mut order = stream.shuffled(arrivals(slots));
    let mut rows = Rows::new();
    let group = group.min(order.len()).max(1);
    for chunk in order.chunks_mut(group) {
        let items = chunk.iter().map(|&(item, _)| item);
        let packed = match config.sample_packing_algorithm {
            Algorithm::BestFitDecreasing if mix => {
                let items = Items::count(slots, items, bounds, threads);
                mixed::pack_items(&items, bounds, stream, threads)
            }
            Algorithm::BestFitDecreasing => best_fit::pack(slots, items, bounds, stream, threads),
            Algorithm::Tight => tight::pack(slots, items, bounds, stream, threads, &mut tries),
            Algorithm::FirstFit => first_fit::pack(chunk, bounds, stream),
            Algorithm::NextFit => next_fit::pack(chunk.iter().copied(), bounds).shuffled(stream),
        };
        if rows.is_empty() {
            rows = packed;
        } else {
            (0..packed.len()).for_each(|row| rows.push_from(&packed, row));
        }
    }
    rows
}

/// An item and its size. They travel together, so that whoever takes items in a random order need
/// not fetch their sizes from all over the memory.
pub type Arrival = (u32, u32);

/// All items in order.
pub fn arrivals(slots: &[u32]) -> impl ExactSizeIterator<Item = Arrival> {
    let items = slots.iter().enumerate();
    items.map(|(item, &slot)| (item as u32, slot))
}

/// A number of rows that no packing can beat: the largest of three bounds.
///
/// The first is the total over the capacity. The second: of the items of some size or more, a row
/// holds at most capacity / size, and at most the limit. The third is Martello and Toth's L2 (1990):
/// items above half the capacity need rows of their own. For a threshold t, those above capacity − t
/// have no space for items of t or more; so what the items from t to one half do not find as free
/// space beside the other large ones needs further rows. For lengths 6, 6, 6 and capacity 10 the
/// total asks for 2 rows, the others for 3.
///
/// O(n + longest), or O(n log n) for sparse sizes; exact integers.
pub fn lower_bound(slots: &[u32], bounds: Bounds) -> u64 {
    Histogram::of(slots.iter().copied()).lower_bound(bounds)
}
