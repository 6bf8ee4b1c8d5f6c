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

    let best = best_of_all(&samples, 2, 10, f64::INFINITY);
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
