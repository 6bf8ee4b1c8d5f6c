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

    /// Puts `items` into a random order, each order equally likely (Fisher and Yates). O(n), in
    /// place.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u32 + 1) as usize);
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
