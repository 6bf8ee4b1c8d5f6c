//! The dull twin of `multipack::batch`: the same answers, token by token and pair by pair.
//!
//! Nothing here is shared with the crate but the types of its arguments. Rows are built by
//! appending one cell after another and asking each time whether a new segment has to begin.

use multipack::batch::{LayoutOptions, PaddedTail};

/// Everything that `collate` returns for a microbatch.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    pub rows: usize,
    pub row_len: usize,
    pub input_ids: Vec<i64>,
    pub labels: Vec<i64>,
    pub position_ids: Vec<i64>,
    pub segment_ids: Vec<i32>,
    pub cu_seqlens: Vec<i32>,
    pub cu_seqlens_padded: Vec<i32>,
    pub max_seqlen: i32,
}

/// A microbatch as it is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    pub tokens: Vec<i64>,
    pub labels: Option<Vec<i64>>,
    pub offsets: Vec<i64>,
    pub index: Vec<i64>,
    pub row_offsets: Vec<i64>,
    pub options: LayoutOptions,
    pub pad_token_id: i64,
    pub mask_first_label: bool,
}

impl Request {
    /// One row of samples with tokens 11, 12, … in the first, 21, 22, … in the second and so on.
    pub fn of(lengths: &[usize]) -> Request {
        Request::rows(&[lengths])
    }

    /// The same for several rows, numbered through.
    pub fn rows(rows: &[&[usize]]) -> Request {
        let (mut tokens, mut offsets, mut row_offsets) = (vec![], vec![0], vec![0]);
        for (i, &length) in rows.iter().copied().flatten().enumerate() {
            tokens.extend((1..=length).map(|t| (10 * (i + 1) + t) as i64));
            offsets.push(tokens.len() as i64);
        }
        for row in rows {
            row_offsets.push(row_offsets[row_offsets.len() - 1] + row.len() as i64);
        }
        Request {
            tokens,
            labels: None,
            index: (0..offsets.len() as i64 - 1).collect(),
            offsets,
            row_offsets,
            options: LayoutOptions::default(),
            pad_token_id: 0,
            mask_first_label: true,
        }
    }

    pub fn with(mut self, change: impl FnOnce(&mut LayoutOptions)) -> Request {
        change(&mut self.options);
        self
    }
}

#[derive(Clone)]
struct Cell {
    id: i64,
    label: i64,
    segment: i32,
    position: i64,
    /// Whether it counts in the true length of its segment.
    counted: bool,
}

/// One row, cut into segments.
#[derive(Default)]
struct Row {
    segments: Vec<Vec<Cell>>,
    /// The first so many segments stand for samples.
    samples: usize,
}

impl Row {
    fn len(&self) -> usize {
        self.segments.iter().map(Vec::len).sum()
    }
}

