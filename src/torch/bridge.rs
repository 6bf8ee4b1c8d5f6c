//! The functions that C++ calls: signatures, and a guard around each.
//!
//! cxx turns `Err` into a C++ exception that carries text alone, and aborts the process on a panic.
//! So every function runs inside [`guarded`], which catches panics and writes the kind of an error
//! as one letter in front of its text; `cpp/check.h` reads it.

use std::any::Any;
use std::ffi::c_char;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cxx::{CxxVector, UniquePtr};
use tch::Tensor;

use super::Batch;
use super::handle::{Borrowed, give};
use super::options::mask_dtype;
use crate::batch::MaskDtype;
use crate::{Config, Error, ErrorKind, Split, memory};

/// The version of the ops as C++ sees them. A C++ program calls this so that the linker keeps the
/// library, which it would otherwise drop for want of any reference, and can compare it with what
/// its header was written for.
// SAFETY: nothing else in a process is called this, except another copy of this very library.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub extern "C" fn multipack_abi_version() -> i32 {
    1
}

/// The version of this crate, ending in a NUL, for Python to compare with its own: a library that
/// was left behind by an earlier release is to be told from a right one before an op is called.
// SAFETY: as above.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub extern "C" fn multipack_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[allow(unsafe_code, missing_docs)]
#[cxx::bridge(namespace = "multipack::ffi")]
pub(super) mod ffi {
    /// What decides the shape of a batch.
    struct RowOptions {
        row_len: i64,
        max_sample_len: i64,
        pad_to_multiple_of: i64,
        align_samples_to: i64,
    }

    /// The options of collate, as the schema gives them.
    struct CollateOptions<'a> {
        rows: RowOptions,
        pad_token_id: i64,
        position_start: i64,
        mask_first_label: bool,
        padded_tail: &'a str,
        attention_mask: &'a str,
        causal: bool,
        has_window: bool,
        window: i64,
        mask_dtype: &'a str,
    }

    struct Batch {
        input_ids: UniquePtr<Tensor>,
        labels: UniquePtr<Tensor>,
        position_ids: UniquePtr<Tensor>,
        segment_ids: UniquePtr<Tensor>,
        cu_seqlens: UniquePtr<Tensor>,
        cu_seqlens_padded: UniquePtr<Tensor>,
        max_seqlen: UniquePtr<Tensor>,
        attention_mask: UniquePtr<Tensor>,
    }

    struct Plan {
        index: UniquePtr<Tensor>,
        row_offsets: UniquePtr<Tensor>,
        batch_offsets: UniquePtr<Tensor>,
        report: UniquePtr<Tensor>,
    }

    struct Microbatch {
        index: UniquePtr<Tensor>,
        row_offsets: UniquePtr<Tensor>,
    }

    struct LabelCounts {
        counts: UniquePtr<Tensor>,
        starts: UniquePtr<Tensor>,
    }

    /// What has to be known of a tensor to read it.
    struct View {
        on_cpu: bool,
        /// Torch's number of it, as in `super::super::dtype`.
        dtype: i8,
        dimensions: usize,
        /// Whether `len` elements begin at `address`, one behind the other and aligned. Only then
        /// do these three count.
        readable: bool,
        len: usize,
        element_size: usize,
        address: usize,
    }

    // SAFETY: it declares the type that torch's header defines under this name, and two functions
    // that read what they are given, hold on to none of it, and may be called from any thread.
    unsafe extern "C++" {
        include!("multipack/cpp/tensor.h");

        #[namespace = "at"]
        type Tensor;

        fn look(tensor: &Tensor) -> Result<View>;
        fn fresh(size: &[i64], dtype: i8) -> Result<UniquePtr<Tensor>>;
    }

    extern "Rust" {
        fn resolve_config(config: &str) -> Result<String>;
        fn plan(
            lengths: &Tensor,
            label_counts: &Tensor,
            label_starts: &Tensor,
            config: &str,
            epoch: i64,
            evaluation: bool,
        ) -> Result<Plan>;
        fn microbatch(
            index: &Tensor,
            row_offsets: &Tensor,
            batch_offsets: &Tensor,
            world_size: i64,
            rank: i64,
            k: i64,
        ) -> Result<Microbatch>;
        fn label_counts(
            labels: &Tensor,
            offsets: &Tensor,
            max_sample_len: i64,
            mask_first_label: bool,
        ) -> Result<LabelCounts>;
        fn collate(
            tokens: &Tensor,
            offsets: &Tensor,
            index: &Tensor,
            row_offsets: &Tensor,
            labels: &Tensor,
            options: &CollateOptions,
        ) -> Result<Batch>;
        fn collate_list(
            input_ids: &CxxVector<Tensor>,
            row_offsets: &Tensor,
            has_labels: bool,
            labels: &CxxVector<Tensor>,
            options: &CollateOptions,
        ) -> Result<Batch>;
        fn pack_values(
            values: &Tensor,
            offsets: &Tensor,
            index: &Tensor,
            row_offsets: &Tensor,
            pad: &Tensor,
            options: &RowOptions,
        ) -> Result<UniquePtr<Tensor>>;
        fn block_mask(
            segment_ids: &Tensor,
            causal: bool,
            has_window: bool,
            window: i64,
            dtype: &str,
        ) -> Result<UniquePtr<Tensor>>;
        fn check_mask(
            rows: usize,
            row_len: usize,
            has_window: bool,
            window: i64,
            dtype: &str,
        ) -> Result<()>;
        fn boundaries(position_ids: &Tensor) -> Result<UniquePtr<Tensor>>;
    }
}

