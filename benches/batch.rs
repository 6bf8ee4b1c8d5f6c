//! Building batches: tokens per second of `collate`, and bytes per second of `block_mask`.
//!
//! `cargo bench --bench batch`; with `-- --test` each case runs once. Lengths are lognormal,
//! clipped at 4096 (see `tests/support/lengths.rs`). Every answer is compared to the one of the dull
//! twin. Beside each stands what memory alone allows: a copy of finished outputs, or a plain fill.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use multipack::batch::{BatchSlices, Layout, LayoutOptions, MaskDtype, MaskSlice};
use multipack::batch::{block_mask, label_counts, mask_len};

#[path = "../tests/support/lengths.rs"]
mod lengths;
#[allow(dead_code)] // the tests use all of it
#[path = "../tests/support/batch.rs"]
mod naive;
use lengths::{SEED, lognormal, stream};
use naive::{Batch, Request};

/// One row of so many tokens exactly, its samples taken from all over the flat tokens.
fn request(size: usize) -> Request {
    let mut offsets = vec![0];
    for length in lognormal(size, 4096, SEED) {
        let end = offsets[offsets.len() - 1] + i64::from(length);
        offsets.push(end.min(size as i64));
        if end >= size as i64 {
            break;
        }
    }
    let samples = offsets.len() - 1;
    let mut index: Vec<i64> = (0..samples as i64).collect();
    stream(SEED).shuffle(&mut index);
    Request {
        tokens: (0..size as i64).map(|i| i % 50_021).collect(),
        labels: None,
        offsets,
        index,
        row_offsets: vec![0, samples as i64],
        options: LayoutOptions::default(),
        pad_token_id: 0,
        mask_first_label: true,
    }
}

fn slices(batch: &mut Batch) -> BatchSlices<'_> {
    BatchSlices {
        input_ids: &mut batch.input_ids,
        labels: &mut batch.labels,
        position_ids: &mut batch.position_ids,
        segment_ids: &mut batch.segment_ids,
    }
}

fn collate(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("collate");
    for size in [1 << 15, 1 << 20] {
        let request = request(size);
        let Request {
            tokens,
            offsets,
            index,
            row_offsets,
            options,
            ..
        } = &request;
        let expected = naive::collate(&request);
        let mut batch = expected.clone();
        let mut fill = |threads| {
            let layout = Layout::new(size, offsets, index, row_offsets, options).unwrap();
            let out = slices(&mut batch);
            layout
                .fill(tokens, None::<&[i64]>, 0, true, out, threads)
                .unwrap();
            batch.max_seqlen = layout.max_seqlen();
        };

        group.throughput(Throughput::Elements(size as u64));
        for threads in [1, 2] {
            fill(threads);
            let name = format!("{threads}_threads");
            group.bench_function(BenchmarkId::new(name, size), |bencher| {
                bencher.iter(|| fill(threads));
            });
        }
        assert!(expected == batch);
        group.bench_function(BenchmarkId::new("copy_of_outputs", size), |bencher| {
            bencher.iter(|| {
                let out = slices(&mut batch);
                out.input_ids.copy_from_slice(&expected.input_ids);
                out.labels.copy_from_slice(&expected.labels);
                out.position_ids.copy_from_slice(&expected.position_ids);
                out.segment_ids.copy_from_slice(&expected.segment_ids);
            });
        });
    }
    group.finish();
}

fn masks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block_mask");
    group.sample_size(20);
    let (rows, len) = (4, 4096);
    let ids = naive::collate(&request(rows * len)).segment_ids;
    let allowed = naive::block_mask(&ids, len, true, None);
    let size = mask_len(rows, len, MaskDtype::BFloat16).unwrap();

    let mut bools = vec![7; size];
    group.throughput(Throughput::Bytes(size as u64));
    for threads in [1, 2] {
        let mut write = || {
            let out = MaskSlice::Bool(&mut bools);
            block_mask(&ids, rows, len, true, None, out, threads).unwrap();
        };
        write();
        group.bench_function(format!("bool/{threads}_threads"), |bencher| {
            bencher.iter(&mut write);
        });
    }
    assert!(
        allowed
            .iter()
            .map(|&a| u8::from(a))
            .eq(bools.iter().copied())
    );
    group.bench_function("bool/fill", |bencher| bencher.iter(|| bools.fill(0)));

    let mut halves = vec![7; size];
    group.throughput(Throughput::Bytes(2 * size as u64));
    for threads in [1, 2] {
        let mut write = || {
            let out = MaskSlice::BFloat16(&mut halves);
            block_mask(&ids, rows, len, true, None, out, threads).unwrap();
        };
        write();
        group.bench_function(format!("bf16/{threads}_threads"), |bencher| {
            bencher.iter(&mut write);
        });
    }
    let bits = |may: &bool| if *may { 0 } else { 0xff7f };
    assert!(allowed.iter().map(bits).eq(halves.iter().copied()));
    group.bench_function("bf16/fill", |bencher| bencher.iter(|| halves.fill(0xff7f)));
    group.finish();
}

fn counts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("label_counts");
    let size = 1 << 22;
    let Request {
        mut tokens,
        offsets,
        ..
    } = request(size);
    // A prompt of seven unsupervised tokens, three supervised ones, and again.
    for (i, label) in tokens.iter_mut().enumerate() {
        *label = if i % 10 < 7 { -100 } else { *label };
    }
    let expected = naive::label_counts(&tokens, &offsets, 0, true);
    group.throughput(Throughput::Elements(size as u64));
    for threads in [1, 2] {
        let count = || label_counts(&tokens, &offsets, 0, true, threads).unwrap();
        assert!(expected == count());
        group.bench_function(format!("{threads}_threads"), |bencher| bencher.iter(count));
    }
    group.finish();
}

criterion_group!(benches, collate, masks, counts);
criterion_main!(benches);
