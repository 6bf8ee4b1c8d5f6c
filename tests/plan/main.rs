//! Whole plans: exact small answers, policies, rounds, reports, and what must hold for any input.

#[path = "../support/lengths.rs"]
mod lengths;

mod inputs;
mod microbatch;
mod packing;
mod properties;
mod report;
mod retained;
mod rounds;

use multipack::{Config, ErrorKind, Plan, Split, plan};

#[track_caller]
fn config(settings: &str) -> Config {
    Config::from_json(&format!("{{{settings}}}"))
        .unwrap_or_else(|error| panic!("{settings}: {error}"))
}

#[track_caller]
fn planned(lengths: &[i64], settings: &str) -> Plan {
    plan(lengths, None, None, &config(settings), 0, Split::Train, 1)
        .unwrap_or_else(|error| panic!("{settings}: {error}"))
}

#[track_caller]
fn refused(lengths: &[i64], labels: Option<&[i64]>, settings: &str, kind: ErrorKind, text: &str) {
    let error = plan(lengths, labels, None, &config(settings), 0, Split::Train, 1)
        .expect_err("must be refused");

    assert_eq!(text, error.to_string());
    assert_eq!(kind, error.kind());
}

/// The rows as sorted lists of samples, sorted.
fn rows(plan: &Plan) -> Vec<Vec<u32>> {
    let mut rows: Vec<Vec<u32>> = (0..plan.row_offsets.len() - 1)
        .map(|row| {
            let mut samples = plan.row(row).to_vec();
            samples.sort_unstable();
            samples
        })
        .collect();
    rows.sort_unstable();
    rows
}

fn none() -> Vec<Vec<u32>> {
    Vec::new()
}

#[track_caller]
fn plan_with_labels(lengths: &[i64], labels: &[i64], settings: &str) -> Plan {
    plan(
        lengths,
        Some(labels),
        None,
        &config(settings),
        0,
        Split::Train,
        1,
    )
    .expect("a plan")
}
