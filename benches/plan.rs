//! Packing and planning: samples per second, on lognormal lengths (capacity 4096) and where best
//! fit is weak.
//!
//! `cargo bench --bench plan`; with `-- --test` each case runs once. Every case checks its answer:
//! no row may be over capacity, every sample in one row, and best fit at the lower bound within
//! three rows in ten thousand.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use multipack::pack::{Bounds, Rows, best_fit, first_fit, lower_bound, next_fit, tight};
use multipack::{Config, Split, plan};

#[path = "../tests/support/lengths.rs"]
mod lengths;
use lengths::{SEED, stream};

const BOUNDS: Bounds = Bounds {
    capacity: 4096,
    limit: u32::MAX,
};

/// A packing algorithm with its arguments filled in.
type Pack = fn(&[u32], &[u32]) -> Rows;

const ALGORITHMS: [(&str, Pack); 4] = [
    ("best_fit", |slots, order| {
        best_fit::pack(slots, order.iter().copied(), BOUNDS, &mut stream(SEED), 1)
    }),
    ("tight", |slots, order| {
        tight::pack(slots, order.iter().copied(), BOUNDS, &mut stream(SEED), 1)
    }),
    ("first_fit", |slots, order| {
        first_fit::pack(slots, order, BOUNDS, &mut stream(SEED))
    }),
    ("next_fit", |slots, order| {
        next_fit::pack(slots, order, BOUNDS)
    }),
];

fn assert_sound(rows: &Rows, slots: &[u32]) {
    let mut seen = vec![false; slots.len()];
    for row in rows.iter() {
        let used: u32 = row.iter().map(|&item| slots[item as usize]).sum();
        assert!(used <= BOUNDS.capacity);
        for &item in row {
            assert!(!std::mem::replace(&mut seen[item as usize], true));
        }
    }
    assert!(seen.iter().all(|&seen| seen));
}

fn pack(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pack");
    group.sample_size(10);
    for n in [100_000, 1_000_000, 10_000_000] {
        let slots = lengths::lognormal(n, BOUNDS.capacity, SEED);
        let order: Vec<u32> = (0..n as u32).collect();
        group.throughput(Throughput::Elements(n as u64));
        for (name, pack) in ALGORITHMS {
            let rows = pack(&slots, &order);
            assert_sound(&rows, &slots);
            let bound = lower_bound(&slots, BOUNDS);
            assert!(name != "best_fit" || rows.len() as u64 <= bound + bound / 3000 + 1);
            group.bench_with_input(BenchmarkId::new(name, n), &n, |bencher, _| {
                bencher.iter(|| pack(&slots, &order));
            });
        }
    }
    group.finish();
}

fn whole_plan(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    group.sample_size(10);
    let settings = r#"{"sequence_len": 4096, "world_size": 4, "gradient_accumulation_steps": 4}"#;
    let config = Config::from_json(settings).expect("valid settings");
    for n in [100_000, 1_000_000, 10_000_000] {
        let lengths: Vec<i64> = lengths::lognormal(n, BOUNDS.capacity, SEED)
            .into_iter()
            .map(i64::from)
            .collect();
        group.throughput(Throughput::Elements(n as u64));
        let make = || plan(&lengths, None, None, &config, 0, Split::Train, 1).expect("a plan");
        let report = make().report;
        assert_eq!(report.retained, n as u64);
        assert!(report.after.efficiency > Some(0.999));
        group.bench_with_input(BenchmarkId::new("best_fit", n), &n, |bencher, _| {
            bencher.iter(make);
        });
    }
    group.finish();
}

criterion_group!(benches, pack, whole_plan);
criterion_main!(benches);