/// An error on its way to C++: the letter of its kind, then its text.
struct Failure(Error);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.0.kind() {
            ErrorKind::Value => 'V',
            ErrorKind::Type => 'T',
            ErrorKind::Index => 'I',
            ErrorKind::Internal => 'R',
        };
        write!(f, "{kind}{}", self.0)
    }
}

/// Runs `work`; a panic becomes an error.
///
/// What `work` touches is its own or read-only, so a panic leaves nothing half done behind.
fn guarded<T>(work: impl FnOnce() -> crate::Result<T>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(Failure),
        Err(panic) => Err(Failure(Error::Internal {
            message: words(&*panic).to_owned(),
        })),
    }
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> &str {
    match panic.downcast_ref::<String>() {
        Some(text) => text,
        None => panic
            .downcast_ref::<&str>()
            .copied()
            .unwrap_or("a panic without words"),
    }
}

/// The tensor, unless it is the undefined one that stands for none.
fn optional<'a>(tensor: &'a Borrowed<'_>) -> Option<&'a Tensor> {
    tensor.defined().then_some(&**tensor)
}

fn resolve_config(config: &str) -> Result<String, Failure> {
    guarded(|| Ok(Config::from_json(config)?.to_json()))
}

fn plan(
    lengths: &ffi::Tensor,
    label_counts: &ffi::Tensor,
    label_starts: &ffi::Tensor,
    config: &str,
    epoch: i64,
    evaluation: bool,
) -> Result<ffi::Plan, Failure> {
    guarded(|| {
        let plan = super::plan(
            &Borrowed::new(lengths),
            optional(&Borrowed::new(label_counts)),
            optional(&Borrowed::new(label_starts)),
            &Config::from_json(config)?,
            epoch,
            if evaluation {
                Split::Eval
            } else {
                Split::Train
            },
        )?;
        Ok(ffi::Plan {
            index: give(plan.index),
            row_offsets: give(plan.row_offsets),
            batch_offsets: give(plan.batch_offsets),
            report: give(plan.report),
        })
    })
}

fn microbatch(
    index: &ffi::Tensor,
    row_offsets: &ffi::Tensor,
    batch_offsets: &ffi::Tensor,
    world_size: i64,
    rank: i64,
    k: i64,
) -> Result<ffi::Microbatch, Failure> {
    guarded(|| {
        let (index, row_offsets) = super::microbatch(
            &Borrowed::new(index),
            &Borrowed::new(row_offsets),
            &Borrowed::new(batch_offsets),
            world_size,
            rank,
            k,
        )?;
        Ok(ffi::Microbatch {
            index: give(index),
            row_offsets: give(row_offsets),
        })
    })
}

fn label_counts(
    labels: &ffi::Tensor,
    offsets: &ffi::Tensor,
    max_sample_len: i64,
    mask_first_label: bool,
) -> Result<ffi::LabelCounts, Failure> {
    guarded(|| {
        let (counts, starts) = super::label_counts(
            &Borrowed::new(labels),
            &Borrowed::new(offsets),
            max_sample_len,
            mask_first_label,
        )?;
        Ok(ffi::LabelCounts {
            counts: give(counts),
            starts: give(starts),
        })
    })
}

fn collate(
    tokens: &ffi::Tensor,
    offsets: &ffi::Tensor,
    index: &ffi::Tensor,
    row_offsets: &ffi::Tensor,
    labels: &ffi::Tensor,
    options: &ffi::CollateOptions<'_>,
) -> Result<ffi::Batch, Failure> {
    guarded(|| {
        let batch = super::collate(
            &Borrowed::new(tokens),
            &Borrowed::new(offsets),
            &Borrowed::new(index),
            &Borrowed::new(row_offsets),
            optional(&Borrowed::new(labels)),
            &options.parse()?,
        )?;
        Ok(give_batch(batch))
    })
}

