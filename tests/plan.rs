//! Whole plans: exact small answers, policies, rounds, statistics, and what must hold for any
//! input.

#[path = "support/lengths.rs"]
mod lengths;

use lengths::{SEED, between, stream};
use multipack::plan::microbatch;
use multipack::{Config, Error, ErrorKind, Plan, Split, plan};

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

// ---- retained samples ----

#[test]
fn an_over_long_sample_is_dropped_whole_and_reported() {
    // A sampler that kept what its collator threw away ended in an empty batch (case C02).
    let plan = planned(&[6, 11, 2], r#""sequence_len": 8"#);

    assert_eq!(vec![vec![0, 2]], rows(&plan));
    assert_eq!(1, plan.report.dropped.over_long.count);
    assert_eq!(Some(1), plan.report.dropped.over_long.first);
    assert_eq!(Some(11), plan.report.dropped.over_long.longest);
    assert_eq!(2, plan.report.retained);
    assert_eq!(
        vec!["of 3 samples 1 dropped as longer than sequence_len 8 (first: 1, longest: 11 tokens)"],
        plan.report.warnings
    );
}

#[test]
fn the_other_samples_survive_complete() {
    // Cutting every sample to the capacity lost most tokens of a set of long ones (C03).
    let plan = planned(&[5, 2, 3, 1], r#""sequence_len": 4"#);

    assert_eq!(vec![vec![1], vec![2, 3]], rows(&plan));
}

#[test]
fn several_over_long_samples_give_one_warning() {
    let plan = planned(&[5, 9, 9], r#""sequence_len": 8"#);

    assert_eq!(1, plan.report.retained);
    assert_eq!(2, plan.report.dropped.over_long.count);
    assert_eq!(1, plan.report.warnings.len());
}

#[test]
fn over_long_samples_can_be_cut_or_refused() {
    let cut = planned(
        &[6, 11, 2],
        r#""sequence_len": 8, "excess_length_strategy": "truncate""#,
    );

    assert_eq!(vec![vec![0, 2], vec![1]], rows(&cut));
    assert_eq!(1, cut.report.truncated.count);
    assert_eq!(
        vec!["of 3 samples 1 cut to sequence_len 8 (first: 1, longest: 11 tokens)"],
        cut.report.warnings
    );
    refused(
        &[6, 11, 2],
        None,
        r#""sequence_len": 8, "excess_length_strategy": "raise""#,
        ErrorKind::Value,
        "sample 1 has 11 tokens, more than sequence_len 8; raise sequence_len, or set excess_length_strategy to \
         drop or truncate",
    );
}

#[test]
fn nothing_but_over_long_samples_ends_at_once() {
    // An allocator that waited for a full row never returned (C01).
    for (lengths, expected) in [
        (vec![3], vec![vec![0]]),
        (vec![], none()),
        (vec![9], none()),
    ] {
        let plan = planned(&lengths, r#""sequence_len": 8"#);

        assert_eq!(expected, rows(&plan));
        assert_eq!(expected.is_empty(), plan.is_empty());
        assert_eq!(usize::from(expected.is_empty()), plan.report.warnings.len());
    }
    assert_eq!(
        vec![
            "no sample is retained, so the plan is empty: of 1 samples 1 dropped as longer than sequence_len 8 \
             (first: 0, longest: 9 tokens)"
        ],
        planned(&[9], r#""sequence_len": 8"#).report.warnings
    );
}

#[test]
fn empty_samples_are_never_placed() {
    // Reading the first token of a row that tokenised to nothing crashed (C13).
    let plan = planned(&[0, 2, 0], r#""sequence_len": 8"#);

    assert_eq!(vec![vec![1]], rows(&plan));
    assert_eq!(2, plan.report.dropped.too_short.count);
    let empty = planned(&[0, 0], r#""sequence_len": 8"#);
    assert!(empty.is_empty());
    assert_eq!(None, empty.report.after.efficiency);
}

#[test]
fn short_and_unlabelled_samples_have_policies() {
    let plan = planned(&[1, 2, 3], r#""sequence_len": 8, "min_sample_len": 3"#);
    assert_eq!(vec![vec![2]], rows(&plan));

    let labelled = |settings: &str| plan_with_labels(&[4, 4, 4], &[0, 3, 0], settings);
    assert_eq!(vec![vec![1]], rows(&labelled(r#""sequence_len": 4"#)));
    assert_eq!(
        2,
        labelled(r#""sequence_len": 4"#)
            .report
            .dropped
            .unlabelled
            .count
    );
    assert_eq!(
        3,
        labelled(r#""sequence_len": 4, "drop_unlabelled": false"#).len()
    );
}

#[test]
fn a_data_set_without_labels_says_so() {
    // Training on it 'succeeded' at loss 0 elsewhere (C25).
    let plan = plan_with_labels(&[4; 10], &[0; 10], r#""sequence_len": 8"#);

    assert!(plan.is_empty());
    assert_eq!(
        vec![
            "no sample is retained, so the plan is empty: of 10 samples 10 dropped as having no supervised token \
             (first: 0, longest: 4 tokens)"
        ],
        plan.report.warnings
    );
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

// ---- rows ----

#[test]
fn exact_fits_and_the_last_sample_are_placed() {
    // An exclusive end that stopped one short lost the last sample of every epoch (C07).
    let all: Vec<u32> = (0..7).collect();

    assert_eq!(vec![all], rows(&planned(&[2; 7], r#""sequence_len": 50"#)));
    assert_eq!(vec![vec![0]], rows(&planned(&[4], r#""sequence_len": 4"#)));
}

#[test]
fn the_layout_decides_the_capacity() {
    // A capacity of one sequence whatever the micro batch size went unnoticed (C12).
    let settings = r#""sequence_len": 8, "micro_batch_size": 4"#;
    let one_row = planned(&[8; 8], settings);
    let real_rows = planned(
        &[8; 8],
        &format!(r#"{settings}, "multipack_real_batches": true"#),
    );

    assert_eq!((2, 2), (one_row.len(), one_row.row_offsets.len() - 1));
    assert_eq!((2, 8), (real_rows.len(), real_rows.row_offsets.len() - 1));
    assert_eq!(vec![0, 4, 8], real_rows.batch_offsets);
}

#[test]
fn sequential_packing_keeps_the_order() {
    let plan = planned(
        &[5, 2, 3, 4, 8],
        r#""sequence_len": 8, "sample_packing_sequentially": true"#,
    );

    assert_eq!(vec![0, 1, 2, 3, 4], plan.index);
    assert_eq!(vec![0, 2, 4, 5], plan.row_offsets);
}

#[test]
fn groups_are_packed_alone() {
    let settings = r#""sequence_len": 8, "sample_packing_group_size": 3"#;
    for algorithm in ["best_fit_decreasing", "tight", "first_fit", "next_fit"] {
        let plan = planned(
            &[4; 7],
            &format!(r#"{settings}, "sample_packing_algorithm": "{algorithm}""#),
        );

        // Three samples of 4 make two rows, three more too, the last one a row of its own.
        assert_eq!(5, rows(&plan).len(), "{algorithm}");
    }
}

#[test]
fn a_limit_of_samples_per_row_holds() {
    let plan = planned(
        &[1; 10],
        r#""sequence_len": 8, "sample_packing_bin_size": 3"#,
    );

    assert_eq!(4, rows(&plan).len());
    assert!(rows(&plan).iter().all(|row| row.len() <= 3));
}

#[test]
fn aligned_samples_take_whole_slots() {
    let settings = r#""sequence_len": 8, "align_samples_to": 4"#;

    // 5 takes 8, 3 takes 4: two rows, although 5 + 3 = 8.
    assert_eq!(vec![vec![0], vec![1]], rows(&planned(&[5, 3], settings)));
    assert_eq!(vec![vec![0, 1]], rows(&planned(&[4, 3], settings)));
}

#[test]
fn samples_above_half_the_capacity_are_planned_in_no_time() {
    // First fit over every open row took minutes to hours on such data (C10); here the bench shows
    // the time.
    for algorithm in ["best_fit_decreasing", "tight", "first_fit", "next_fit"] {
        let plan = planned(
            &vec![6; 100_000],
            &format!(r#""sequence_len": 10, "sample_packing_algorithm": "{algorithm}""#),
        );

        assert_eq!(100_000, plan.len());
    }
}

#[test]
fn totals_above_31_bits_are_exact() {
    let plan = planned(&vec![8192; 300_000], r#""sequence_len": 8192"#);

    assert_eq!(300_000, plan.len());
    assert_eq!(Some(1.0), plan.report.after.efficiency);
    assert_eq!(300_000, plan.report.after.lower_bound);
}

// ---- rounds of all ranks ----

#[test]
fn rows_that_fill_no_round_are_left_out_others_each_epoch() {
    let settings = config(r#""sequence_len": 5, "world_size": 4"#);
    let mut used = [false; 10];
    for epoch in 0..20 {
        let plan = plan(&[5; 10], None, None, &settings, epoch, Split::Train, 1).expect("a plan");

        assert_eq!((2, 2), (plan.len(), plan.report.unused_rows));
        assert_eq!(8, plan.index.len());
        plan.index.iter().for_each(|&i| used[i as usize] = true);
    }
    assert_eq!([true; 10], used);
}

#[test]
fn repeats_fill_a_round_and_are_marked() {
    // Fillers that were counted as left over were trained on again (C29).
    let plan = planned(
        &[5; 5],
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "fill""#,
    );

    assert_eq!((2, 3), (plan.len(), plan.report.repeated_rows));
    assert_eq!(3, plan.report.repeated_samples);
    let mut first: Vec<u32> = plan.index[..5].to_vec();
    first.sort_unstable();
    assert_eq!(vec![0, 1, 2, 3, 4], first);
    assert_eq!(plan.index[..3], plan.index[5..]);
    // The repeats bring neither tokens nor labels, but take up space.
    assert_eq!(Some(25.0 / 40.0), plan.report.after.efficiency);
}

#[test]
fn the_fullest_rows_are_split_until_a_round_is_full() {
    let plan = planned(
        &[2, 2, 3, 3, 1],
        r#""sequence_len": 10, "world_size": 4, "incomplete_batches": "split""#,
    );

    // 10 + 1 tokens in two rows; of the full one two splits make three.
    assert_eq!(4, rows(&plan).len());
    assert_eq!(5, plan.index.len());
    assert_eq!(0, plan.report.repeated_samples + plan.report.unused_samples);
    refused(
        &[5; 3],
        None,
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "split""#,
        ErrorKind::Value,
        "3 samples cannot be split over 4 rows, the next multiple of the 4 rows of a round of all \
         ranks; use fewer ranks or a smaller micro_batch_size, or set incomplete_batches to drop or \
         fill",
    );
}

#[test]
fn splitting_keeps_the_order_of_sequential_packing() {
    let plan = planned(
        &[2; 6],
        r#""sequence_len": 4, "world_size": 2, "sample_packing_sequentially": true,
           "incomplete_batches": "split""#,
    );

    assert_eq!(vec![0, 1, 2, 3, 4, 5], plan.index);
    assert_eq!(4, plan.row_offsets.len() - 1);
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
fn fewer_microbatches_than_ranks_are_an_error_with_both_numbers() {
    // A rank without work hung or crashed the job (C14).
    refused(
        &[5; 3],
        None,
        r#""sequence_len": 5, "world_size": 4"#,
        ErrorKind::Value,
        "3 complete microbatches for 4 ranks: at least one each is needed; lower micro_batch_size or sequence_len, \
         use fewer ranks, or set incomplete_batches to fill",
    );
}

#[test]
fn one_rank_without_a_complete_microbatch_has_an_empty_plan_and_a_warning() {
    // Reading the last batch after dropping it crashed (C16).
    let settings = r#""sequence_len": 10, "micro_batch_size": 2, "multipack_real_batches": true"#;
    let full = planned(&[9; 5], settings);

    assert_eq!((2, 1), (full.len(), full.report.unused_rows));
    assert_eq!(
        (4, Some(0.9)),
        (full.report.after.rows, full.report.after.efficiency)
    );
    let lone = planned(&[9], settings);
    assert!(lone.is_empty());
    assert_eq!(None, lone.report.after.efficiency);
    assert_eq!(
        vec![
            "no complete microbatch, so the plan is empty: 1 row, but a microbatch needs 2; incomplete_batches: \
             fill or split keeps them"
        ],
        lone.report.warnings
    );
    let unpacked = planned(
        &[9],
        r#""sequence_len": 10, "micro_batch_size": 2, "sample_packing": false"#,
    );
    assert_eq!(
        vec![
            "no complete microbatch, so the plan is empty: 1 sample, but a microbatch needs 2; incomplete_batches: \
             fill or split keeps them"
        ],
        unpacked.report.warnings
    );
}

#[test]
fn an_evaluation_smaller_than_a_row_is_one_batch_on_every_rank() {
    // An estimated length came out as 0 for it (C15).
    for world_size in [1, 2] {
        let settings = config(&format!(
            r#""sequence_len": 64, "world_size": {world_size}"#
        ));
        let plan = plan(&[3, 3], None, None, &settings, 7, Split::Eval, 1).expect("a plan");

        assert_eq!(1, plan.len());
        assert_eq!(world_size - 1, plan.report.repeated_rows);
        assert_eq!(1, plan.report.gradient_accumulation_steps);
    }
}

#[test]
fn evaluation_has_its_own_batch_size_and_no_epochs() {
    let settings = config(
        r#""sequence_len": 8, "micro_batch_size": 4, "eval_batch_size": 2, "incomplete_batches": "drop""#,
    );
    let at = |epoch| plan(&[8; 8], None, None, &settings, epoch, Split::Eval, 1).expect("a plan");

    assert_eq!(4, at(0).len());
    assert_eq!(at(0).index, at(5).index);
    assert_eq!(at(0).report.digest, at(5).report.digest);
}

#[test]
fn fixed_numbers_of_samples() {
    let settings = r#""sequence_len": 8, "micro_batch_size": 4, "sample_packing": false"#;
    for incomplete in ["drop", "split", "fill"] {
        let plan = planned(
            &[1, 2, 3, 4, 5, 6, 7, 8, 1, 2],
            &format!(r#"{settings}, "incomplete_batches": "{incomplete}""#),
        );
        let sizes: Vec<usize> = (0..plan.row_offsets.len() - 1)
            .map(|row| plan.row(row).len())
            .collect();

        match incomplete {
            "drop" => assert_eq!((vec![4, 4], 2), (sizes, plan.report.unused_samples)),
            "split" => assert_eq!((vec![4, 4, 2], 0), (sizes, plan.report.repeated_samples)),
            _ => assert_eq!((vec![4, 4, 4], 2), (sizes, plan.report.repeated_samples)),
        }
    }
}

// ---- statistics ----

#[test]
fn statistics_of_a_padded_batch() {
    let plan = plan_with_labels(
        &[4, 2],
        &[3, 1],
        r#""sequence_len": 8, "micro_batch_size": 2, "sample_packing": false"#,
    );
    let stats = &plan.report.after;

    assert_eq!((2, 2), (stats.rows, stats.padding_tokens));
    assert_eq!(Some(6.0), stats.mean_unpadded_length);
    assert_eq!(Some(6.0 / 8.0), stats.efficiency);
    assert_eq!(Some(4.0), stats.mean_labels);
    assert_eq!(Some(0.0), stats.microbatch_label_std);
}

#[test]
fn statistics_of_steps_leave_out_the_incomplete_last_one() {
    // Seven microbatches, three in a step: two complete steps (C28).
    let lengths = [8, 8, 8, 8, 8, 8, 8];
    let labels = [1, 2, 3, 4, 5, 6, 7];
    let at = |steps: u32| {
        plan_with_labels(
            &lengths,
            &labels,
            &format!(
                r#""sequence_len": 8, "sample_packing_sequentially": true, "gradient_accumulation_steps": {steps}"#
            ),
        )
    };

    assert_eq!(7, at(3).len());
    // Steps of 1 + 2 + 3 = 6 and 4 + 5 + 6 = 15 labels: 4.5 from their mean.
    assert_eq!(Some(4.5), at(3).report.after.step_label_std);
    assert_eq!(Some(0.0), at(3).report.after.step_token_std);
    assert_eq!(Some(2.0), at(3).report.after.microbatch_label_std);
    assert_eq!(None, at(8).report.after.step_label_std);
}

#[test]
fn the_first_sample_of_a_row_loses_its_first_label_when_it_is_not_masked() {
    let settings = config(r#""sequence_len": 5, "mask_first_label": false"#);
    let labels = |starts: Option<&[bool]>, counts: Option<&[i64]>| {
        let plan = plan(&[3, 2], counts, starts, &settings, 0, Split::Train, 1).expect("a plan");
        assert_eq!(1, plan.len());
        plan.report.after.mean_labels
    };

    // Every token supervised: 5 labels, of which the row's first has nothing to predict it.
    assert_eq!(Some(4.0), labels(None, None));
    assert_eq!(Some(4.0), labels(Some(&[true, true]), Some(&[3, 2])));
    assert_eq!(Some(3.0), labels(Some(&[false, false]), Some(&[2, 1])));
}

#[test]
fn labels_of_pretraining_samples_leave_out_each_first_one() {
    // One row of 3 and 2 tokens, all supervised: 2 + 1 enter the loss (C22).
    let plan = planned(&[3, 2], r#""sequence_len": 5"#);

    assert_eq!(Some(3.0), plan.report.after.mean_labels);
}

#[test]
fn costs_of_ranks_are_compared_at_each_microstep() {
    let plan = planned(
        &[8, 4],
        r#""sequence_len": 8, "world_size": 2, "sample_packing_sequentially": true,
           "sample_packing_bin_size": 1"#,
    );
    assert_eq!(Some(8.0 / 6.0), plan.report.after.rank_cost_imbalance);

    let squares = planned(
        &[8, 4],
        r#""sequence_len": 8, "world_size": 2, "sample_packing_sequentially": true,
           "sample_packing_bin_size": 1, "balance_cost": "attention""#,
    );
    assert_eq!(Some(64.0 / 40.0), squares.report.after.rank_cost_imbalance);
}

// ---- digests ----

#[test]
fn the_digest_follows_settings_lengths_and_labels() {
    // Plans that were kept under one name for two settings were mixed up (C84).
    let lengths = [3, 4, 5, 6];
    let base = planned(&lengths, r#""sequence_len": 8"#).report;
    let other = |settings| planned(&lengths, settings).report;

    assert_eq!(base.digest, other(r#""sequence_len": 8"#).digest);
    for settings in [
        r#""sequence_len": 16"#,
        r#""sequence_len": 8, "pad_to_multiple_of": 8"#,
        r#""sequence_len": 8, "seed": 1"#,
    ] {
        assert_ne!(base.digest, other(settings).digest, "{settings}");
        assert_ne!(base.inputs.settings, other(settings).inputs.settings);
        assert_eq!(base.inputs.lengths, other(settings).inputs.lengths);
    }
    let longer = planned(&[3, 4, 5, 7], r#""sequence_len": 8"#).report;
    assert_ne!(base.inputs.lengths, longer.inputs.lengths);
    assert_eq!(base.inputs.settings, longer.inputs.settings);
}

// ---- one microbatch ----

#[test]
fn a_microbatch_is_found_by_rank_and_number() {
    let plan = planned(
        &[5; 8],
        r#""sequence_len": 5, "world_size": 2, "micro_batch_size": 2, "multipack_real_batches": true"#,
    );
    let wide = |values: &[u32]| {
        values
            .iter()
            .map(|&value| value.into())
            .collect::<Vec<i64>>()
    };
    let index = wide(&plan.index);
    let (rows, batches) = (wide(&plan.row_offsets), wide(&plan.batch_offsets));
    let at = |rank, k| microbatch(&index, &rows, &batches, 2, rank, k);

    let (samples, offsets) = at(1, 1).expect("the last microbatch");
    assert_eq!(index[6..], samples);
    assert_eq!(vec![0, 1, 2], offsets);
    for (rank, k, text) in [
        (2, 0, "rank is 2, but must be from 0 to 1"),
        (-1, 0, "rank is -1, but must be from 0 to 1"),
        (0, 2, "k is 2, but must be from 0 to 1"),
    ] {
        let error = at(rank, k).expect_err("must be refused");
        assert_eq!(text, error.to_string());
        assert_eq!(ErrorKind::Index, error.kind());
    }
}

#[test]
fn arrays_that_are_no_plan_are_refused() {
    let broken = |index: &[i64], rows: &[i64], batches: &[i64], world| {
        let error = microbatch(index, rows, batches, world, 0, 0).expect_err("must be refused");
        assert!(matches!(error, Error::BrokenPlan { .. }), "{error}");
    };

    broken(&[0], &[0, 1], &[0, 1], 0);
    broken(&[0], &[0, 1], &[], 1);
    broken(&[0], &[0, 1], &[0, 1, 1], 3);
    broken(&[0], &[0, 2], &[0, 1], 1);
    broken(&[0], &[0, 1], &[0, 2], 1);
    broken(&[0], &[1, 0], &[0, 1], 1);
    broken(&[0], &[0, 1], &[-1, 1], 1);
}

// ---- whatever the input ----

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
