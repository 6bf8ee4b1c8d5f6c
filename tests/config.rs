//! What settings are accepted, and the whole sentence for each that is not.

use multipack::config::{Algorithm, ExcessLength, Incomplete, PaddedTail};
use multipack::{BatchLayout, Config, ErrorKind, Split};

#[track_caller]
fn refused(settings: &str, kind: ErrorKind, text: &str) {
    let error = Config::from_json(settings).expect_err("must be refused");

    assert_eq!(text, error.to_string());
    assert_eq!(kind, error.kind());
}

fn accepted(settings: &str) -> Config {
    Config::from_json(settings).unwrap_or_else(|error| panic!("{settings}: {error}"))
}

#[test]
fn no_settings_are_the_defaults() {
    assert_eq!(Config::default(), accepted("{}"));
    assert_eq!(
        Config::default(),
        accepted(r#"{"sequence_len": null, "seed": null}"#)
    );
}

#[test]
fn settings_survive_their_json() {
    let config = accepted(
        r#"{"sequence_len": 4096, "micro_batch_size": 4, "eval_batch_size": 2, "world_size": 8,
            "multipack_real_batches": true, "sample_packing_algorithm": "first_fit",
            "sample_packing_bin_size": 64, "excess_length_strategy": "truncate",
            "incomplete_batches": "split", "padded_tail": "last", "balance_cost": "attention",
            "balance_cost_linear": 2.5, "seed": 18446744073709551615, "data_seed": 3}"#,
    );

    assert_eq!(config, accepted(&config.to_json()));
    assert_eq!(Algorithm::FirstFit, config.sample_packing_algorithm);
    assert_eq!(ExcessLength::Truncate, config.excess_length_strategy);
    assert_eq!(Incomplete::Split, config.incomplete_batches);
    assert_eq!(PaddedTail::Last, config.padded_tail);
    assert_eq!(u64::MAX, config.seed);
    assert_eq!(3, config.planning_seed());
}

