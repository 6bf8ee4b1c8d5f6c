//! Memory, asked for before it is needed.
//!
//! A `Vec` that cannot grow ends the process, and with it a training that might have gone on with a
//! smaller batch. So what grows with the input is asked for first, in a way that may be refused:
//! [`reserved`] for one list whose length is known, [`ensure`] for work that makes many.
//!
//! Where the system promises more than it has, as Linux does by default, this catches what is far
//! too large and what a limit forbids (`ulimit -v`), and not the last page that was not there after
//! all. It costs one call of the allocator.

use std::hint::black_box;

use crate::{Error, Result};

/// An empty list with space for `len` entries.
///
/// # Errors
///
/// [`Error::OutOfMemory`] if there is not so much.
pub(crate) fn reserved<T>(len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    match list.try_reserve_exact(len) {
        Ok(()) => Ok(list),
        Err(_) => Err(Error::OutOfMemory {
            bytes: len.saturating_mul(size_of::<T>()),
        }),
    }
}

/// Checks that so many entries of `bytes` bytes could be had at once.
///
/// # Errors
///
/// [`Error::OutOfMemory`] if not.
pub(crate) fn ensure(entries: usize, bytes: usize) -> Result<()> {
    /// What is less comes from memory that the process has.
    const NOTHING: usize = 1 << 20;
    let bytes = entries.saturating_mul(bytes);
    if bytes > NOTHING {
        // Or the compiler sees that nobody uses it, and does not ask.
        black_box(reserved::<u8>(bytes)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_an_error() {
        let most = usize::MAX / 2;
        let error = || Error::OutOfMemory { bytes: most & !7 };

        assert_eq!(error(), reserved::<u64>(most / 8).unwrap_err());
        assert_eq!(error(), ensure(most / 8, 8).unwrap_err());
        assert_eq!(
            Error::OutOfMemory { bytes: usize::MAX },
            ensure(usize::MAX, 2).unwrap_err()
        );
    }

    #[test]
    fn what_can_be_had_is_had() {
        let mut list = reserved(3).unwrap();
        list.extend([1, 2, 3]);

        assert_eq!(3, list.capacity());
        assert_eq!(Ok(()), ensure(1 << 22, 1));
    }
}
