//! Seeded sample lengths, shared by the tests and the benches.
//!
//! The distributions are the ones of the published comparisons: *lognormal* is the long tail of
//! chats and documents (mean about 600 after clipping at 4096); *uniform* from 0.2 to 0.6 of the
//! capacity has no small samples to fill gaps; *triplets* fill every row exactly three by three, so
//! their optimum, n / 3 rows, is known.
#![allow(dead_code)] // each test binary uses a part

use multipack::{Purpose, Stream};

/// The seed of everything here, printed by failing property tests.
pub const SEED: u64 = 20_261_130;

/// A seeded stream for making test data.
pub fn stream(seed: u64) -> Stream {
    Stream::new(seed, 0, Purpose::Pack)
}

/// A uniform number from `low` to `high` − 1.
pub fn between(stream: &mut Stream, low: u32, high: u32) -> u32 {
    low + stream.below(high - low)
}

/// Lognormal lengths (µ 5.9235, σ 1.0), rounded up and clipped to 1..=cap.
pub fn lognormal(n: usize, cap: u32, seed: u64) -> Vec<u32> {
    let mut stream = stream(seed);
    let mut unit = || (f64::from(stream.below(1 << 31)) + 0.5) / f64::from(1u32 << 31);
    (0..n)
        .map(|_| {
            // Box and Muller's transform.
            let normal = (-2.0 * unit().ln()).sqrt() * (std::f64::consts::TAU * unit()).cos();
            ((5.923_548 + normal).exp().ceil() as u32).clamp(1, cap)
        })
        .collect()
}

/// Uniform lengths from 0.2 to 0.6 of the capacity.
pub fn uniform(n: usize, cap: u32, seed: u64) -> Vec<u32> {
    let mut stream = stream(seed);
    (0..n)
        .map(|_| between(&mut stream, cap / 5, 3 * cap / 5))
        .collect()
}

/// n / 3 rows, each cut into three parts between a quarter and a half of the capacity, in random
/// order.
pub fn triplets(n: usize, cap: u32, seed: u64) -> Vec<u32> {
    let mut stream = stream(seed);
    let mut lengths = Vec::with_capacity(n);
    while lengths.len() + 3 <= n {
        let a = between(&mut stream, cap / 4 + 1, cap / 2);
        let b = between(&mut stream, cap / 4 + 1, cap / 2);
        let c = cap - a - b;
        if c > cap / 4 && c < cap / 2 {
            lengths.extend([a, b, c]);
        }
    }
    stream.shuffle(&mut lengths);
    lengths
}
