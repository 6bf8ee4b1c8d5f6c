//! Fingerprints of numbers: XXH3 with 128 bits, in hexadecimal.
//!
//! They tell whether two ranks, or a checkpoint and a run, speak of the same thing. They are no
//! protection against forgery. Every number is hashed as eight little-endian bytes, whatever the
//! machine and the type that it is kept in. About 5 GB/s.

use xxhash_rust::xxh3::Xxh3;

/// A fingerprint being made.
pub(crate) struct Digest(Xxh3);

impl Digest {
    pub fn new() -> Digest {
        Digest(Xxh3::new())
    }

    /// Adds a text.
    pub fn text(mut self, text: &str) -> Digest {
        self.0.update(&(text.len() as u64).to_le_bytes());
        self.0.update(text.as_bytes());
        self
    }

    /// Adds a list of numbers.
    pub fn numbers<T: Copy + Into<i64>>(mut self, numbers: &[T]) -> Digest {
        self.0.update(&(numbers.len() as u64).to_le_bytes());
        let mut bytes = [0u8; 4096];
        for chunk in numbers.chunks(bytes.len() / 8) {
            for (place, &number) in bytes.chunks_exact_mut(8).zip(chunk) {
                place.copy_from_slice(&number.into().to_le_bytes());
            }
            self.0.update(&bytes[..8 * chunk.len()]);
        }
        self
    }

    /// 32 hexadecimal digits.
    pub fn finish(self) -> String {
        format!("{:032x}", self.0.digest128())
    }
}
