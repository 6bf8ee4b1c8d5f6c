//! The one place that runs work on several threads.
//!
//! [`for_each`] hands a list of independent parts to a pool of threads and waits. The parts are cut
//! by the caller and own disjoint pieces of the output, so that the answer cannot depend on how
//! many threads there are or which of them comes first. With one thread, or one part, everything
//! runs on the calling thread and no pool is ever built.
//!
//! # Why a pool of our own
//!
//! PyTorch's data loaders fork. A forked child inherits the memory of rayon's global pool but not
//! its threads, so its first parallel call waits for ever. Here every pool is stored with the id of
//! the process that built it: a child does not find one of its own, and builds it. The parent's
//! pool is left alone in the child, never dropped, because dropping it would signal threads that do
//! not exist there.
//!
//! A fork can also happen in the very moment in which another thread stores a pool, so that the
//! child inherits a half-written slot for ever. A lock would hang the child then. Hence the table
//! below: a writer first takes a slot number that nobody else will ever write to, and readers pass
//! over slots that are not (or will never be) complete. Nobody waits for anybody.
//!
//! # Cost
//!
//! Handing over a small job takes around 10 µs, building a pool around a millisecond. It pays for
//! work above 100 µs, which for us is about 64k tokens.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A pool, and the process in which its threads live.
struct Slot {
    process: u32,
    threads: usize,
    pool: ThreadPool,
}

/// Every pool that this process or the ones it was forked from have built, in order.
///
/// One slot goes for each combination of process and thread count along a chain of forks. Whoever
/// changes the count or forks from forks more often than there are slots gets the same answers from
/// the calling thread alone.
static SLOTS: [OnceLock<Slot>; 64] = [const { OnceLock::new() }; 64];

/// Slots handed out to writers so far.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Calls `work` once for every part, on up to `threads` threads, and returns when all are done.
///
/// A panic in `work` comes out of this call, after the other parts have finished or been given up.
/// 0 threads means 1.
pub fn for_each<T: Send>(threads: usize, parts: Vec<T>, work: impl Fn(T) + Send + Sync) {
    let pool = if parts.len() > 1 { pool(threads) } else { None };
    match pool {
        Some(pool) => pool.install(|| parts.into_par_iter().with_max_len(1).for_each(work)),
        None => parts.into_iter().for_each(work),
    }
}

/// How much of `len` goes to one part of the work: a few parts for each thread, so that none waits
/// long for the last. At least 1.
pub(crate) fn chunk_len(len: usize, threads: usize) -> usize {
    len.div_ceil(4 * threads.max(1)).max(1)
}

/// This process's pool of that many threads; none for one thread, where threads cannot be had, or
/// when the slots have run out.
fn pool(threads: usize) -> Option<&'static ThreadPool> {
    if threads <= 1 {
        return None;
    }
    let process = std::process::id();
    if let Some(pool) = find(process, threads) {
        return Some(pool);
    }
    if TAKEN.load(Ordering::Relaxed) >= SLOTS.len() {
        return None;
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("multipack-{i}"))
        .build()
        .ok()?;
    // Another thread may have been as quick as we were. If both get here at the same instant, both
    // pools stay and the first is used from then on.
    if let Some(earlier) = find(process, threads) {
        return Some(earlier);
    }
    let slot = SLOTS.get(TAKEN.fetch_add(1, Ordering::Relaxed))?;
    Some(
        &slot
            .get_or_init(|| Slot {
                process,
                threads,
                pool,
            })
            .pool,
    )
}

fn find(process: u32, threads: usize) -> Option<&'static ThreadPool> {
    SLOTS
        .iter()
        .filter_map(OnceLock::get)
        .find(|slot| slot.process == process && slot.threads == threads)
        .map(|slot| &slot.pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pool_per_process_and_thread_count() {
        let two = pool(2).unwrap();

        assert!(std::ptr::eq(two, pool(2).unwrap()));
        assert_eq!(2, two.current_num_threads());
        assert!(!std::ptr::eq(two, pool(3).unwrap()));
        // The id of another process finds nothing, as in a child just forked.
        assert!(find(std::process::id() + 1, 2).is_none());
    }

    #[test]
    fn one_thread_needs_no_pool() {
        assert!(pool(0).is_none());
        assert!(pool(1).is_none());
    }

    #[test]
    fn a_single_part_stays_on_the_calling_thread() {
        let here = std::thread::current().id();

        for_each(2, vec![()], |()| {
            assert_eq!(here, std::thread::current().id())
        });
    }

    #[test]
    fn parts_run_in_the_pool() {
        let names = std::sync::Mutex::new(Vec::new());

        for_each(2, vec![1, 2, 3], |part| {
            let name = std::thread::current().name().map(str::to_owned);
            names.lock().unwrap().push((part, name.unwrap()));
        });

        let mut names = names.into_inner().unwrap();
        names.sort();
        assert_eq!(
            vec![1, 2, 3],
            names.iter().map(|(part, _)| *part).collect::<Vec<_>>()
        );
        assert!(names.iter().all(|(_, name)| name.starts_with("multipack-")));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let panicked = std::panic::catch_unwind(|| {
            for_each(2, vec![0, 1, 2], |part| assert_ne!(part, 1, "part one"));
        });

        assert!(panicked.is_err());
        let sum = AtomicUsize::new(0);
        for_each(2, vec![1, 2, 3], |part| {
            sum.fetch_add(part, Ordering::Relaxed);
        });
        assert_eq!(6, sum.into_inner());
    }
}
