//! What twice as many samples cost: every strategy, on usual lengths and on the worst ones.
//!
//! `cargo bench --bench scaling` prints the seconds of processor time, of all threads, of a whole
//! plan for half a million samples, and how many times as much one and two million take. It fails
//! where doubling costs more than 2.3 times: all strategies are linear but for a logarithm and for
//! what larger memory costs. The cheapest of some rounds counts, and the sizes take turns in each,
//! so that a busy machine spoils a round and not a size. With `-- --test` each plan is made once,
//! of few samples.
//!
//! Every plan gets its memory fresh from the system, as the first plan of a process does. The
//! allocator of the C library would keep what small plans free and return what large ones free: the
//! smaller of two sizes would then be spared the page faults that the larger one pays for, which
//! alone makes up to 2.5 times out of 2.1 (next fit on *middle*). So the bench runs itself again
//! with `MALLOC_MMAP_THRESHOLD_` set, which makes the allocator treat all sizes alike.
//!
//! *Half* is the worst case of a search through all open rows: every sample needs a row of its own.
//! *Ones* makes the longest rows, *long* leaves gaps that nothing fills.

use std::process::{Command, exit};
use std::time::Instant;

use multipack::{Config, Split, plan};

#[path = "../tests/support/lengths.rs"]
mod lengths;
use lengths::{SEED, between, stream};

const CAPACITY: u32 = 4096;
const ROUNDS: usize = 60;
/// Rounds that are made in any case, and the seconds after which they are enough.
const FEWEST: usize = 3;
const ENOUGH: f64 = 8.0;
const MOST: f64 = 2.3;

const ALGORITHMS: [&str; 4] = ["best_fit_decreasing", "tight", "first_fit", "next_fit"];

/// So many lengths of a kind.
type Make = fn(usize) -> Vec<u32>;

const LENGTHS: [(&str, Make); 6] = [
    ("lognormal", |n| lengths::lognormal(n, CAPACITY, SEED)),
    ("uniform", |n| {
        let mut stream = stream(SEED);
        (0..n)
            .map(|_| between(&mut stream, 1, CAPACITY + 1))
            .collect()
    }),
    ("middle", |n| lengths::uniform(n, CAPACITY, SEED)),
    ("long", |n| {
        let mut stream = stream(SEED);
        (0..n)
            .map(|_| between(&mut stream, CAPACITY / 2 + 1, CAPACITY + 1))
            .collect()
    }),
    ("half", |n| vec![6 * CAPACITY / 10; n]),
    ("ones", |n| vec![1; n]),
];

/// What all threads of this process have run for, as Linux counts it.
fn processor_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux");
    let nanoseconds = threads.map(|thread| {
        let path = thread.expect("a thread").path().join("schedstat");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split(' ')
            .next()
            .and_then(|number| number.parse().ok())
            .unwrap_or(0.0)
    });
    nanoseconds.sum::<f64>() / 1e9
}

/// The allocator's name for the size from which memory is the system's, and returned to it.
const FRESH_FROM: (&str, &str) = ("MALLOC_MMAP_THRESHOLD_", "131072");

fn main() {
    if std::env::var_os(FRESH_FROM.0).is_none() {
        let again = std::env::current_exe().expect("the bench's own path");
        let mut again = Command::new(again);
        again.args(std::env::args().skip(1));
        let status = again.env(FRESH_FROM.0, FRESH_FROM.1).status();
        exit(status.expect("the bench, again").code().unwrap_or(1));
    }
    let test = std::env::args().any(|argument| argument == "--test");
    let (first, rounds) = if test { (500, 1) } else { (500_000, ROUNDS) };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{:22}{:12}{:>10}{:>8}{:>8}", "", "", first, "x 2", "x 4");
    let mut worst = 0.0;
    for algorithm in ALGORITHMS {
        let settings =
            format!(r#"{{"sequence_len": {CAPACITY}, "sample_packing_algorithm": "{algorithm}"}}"#);
        let config = Config::from_json(&settings).expect("valid settings");
        for (name, make) in LENGTHS {
            let inputs: Vec<Vec<i64>> = [1, 2, 4]
                .map(|times| make(times * first).into_iter().map(i64::from).collect())
                .into();
            let mut seconds = [f64::INFINITY; 3];
            let begun = Instant::now();
            for round in 0..rounds {
                if round >= FEWEST && begun.elapsed().as_secs_f64() > ENOUGH {
                    break;
                }
                for (lengths, best) in inputs.iter().zip(&mut seconds) {
                    let start = processor_seconds();
                    let plan = plan(lengths, None, None, &config, 0, Split::Train, threads);
                    *best = best.min(processor_seconds() - start);
                    let report = plan.expect("a plan").report;
                    assert_eq!(lengths.len() as u64, report.retained);
                    assert_eq!(0, report.unused_samples);
                }
            }
            let [one, two, four] = seconds;
            println!(
                "{algorithm:22}{name:12}{one:10.4}{:8.2}{:8.2}",
                two / one,
                four / two
            );
            worst = f64::max(worst, (two / one).max(four / two));
        }
    }
    println!("at most {worst:.2} times");
    assert!(
        test || worst <= MOST,
        "doubling costs {worst:.2} times, more than {MOST}"
    );
}
