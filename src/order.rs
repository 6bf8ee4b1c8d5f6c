//! Seeded order: the only source of randomness in a plan.
//!
//! The generator is xoshiro256++ (Blackman and Vigna, 2018), seeded through SplitMix64 as its
//! authors advise. Its stream is fixed by its publication, so the same seed gives the same plan on
//! every platform and in every release. Each use has its own stream: seed, epoch and purpose are
//! mixed by XXH3, so that seed 1 in epoch 0 is not seed 0 in epoch 1. The bounded draw and the
//! shuffle are written out here, since a library may change how it makes them.

use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng, SeedableRng};
use xxhash_rust::xxh3::xxh3_64;

/// Most items that are shuffled by swaps all over: they should lie in a second-level cache.
const MOST_SWAPPED: usize = 1 << 18;

/// What a stream of random numbers is used for. The numbers are part of the plan's version.
#[derive(Debug, Clone, Copy)]
pub enum Purpose {
    /// Packing: the visiting order, who is dealt to which row, the order of the rows.
    Pack = 1,
    /// Balancing: ties, and the order of steps and microbatches.
    Balance = 2,
}

/// A seeded stream of random numbers.
#[derive(Debug, Clone)]
pub struct Stream(Xoshiro256PlusPlus);

impl Stream {
    /// The stream of a seed, an epoch and a purpose.
    pub fn new(seed: u64, epoch: u64, purpose: Purpose) -> Stream {
        let mut key = [0u8; 24];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&epoch.to_le_bytes());
        key[16..].copy_from_slice(&(purpose as u64).to_le_bytes());
        Stream(Xoshiro256PlusPlus::seed_from_u64(xxh3_64(&key)))
    }

    /// A family of streams, for work that is divided: number `i` of a family is the same whoever
    /// draws from it and when.
    pub(crate) fn family(&mut self) -> Family {
        Family(self.0.next_u64())
    }

    /// A number from 0 to `bound` − 1, each equally likely; `bound` is at least 1.
    ///
    /// Lemire's multiplication with rejection (2019): no division unless the draw falls into the
    /// short, biased range.
    pub fn below(&mut self, bound: u32) -> u32 {
        let bound = u64::from(bound);
        loop {
            let product = (self.0.next_u64() >> 32) * bound;
            let low = product & 0xffff_ffff;
            if low >= bound || low >= (1 << 32) % bound {
                return (product >> 32) as u32;
            }
        }
    }

    /// Puts `items` into a random order, each order equally likely. O(n).
    pub fn shuffle<T: Copy>(&mut self, items: &mut [T]) {
        if items.len() > MOST_SWAPPED {
            let values = items.to_vec();
            self.throw(values.into_iter(), items);
        } else {
            self.swap_all(items);
        }
    }

    /// `values` in a random order, each order equally likely. O(n).
    pub(crate) fn shuffled<T: Clone + Default>(
        &mut self,
        values: impl ExactSizeIterator<Item = T>,
    ) -> Vec<T> {
        if values.len() > MOST_SWAPPED {
            let mut items = vec![T::default(); values.len()];
            self.throw(values, &mut items);
            items
        } else {
            let mut items: Vec<T> = values.collect();
            self.swap_all(&mut items);
            items
        }
    }

    /// Fisher and Yates: in place, but a swap with a place anywhere in a large memory waits for it.
    fn swap_all<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u32 + 1) as usize);
        }
    }

    /// Throws each of `values` into one of 256 buckets, each equally likely, which lie one after the
    /// other in `items`; shuffled in themselves, they are a shuffled whole (Rao, 1961, and
    /// Sandelius, 1962). Values are read in order and written to 256 places that move on in order,
    /// and a bucket fits into a cache.
    fn throw<T>(&mut self, values: impl ExactSizeIterator<Item = T>, items: &mut [T]) {
        let mut bucket_of = vec![0u8; values.len()];
        for buckets in bucket_of.chunks_mut(8) {
            buckets.copy_from_slice(&self.0.next_u64().to_le_bytes()[..buckets.len()]);
        }
        let mut sizes = [0; 256];
        for &bucket in &bucket_of {
            sizes[usize::from(bucket)] += 1;
        }
        let mut end = 0;
        let mut next = sizes.map(|size| {
            end += size;
            end - size
        });
        for (value, bucket) in values.zip(bucket_of) {
            let place = &mut next[usize::from(bucket)];
            items[*place] = value;
            *place += 1;
        }
        for (size, end) in sizes.into_iter().zip(next) {
            self.swap_all(&mut items[end - size..end]);
        }
    }
}

/// Streams by number; see [`Stream::family`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Family(u64);

impl Family {
    /// The stream of that number.
    pub fn stream(self, number: u64) -> Stream {
        let mut key = [0u8; 16];
        key[..8].copy_from_slice(&self.0.to_le_bytes());
        key[8..].copy_from_slice(&number.to_le_bytes());
        Stream(Xoshiro256PlusPlus::seed_from_u64(xxh3_64(&key)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_shuffled_in_themselves_make_every_order_as_often() {
        let mut stream = Stream::new(0, 0, Purpose::Pack);
        let mut times = std::collections::BTreeMap::new();
        for _ in 0..60_000 {
            let mut items = [0; 3];
            stream.throw(0..3, &mut items);
            *times.entry(items).or_insert(0) += 1;
        }

        // 10,000 each are expected, with a deviation of 91.
        assert_eq!(6, times.len());
        assert!(
            times.values().all(|&n: &i32| (n - 10_000).abs() < 400),
            "{times:?}"
        );
    }

    #[test]
    fn many_items_are_all_there_and_anywhere() {
        let n = MOST_SWAPPED as u32 + 5;
        let mut items = Stream::new(0, 0, Purpose::Pack).shuffled(0..n);
        let mut in_place: Vec<u32> = (0..n).collect();
        Stream::new(0, 0, Purpose::Pack).shuffle(&mut in_place);
        assert_eq!(items, in_place);

        // The mean distance of two random places is a third of the length.
        let moved: f64 = (0..)
            .zip(&items)
            .map(|(at, &item)| f64::from(item.abs_diff(at)))
            .sum();
        let mean = moved / f64::from(n) / f64::from(n);
        assert!((mean - 1.0 / 3.0).abs() < 0.005, "{mean}");
        items.sort_unstable();
        assert!(items.into_iter().eq(0..n));
    }
}