/// Lays a valid request out.
pub fn collate(request: &Request) -> Batch {
    let options = &request.options;
    let start = options.position_start;
    let align = options.align_samples_to as usize;
    let cut = match options.max_sample_len {
        0 => usize::MAX,
        most => most as usize,
    };
    let pad = |segment: &[Cell], counted| Cell {
        id: request.pad_token_id,
        label: -100,
        segment: 0,
        position: start + segment.len() as i64,
        counted,
    };

    let mut rows = Vec::new();
    for r in 1..request.row_offsets.len() {
        let mut row = Row::default();
        for m in request.row_offsets[r - 1]..request.row_offsets[r] {
            let sample = request.index[m as usize] as usize;
            let mut segment = Vec::new();
            for t in request.offsets[sample] as usize..request.offsets[sample + 1] as usize {
                if segment.len() == cut {
                    break;
                }
                let labels = request.labels.as_ref().unwrap_or(&request.tokens);
                let masked = request.mask_first_label && segment.is_empty();
                segment.push(Cell {
                    id: request.tokens[t],
                    label: if masked { -100 } else { labels[t] },
                    segment: row.segments.len() as i32 + 1,
                    position: start + segment.len() as i64,
                    counted: true,
                });
            }
            while segment.len() % align != 0 {
                segment.push(pad(&segment, false));
            }
            if !segment.is_empty() {
                row.segments.push(segment);
            }
        }
        row.samples = row.segments.len();
        rows.push(row);
    }

    let mut row_len = options.row_len as usize;
    if row_len == 0 {
        row_len = rows.iter().map(Row::len).max().unwrap_or(0);
        while !row_len.is_multiple_of(options.pad_to_multiple_of as usize) {
            row_len += 1;
        }
    }
    // A tail segment ends where it would be longer than a sample may be, at a multiple of the
    // alignment.
    let longest = match cut {
        usize::MAX => usize::MAX,
        cut => (1..=cut).rev().find(|n| n % align == 0).unwrap_or(align),
    };
    for row in &mut rows {
        while row.len() < row_len {
            let in_tail = row.segments.len() > row.samples;
            let may_go_on = in_tail || options.padded_tail == PaddedTail::Last;
            match row.segments.last_mut() {
                Some(segment) if may_go_on && segment.len() < longest => {
                    // What is merged makes the padding inside the slot part of the segment.
                    for cell in segment.iter_mut().take(cut) {
                        cell.counted = true;
                    }
                    let counted = segment.len() < cut;
                    segment.push(pad(segment, counted));
                }
                _ => row.segments.push(vec![pad(&[], true)]),
            }
        }
    }

    let mut batch = Batch {
        rows: rows.len(),
        row_len,
        input_ids: vec![],
        labels: vec![],
        position_ids: vec![],
        segment_ids: vec![],
        cu_seqlens: vec![0],
        cu_seqlens_padded: vec![0],
        max_seqlen: 0,
    };
    for row in rows {
        for (i, segment) in row.segments.into_iter().enumerate() {
            if options.padded_tail != PaddedTail::None || i < row.samples {
                let length = segment.iter().filter(|cell| cell.counted).count() as i32;
                let slot = segment.len() as i32;
                batch
                    .cu_seqlens
                    .push(batch.cu_seqlens.last().unwrap() + length);
                batch
                    .cu_seqlens_padded
                    .push(batch.cu_seqlens_padded.last().unwrap() + slot);
                batch.max_seqlen = batch.max_seqlen.max(length);
            }
            for cell in segment {
                batch.input_ids.push(cell.id);
                batch.labels.push(cell.label);
                batch.position_ids.push(cell.position);
                batch.segment_ids.push(cell.segment);
            }
        }
    }
    batch
}

/// Whether query `i` may attend to key `j`, for every pair of every row.
pub fn block_mask(
    segment_ids: &[i32],
    row_len: usize,
    causal: bool,
    window: Option<usize>,
) -> Vec<bool> {
    let mut mask = Vec::new();
    for row in segment_ids.chunks(row_len.max(1)) {
        for i in 0..row_len {
            for j in 0..row_len {
                let same = row[i] == row[j];
                let before = !causal || j <= i;
                let near = window.is_none_or(|window| i.abs_diff(j) < window);
                mask.push(same && before && near);
            }
        }
    }
    mask
}

/// `cu_seqlens` from positions.
pub fn boundaries(position_ids: &[i64], row_len: usize) -> Vec<i32> {
    let mut borders = Vec::new();
    for i in 0..position_ids.len() {
        if i % row_len == 0 || position_ids[i] - 1 != position_ids[i - 1] {
            borders.push(i as i32);
        }
    }
    borders.push(position_ids.len() as i32);
    borders
}

/// Supervised tokens of each sample, and whether its first label is one.
pub fn label_counts(
    labels: &[i64],
    offsets: &[i64],
    max_sample_len: usize,
    mask_first_label: bool,
) -> (Vec<i64>, Vec<bool>) {
    let (mut counts, mut starts) = (vec![], vec![]);
    for i in 1..offsets.len() {
        let (from, to) = (offsets[i - 1] as usize, offsets[i] as usize);
        let mut count = 0;
        for (t, &label) in labels[from..to].iter().enumerate() {
            let kept = max_sample_len == 0 || t < max_sample_len;
            let masked = mask_first_label && t == 0;
            if label != -100 && kept && !masked {
                count += 1;
            }
        }
        counts.push(count);
        starts.push(from < to && labels[from] != -100);
    }
    (counts, starts)
}
