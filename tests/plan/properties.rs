//! What must hold whatever the input.

use crate::lengths::{self, SEED, between, stream};
use crate::{config, planned};
use multipack::{Error, Split, plan};

/// Settings drawn at random, valid together.
fn random_settings(stream: &mut multipack::Stream) -> String {
    let pick = |stream: &mut multipack::Stream, of: &[&str]| {
        of[stream.below(of.len() as u32) as usize].to_string()
    };
    let mut settings = format!(
        r#""sequence_len": {}, "micro_batch_size": {}, "world_size": {}, "gradient_accumulation_steps": {},
           "seed": {}, "pad_to_multiple_of": {}"#,
        4 * between(stream, 2, 12),
        between(stream, 1, 4),
        between(stream, 1, 5),
        between(stream, 1, 4),
        stream.below(1000),
        between(stream, 1, 9),
    );
    settings += &pick(
        stream,
        &[
            "",
            r#", "multipack_real_batches": true"#,
            r#", "sample_packing": false"#,
            r#", "sample_packing": false, "batch_flattening": true"#,
        ],
    );
    settings += &pick(
        stream,
        &[
            "",
            r#", "sample_packing_algorithm": "tight""#,
            r#", "sample_packing_algorithm": "first_fit""#,
            r#", "sample_packing_algorithm": "next_fit""#,
            r#", "sample_packing_sequentially": true"#,
        ],
    );
    settings += &pick(stream, &["", r#", "sample_packing_bin_size": 2"#]);
    settings += &pick(stream, &["", r#", "sample_packing_group_size": 20"#]);
    settings += &pick(stream, &["", r#", "align_samples_to": 4"#]);
    settings += &pick(stream, &["", r#", "excess_length_strategy": "truncate""#]);
    let incomplete = pick(stream, &["drop", "split", "fill"]);
    settings + &format!(r#", "incomplete_batches": "{incomplete}""#)
}

#[test]
fn every_retained_sample_is_planned_once_or_reported() {
    let cases = std::env::var("MULTIPACK_CASES").map_or(3000, |n| n.parse().expect("a number"));
    let mut stream = stream(SEED);
    let mut planned = 0;
    for case in 0..cases {
        let settings = random_settings(&mut stream);
        let n = between(&mut stream, 0, 150);
        let lengths: Vec<i64> = (0..n).map(|_| i64::from(stream.below(50))).collect();
        let split = if stream.below(4) == 0 {
            Split::Eval
        } else {
            Split::Train
        };
        let config = config(&settings);
        let plan = match plan(&lengths, None, None, &config, 1, split, 1) {
            Ok(plan) => plan,
            Err(Error::TooFewMicrobatches { .. } | Error::TooFewToSplit { .. }) => continue,
            Err(error) => panic!("case {case}, seed {SEED}: {settings}: {error}"),
        };
        planned += 1;
        let report = &plan.report;
        let context = format!("case {case}, seed {SEED}: {settings}, lengths {lengths:?}");

        let real = plan.index.len() - report.repeated_samples as usize;
        let mut used = plan.index[..real].to_vec();
        used.sort_unstable();
        used.dedup();
        assert_eq!(real, used.len(), "a sample twice: {context}");
        assert_eq!(
            lengths.len() as u64,
            real as u64 + report.unused_samples + report.dropped.count(),
            "a sample lost: {context}"
        );
        let capacity = report.capacity;
        let slot = |&sample: &u32| {
            let length = lengths[sample as usize] as u64;
            assert!(length > 0, "{context}");
            length
                .min(config.sequence_len.expect("given"))
                .next_multiple_of(config.align_samples_to)
        };
        for row in 0..plan.row_offsets.len() - 1 {
            assert!(!plan.row(row).is_empty(), "an empty row: {context}");
            let used: u64 = plan.row(row).iter().map(slot).sum();
            let limit = match report.layout.is_packed() {
                true => config.sample_packing_bin_size.unwrap_or(u64::MAX),
                false => config.batch_size(split),
            };
            assert!(
                plan.row(row).len() as u64 <= limit,
                "over {limit} samples: {context}"
            );
            assert!(
                !report.layout.is_packed() || used <= capacity,
                "{used}: {context}"
            );
        }
        let microbatches = plan.batch_offsets.len() as u64 - 1;
        assert_eq!(
            microbatches,
            report.microbatches_per_rank * report.world_size
        );
        assert!(
            !report.layout.is_packed() || report.after.rows >= report.after.lower_bound,
            "{context}"
        );
        for threads in [2, 8] {
            let again = multipack::plan(&lengths, None, None, &config, 1, split, threads);
            assert_eq!(Ok(&plan), again.as_ref(), "{threads} threads: {context}");
        }
    }
    assert!(planned > cases / 2, "most cases must get as far as a plan");
}

#[test]
fn large_plans_do_not_depend_on_the_threads() {
    let lengths: Vec<i64> = lengths::lognormal(600_000, 4096, SEED)
        .into_iter()
        .map(i64::from)
        .collect();
    let settings = config(r#""sequence_len": 4096, "world_size": 2"#);
    let make =
        |threads| plan(&lengths, None, None, &settings, 0, Split::Train, threads).expect("a plan");

    let alone = make(1);
    for threads in [2, 3, 8] {
        assert_eq!(alone, make(threads), "{threads} threads");
    }
}

#[test]
fn neighbouring_batches_are_not_alike() {
    for algorithm in ["best_fit_decreasing", "tight", "first_fit", "next_fit"] {
        let lengths: Vec<i64> = lengths::lognormal(20_000, 4096, SEED)
            .into_iter()
            .map(i64::from)
            .collect();
        let plan = planned(
            &lengths,
            &format!(r#""sequence_len": 4096, "sample_packing_algorithm": "{algorithm}""#),
        );
        let correlation = plan
            .report
            .after
            .length_correlation
            .expect("many microbatches");

        assert!(
            correlation.abs() <= 3.0 / (plan.len() as f64).sqrt(),
            "{algorithm}: {correlation}"
        );
    }
}
