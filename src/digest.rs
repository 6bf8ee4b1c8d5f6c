//! Fingerprints of numbers: XXH3 with 128 bits, in hexadecimal.
//!
//! They tell whether two ranks, or a checkpoint and a run, speak of the same thing. They are no
//! protection against forgery. Numbers are hashed as little-endian bytes, whatever the machine.
//! About 5 GB/s.

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

    /// Adds a list of 64-bit numbers.
    pub fn longs(self, numbers: &[i64]) -> Digest {
        self.bytes(numbers, |number| number.to_le_bytes())
    }

    /// Adds a list of 32-bit numbers.
    pub fn ints(self, numbers: &[u32]) -> Digest {
        self.bytes(numbers, |number| number.to_le_bytes())
    }

    /// Adds a list of truth values.
    pub fn flags(self, flags: &[bool]) -> Digest {
        self.bytes(flags, |flag| [u8::from(flag)])
    }

    fn bytes<T: Copy, const N: usize>(mut self, values: &[T], bytes: fn(T) -> [u8; N]) -> Digest {
        self.0.update(&(values.len() as u64).to_le_bytes());
        let mut buffer = [0u8; 4096];
        for chunk in values.chunks(buffer.len() / N) {
            for (place, &value) in buffer.chunks_exact_mut(N).zip(chunk) {
                place.copy_from_slice(&bytes(value));
            }
            self.0.update(&buffer[..N * chunk.len()]);
        }
        self
    }

    /// 32 hexadecimal digits.
    pub fn finish(self) -> String {
        format!("{:032x}", self.0.digest128())
    }
}
