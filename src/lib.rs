//! Plans and builds packed batches for training language models.
//!
//! Samples of very different lengths are laid end to end in rows of a fixed capacity, shared out
//! over ranks and optimizer steps, and turned into the tensors of a batch: token ids, labels,
//! positions, segment boundaries and attention masks.
//!
//! - [`plan()`] makes the plan of an epoch from lengths, label counts and a [`Config`]. It is a
//!   pure function: the same inputs give the same plan on every rank, platform and thread count.
//! - [`batch`] says where each token of a microbatch goes, and writes it there.
//! - [`pack`] holds the packing algorithms, each to be used alone.
//!
//! Without features this crate knows integers and slices only. The feature `torch` adds
//! `multipack::torch`, the same functions on tensors, and makes the `cdylib` register them as the
//! PyTorch ops `torch.ops.multipack.*`; it needs libtorch 2.13.
//!
//! ```
//! use multipack::{Config, Split, plan};
//!
//! let config = Config::from_json(r#"{"sequence_len": 8}"#)?;
//! let plan = plan(&[5, 3, 6, 2], None, None, &config, 0, Split::Train, 1)?;
//!
//! assert_eq!(plan.len(), 2); // 5 + 3 and 6 + 2 tokens
//! assert_eq!(plan.report.after.efficiency, Some(1.0));
//! # Ok::<(), multipack::Error>(())
//! ```

// The Rust of the documentation is tested with that of the code.
#[cfg(doctest)]
#[doc = include_str!("../docs/cpp.md")]
struct CppPage;

mod balance;
pub mod batch;
pub mod config;
mod digest;
pub mod error;
mod memory;
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