#[test]
fn the_short_form_leaves_out_defaults() {
    let config = accepted(r#"{"seed": 0, "world_size": 2, "sequence_len": 8}"#);

    assert_eq!(
        r#"{"sequence_len":8,"world_size":2}"#,
        config.to_short_json()
    );
    assert_eq!("{}", Config::default().to_short_json());
}

#[test]
fn every_field_has_a_rule() {
    // A field without a rule would be refused as unknown when its own JSON is read back.
    let text = Config::default().to_json();

    assert_eq!(Config::default(), accepted(&text));
    assert_eq!(29, text.matches("\":").count());
}

#[test]
fn a_misspelt_key_is_refused_with_the_nearest_one() {
    refused(
        r#"{"sequence_length": 8}"#,
        ErrorKind::Value,
        "unknown setting 'sequence_length', did you mean 'sequence_len'?",
    );
    refused(
        r#"{"batch_size": 8}"#,
        ErrorKind::Value,
        "unknown setting 'batch_size', did you mean 'micro_batch_size'?",
    );
    refused(
        r#"{"learning_rate": 1}"#,
        ErrorKind::Value,
        "unknown setting 'learning_rate'",
    );
}

#[test]
fn counts_are_positive_integers() {
    let bound = "but must be an integer from 1 to 2147483647";
    for (value, kind) in [
        ("0", ErrorKind::Value),
        ("-1", ErrorKind::Value),
        ("2147483648", ErrorKind::Value),
        ("1e30", ErrorKind::Value),
        ("true", ErrorKind::Type),
        ("8.0", ErrorKind::Type),
        ("\"8\"", ErrorKind::Type),
        ("[8]", ErrorKind::Type),
    ] {
        let found = if value == "1e30" { "1e+30" } else { value };
        refused(
            &format!(r#"{{"sequence_len": {value}}}"#),
            kind,
            &format!("sequence_len is {found}, {bound}"),
        );
    }
}

#[test]
fn switches_choices_seeds_and_weights_are_checked() {
    refused(
        r#"{"sample_packing": 1}"#,
        ErrorKind::Type,
        "sample_packing is 1, but must be true or false",
    );
    refused(
        r#"{"incomplete_batches": "keep"}"#,
        ErrorKind::Value,
        "incomplete_batches is \"keep\", but must be one of drop, split, fill",
    );
    refused(
        r#"{"padded_tail": false}"#,
        ErrorKind::Type,
        "padded_tail is false, but must be one of own, last, none",
    );
    refused(
        r#"{"seed": -1}"#,
        ErrorKind::Value,
        "seed is -1, but must be an integer from 0 to 18446744073709551615",
    );
    refused(
        r#"{"balance_cost_linear": -0.5}"#,
        ErrorKind::Value,
        "balance_cost_linear is -0.5, but must be a number from 0 to 1e12",
    );
    refused(
        "[1]",
        ErrorKind::Value,
        "the settings are not a JSON object: invalid type: sequence, expected a map at line 1 column 0",
    );
}

#[test]
fn a_long_string_in_the_place_of_settings_is_not_repeated_in_the_error() {
    let text = "y".repeat(1000);

    refused(
        &format!("\"{text}\""),
        ErrorKind::Value,
        &format!(
            "the settings are not a JSON object: invalid type: string \"{}… (1061 characters)",
            "y".repeat(78)
        ),
    );
}

#[test]
fn settings_that_exclude_one_another_are_refused() {
    for (settings, text) in [
        (
            r#"{"balance_labels": true, "sample_packing_sequentially": true}"#,
            "balance_labels moves samples between batches, so it cannot keep the order of \
             sample_packing_sequentially",
        ),
        (
            r#"{"batch_flattening": true}"#,
            "batch_flattening lays a fixed number of samples end to end, so it needs sample_packing: false",
        ),
        (
            r#"{"sample_packing": false, "multipack_real_batches": true}"#,
            "multipack_real_batches shapes packed rows, so it needs sample_packing: true",
        ),
        (
            r#"{"sample_packing_sequentially": true, "sample_packing_algorithm": "first_fit"}"#,
            "sample_packing_sequentially keeps the dataset's order by next fit, so another \
             sample_packing_algorithm has no place beside it",
        ),
        (
            r#"{"sequence_len": 65536, "micro_batch_size": 32768}"#,
            "micro_batch_size 32768 × sequence_len 65536 is more than 2147483647 tokens, the most that the \
             int32 cu_seqlens of one microbatch can count",
        ),
        (
            r#"{"sequence_len": 65536, "eval_batch_size": 32768}"#,
            "eval_batch_size 32768 × sequence_len 65536 is more than 2147483647 tokens, the most that the \
             int32 cu_seqlens of one microbatch can count",
        ),
        (
            r#"{"sequence_len": 10, "align_samples_to": 2147483647, "micro_batch_size": 2}"#,
            "micro_batch_size 2 × sequence_len 10, rounded up to 2147483647 by align_samples_to, is \
             more than 2147483647 tokens, the most that the int32 cu_seqlens of one microbatch can \
             count",
        ),
        (
            r#"{"sequence_len": 10, "min_sample_len": 11}"#,
            "min_sample_len 11 is more than sequence_len 10: no sample could be kept",
        ),
        (
            r#"{"sequence_len": 10, "align_samples_to": 4}"#,
            "align_samples_to 4 must divide the row capacity 10",
        ),
        (
            r#"{"sequence_len": 8, "padded_tail": "none", "micro_batch_size": 2, "multipack_real_batches": true}"#,
            "padded_tail: none leaves the tail out of cu_seqlens, which one row alone can do, but a microbatch \
             has 2 rows",
        ),
    ] {
        refused(settings, ErrorKind::Value, text);
    }
}

#[test]
fn the_layout_and_the_capacity_follow_from_the_settings() {
    for (settings, train, capacity, eval, eval_capacity) in [
        ("", BatchLayout::OneRow, 32, BatchLayout::OneRow, 16),
        (
            r#", "multipack_real_batches": true"#,
            BatchLayout::RealRows,
            8,
            BatchLayout::RealRows,
            8,
        ),
        (
            r#", "sample_packing": false"#,
            BatchLayout::Padded,
            8,
            BatchLayout::Padded,
            8,
        ),
        (
            r#", "sample_packing": false, "batch_flattening": true"#,
            BatchLayout::Flattened,
            32,
            BatchLayout::Flattened,
            16,
        ),
        (
            r#", "eval_sample_packing": false"#,
            BatchLayout::OneRow,
            32,
            BatchLayout::Padded,
            8,
        ),
    ] {
        let config = accepted(&format!(
            r#"{{"sequence_len": 8, "micro_batch_size": 4, "eval_batch_size": 2{settings}}}"#
        ));

        assert_eq!(train, config.layout(Split::Train), "{settings}");
        assert_eq!(Ok(capacity), config.capacity(Split::Train), "{settings}");
        assert_eq!(eval, config.layout(Split::Eval), "{settings}");
        assert_eq!(
            Ok(eval_capacity),
            config.capacity(Split::Eval),
            "{settings}"
        );
    }
}
