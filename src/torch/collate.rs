//! `collate`, `collate_list` and `pack_values`: a microbatch of samples as tensors.
//!
//! The arithmetic and the writing are the core's ([`crate::batch`]). Here the arguments are
//! checked, the outputs are allocated once the layout knows their size, and the core writes
//! straight into them.

use tch::Tensor;

use super::args::{self, Ids};
use super::handle::{Dense, Fresh, Plain, vector};
use super::{dtype, mask, threads};
use crate::batch::{BatchSlices, Id, Layout, LayoutOptions, MaskDtype, Sample, Source};
use crate::{Error, Result};

/// How [`collate`] lays out and labels a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollateOptions {
    /// Rows, slots, padding and positions.
    pub layout: LayoutOptions,
    /// What stands in `input_ids` where there is no token.
    pub pad_token_id: i64,
    /// Whether the first label of every sample becomes -100, so that no sample is predicted from
    /// the one before it.
    pub mask_first_label: bool,
    /// The dtype of the attention mask, if there shall be one. It is causal if the layout is.
    pub attention_mask: Option<MaskDtype>,
    /// Keys that a query sees in the mask, its own among them; `None`: no limit. At least 1.
    pub window: Option<i64>,
}

impl Default for CollateOptions {
    /// Rows as long as the longest, pad id 0, first labels masked, no attention mask.
    fn default() -> Self {
        CollateOptions {
            layout: LayoutOptions::default(),
            pad_token_id: 0,
            mask_first_label: true,
            attention_mask: None,
            window: None,
        }
    }
}

/// A packed batch of R rows of L tokens with S segments.
#[derive(Debug)]
pub struct Batch {
    /// (R, L) int64; the pad id on padding.
    pub input_ids: Tensor,
    /// (R, L) int64, not shifted; -100 on padding and wherever there is no supervision.
    pub labels: Tensor,
    /// (R, L) int64, counting from the start position in every segment.
    pub position_ids: Tensor,
    /// (R, L) int32: 1, 2, … within a row, 0 on padding.
    pub segment_ids: Tensor,
    /// (S + 1,) int32, strictly increasing from 0, over the R·L flattened tokens.
    pub cu_seqlens: Tensor,
    /// (S + 1,) int32: the slots where samples are aligned, else equal to `cu_seqlens`.
    pub cu_seqlens_padded: Tensor,
    /// int32 without dimensions: the longest segment.
    pub max_seqlen: Tensor,
    /// (R, 1, L, L), or (0,) where none was asked for.
    pub attention_mask: Tensor,
}

/// Packs samples of flat `tokens` into rows.
///
/// Sample `i` is `tokens[offsets[i]..offsets[i + 1]]`; row `r` holds the samples
/// `index[row_offsets[r]..row_offsets[r + 1]]`. `labels` share the offsets; without them every
/// token is its own label. [`Layout`] has the rules and a worked example.
///
/// # Errors
///
/// Arguments of the wrong dtype, rank or device, and everything that [`Layout::new`] refuses.
pub fn collate(
    tokens: &Tensor,
    offsets: &Tensor,
    index: &Tensor,
    row_offsets: &Tensor,
    labels: Option<&Tensor>,
    options: &CollateOptions,
) -> Result<Batch> {
    let tokens = args::ids("tokens", tokens)?;
    let offsets = args::integers("offsets", offsets)?;
    let index = args::integers("index", index)?;
    let labels = labels
        .map(|labels| args::ids("labels", labels))
        .transpose()?;
    let row_offsets = args::integers("row_offsets", row_offsets)?;
    let (offsets, index, row_offsets) = (
        offsets.as_slice()?,
        index.as_slice()?,
        row_offsets.as_slice()?,
    );
    match &tokens {
        Ids::I32(tokens) => with_labels(
            tokens.as_slice::<i32>()?,
            offsets,
            index,
            row_offsets,
            labels,
            options,
        ),
        Ids::I64(tokens) => with_labels(
            tokens.as_slice::<i64>()?,
            offsets,
            index,
            row_offsets,
            labels,
            options,
        ),
    }
}

