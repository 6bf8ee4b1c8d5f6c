//! Plans and builds packed batches for language-model training.
pub mod error;

pub use error::{Error, ErrorKind, Result};
