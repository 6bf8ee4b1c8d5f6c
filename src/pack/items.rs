//! Items to be packed, counted by size and later dealt by it: what the packers on a [`Histogram`]
//! begin and end with.
//!
//! Counting and sorting go over the items in a few pieces, one for each thread. What a piece has of
//! each size is kept from the one to the other, so that nothing is counted twice. Both are O(n), and
//! so is the shuffle of the items of each size, which joins the pieces.

use super::{Bounds, Histogram};
use crate::order::Family;
use crate::parallel;

/// The order in which items are visited.
pub(crate) trait Order: ExactSizeIterator<Item = u32> + Clone + Send + Sync {}

impl<T: ExactSizeIterator<Item = u32> + Clone + Send + Sync> Order for T {}

/// Items in a visiting order, counted.
pub(crate) struct Items<'a, O> {
    slots: &'a [u32],
    order: O,
    /// How many there are of each size.
    pub histogram: Histogram,
    /// How many each piece of the order has of each class.
    pieces: Vec<Vec<u32>>,
}

impl<'a, O: Order> Items<'a, O> {
    /// Counts the items of `order`, each of `slots[item]` tokens. Panics unless every item fits
    /// into an empty row.
    pub fn count(slots: &'a [u32], order: O, bounds: Bounds, threads: usize) -> Items<'a, O> {
        let sizes = order.clone().map(|item| slots[item as usize]);
        let (histogram, pieces) = Histogram::by_pieces(sizes, threads);
        let extremes = [histogram.sizes.first(), histogram.sizes.last()];
        for &size in extremes.into_iter().flatten() {
            bounds.checked(size);
        }
        Items {
            slots,
            order,
            histogram,
            pieces,
        }
    }

    /// How many items there are.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// A number of rows that no packing of the items but these can beat.
    pub fn lower_bound_without(&self, unused: &[u32], bounds: Bounds) -> u64 {
        let mut histogram = self.histogram.clone();
        let class_of = histogram.lookup();
        for &item in unused {
            histogram.counts[class_of(self.slots[item as usize]) as usize] -= 1;
        }
        histogram.lower_bound(bounds)
    }

    /// Sorts each piece by class. Items of a class keep their order.
    pub(super) fn sort(&self, threads: usize) -> Sorted {
        let mut sorted = Sorted {
            items: vec![0; self.len()],
            piece: self.len().div_ceil(self.pieces.len()).max(1),
            starts: self
                .pieces
                .iter()
                .map(|counts| sums_before(counts))
                .collect(),
        };
        let table = self.histogram.table();
        let places = sorted.items.chunks_mut(sorted.piece);
        let parts = places.zip(&sorted.starts).enumerate().collect();
        parallel::for_each(
            threads,
            parts,
            |(number, (places, starts)): (usize, (&mut [u32], &Vec<u32>))| {
                let items = self.order.clone().skip(number * sorted.piece);
                let items = items.take(sorted.piece);
                let mut put = |at: &mut u32, item: u32| {
                    places[*at as usize] = item;
                    *at += 1;
                };
                if let Some(table) = &table {
                    // Where the next item of each size goes: one look-up less than by class.
                    let of_size = table.iter().map(|&class| starts[class as usize]);
                    let mut next: Vec<u32> = of_size.collect();
                    items.for_each(|item| {
                        put(&mut next[self.slots[item as usize] as usize], item);
                    });
                } else {
                    let mut next = starts.clone();
                    let class_of = self.histogram.lookup();
                    items.for_each(|item| {
                        let class = class_of(self.slots[item as usize]);
                        put(&mut next[class as usize], item);
                    });
                }
            },
        );
        sorted
    }
}

/// Items sorted by class, the largest sizes first, inside each piece.
pub(super) struct Sorted {
    /// The pieces, one after the other.
    items: Vec<u32>,
    /// Items of a piece; the last one may have fewer.
    piece: usize,
    /// For each piece, where each class begins in it; one more entry than classes.
    starts: Vec<Vec<u32>>,
}

/// Items by class, in random order inside each.
pub(super) struct Shuffled {
    pub items: Vec<u32>,
    /// Where each class begins; one more entry than classes.
    pub starts: Vec<u32>,
    /// Memory for as many items, for whoever needs it next: fresh memory costs as much as what is
    /// written to it here.
    pub spare: Vec<u32>,
}

impl Sorted {
    /// Joins the pieces and shuffles the items of each class, with `meanwhile` going on beside it.
    /// Every class has a random stream of its own, so that it does not matter which thread shuffles
    /// it.
    pub fn shuffle(
        mut self,
        family: Family,
        meanwhile: impl FnOnce() + Send,
        threads: usize,
    ) -> Shuffled {
        let mut starts = vec![0u32; self.starts[0].len()];
        for of_piece in &self.starts {
            for (start, of_piece) in starts.iter_mut().zip(of_piece) {
                *start += of_piece;
            }
        }
        let classes = starts.len() - 1;
        let joined = self.starts.len() == 1;
        let mut items = vec![0; self.items.len()];
        if joined {
            std::mem::swap(&mut items, &mut self.items);
        }
        let (sorted, starts_of) = (&self, &starts);
        let mut jobs: Vec<Box<dyn FnOnce() + Send>> = vec![Box::new(meanwhile)];
        // Parts of about as many items; the short sizes have most of them.
        let chunk = parallel::chunk_len(items.len(), threads) as u32;
        let (mut rest, mut first) = (&mut items[..], 0);
        for end in 1..=classes {
            let len = starts[end] - starts[first];
            if len >= chunk || end == classes {
                let (mut mine, others) = rest.split_at_mut(len as usize);
                rest = others;
                let classes = first..end;
                first = end;
                jobs.push(Box::new(move || {
                    for class in classes {
                        let len = starts_of[class + 1] - starts_of[class];
                        let places = mine.split_off_mut(..len as usize).unwrap_or_default();
                        if !joined {
                            sorted.join(class, places);
                        }
                        family.stream(class as u64).shuffle(places);
                    }
                }));
            }
        }
        parallel::for_each(threads, jobs, |job| job());
        Shuffled {
            items,
            starts,
            spare: self.items,
        }
    }

    /// Copies the items of a class from all pieces.
    fn join(&self, class: usize, mut places: &mut [u32]) {
        for (piece, starts) in self.items.chunks(self.piece).zip(&self.starts) {
            let from = &piece[starts[class] as usize..starts[class + 1] as usize];
            let (mine, rest) = places.split_at_mut(from.len());
            mine.copy_from_slice(from);
            places = rest;
        }
    }
}

/// 0 and the running sums: for 2, 3 these are 0, 2, 5.
fn sums_before(counts: &[u32]) -> Vec<u32> {
    let mut sums = Vec::with_capacity(counts.len() + 1);
    sums.push(0);
    for &count in counts {
        sums.push(sums[sums.len() - 1] + count);
    }
    sums
}