/// What lists take for a sample of `collate_list`, and for its labels: handles, slices, offsets.
const BYTES_OF_A_SAMPLE: usize = 192;

fn collate_list(
    input_ids: &CxxVector<ffi::Tensor>,
    row_offsets: &ffi::Tensor,
    has_labels: bool,
    labels: &CxxVector<ffi::Tensor>,
    options: &ffi::CollateOptions<'_>,
) -> Result<ffi::Batch, Failure> {
    guarded(|| {
        memory::ensure(input_ids.len() + labels.len(), BYTES_OF_A_SAMPLE)?;
        let input_ids: Vec<Borrowed<'_>> = input_ids.iter().map(Borrowed::new).collect();
        let input_ids: Vec<&Tensor> = input_ids.iter().map(|tensor| &**tensor).collect();
        let labels: Vec<Borrowed<'_>> = labels.iter().map(Borrowed::new).collect();
        let labels: Vec<&Tensor> = labels.iter().map(|tensor| &**tensor).collect();
        let batch = super::collate_list(
            &input_ids,
            &Borrowed::new(row_offsets),
            has_labels.then_some(&labels[..]),
            &options.parse()?,
        )?;
        Ok(give_batch(batch))
    })
}

fn pack_values(
    values: &ffi::Tensor,
    offsets: &ffi::Tensor,
    index: &ffi::Tensor,
    row_offsets: &ffi::Tensor,
    pad: &ffi::Tensor,
    options: &ffi::RowOptions,
) -> Result<UniquePtr<ffi::Tensor>, Failure> {
    guarded(|| {
        let packed = super::pack_values(
            &Borrowed::new(values),
            &Borrowed::new(offsets),
            &Borrowed::new(index),
            &Borrowed::new(row_offsets),
            &Borrowed::new(pad),
            &options.layout(),
        )?;
        Ok(give(packed))
    })
}

fn block_mask(
    segment_ids: &ffi::Tensor,
    causal: bool,
    has_window: bool,
    window: i64,
    dtype: &str,
) -> Result<UniquePtr<ffi::Tensor>, Failure> {
    guarded(|| {
        Ok(give(super::block_mask(
            &Borrowed::new(segment_ids),
            causal,
            has_window.then_some(window),
            block_mask_dtype(dtype)?,
        )?))
    })
}

/// What `block_mask` refuses before it looks at the ids, for the kernel that is not in Rust.
fn check_mask(
    rows: usize,
    row_len: usize,
    has_window: bool,
    window: i64,
    dtype: &str,
) -> Result<(), Failure> {
    guarded(|| {
        let window = has_window.then_some(window);
        super::mask::check(rows, row_len, window, block_mask_dtype(dtype)?)
    })
}

fn block_mask_dtype(name: &str) -> crate::Result<MaskDtype> {
    Ok(mask_dtype("dtype", name)?.unwrap_or(MaskDtype::Bool))
}

fn boundaries(position_ids: &ffi::Tensor) -> Result<UniquePtr<ffi::Tensor>, Failure> {
    guarded(|| Ok(give(super::boundaries(&Borrowed::new(position_ids))?)))
}

fn give_batch(batch: Batch) -> ffi::Batch {
    ffi::Batch {
        input_ids: give(batch.input_ids),
        labels: give(batch.labels),
        position_ids: give(batch.position_ids),
        segment_ids: give(batch.segment_ids),
        cu_seqlens: give(batch.cu_seqlens),
        cu_seqlens_padded: give(batch.cu_seqlens_padded),
        max_seqlen: give(batch.max_seqlen),
        attention_mask: give(batch.attention_mask),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error_and_the_process_goes_on() {
        let failure = guarded::<()>(|| panic!("sample {}", 17)).unwrap_err();

        assert_eq!(
            "Rinternal error: sample 17; please report it",
            failure.to_string()
        );
        assert!(guarded(|| Ok(1)).is_ok());
    }

    #[test]
    fn every_kind_of_error_has_its_letter() {
        let letter = |error: Error| {
            guarded::<()>(|| Err(error))
                .unwrap_err()
                .to_string()
                .remove(0)
        };

        assert_eq!('V', letter(Error::EmptyOffsets { name: "offsets" }));
        assert_eq!('T', letter(mask_dtype("dtype", "int32").unwrap_err()));
        assert_eq!(
            'I',
            letter(Error::SampleIndex {
                entry: 0,
                sample: 1,
                samples: 1
            })
        );
        assert_eq!(
            'R',
            letter(Error::Internal {
                message: String::new()
            })
        );
    }
}
