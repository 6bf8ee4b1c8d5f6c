//! `plan`, `microbatch` and `label_counts`: the planner on tensors.

use tch::Tensor;

use super::args::{self, Ids};
use super::handle::{Fresh, vector};
use super::{dtype, threads};
use crate::{Config, Error, Result, Split, batch, memory, parallel};

/// A plan as tensors: see [`Plan`](crate::Plan).
#[derive(Debug)]
pub struct PlanTensors {
    /// (M,) int64: dataset indices, row after row.
    pub index: Tensor,
    /// (R + 1,) int64: where each row begins in `index`.
    pub row_offsets: Tensor,
    /// (B + 1,) int64: where each microbatch begins among the rows.
    pub batch_offsets: Tensor,
    /// (bytes,) uint8: the report as JSON.
    pub report: Tensor,
}

/// Plans an epoch: see [`crate::plan()`].
///
/// # Errors
///
/// Arguments of the wrong dtype, rank or device, and everything that the planner refuses.
pub fn plan(
    lengths: &Tensor,
    label_counts: Option<&Tensor>,
    label_starts: Option<&Tensor>,
    config: &Config,
    epoch: i64,
    split: Split,
) -> Result<PlanTensors> {
    let lengths = args::integers("lengths", lengths)?;
    let counts = label_counts
        .map(|counts| args::integers("label_counts", counts))
        .transpose()?;
    let starts = label_starts
        .map(|starts| args::bools("label_starts", starts))
        .transpose()?;
    let counts = counts
        .as_ref()
        .map(|counts| counts.as_slice())
        .transpose()?;
    let starts = match &starts {
        Some(starts) => {
            let starts = starts.as_slice::<u8>()?;
            let mut bools = memory::reserved(starts.len())?;
            bools.extend(starts.iter().map(|&start| start != 0));
            Some(bools)
        }
        None => None,
    };
    let epoch = u64::try_from(epoch).map_err(|_| Error::SettingValue {
        key: "epoch",
        found: epoch.to_string(),
        expected: "0 or more".into(),
    })?;
    let threads = threads()?;
    let plan = crate::plan(
        lengths.as_slice()?,
        counts,
        starts.as_deref(),
        config,
        epoch,
        split,
        threads,
    )?;
    Ok(PlanTensors {
        index: widened(&plan.index, threads)?,
        row_offsets: widened(&plan.row_offsets, threads)?,
        batch_offsets: widened(&plan.batch_offsets, threads)?,
        report: vector(plan.report.to_json().as_bytes(), dtype::UINT8)?,
    })
}

/// Indices and offsets in torch's usual dtype.
fn widened(values: &[u32], threads: usize) -> Result<Tensor> {
    /// Values for one part of the work: fewer are done before a thread is woken.
    const PART: usize = 1 << 18;
    let mut fresh = Fresh::<i64>::new(&[values.len() as i64], dtype::INT64)?;
    // As long as the values, so that both are cut in the same places.
    let parts = fresh.as_mut_slice().chunks_mut(PART);
    let parts: Vec<(&mut [i64], &[u32])> = parts.zip(values.chunks(PART)).collect();
    parallel::for_each(threads, parts, |(places, values)| {
        for (place, &value) in places.iter_mut().zip(values) {
            *place = value.into();
        }
    });
    Ok(fresh.into_tensor())
}

/// Microbatch `k` of a rank out of a plan's tensors: see [`crate::plan::microbatch`].
///
/// # Errors
///
/// Arguments of the wrong dtype, rank or device, a rank or a microbatch that does not exist,
/// tensors that are no plan.
pub fn microbatch(
    index: &Tensor,
    row_offsets: &Tensor,
    batch_offsets: &Tensor,
    world_size: i64,
    rank: i64,
    k: i64,
) -> Result<(Tensor, Tensor)> {
    let index = args::integers("index", index)?;
    let rows = args::integers("row_offsets", row_offsets)?;
    let batches = args::integers("batch_offsets", batch_offsets)?;
    let (index, row_offsets) = crate::plan::microbatch(
        index.as_slice()?,
        rows.as_slice()?,
        batches.as_slice()?,
        world_size,
        rank,
        k,
    )?;
    Ok((
        vector(&index, dtype::INT64)?,
        vector(&row_offsets, dtype::INT64)?,
    ))
}

/// Supervised tokens of each sample, (N,) int64, and whether its first label is one, (N,) bool: see
/// [`batch::label_counts`].
///
/// # Errors
///
/// Arguments of the wrong dtype, rank or device, and wrong offsets.
pub fn label_counts(
    labels: &Tensor,
    offsets: &Tensor,
    max_sample_len: i64,
    mask_first_label: bool,
) -> Result<(Tensor, Tensor)> {
    let offsets = args::integers("offsets", offsets)?;
    let offsets = offsets.as_slice()?;
    let threads = threads()?;
    let (counts, starts) = match args::ids("labels", labels)? {
        Ids::I32(labels) => {
            let labels = labels.as_slice::<i32>()?;
            batch::label_counts(labels, offsets, max_sample_len, mask_first_label, threads)?
        }
        Ids::I64(labels) => {
            let labels = labels.as_slice::<i64>()?;
            batch::label_counts(labels, offsets, max_sample_len, mask_first_label, threads)?
        }
    };
    let starts: Vec<u8> = starts.into_iter().map(u8::from).collect();
    Ok((
        vector(&counts, dtype::INT64)?,
        vector(&starts, dtype::BOOL)?,
    ))
}
