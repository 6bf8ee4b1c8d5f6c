//! Lengths, labels and settings that nothing can be planned with.

use crate::{config, planned, refused};
use multipack::{Config, ErrorKind, Split, plan};

#[test]
fn broken_inputs_are_refused_with_their_numbers() {
    let settings = r#""sequence_len": 8"#;
    refused(
        &[3, -1],
        None,
        settings,
        ErrorKind::Value,
        "sample 1 has length -1, but a length is 0 or more tokens",
    );
    refused(
        &[3, 3],
        Some(&[1]),
        settings,
        ErrorKind::Value,
        "label_counts has 1 entries, but lengths has 2: give one entry per sample",
    );
    for count in [4, -1] {
        refused(
            &[3, 3],
            Some(&[1, count]),
            settings,
            ErrorKind::Value,
            &format!(
                "sample 1 has {count} labels but 3 tokens: a label count is from 0 to the length, after truncation \
                 if excess_length_strategy is truncate; multipack.label_counts counts so"
            ),
        );
    }
    refused(
        &[3],
        None,
        "",
        ErrorKind::Value,
        "sequence_len is needed to plan: the most tokens of one sample",
    );
    let plan = planned(&[i64::MAX, 3], settings);
    assert_eq!(Some(i64::MAX as u64), plan.report.dropped.over_long.longest);
}

#[test]
fn settings_that_were_not_checked_are_checked_by_the_planner() {
    let settings = Config {
        world_size: 0,
        ..config(r#""sequence_len": 8"#)
    };
    let error = plan(&[5], None, None, &settings, 0, Split::Train, 1).expect_err("must be refused");

    assert_eq!(
        "world_size is 0, but must be an integer from 1 to 2147483647",
        error.to_string()
    );

    for weight in [f64::NAN, f64::INFINITY] {
        let settings = Config {
            balance_cost_linear: weight,
            ..config(r#""sequence_len": 8"#)
        };
        let error =
            plan(&[5], None, None, &settings, 0, Split::Train, 1).expect_err("must be refused");

        assert_eq!(
            "balance_cost_linear is null, but must be a number from 0 to 1e12",
            error.to_string()
        );
    }
}

#[test]
fn label_counts_and_starts_must_agree() {
    let settings = config(r#""sequence_len": 8, "mask_first_label": false"#);
    for (count, start, text) in [
        (
            0,
            true,
            "sample 0 has 0 labels of 4 tokens, but label_starts says that its first token is a label; \
             multipack.label_counts gives both",
        ),
        (
            4,
            false,
            "sample 0 has 4 labels of 4 tokens, but label_starts says that its first token is no label; \
             multipack.label_counts gives both",
        ),
    ] {
        let (counts, starts) = (Some(&[count][..]), Some(&[start][..]));
        let error = plan(&[4], counts, starts, &settings, 0, Split::Train, 1);
        assert_eq!(text, error.expect_err("must be refused").to_string());
    }
}

#[test]
fn a_round_of_absurdly_many_ranks_is_refused_before_memory_runs_out() {
    let settings = config(r#""sequence_len": 8, "world_size": 1000000000"#);
    let error = plan(&[5], None, None, &settings, 0, Split::Eval, 1).expect_err("must be refused");

    assert_eq!(
        "filling the last round of 1000000000 ranks would repeat 999999999 samples or rows of the 1 \
         rows that there are, more than 16777216; use fewer ranks or smaller batches",
        error.to_string()
    );
}

#[test]
fn a_batch_of_absurdly_many_samples_is_refused_before_memory_runs_out() {
    for keys in ["", r#", "batch_flattening": true"#] {
        let settings = config(&format!(
            r#""sequence_len": 1, "sample_packing": false, "micro_batch_size": 2147483647{keys}"#
        ));
        let error =
            plan(&[1; 3], None, None, &settings, 0, Split::Eval, 1).expect_err("must be refused");

        assert_eq!(
            "filling the last round of 1 rank would repeat 2147483644 samples or rows of the 1 \
             rows that there are, more than 16777216; use fewer ranks or smaller batches",
            error.to_string()
        );
    }
}
