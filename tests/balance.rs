//! Balancing: what must stay as it was, what must get better, and how near it comes to the best.

#[path = "support/lengths.rs"]
mod lengths;

use std::collections::BTreeMap;

use lengths::{SEED, between, stream};
use multipack::{BatchLayout, Config, Plan, Split, Stream, plan};

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

// ---- exact small answers ----

#[test]
fn samples_of_equal_length_are_dealt_out_evenly() {
    // Rows of 20 hold two samples of 10: 1 + 9 and 1 + 9 labels (case C26).
    let samples = vec![(10, 1), (10, 1), (10, 9), (10, 9)];
    let plan = balanced(&samples, r#""sequence_len": 20"#);

    assert_eq!(vec![10, 10], batch_labels(&plan, &samples));
    assert_eq!(Some(0.0), plan.report.after.microbatch_label_std);
}

#[test]
fn no_row_goes_over_its_capacity_to_even_out_labels() {
    // A partitioner without a cap made the training run out of memory (C17). No exchange fits here.
    let samples = vec![(8, 1), (2, 2), (5, 5), (5, 5)];
    let plan = balanced(&samples, r#""sequence_len": 10"#);
    let mut labels = batch_labels(&plan, &samples);
    labels.sort_unstable();

    assert_eq!(vec![3, 10], labels);
    assert_eq!(0, plan.report.after.padding_tokens);
}

#[test]
fn steps_of_ranks_get_as_many_labels_as_they_can() {
    // One row each for 1, 9, 1, 9 labels: two ranks learn from 10 in each step (C27).
    let samples = vec![(10, 1), (10, 1), (10, 9), (10, 9)];
    let plan = balanced(&samples, r#""sequence_len": 10, "world_size": 2"#);
    let labels = batch_labels(&plan, &samples);

    assert_eq!(10, labels[0] + labels[1]);
    assert_eq!(10, labels[2] + labels[3]);
    assert_eq!(Some(0.0), plan.report.after.step_label_std);
}

#[test]
fn no_rank_is_the_heavy_one() {
    // Ties that always went to the lowest rank made its total grow (C21).
    let samples: Samples = (0..400).map(|i| (10, 10 - i % 4)).collect();
    let plan = balanced(&samples, r#""sequence_len": 10, "world_size": 4"#);
    let mut ranks = [0i64; 4];
    for (batch, labels) in batch_labels(&plan, &samples).into_iter().enumerate() {
        ranks[batch % 4] += labels;
    }

    let mean = ranks.iter().sum::<i64>() / 4;
    for labels in ranks {
        assert!((labels - mean).abs() * 50 <= mean, "{ranks:?}");
    }
}

#[test]
fn every_rank_gets_as_many_microbatches_as_the_others() {
    // Shares of ⌈n / ranks⌉ left the last rank without any (C19): 11 rows for 4 ranks are 2 each.
    let plan = balanced(
        &vec![(5, 3); 11],
        r#""sequence_len": 5, "world_size": 4, "gradient_accumulation_steps": 2"#,
    );
    assert_eq!((2, 3), (plan.len(), plan.report.unused_rows));

    let filled = balanced(
        &vec![(5, 3); 11],
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "fill""#,
    );
    assert_eq!((3, 1), (filled.len(), filled.report.repeated_rows));
}

#[test]
fn numbers_that_do_not_divide_are_no_reason_to_stop() {
    // A partitioner that wanted groups of equal size stopped the training (C20).
    let samples = chats(10, 8, SEED);
    let plan = balanced(&samples, r#""sequence_len": 8, "world_size": 4"#);
    assert_eq!(4 * plan.len(), plan.batch_offsets.len() - 1);
    assert_eq!(10, plan.index.len() as u64 + plan.report.unused_samples);

    let settings = r#""sequence_len": 8, "world_size": 4, "balance_labels": true"#;
    let too_few = plan_of(&[(4, 2)], settings).expect_err("one row for four ranks");
    assert_eq!(
        "1 complete microbatches for 4 ranks: at least one each is needed; lower micro_batch_size \
         or sequence_len, use fewer ranks, or set incomplete_batches to fill",
        too_few.to_string()
    );
}

#[test]
fn a_microbatch_without_labels_is_made_up_for_in_its_step() {
    // The mean over no labels ruined the weights (C23). One row each: the step has 3 labels.
    let samples = vec![(4, 0), (4, 3)];
    let keep = r#""drop_unlabelled": false, "gradient_accumulation_steps": 2"#;
    let alone = balanced(&samples, &format!(r#""sequence_len": 4, {keep}"#));
    let mut labels = batch_labels(&alone, &samples);
    labels.sort_unstable();
    assert_eq!(vec![0, 3], labels);
    assert_eq!(Some(0.0), alone.report.after.step_label_std);

    // Where both fit into one row, they share it.
    let together = balanced(&samples, &format!(r#""sequence_len": 8, {keep}"#));
    assert_eq!(vec![3], batch_labels(&together, &samples));
}

#[test]
fn samples_without_any_label_do_no_harm() {
    // Training at loss 0 looked like success (C25): left out, the plan says so; kept, all is 0.
    let samples = vec![(4, 0); 10];
    let left_out = balanced(&samples, r#""sequence_len": 8"#);
    assert!(left_out.is_empty());
    assert!(left_out.report.warnings[0].contains("10 dropped as having no supervised token"));

    let kept = balanced(&samples, r#""sequence_len": 8, "drop_unlabelled": false"#);
    assert_eq!(Some(0.0), kept.report.after.microbatch_label_std);
    assert_eq!(Some(0.0), kept.report.after.step_label_std);
    assert_eq!(Some(0.0), kept.report.after.label_std_floor);
}

#[test]
fn an_incomplete_last_step_stays() {
    // Seven microbatches, three in a step (C28): two complete steps, and one microbatch more.
    let samples: Samples = (1..=7).map(|labels| (8, labels)).collect();
    let at = |steps: u32| {
        let settings = format!(r#""sequence_len": 8, "gradient_accumulation_steps": {steps}"#);
        balanced(&samples, &settings)
    };
    let labels = batch_labels(&at(3), &samples);
    assert_eq!(7, labels.len());
    let steps: Vec<i64> = labels[..6]
        .chunks(3)
        .map(|step| step.iter().sum())
        .collect();
    let even = (28 - labels[6]).rem_euclid(2);
    assert_eq!(even, (steps[0] - steps[1]).abs(), "{labels:?}");

    assert_eq!((7, None), (at(8).len(), at(8).report.after.step_label_std));
}

#[test]
fn repeats_bring_no_labels_and_stay_marked() {
    // Five rows for four ranks (C29): three repeats, none of them twice, and every row once.
    let samples: Samples = (1..=5).map(|labels| (5, labels)).collect();
    let plan = balanced(
        &samples,
        r#""sequence_len": 5, "world_size": 4, "incomplete_batches": "fill""#,
    );
    assert_eq!((2, 3), (plan.len(), plan.report.repeated_samples));
    let mut once = plan.index[..5].to_vec();
    once.sort_unstable();
    assert_eq!(vec![0, 1, 2, 3, 4], once);
    let mut repeats = plan.index[5..].to_vec();
    repeats.sort_unstable();
    repeats.dedup();
    assert_eq!(3, repeats.len());
    assert_eq!(Some(15.0 / 8.0), plan.report.after.mean_labels);
}

#[test]
fn balancing_without_label_counts_is_not_silent() {
    let warnings = |settings: &str| {
        let config = config(&format!(r#""sequence_len": 8, {settings}"#));
        let plan = plan(&[5, 3, 6], None, None, &config, 0, Split::Train, 1);
        plan.expect("a plan").report.warnings
    };

    assert_eq!(
        vec![
            "balance_labels has no label counts to go by, so every token counts as supervised; give \
             label_counts where prompts are masked"
        ],
        warnings(r#""balance_labels": true"#)
    );
    assert!(warnings(r#""balance_labels": false"#).is_empty());
}

#[test]
fn sets_of_samples_change_rows_where_no_two_are_of_one_length() {
    // 7 + 3 and 6 + 1 + 1 + 2 tokens: the 3 can go against 2 + 1, which is all that evens anything.
    let samples = vec![(7, 7), (3, 3), (6, 1), (2, 0), (1, 1), (1, 1)];
    let keep = r#""sequence_len": 10, "drop_unlabelled": false"#;
    let report = balanced(&samples, keep).report;

    let best = best_of_all(&samples, 2, 10, f64::INFINITY);
    assert_eq!(Some(best), report.after.microbatch_label_std);
    assert!(report.before.microbatch_label_std > Some(best));
}

#[test]
fn many_ranks_are_even_at_each_microstep() {
    // 64 ranks, 16 microsteps: no assignment is searched, the costs are sorted.
    let samples = chats(30_000, 512, SEED);
    let report = balanced(
        &samples,
        r#""sequence_len": 512, "world_size": 64, "gradient_accumulation_steps": 16,
           "sample_packing": false, "batch_flattening": true, "micro_batch_size": 4"#,
    )
    .report;

    assert!(report.before.rank_cost_imbalance > Some(1.4), "{report:?}");
    assert!(report.after.rank_cost_imbalance < Some(1.02), "{report:?}");
}

#[test]
fn ranks_do_not_wait_longer_where_a_step_is_one_microstep() {
    // Steps with the same tokens were those with a large microbatch beside seven small ones.
    // And where the last step had repeats, it alone made all others look uneven in labels.
    for (n, incomplete, share) in [(8_000, "drop", 0.1), (2_010, "fill", 0.7)] {
        let samples = chats(n, 4096, SEED);
        let report = balanced(
            &samples,
            &format!(
                r#""sequence_len": 4096, "world_size": 8, "sample_packing": false,
                   "micro_batch_size": 4, "incomplete_batches": "{incomplete}""#
            ),
        )
        .report;
        let (before, after) = (report.before, report.after);

        assert!(before.rank_cost_imbalance > Some(2.0), "{before:?}");
        assert!(
            after.rank_cost_imbalance <= before.rank_cost_imbalance,
            "{before:?} {after:?}"
        );
        assert!(
            after.step_label_std < before.step_label_std.map(|std| share * std),
            "{before:?} {after:?}"
        );
        assert!(
            after.step_token_std <= before.step_token_std,
            "{before:?} {after:?}"
        );
    }
}

#[test]
fn the_longest_rows_that_can_be_are_balanced_without_overflow() {
    // The squares of a step's labels are beyond 64 bits; the products were, too.
    let mut stream = stream(SEED);
    let longest = i64::from(i32::MAX);
    let samples: Samples = (0..400)
        .map(|_| {
            let length = longest - i64::from(stream.below(4));
            let labels = [1, length][stream.below(2) as usize];
            (length, labels)
        })
        .collect();
    for settings in [
        r#""world_size": 100, "sample_packing": false"#,
        r#""world_size": 32"#,
        r#""gradient_accumulation_steps": 64"#,
        r#""world_size": 8, "gradient_accumulation_steps": 8"#,
    ] {
        let settings =
            format!(r#""sequence_len": {longest}, "mask_first_label": false, {settings}"#);
        let report = balanced(&samples, &settings).report;
        let (before, after) = (report.before, report.after);

        assert!(
            after.step_label_std < before.step_label_std.map(|std| 0.3 * std),
            "{settings}: {before:?} {after:?}"
        );
    }
}

#[test]
fn a_few_samples_for_very_many_ranks_take_no_longer() {
    // Each of the thousands of schedules that are tried was judged with all the repeats: minutes.
    let samples: Samples = vec![(10, 5); 8];
    let ranks = 1 << 19;
    let settings = format!(
        r#""sequence_len": 30, "world_size": {ranks}, "incomplete_batches": "fill", "mask_first_label": false"#
    );
    let plan = balanced(&samples, &settings);

    assert_eq!(ranks + 1, plan.batch_offsets.len());
}

#[test]
fn the_floor_is_what_single_long_samples_allow() {
    // Two rows of one sample each, 2 and 8 labels: 3 from the mean, whatever is done.
    let plan = balanced(&vec![(10, 2), (10, 8)], r#""sequence_len": 10"#);
    assert_eq!(Some(3.0), plan.report.after.label_std_floor);
    assert_eq!(Some(3.0), plan.report.after.microbatch_label_std);

    // Rows of two: nothing stands in the way.
    let even = balanced(
        &vec![(5, 2), (5, 3), (5, 2), (5, 3)],
        r#""sequence_len": 10"#,
    );
    assert_eq!(Some(0.0), even.report.after.label_std_floor);
    assert_eq!(Some(0.0), even.report.after.microbatch_label_std);
}

/// The smallest standard deviation of the labels that any way of putting the samples into so many
/// rows of this capacity has, by trying all in which the tokens of rows vary no more than so.
fn best_of_all(samples: &[(i64, i64)], rows: usize, capacity: i64, token_std: f64) -> f64 {
    fn search(
        left: &[(i64, i64)],
        rows: &mut [(i64, i64)],
        (capacity, token_std): (i64, f64),
        best: &mut i64,
    ) {
        let Some((&(tokens, labels), left)) = left.split_first() else {
            let n = rows.len() as f64;
            let mean = rows.iter().map(|row| row.0).sum::<i64>() as f64 / n;
            let squares = rows.iter().map(|row| (row.0 as f64 - mean).powi(2));
            let variance = squares.sum::<f64>() / n;
            if rows.iter().all(|row| row.0 > 0) && variance <= token_std.powi(2) + 1e-9 {
                *best = (*best).min(rows.iter().map(|row| row.1 * row.1).sum());
            }
            return;
        };
        for row in 0..rows.len() {
            // Empty rows are all the same: the first will do.
            let first = rows[..row].iter().all(|row| row.0 > 0);
            if rows[row].0 + tokens <= capacity && (rows[row].0 > 0 || first) {
                rows[row] = (rows[row].0 + tokens, rows[row].1 + labels);
                search(left, rows, (capacity, token_std), best);
                rows[row] = (rows[row].0 - tokens, rows[row].1 - labels);
            }
        }
    }
    let mut squares = i64::MAX;
    let bounds = (capacity, token_std);
    search(samples, &mut vec![(0, 0); rows], bounds, &mut squares);
    let mean = samples.iter().map(|sample| sample.1).sum::<i64>() as f64 / rows as f64;
    (squares as f64 / rows as f64 - mean * mean).max(0.0).sqrt()
}

#[test]
fn no_schedule_gets_below_the_floor() {
    let mut stream = stream(SEED);
    let (mut floors, mut above) = (0.0, 0);
    for case in 0..400 {
        let samples: Samples = (0..between(&mut stream, 2, 9))
            .map(|_| {
                let length = between(&mut stream, 2, 13);
                (
                    length.into(),
                    i64::from(between(&mut stream, 1, length + 1)),
                )
            })
            .collect();
        let plan = balanced(&samples, r#""sequence_len": 12"#);
        let rows = plan.report.after.rows as usize;
        let best = best_of_all(&samples, rows, 12, f64::INFINITY);
        let floor = plan.report.after.label_std_floor.expect("rows");

        assert!(
            floor <= best + 1e-9,
            "case {case}: {samples:?}: {floor} {best}"
        );
        floors += floor;
        above += usize::from(best > 0.0 && floor > 0.7 * best);
    }
    assert!(floors > 100.0 && above > 100, "{floors} {above}");
}

#[test]
fn evaluation_is_never_balanced() {
    let samples = chats(500, 256, SEED);
    let (lengths, labels): (Vec<i64>, Vec<i64>) = samples.iter().copied().unzip();
    let index = |settings: &str| {
        let config = config(settings);
        let plan = plan(&lengths, Some(&labels), None, &config, 0, Split::Eval, 1);
        plan.expect("a plan").index
    };

    assert_eq!(
        index(r#""sequence_len": 256"#),
        index(r#""sequence_len": 256, "balance_labels": true"#)
    );
}

// ---- how good it is ----

#[test]
fn long_tailed_samples_come_near_the_floor() {
    let samples = chats(20_000, 4096, SEED);
    for (settings, batch, step) in [
        // Row after row one long sample: most of what is left is the data's.
        ("", 0.24, 0.002),
        (r#", "micro_batch_size": 4"#, 0.06, 0.001),
        (
            r#", "micro_batch_size": 4, "multipack_real_batches": true"#,
            0.01,
            0.001,
        ),
        (r#", "balance_cost": "attention""#, 0.24, 0.005),
        (
            r#", "micro_batch_size": 4, "sample_packing": false, "batch_flattening": true"#,
            0.45,
            0.002,
        ),
        (
            r#", "micro_batch_size": 4, "sample_packing": false"#,
            0.5,
            0.002,
        ),
    ] {
        let settings = format!(
            r#""sequence_len": 4096, "world_size": 4, "gradient_accumulation_steps": 4{settings}"#
        );
        let report = balanced(&samples, &settings).report;
        let (before, after) = (report.before, report.after);
        let mean = after.mean_labels.expect("microbatches");
        let of = |value: Option<f64>| value.expect("steps") / mean;

        assert!(
            of(after.microbatch_label_std) <= batch,
            "{settings}: {after:?}"
        );
        assert!(
            of(after.step_label_std) / 16.0 <= step,
            "{settings}: {after:?}"
        );
        assert!(after.microbatch_label_std >= after.label_std_floor);
        assert!(before.microbatch_label_std > after.microbatch_label_std);
        assert!(after.padding_tokens <= before.padding_tokens);
        assert_eq!(before.mean_labels, after.mean_labels);
        if settings.contains("attention") {
            assert!(before.rank_cost_imbalance > Some(1.5));
            assert!(after.rank_cost_imbalance < Some(1.05), "{after:?}");
        }
    }
}

/// What all schedules have in common to which a plan of a few samples is compared.
struct Frame {
    samples: Vec<(i64, i64)>,
    /// Whether a sample loses a label where it is the first of a row.
    leads: Vec<bool>,
    rows: usize,
    rows_per_batch: usize,
    step: usize,
    /// Most tokens and most samples of a row; fewest samples.
    capacity: i64,
    limit: usize,
    fewest: usize,
    align: i64,
    multiple: i64,
    padded: bool,
    /// Labels of all, positions of all batches, and variances of a step's labels and tokens, of which
    /// there may not be more.
    labels: i64,
    size: i64,
    step_variances: [f64; 2],
}

impl Frame {
    /// The smallest variance of the labels of a microbatch, and of the labels of a step among those
    /// that have it: tries every division into rows, every order of the rows, and whoever may lead.
    fn least(&self) -> (f64, f64) {
        let mut best = (f64::INFINITY, f64::INFINITY);
        self.divide(0, &mut Vec::new(), &mut best);
        best
    }

    fn divide(&self, next: usize, rows: &mut Vec<Vec<usize>>, best: &mut (f64, f64)) {
        if next == self.samples.len() {
            if rows.len() == self.rows && rows.iter().all(|row| self.fits(row)) {
                self.permute(rows, 0, best);
            }
            return;
        }
        for row in 0..rows.len() {
            rows[row].push(next);
            self.divide(next + 1, rows, best);
            rows[row].pop();
        }
        if rows.len() < self.rows {
            rows.push(vec![next]);
            self.divide(next + 1, rows, best);
            rows.pop();
        }
    }

    fn slot(&self, sample: usize) -> i64 {
        (self.samples[sample].0 as u64).next_multiple_of(self.align as u64) as i64
    }

    fn used(&self, row: &[usize]) -> i64 {
        row.iter().map(|&sample| self.slot(sample)).sum()
    }

    fn fits(&self, row: &[usize]) -> bool {
        (self.fewest..=self.limit).contains(&row.len()) && self.used(row) <= self.capacity
    }

    fn permute(&self, rows: &mut Vec<Vec<usize>>, fixed: usize, best: &mut (f64, f64)) {
        if fixed == rows.len() {
            if self.size_of(rows) <= self.size {
                self.lead(rows, &mut Vec::new(), best);
            }
            return;
        }
        for row in fixed..rows.len() {
            rows.swap(fixed, row);
            self.permute(rows, fixed + 1, best);
            rows.swap(fixed, row);
        }
    }

    fn size_of(&self, rows: &[Vec<usize>]) -> i64 {
        let round = |longest: i64| (longest as u64).next_multiple_of(self.multiple as u64) as i64;
        let batches = rows.chunks(self.rows_per_batch);
        let longest = |row: &Vec<usize>| row.iter().map(|&sample| self.slot(sample)).max();
        batches
            .map(|batch| match self.padded {
                true => batch[0].len() as i64 * round(longest(&batch[0]).expect("samples")),
                false => {
                    let used = batch.iter().map(|row| self.used(row)).max();
                    batch.len() as i64 * round(used.expect("rows"))
                }
            })
            .sum()
    }

    /// Chooses for each row whether a sample leads that loses a label by that.
    fn lead(&self, rows: &[Vec<usize>], labels: &mut Vec<i64>, best: &mut (f64, f64)) {
        let Some(row) = rows.get(labels.len()) else {
            return self.judge(rows, labels, best);
        };
        let sum: i64 = row.iter().map(|&sample| self.samples[sample].1).sum();
        let leaders = row.iter().filter(|&&sample| self.leads[sample]).count();
        let all_lose = self.padded;
        for lost in [0, 1] {
            let can = match lost {
                _ if all_lose => lost == 0,
                0 => leaders < row.len(),
                _ => leaders > 0,
            };
            if can {
                let lost = if all_lose { leaders as i64 } else { lost };
                labels.push(sum - lost);
                self.lead(rows, labels, best);
                labels.pop();
            }
        }
    }

    fn judge(&self, rows: &[Vec<usize>], labels: &[i64], best: &mut (f64, f64)) {
        let length = |row: &Vec<usize>| -> i64 { row.iter().map(|&i| self.samples[i].0).sum() };
        let tokens: Vec<i64> = rows.iter().map(length).collect();
        let batches = |of: &[i64]| -> Vec<i64> {
            let batches = of.chunks(self.rows_per_batch);
            batches.map(|rows| rows.iter().sum()).collect()
        };
        let steps = |of: &[i64]| {
            let batches = batches(of);
            let steps = batches.chunks_exact(self.step);
            variance(&steps.map(|step| step.iter().sum()).collect::<Vec<i64>>())
        };
        let found = (variance(&batches(labels)), steps(labels));
        if labels.iter().sum::<i64>() == self.labels
            && found.1 <= self.step_variances[0]
            && steps(&tokens) <= self.step_variances[1]
        {
            let same = (found.0 - best.0).abs() < 1e-9;
            if found.0 < best.0 - 1e-9 || same && found.1 < best.1 {
                *best = found;
            }
        }
    }
}

fn variance(values: &[i64]) -> f64 {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<i64>() as f64 / n;
    let square = |&value: &i64| (value as f64 - mean).powi(2);
    values.iter().map(square).sum::<f64>() / n
}

#[test]
fn with_a_handful_of_samples_it_is_the_best_of_all() {
    let layouts = [
        "",
        r#", "micro_batch_size": 2"#,
        r#", "multipack_real_batches": true, "micro_batch_size": 2"#,
        r#", "sample_packing": false, "batch_flattening": true, "micro_batch_size": 2"#,
        r#", "sample_packing": false, "micro_batch_size": 2"#,
        r#", "sample_packing": false, "micro_batch_size": 3"#,
    ];
    let extras = [
        "",
        "",
        r#", "pad_to_multiple_of": 4"#,
        r#", "sample_packing_bin_size": 3"#,
        r#", "align_samples_to": 2"#,
        r#", "mask_first_label": false"#,
    ];
    let mut stream = stream(SEED);
    let (mut compared, mut better) = (0, 0);
    for case in 0..600 {
        let (layout, extra) = (
            layouts[case % layouts.len()],
            extras[case / 6 % extras.len()],
        );
        let (world, accumulation) = (between(&mut stream, 1, 3), between(&mut stream, 1, 4));
        let settings = format!(
            r#""sequence_len": 20, "world_size": {world}, "gradient_accumulation_steps": {accumulation}
               {layout}{extra}"#
        );
        let shortest = if case % 4 == 0 { 10 } else { 3 };
        let samples: Samples = (0..between(&mut stream, 4, 9))
            .map(|_| {
                let length = between(&mut stream, shortest, 13);
                let labels = between(&mut stream, 1, length + 1);
                (length.into(), labels.into())
            })
            .collect();
        let (lengths, labels): (Vec<i64>, Vec<i64>) = samples.iter().copied().unzip();
        let config = config(&format!(r#"{settings}, "balance_labels": true"#));
        let starts: Vec<bool> = samples
            .iter()
            .map(|&(length, labels)| labels == length || stream.below(2) == 0)
            .collect();
        let made = plan(
            &lengths,
            Some(&labels),
            Some(&starts),
            &config,
            0,
            Split::Train,
            1,
        );
        let Ok(plan) = made else { continue };
        let (report, batches) = (&plan.report, plan.batch_offsets.len() - 1);
        if batches == 0 {
            continue;
        }
        let packed = report.layout.is_packed();
        let index = || plan.index.iter().map(|&sample| sample as usize);
        let tokens: i64 = index().map(|sample| lengths[sample]).sum();
        let count = config.micro_batch_size as usize;
        let least = Frame {
            samples: index().map(|sample| samples[sample]).collect(),
            leads: index()
                .map(|sample| starts[sample] && !config.mask_first_label)
                .collect(),
            rows: plan.row_offsets.len() - 1,
            rows_per_batch: plan.rows_of(0).len(),
            step: (world * accumulation) as usize,
            capacity: if packed {
                report.capacity as i64
            } else {
                i64::MAX
            },
            limit: match config.sample_packing_bin_size {
                Some(limit) if packed => limit as usize,
                _ if packed => usize::MAX,
                _ => count,
            },
            fewest: if packed { 1 } else { count },
            align: config.align_samples_to as i64,
            multiple: config.pad_to_multiple_of as i64,
            padded: report.layout == BatchLayout::Padded,
            labels: (report.before.mean_labels.expect("microbatches") * batches as f64).round()
                as i64,
            size: report.before.padding_tokens as i64 + tokens,
            step_variances: [report.before.step_label_std, report.before.step_token_std]
                .map(|std| std.map_or(f64::INFINITY, |std| std.powi(2) + 1e-6)),
        }
        .least();

        let of = |std: Option<f64>| std.unwrap_or(0.0).powi(2);
        let found = (
            of(report.after.microbatch_label_std),
            of(report.after.step_label_std),
        );
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(
            near(found.0, least.0) && near(found.1, least.1),
            "case {case}: {settings}, {samples:?}, {starts:?}: {found:?}, not {least:?}"
        );
        better += usize::from(!near(of(report.before.microbatch_label_std), least.0));
        compared += 1;
    }
    assert!(
        compared > 300 && 2 * better > compared,
        "{better} of {compared}"
    );
}

#[test]
fn labels_do_not_depend_on_the_place_in_a_step() {
    let samples = chats(30_000, 2048, SEED);
    let plan = balanced(
        &samples,
        r#""sequence_len": 2048, "world_size": 2, "gradient_accumulation_steps": 8"#,
    );
    let labels = batch_labels(&plan, &samples);
    let steps: Vec<&[i64]> = labels.chunks_exact(16).collect();
    let pairs: Vec<(f64, f64)> = steps
        .iter()
        .flat_map(|step| step.iter().enumerate())
        .map(|(place, &labels)| (place as f64, labels as f64))
        .collect();
    let n = pairs.len() as f64;
    let mean = pairs
        .iter()
        .fold((0.0, 0.0), |(x, y), pair| (x + pair.0 / n, y + pair.1 / n));
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in pairs {
        let (x, y) = (x - mean.0, y - mean.1);
        (xy, xx, yy) = (xy + x * y, xx + x * x, yy + y * y);
    }

    let correlation = xy / (xx * yy).sqrt();
    assert!(correlation.abs() <= 3.0 / n.sqrt(), "{correlation}");
}

// ---- whatever the input ----

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
        let n = between(&mut stream, 1, 120);
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
        let Ok(plan) = make(1) else { continue };
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
        assert!(
            after.padding_tokens <= before.padding_tokens,
            "padding: {context}"
        );
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
