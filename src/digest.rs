//! Fingerprints of numbers: XXH3 with 128 bits, in hexadecimal.
//!
//! They tell whether two ranks, or a checkpoint and a run, speak of the same thing. They are no
//! protection against forgery. Numbers are hashed as little-endian bytes, whatever the machine.
//! About as fast as memory is read.

use bytemuck::NoUninit;
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
        self.values(numbers, i64::to_le)
    }

    /// Adds a list of 32-bit numbers.
    pub fn ints(self, numbers: &[u32]) -> Digest {
        self.values(numbers, u32::to_le)
    }

    /// Adds a list of truth values.
    pub fn flags(self, flags: &[bool]) -> Digest {
        let bytes: Vec<u8> = flags.iter().map(|&flag| u8::from(flag)).collect();
        self.values(&bytes, |byte| byte)
    }

    fn values<T: NoUninit>(mut self, values: &[T], little_endian: fn(T) -> T) -> Digest {
        self.0.update(&(values.len() as u64).to_le_bytes());
        if cfg!(target_endian = "little") {
            self.0.update(bytemuck::cast_slice(values));
        } else {
            for &value in values {
                self.0.update(bytemuck::bytes_of(&little_endian(value)));
            }
        }
        self
    }

    /// 32 hexadecimal digits.
    pub fn finish(self) -> String {
        format!("{:032x}", self.0.digest128())
    }
}
