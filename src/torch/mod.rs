//! The core on torch tensors, for Rust programs that use tch, and the bridge that registers the
//! same functions as PyTorch ops.
//!
//! Every function here takes CPU tensors, checks them, and returns new contiguous CPU tensors that
//! share memory with none of the arguments. Arguments need not be contiguous. Token ids and labels
//! are int32 or int64; lengths, offsets, indices and positions any integer dtype. Errors name the
//! argument, what was found and what is allowed.
//!
//! The number of threads is torch's (`torch.get_num_threads()`, which is 1 in a data loader's
//! worker), or the environment variable `MULTIPACK_NUM_THREADS` where that is less. It never
//! changes a result.
//!
//! # Examples
//!
//! ```
//! use multipack::torch::{CollateOptions, collate};
//! use tch::Tensor;
//!
//! let tokens = Tensor::from_slice(&[11, 12, 13, 21, 22]);
//! let offsets = Tensor::from_slice(&[0i64, 3, 5]);
//! let index = Tensor::from_slice(&[0i64, 1]);
//! let row_offsets = Tensor::from_slice(&[0i64, 2]);
//!
//! let batch = collate(&tokens, &offsets, &index, &row_offsets, None, &CollateOptions::default())?;
//!
//! assert_eq!(batch.input_ids.size(), [1, 5]);
//! assert_eq!(Vec::<i32>::try_from(&batch.cu_seqlens).unwrap(), [0, 3, 5]);
//! # Ok::<(), multipack::Error>(())
//! ```

mod args;
mod bridge;
mod collate;
mod handle;
mod mask;
mod options;
mod plan;

use std::sync::OnceLock;

pub use collate::{Batch, CollateOptions, collate, collate_list, pack_values};
pub use mask::{block_mask, boundaries};
pub use plan::{PlanTensors, label_counts, microbatch, plan};

use crate::{Error, Result};

/// Torch's numbers of the dtypes that are made, or read as they are.
mod dtype {
    pub const UINT8: i8 = 0;
    pub const INT32: i8 = 3;
    pub const INT64: i8 = 4;
    pub const FLOAT16: i8 = 5;
    pub const FLOAT32: i8 = 6;
    pub const BOOL: i8 = 11;
    pub const BFLOAT16: i8 = 15;
}

/// Threads for one call: torch's number, or what the environment allows if that is less.
///
/// The environment is read once, because reading it while another thread changes it is not safe.
fn threads() -> Result<usize> {
    static LIMIT: OnceLock<std::result::Result<usize, String>> = OnceLock::new();
    let limit = LIMIT.get_or_init(|| match std::env::var_os("MULTIPACK_NUM_THREADS") {
        None => Ok(usize::MAX),
        Some(text) => match text.to_str().and_then(|text| text.trim().parse().ok()) {
            Some(limit) if limit > 0 => Ok(limit),
            _ => Err(text.to_string_lossy().into_owned()),
        },
    });
    match limit {
        Ok(limit) => Ok((*limit).min(usize::try_from(tch::get_num_threads()).unwrap_or(1))),
        Err(found) => Err(Error::ThreadCount {
            found: found.clone(),
        }),
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        let text = match error {
            tch::TchError::Torch(text) => text,
            other => other.to_string(),
        };
        torch_error(&text)
    }
}

/// An error of torch's in its own words, without the stack trace that it appends.
fn torch_error(text: &str) -> Error {
    Error::Torch {
        message: text.lines().next().unwrap_or_default().to_owned(),
    }
}