/// [`collate`] of samples that are a tensor each, all of them, in order.
///
/// For callers that have nothing flat. Each tensor costs as much as a few hundred tokens.
///
/// # Errors
///
/// As [`collate`], naming the tensor in the list; also labels of another length than their sample.
pub fn collate_list(
    input_ids: &[&Tensor],
    row_offsets: &Tensor,
    labels: Option<&[&Tensor]>,
    options: &CollateOptions,
) -> Result<Batch> {
    let input_ids = ids_of("input_ids", input_ids)?;
    let tokens = samples(&input_ids)?;
    let mut offsets = vec![0];
    offsets.extend(input_ids.iter().scan(0, |end, ids| {
        *end += ids.len() as i64;
        Some(*end)
    }));
    let index: Vec<i64> = (0..input_ids.len() as i64).collect();
    let row_offsets = args::integers("row_offsets", row_offsets)?;
    match row_offsets.as_slice::<i64>()? {
        &[.., found] if found != index.len() as i64 => {
            let samples = index.len();
            return Err(Error::ListRows { found, samples });
        }
        _ => {} // the rest is checked with the flat form
    }
    let labels = labels
        .map(|labels| labels_of(labels, &input_ids))
        .transpose()?;
    let labels = labels.as_deref().map(samples).transpose()?;
    fill(
        &tokens[..],
        &offsets,
        &index,
        row_offsets.as_slice()?,
        labels.as_deref(),
        options,
    )
}

/// Lays other per-token values of any dtype out as [`collate`] lays the tokens: (R, L), `pad` where
/// there is no token.
///
/// `pad` is a single value of the same dtype. Of the options, those that only concern positions and
/// `cu_seqlens` change nothing here.
///
/// # Errors
///
/// As [`collate`].
pub fn pack_values(
    values: &Tensor,
    offsets: &Tensor,
    index: &Tensor,
    row_offsets: &Tensor,
    pad: &Tensor,
    options: &LayoutOptions,
) -> Result<Tensor> {
    let values = args::values("values", values)?;
    let pad = args::single("pad", pad, &values)?;
    let offsets = args::integers("offsets", offsets)?;
    let index = args::integers("index", index)?;
    let row_offsets = args::integers("row_offsets", row_offsets)?;
    let tokens = values.len();
    let layout = Layout::new(
        tokens,
        offsets.as_slice()?,
        index.as_slice()?,
        row_offsets.as_slice()?,
        options,
    )?;
    // Only the size of an element matters for moving it; `as_slice` refuses any other.
    match values.element_size() {
        1 => place::<u8>(&layout, &values, &pad),
        2 => place::<u16>(&layout, &values, &pad),
        4 => place::<u32>(&layout, &values, &pad),
        8 => place::<u64>(&layout, &values, &pad),
        _ => place::<[u64; 2]>(&layout, &values, &pad),
    }
}

/// `pad` is one value, as [`args::single`] has found.
fn place<T: Plain>(layout: &Layout, values: &Dense, pad: &Dense) -> Result<Tensor> {
    let size = [layout.rows() as i64, layout.row_len() as i64];
    let mut out = Fresh::<T>::new(&size, values.dtype())?;
    layout.fill_values(
        values.as_slice()?,
        pad.as_slice()?[0],
        out.as_mut_slice(),
        threads()?,
    );
    Ok(out.into_tensor())
}

fn with_labels<T: Id>(
    tokens: &[T],
    offsets: &[i64],
    index: &[i64],
    row_offsets: &[i64],
    labels: Option<Ids<'_>>,
    options: &CollateOptions,
) -> Result<Batch> {
    match labels {
        None => fill(tokens, offsets, index, row_offsets, None::<&[i64]>, options),
        Some(Ids::I32(labels)) => fill(
            tokens,
            offsets,
            index,
            row_offsets,
            Some(labels.as_slice::<i32>()?),
            options,
        ),
        Some(Ids::I64(labels)) => fill(
            tokens,
            offsets,
            index,
            row_offsets,
            Some(labels.as_slice::<i64>()?),
            options,
        ),
    }
}

