//! Whatever the input: nothing is lost, nothing gets worse, and threads make no difference.

use std::collections::BTreeMap;

use multipack::{BatchLayout, Error, Split, Stream, plan};

use crate::config;
use crate::lengths::{SEED, between, stream};

fn random_settings(stream: &mut Stream) -> String {
    let layouts = [
        "",
        r#", "multipack_real_batches": true"#,
        r#", "sample_packing": false"#,
        r#", "sample_packing": false, "batch_flattening": true"#,
    ];
    let extras = [
        "",
        r#", "sample_packing_algorithm": "first_fit""#,
        r#", "sample_packing_bin_size": 3"#,
        r#", "balance_cost": "attention""#,
        r#", "align_samples_to": 4"#,
        r#", "pad_to_multiple_of": 8"#,
        r#", "incomplete_batches": "fill""#,
        r#", "incomplete_batches": "split""#,
        r#", "label_balance_window_optim_steps": 4"#,
    ];
    let mut pick = |of: &[&str]| of[stream.below(of.len() as u32) as usize].to_string();
    let (layout, extra) = (pick(&layouts), pick(&extras));
    format!(
        r#""sequence_len": {}, "micro_batch_size": {}, "world_size": {}, "gradient_accumulation_steps": {},
           "seed": {}{layout}{extra}"#,
        4 * between(stream, 2, 12),
        between(stream, 1, 5),
        between(stream, 1, 4),
        between(stream, 1, 4),
        stream.below(1000),
    )
}

#[test]
fn nothing_is_lost_and_nothing_gets_worse() {
    let cases = std::env::var("MULTIPACK_CASES").map_or(1000, |n| n.parse().expect("a number"));
    let mut stream = stream(SEED);
    let mut compared = 0;
    for case in 0..cases {
        let settings = random_settings(&mut stream);
        // Some are so many that long samples come together in padded batches.
        let most = if case % 8 == 0 { 1000 } else { 120 };
        let n = between(&mut stream, 1, most);
        let (lengths, labels): (Vec<i64>, Vec<i64>) = (0..n)
            .map(|_| {
                let length = between(&mut stream, 1, 45);
                (i64::from(length), i64::from(stream.below(length + 1)))
            })
            .unzip();
        let starts: Vec<bool> = labels
            .iter()
            .zip(&lengths)
            .map(|(&labels, &length)| labels == length || labels > 0 && stream.below(2) == 1)
            .collect();
        let masked = stream.below(2) == 0;
        let settings =
            format!(r#"{settings}, "mask_first_label": {masked}, "balance_labels": true"#);
        let config = config(&settings);
        let make = |threads| {
            plan(
                &lengths,
                Some(&labels),
                Some(&starts),
                &config,
                1,
                Split::Train,
                threads,
            )
        };
        let plan = match make(1) {
            Err(Error::TooFewMicrobatches { .. } | Error::TooFewToSplit { .. }) => continue,
            made => made.expect(&settings),
        };
        let (before, after) = (&plan.report.before, &plan.report.after);
        let context = format!("case {case}, seed {SEED}: {settings}, {lengths:?}, {labels:?}");

        let real = plan.index.len() - plan.report.repeated_samples as usize;
        let mut seen = BTreeMap::new();
        plan.index[..real]
            .iter()
            .for_each(|&i| *seen.entry(i).or_insert(0) += 1);
        assert!(seen.values().all(|&times| times == 1), "twice: {context}");
        assert_eq!(
            lengths.len() as u64,
            real as u64 + plan.report.unused_samples + plan.report.dropped.count(),
            "lost: {context}"
        );
        for row in 0..plan.row_offsets.len() - 1 {
            let slot =
                |&i: &u32| (lengths[i as usize] as u64).next_multiple_of(config.align_samples_to);
            let used: u64 = plan.row(row).iter().map(slot).sum();
            assert!(
                !plan.report.layout.is_packed() || used <= plan.report.capacity,
                "over capacity: {context}"
            );
        }
        assert_eq!(before.rows, after.rows, "{context}");
        // Where samples are regrouped, so is what flattened batches are rounded up by.
        let rounding = plan.len() as u64 * config.world_size * (config.pad_to_multiple_of - 1);
        let most_padding = match plan.report.layout {
            BatchLayout::Flattened => before.padding_tokens.max(rounding),
            _ => before.padding_tokens,
        };
        assert!(after.padding_tokens <= most_padding, "padding: {context}");
        let (mean_before, mean_after) = (before.mean_labels, after.mean_labels);
        assert_eq!(mean_before, mean_after, "mean: {context}");
        assert!(
            after.microbatch_label_std <= before.microbatch_label_std,
            "batches: {context}"
        );
        assert!(
            after.step_label_std <= before.step_label_std,
            "steps: {context}"
        );
        if !settings.contains("attention") {
            assert!(
                after.step_token_std <= before.step_token_std,
                "tokens: {context}"
            );
        }
        for threads in [2, 8] {
            assert_eq!(Ok(&plan), make(threads).as_ref(), "{context}");
        }
        compared += 1;
    }
    assert!(compared > cases / 2);
}
