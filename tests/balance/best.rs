//! How near it comes to the best that could be: all schedules of a few samples are tried.

use multipack::{BatchLayout, Split, plan};

use crate::lengths::{SEED, between, stream};
use crate::{Samples, balanced, config};

#[test]
fn sets_of_samples_change_rows_where_no_two_are_of_one_length() {
    // 7 + 3 and 6 + 1 + 1 + 2 tokens: the 3 can go against 2 + 1, which is all that evens anything.
    let samples = vec![(7, 7), (3, 3), (6, 1), (2, 0), (1, 1), (1, 1)];
    let keep = r#""sequence_len": 10, "drop_unlabelled": false"#;
    let report = balanced(&samples, keep).report;

    let best = best_of_all(&samples, 2, 10);
    assert_eq!(Some(best), report.after.microbatch_label_std);
    assert!(report.before.microbatch_label_std > Some(best));
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
/// rows of this capacity has, by trying all.
fn best_of_all(samples: &[(i64, i64)], rows: usize, capacity: i64) -> f64 {
    fn search(left: &[(i64, i64)], rows: &mut [(i64, i64)], capacity: i64, best: &mut i64) {
        let Some((&(tokens, labels), left)) = left.split_first() else {
            if rows.iter().all(|row| row.0 > 0) {
                *best = (*best).min(rows.iter().map(|row| row.1 * row.1).sum());
            }
            return;
        };
        for row in 0..rows.len() {
            // Empty rows are all the same: the first will do.
            let first = rows[..row].iter().all(|row| row.0 > 0);
            if rows[row].0 + tokens <= capacity && (rows[row].0 > 0 || first) {
                rows[row] = (rows[row].0 + tokens, rows[row].1 + labels);
                search(left, rows, capacity, best);
                rows[row] = (rows[row].0 - tokens, rows[row].1 - labels);
            }
        }
    }
    let mut squares = i64::MAX;
    search(samples, &mut vec![(0, 0); rows], capacity, &mut squares);
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
        let best = best_of_all(&samples, rows, 12);
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

/// What all schedules have in common to which a plan of a few samples is compared.
struct Frame {
    /// The samples of the plan in its order, repeats too.
    samples: Vec<(i64, i64)>,
    /// Whether a sample loses a label where it is the first of a row.
    leads: Vec<bool>,
    /// Samples, and rows, of the microbatches without repeats: the schedule that is searched for.
    given: usize,
    rows: usize,
    rows_per_batch: usize,
    world: usize,
    step: usize,
    /// Most tokens and most samples of a row.
    capacity: i64,
    limit: usize,
    /// Samples of each row, where that is fixed.
    counts: Option<Vec<usize>>,
    align: i64,
    multiple: i64,
    padded: bool,
    by_attention: bool,
    /// Labels and tokens of the microbatches with repeats, which come last and stay as they are.
    rest: Vec<(i64, i64)>,
    /// Labels of all others, their positions, and variances of a step's labels and tokens, of which
    /// there may not be more.
    labels: i64,
    size: i64,
    step_variances: [f64; 2],
}

/// Variance of the labels of a microbatch, variance of those of a step, and the costs of the slowest
/// ranks of all microsteps; the last two change places where steps are composed for cost.
type Found = [f64; 3];

impl Frame {
    /// The smallest that can be found, the first number before the second: tries every division into
    /// rows, every order of the rows, and whoever may lead.
    fn least(&self) -> Found {
        let mut best = [f64::INFINITY; 3];
        self.divide(0, &mut Vec::new(), &mut best);
        best
    }

    fn divide(&self, next: usize, rows: &mut Vec<Vec<usize>>, best: &mut Found) {
        if next == self.given {
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
        row.len() <= self.limit && self.used(row) <= self.capacity
    }

    fn permute(&self, rows: &mut Vec<Vec<usize>>, fixed: usize, best: &mut Found) {
        if fixed == rows.len() {
            if self.sizes(rows).iter().sum::<i64>() <= self.size {
                self.lead(rows, &mut Vec::new(), best);
            }
            return;
        }
        for row in fixed..rows.len() {
            let count = self.counts.as_ref().map(|counts| counts[fixed]);
            if count.is_none_or(|count| count == rows[row].len()) {
                rows.swap(fixed, row);
                self.permute(rows, fixed + 1, best);
                rows.swap(fixed, row);
            }
        }
    }

    /// Positions of each microbatch.
    fn sizes(&self, rows: &[Vec<usize>]) -> Vec<i64> {
        let round = |longest: i64| (longest as u64).next_multiple_of(self.multiple as u64) as i64;
        let longest = |row: &Vec<usize>| row.iter().map(|&sample| self.slot(sample)).max();
        let size = |batch: &[Vec<usize>]| match self.padded {
            true => batch[0].len() as i64 * round(longest(&batch[0]).expect("samples")),
            false => {
                let used = batch.iter().map(|row| self.used(row)).max();
                batch.len() as i64 * round(used.expect("rows"))
            }
        };
        rows.chunks(self.rows_per_batch).map(size).collect()
    }

    /// Chooses for each row whether a sample leads that loses a label by that.
    fn lead(&self, rows: &[Vec<usize>], labels: &mut Vec<i64>, best: &mut Found) {
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

    fn judge(&self, rows: &[Vec<usize>], labels: &[i64], best: &mut Found) {
        let length = |row: &Vec<usize>| -> i64 { row.iter().map(|&i| self.samples[i].0).sum() };
        let tokens: Vec<i64> = rows.iter().map(length).collect();
        let batches = |of: &[i64], rest: fn(&(i64, i64)) -> i64| -> Vec<i64> {
            let batches = of.chunks(self.rows_per_batch);
            let given = batches.map(|rows| rows.iter().sum());
            given.chain(self.rest.iter().map(rest)).collect()
        };
        let steps = |batches: &[i64]| {
            let steps = batches.chunks_exact(self.step);
            variance(&steps.map(|step| step.iter().sum()).collect::<Vec<i64>>())
        };
        let batch_labels = batches(labels, |rest| rest.0);
        let batch_tokens = batches(&tokens, |rest| rest.1);
        let step_labels = steps(&batch_labels);
        if labels.iter().sum::<i64>() == self.labels
            && step_labels <= self.step_variances[0]
            && (self.by_attention || steps(&batch_tokens) <= self.step_variances[1])
        {
            let found = self.found(variance(&batch_labels), step_labels, self.waits(rows));
            let differ = found.iter().zip(&*best).find(|(a, b)| !near(**a, **b));
            if differ.is_some_and(|(found, best)| found < best) {
                *best = found;
            }
        }
    }

    fn found(&self, batch_labels: f64, step_labels: f64, waits: f64) -> Found {
        match self.by_attention {
            true => [batch_labels, waits, step_labels],
            false => [batch_labels, step_labels, waits],
        }
    }

    /// The costs of the slowest ranks, if the microbatches of each step are in the order of theirs.
    fn waits(&self, rows: &[Vec<usize>]) -> f64 {
        let lengths = |batch: &[Vec<usize>]| -> Vec<i64> {
            batch
                .concat()
                .iter()
                .map(|&sample| self.samples[sample].0)
                .collect()
        };
        let mut costs: Vec<i64> = match (self.by_attention, self.padded) {
            (false, true) => self.sizes(rows),
            (by_attention, _) => {
                let power = if by_attention { 2 } else { 1 };
                let batches = rows.chunks(self.rows_per_batch).map(lengths);
                batches
                    .map(|batch| batch.iter().map(|length| length.pow(power)).sum())
                    .collect()
            }
        };
        let steps = costs.chunks_exact_mut(self.step).map(|step| {
            step.sort_unstable();
            step.chunks(self.world)
                .map(|microstep| microstep[self.world - 1])
                .sum::<i64>()
        });
        steps.sum::<i64>() as f64
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6
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
        r#", "balance_cost": "attention""#,
        r#", "pad_to_multiple_of": 4"#,
        r#", "sample_packing_bin_size": 3"#,
        r#", "incomplete_batches": "fill""#,
        r#", "align_samples_to": 2"#,
        r#", "incomplete_batches": "split""#,
        r#", "mask_first_label": false"#,
        r#", "balance_cost": "attention", "mask_first_label": false"#,
        r#", "incomplete_batches": "fill", "mask_first_label": false"#,
    ];
    let mut stream = stream(SEED);
    let mut compared = vec![0; extras.len()];
    let mut better = 0;
    for case in 0..900 {
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
        if plan.is_empty() {
            continue;
        }
        let report = &plan.report;
        let packed = report.layout.is_packed();
        let rows_per_batch = plan.rows_of(0).len();
        let offsets = plan.row_offsets.iter().map(|&offset| offset as usize);
        let offsets: Vec<usize> = offsets.collect();
        let rows: Vec<Vec<usize>> = offsets.windows(2).map(|w| (w[0]..w[1]).collect()).collect();
        let real = plan.index.len() - report.repeated_samples as usize;
        let whole = rows.chunks(rows_per_batch);
        let whole = whole.take_while(|batch| batch.concat().iter().all(|&place| place < real));
        let (given, rest) = rows.split_at(whole.count() * rows_per_batch);
        let index = || plan.index.iter().map(|&sample| sample as usize);
        let loses = |place: usize| starts[plan.index[place] as usize] && !config.mask_first_label;
        let mut frame = Frame {
            samples: index().map(|sample| samples[sample]).collect(),
            leads: (0..plan.index.len()).map(loses).collect(),
            given: given.concat().len(),
            rows: given.len(),
            rows_per_batch,
            world: world as usize,
            step: (world * accumulation) as usize,
            capacity: if packed {
                report.capacity as i64
            } else {
                i64::MAX
            },
            limit: match config.sample_packing_bin_size {
                Some(limit) if packed => limit as usize,
                _ => usize::MAX,
            },
            counts: (!packed).then(|| given.iter().map(Vec::len).collect()),
            align: config.align_samples_to as i64,
            multiple: config.pad_to_multiple_of as i64,
            padded: report.layout == BatchLayout::Padded,
            by_attention: extra.contains("attention"),
            rest: Vec::new(),
            labels: 0,
            size: 0,
            step_variances: [report.before.step_label_std, report.before.step_token_std]
                .map(|std| std.map_or(f64::INFINITY, |std| std.powi(2) + 1e-6)),
        };
        // Of the samples in the microbatches with repeats only those count that are none.
        for batch in rest.chunks(rows_per_batch) {
            let mut sum = (0, 0);
            for row in batch {
                for &place in row.iter().filter(|&&place| place < real) {
                    let first = frame.padded || place == row[0];
                    let (tokens, labels) = frame.samples[place];
                    sum.0 += labels - i64::from(first && frame.leads[place]);
                    sum.1 += tokens;
                }
            }
            frame.rest.push(sum);
        }
        let all_tokens: i64 = frame.samples[..real].iter().map(|sample| sample.0).sum();
        frame.size = report.before.padding_tokens as i64 + all_tokens
            - frame.sizes(rest).iter().sum::<i64>();
        let batches = (rows.len() / rows_per_batch) as f64;
        let all_labels = report.before.mean_labels.expect("microbatches") * batches;
        frame.labels =
            all_labels.round() as i64 - frame.rest.iter().map(|rest| rest.0).sum::<i64>();

        let of = |std: Option<f64>| std.unwrap_or(0.0).powi(2);
        let found = frame.found(
            of(report.after.microbatch_label_std),
            of(report.after.step_label_std),
            frame.waits(given),
        );
        let least = frame.least();
        assert!(
            found
                .iter()
                .zip(&least)
                .all(|(&found, &least)| near(found, least)),
            "case {case}: {settings}, {samples:?}, {starts:?}: {found:?}, not {least:?}"
        );
        better += usize::from(!near(of(report.before.microbatch_label_std), least[0]));
        compared[case / 6 % extras.len()] += 1;
    }
    let all: usize = compared.iter().sum();
    assert!(
        compared.iter().all(|&cases| cases > 30) && 2 * better > all,
        "{better} of {compared:?}"
    );
}