fn fill<S, L>(
    tokens: &S,
    offsets: &[i64],
    index: &[i64],
    row_offsets: &[i64],
    labels: Option<&L>,
    options: &CollateOptions,
) -> Result<Batch>
where
    S: Source + ?Sized,
    L: Source + ?Sized,
{
    // Even where there is no mask that it would be used for.
    mask::check_window(options.window)?;
    let threads = threads()?;
    let layout = Layout::new(tokens.len(), offsets, index, row_offsets, &options.layout)?;
    if let Some(dtype) = options.attention_mask {
        mask::check(layout.rows(), layout.row_len(), options.window, dtype)?;
    }

    let size = [layout.rows() as i64, layout.row_len() as i64];
    let mut input_ids = Fresh::<i64>::new(&size, dtype::INT64)?;
    let mut label_ids = Fresh::<i64>::new(&size, dtype::INT64)?;
    let mut position_ids = Fresh::<i64>::new(&size, dtype::INT64)?;
    let mut segment_ids = Fresh::<i32>::new(&size, dtype::INT32)?;
    let out = BatchSlices {
        input_ids: input_ids.as_mut_slice(),
        labels: label_ids.as_mut_slice(),
        position_ids: position_ids.as_mut_slice(),
        segment_ids: segment_ids.as_mut_slice(),
    };
    layout.fill_from(
        tokens,
        labels,
        options.pad_token_id,
        options.mask_first_label,
        out,
        threads,
    )?;

    let mut max_seqlen = Fresh::<i32>::new(&[], dtype::INT32)?;
    max_seqlen.as_mut_slice()[0] = layout.max_seqlen(); // no dimensions: one value
    let attention_mask = match options.attention_mask {
        Some(dtype) => mask::allocate_and_fill(
            segment_ids.as_mut_slice(),
            layout.rows(),
            layout.row_len(),
            options.layout.causal,
            options.window,
            dtype,
        )?,
        None => vector::<u8>(&[], dtype::BOOL)?,
    };
    Ok(Batch {
        input_ids: input_ids.into_tensor(),
        labels: label_ids.into_tensor(),
        position_ids: position_ids.into_tensor(),
        segment_ids: segment_ids.into_tensor(),
        cu_seqlens: vector(layout.cu_seqlens(), dtype::INT32)?,
        cu_seqlens_padded: vector(layout.cu_seqlens_padded(), dtype::INT32)?,
        max_seqlen: max_seqlen.into_tensor(),
        attention_mask,
    })
}

/// The tensors of a list, checked.
fn ids_of<'a>(name: &str, list: &[&'a Tensor]) -> Result<Vec<Ids<'a>>> {
    let all = list.iter().enumerate();
    // The place in the list is only spelled out for an error.
    all.map(|(i, tensor)| {
        args::ids(name, tensor).or_else(|_| args::ids(&format!("{name}[{i}]"), tensor))
    })
    .collect()
}

/// The labels of a list, checked: each as long as its sample.
fn labels_of<'a>(list: &[&'a Tensor], input_ids: &[Ids<'_>]) -> Result<Vec<Ids<'a>>> {
    if list.len() != input_ids.len() {
        return Err(Error::LabelledSamples {
            labels: list.len(),
            samples: input_ids.len(),
        });
    }
    let labels = ids_of("labels", list)?;
    for (sample, (labels, ids)) in labels.iter().zip(input_ids).enumerate() {
        if labels.len() != ids.len() {
            return Err(Error::SampleLabels {
                sample,
                labels: labels.len(),
                tokens: ids.len(),
            });
        }
    }
    Ok(labels)
}

/// What the core reads of each.
fn samples<'a>(ids: &'a [Ids<'_>]) -> Result<Vec<Sample<'a>>> {
    ids.iter()
        .map(|ids| match ids {
            Ids::I32(ids) => Ok(Sample::I32(ids.as_slice()?)),
            Ids::I64(ids) => Ok(Sample::I64(ids.as_slice()?)),
        })
        .collect()
}
