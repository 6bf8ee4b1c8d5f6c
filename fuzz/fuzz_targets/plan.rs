//! Plans of any lengths, labels and settings: each retained sample once, nothing above capacity, as
//! many microbatches for every rank. Overflow checks are on.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use multipack::config::{Algorithm, BalanceCost, ExcessLength, Incomplete};
use multipack::{Config, Error, Split, plan};

#[derive(Debug)]
struct Case {
    lengths: Vec<i64>,
    counts: Option<Vec<i64>>,
    starts: Option<Vec<bool>>,
    config: Config,
    epoch: u64,
    split: Split,
}

impl<'a> Arbitrary<'a> for Case {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        /// A count that is small, or anything.
        fn count(u: &mut Unstructured<'_>) -> arbitrary::Result<u64> {
            Ok(match u.int_in_range(0..=15)? {
                0 => u.arbitrary()?,
                1 => i32::MAX as u64,
                _ => u.int_in_range(1..=6)?,
            })
        }
        fn some(u: &mut Unstructured<'_>) -> arbitrary::Result<Option<u64>> {
            Ok(if u.arbitrary()? {
                Some(count(u)?)
            } else {
                None
            })
        }
        let sequence_len = match u.int_in_range(0..=7)? {
            0 => i32::MAX as u64,
            1 => count(u)?,
            _ => u.int_in_range(1..=64)?,
        };
        let config = Config {
            sequence_len: Some(sequence_len),
            micro_batch_size: count(u)?,
            eval_batch_size: some(u)?,
            gradient_accumulation_steps: count(u)?,
            world_size: count(u)?,
            sample_packing: u.arbitrary()?,
            batch_flattening: u.arbitrary()?,
            multipack_real_batches: u.arbitrary()?,
            sample_packing_algorithm: *u.choose(&[
                Algorithm::BestFitDecreasing,
                Algorithm::FirstFit,
                Algorithm::NextFit,
                Algorithm::Tight,
            ])?,
            sample_packing_sequentially: u.ratio(1, 4)?,
            sample_packing_bin_size: some(u)?,
            sample_packing_group_size: some(u)?,
            balance_labels: u.arbitrary()?,
            balance_cost: *u.choose(&[
                BalanceCost::Auto,
                BalanceCost::Tokens,
                BalanceCost::Padded,
                BalanceCost::Attention,
            ])?,
            balance_cost_linear: f64::from(u.arbitrary::<u16>()?),
            excess_length_strategy: *u.choose(&[
                ExcessLength::Drop,
                ExcessLength::Truncate,
                ExcessLength::Raise,
            ])?,
            min_sample_len: count(u)?.min(sequence_len),
            drop_unlabelled: u.arbitrary()?,
            incomplete_batches: *u.choose(&[
                Incomplete::Drop,
                Incomplete::Split,
                Incomplete::Fill,
            ])?,
            align_samples_to: *u.choose(&[1, 1, 1, 2, 8])?,
            mask_first_label: u.arbitrary()?,
            eval_sample_packing: u.arbitrary()?,
            seed: u.arbitrary()?,
            ..Config::default()
        };
        let n = u.int_in_range(0..=60)?;
        let mut lengths = Vec::new();
        for _ in 0..n {
            lengths.push(match u.int_in_range(0..=31)? {
                0 => u.arbitrary()?,
                1 => sequence_len as i64,
                _ => u.int_in_range(0..=sequence_len.min(1 << 40) as i64)?,
            });
        }
        let mut counts = None;
        if u.arbitrary()? {
            // Twice the most that sequence_len may be, which itself may be anything.
            let bound = sequence_len.min(1 << 32) as i64;
            let most = lengths.iter().map(|&length| length.clamp(0, bound));
            let drawn = most.map(|most| u.int_in_range(0..=most));
            counts = Some(drawn.collect::<arbitrary::Result<Vec<i64>>>()?);
        }
        let mut starts = None;
        if u.arbitrary()? {
            let drawn = (0..n).map(|_| u.arbitrary());
            starts = Some(drawn.collect::<arbitrary::Result<Vec<bool>>>()?);
        }
        let split = *u.choose(&[Split::Train, Split::Train, Split::Eval])?;
        Ok(Case {
            lengths,
            counts,
            starts,
            config,
            epoch: u.arbitrary()?,
            split,
        })
    }
}

fuzz_target!(|case: Case| {
    let Case {
        lengths,
        counts,
        starts,
        config,
        epoch,
        split,
    } = &case;
    let make = |threads| {
        plan(
            lengths,
            counts.as_deref(),
            starts.as_deref(),
            config,
            *epoch,
            *split,
            threads,
        )
    };
    let made = match make(1) {
        Ok(made) => made,
        Err(Error::Internal { message }) => panic!("{message}"),
        Err(_) => return,
    };
    let report = &made.report;
    let world = config.world_size as usize;
    assert_eq!(made.batch_offsets.len() - 1, made.len() * world);
    assert_eq!(
        *made.batch_offsets.last().unwrap() as usize,
        made.row_offsets.len() - 1
    );
    assert_eq!(*made.row_offsets.last().unwrap() as usize, made.index.len());

    let real = made.index.len() - report.repeated_samples as usize;
    let mut times = vec![0; lengths.len()];
    for &sample in &made.index[..real] {
        times[sample as usize] += 1;
    }
    assert!(times.iter().all(|&times| times <= 1));
    assert_eq!(real as u64 + report.unused_samples, report.retained);
    assert_eq!(
        report.retained + report.dropped.count(),
        lengths.len() as u64
    );

    let layout = config.layout(*split);
    let capacity = config.capacity(*split).unwrap();
    for row in 0..made.row_offsets.len() - 1 {
        let samples = made.row(row);
        assert!(!samples.is_empty());
        let slot = |&sample: &u32| {
            let length = (lengths[sample as usize] as u64).min(config.sequence_len.unwrap());
            length.next_multiple_of(config.align_samples_to)
        };
        if layout.is_packed() {
            assert!(samples.iter().map(slot).sum::<u64>() <= capacity);
        }
    }
    assert_eq!(Ok(made), make(2));
});
