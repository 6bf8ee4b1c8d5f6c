//! Balancing: what must stay as it was, what must get better, and how near it comes to the best.

#[path = "../support/lengths.rs"]
mod lengths;

mod best;
mod exact;
mod large;
mod properties;
mod ranks;

use lengths::{between, stream};
use multipack::{Config, Plan, Split, plan};

/// Samples as (tokens, labels).
type Samples = Vec<(i64, i64)>;

#[track_caller]
fn config(settings: &str) -> Config {
    Config::from_json(&format!("{{{settings}}}"))
        .unwrap_or_else(|error| panic!("{settings}: {error}"))
}

#[track_caller]
fn balanced(samples: &Samples, settings: &str) -> Plan {
    planned(samples, &format!(r#"{settings}, "balance_labels": true"#))
}

#[track_caller]
fn planned(samples: &Samples, settings: &str) -> Plan {
    plan_of(samples, settings).unwrap_or_else(|error| panic!("{settings}: {error}"))
}

fn plan_of(samples: &[(i64, i64)], settings: &str) -> Result<Plan, multipack::Error> {
    let (lengths, labels): (Vec<i64>, Vec<i64>) = samples.iter().copied().unzip();
    plan(
        &lengths,
        Some(&labels),
        None,
        &config(settings),
        0,
        Split::Train,
        1,
    )
}

/// Labels of each microbatch.
fn batch_labels(plan: &Plan, samples: &Samples) -> Vec<i64> {
    (0..plan.batch_offsets.len() - 1)
        .map(|batch| {
            plan.rows_of(batch)
                .flat_map(|row| plan.row(row))
                .map(|&sample| samples[sample as usize].1)
                .sum()
        })
        .collect()
}

/// Lognormal lengths, each with a share of labels between 0.02 and 0.98.
fn chats(n: usize, cap: u32, seed: u64) -> Samples {
    let mut shares = stream(seed + 1);
    lengths::lognormal(n, cap, seed)
        .into_iter()
        .map(|length| {
            let share = f64::from(between(&mut shares, 2, 99)) / 100.0;
            let labels = (f64::from(length) * share).round().max(1.0);
            (length.into(), labels as i64)
        })
        .collect()
}
