//! Plans and builds packed batches for language-model training.
pub mod batch;
pub mod config;
pub mod error;
mod order;
pub mod pack;
pub mod parallel;
pub mod plan;
mod samples;
mod schedule;
mod stats;
#[cfg(feature = "torch")]
pub mod torch;

pub use config::{BatchLayout, Config, Split};
pub use error::{Error, ErrorKind, Result};
pub use order::{Purpose, Stream};
pub use plan::{Plan, Report, plan};
pub use samples::{Dropped, Tally};
pub use stats::Stats;
