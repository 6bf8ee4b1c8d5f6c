//! Exchange: sets of a few samples change rows, for others of as many tokens.
//!
//! Long samples have few others of their length, so [`super::level`] leaves rows of two or three
//! samples far from the mean. But for nearly every sum of tokens there are many sets of one, two or
//! three samples, with any number of labels. So a sample of a row with too few labels goes against
//! two or three of another row that are as long together and have more of them, and so on: k for m.
//!
//! ```text
//! sort the sets of all rows by tokens and labels
//! for each row, the farthest from the mean first:
//!     for each of its sets: look where the sets of as many tokens have the labels that are missing
//!     make the exchange that lowers the sum of squares most; both microbatches are done
//! ```
//!
//! Where one of the two rows has space left, its set may also be the shorter one by as much, or
//! empty: then samples move into the space, at best half of it, so that two rows share it. No row
//! goes over its capacity, no padding is added, and the tokens of the two microbatches do not get
//! more uneven. What comes into rows of many short samples, level evens out afterwards.
//!
//! | 100,000 lognormal lengths, labels of a microbatch | one row of 4096 | one row of 16384 | four rows of 4096 |
//! |---|---|---|---|
//! | level alone | 20.5 % of the mean | 2.5 % | 0.2 % |
//! | with one round of exchanges | 19.1 % | 0.8 % | 0.1 % |
//! | with two | 18.9 % | 0.3 % | 0.04 % |
//! | no schedule can get below | 18.4 % | 0 | 0 |
//!
//! By blocks of microbatches, each by itself, so that memory stays bounded and threads can share the
//! work. At most [`MEMBERS`] samples of a row are looked at: O(n log n).

use std::ops::Range;

use super::change;
use super::work::Work;
use crate::order::Stream;
use crate::pack::{Bounds, Rows};
use crate::parallel;
use crate::schedule::Round;

/// Microbatches that exchange with one another.
const BLOCK: usize = 1 << 13;
/// Samples of a row that are looked at, evenly taken from all.
const MEMBERS: usize = 8;
/// Rows with more of them have no sets of three: their pairs are enough.
const FOR_TRIPLES: usize = 5;
/// Sets tried on each side of the best number of labels.
const NEAR: usize = 2;
/// Other sums of tokens that are tried where there is space.
const SUMS: usize = 8;
/// Pairs of sets drawn for one exchange at random.
const DRAWS: usize = 64;
/// Most sets of a row of so many samples, or more: the empty one, single samples, pairs and, of five
/// at most, triples. Six have those of five where the first sample stays.
const MOST_SETS: [usize; MEMBERS + 1] = [1, 2, 4, 8, 15, 26, 26, 29, 37];
/// What each set takes while exchanges are looked for: itself, in a list that may be twice as large
/// as it need be, and once more in each [`Index`].
const BYTES_OF_A_SET: usize = 72;

/// What rows may hold, and how long they are in a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub bounds: Bounds,
    pub align: u32,
    /// Row lengths are rounded up to a multiple of this.
    pub multiple: u32,
}

impl Shape {
    /// Positions that a sample takes up.
    pub fn slot(self, length: u32) -> u32 {
        match self.align {
            1 => length, // divisions take their time
            align => length.next_multiple_of(align),
        }
    }

    /// Positions of so many rows in one batch, the longest of which has so many in use.
    pub fn size(self, rows: usize, longest: u32) -> u64 {
        rows as u64 * u64::from(longest.next_multiple_of(self.multiple))
    }
}

/// Up to three samples of one row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Set {
    /// Slots of all.
    tokens: u32,
    labels: u32,
    row: u32,
    /// Where in the row they stand.
    members: [u8; 3],
    len: u8,
}

impl Set {
    /// By tokens, then by labels, then by place: one number, which is quicker to sort by than four.
    fn order(&self) -> u128 {
        let [a, b, c] = self.members;
        u128::from(self.tokens) << 96
            | u128::from(self.labels) << 64
            | u128::from(self.row) << 32
            | u128::from(u32::from_be_bytes([0, a, b, c]))
    }

    fn contains(&self, member: u32) -> bool {
        self.members[..self.len as usize]
            .iter()
            .any(|&m| u32::from(m) == member)
    }
}

/// Makes exchanges between rows of different microbatches, at most one for each microbatch; returns
/// how many.
pub(super) fn equal_sums(work: &mut Work, shape: Shape, threads: usize) -> usize {
    let batches = work.totals.len();
    let mut found: Vec<Vec<(Set, Set)>> = vec![Vec::new(); batches.div_ceil(BLOCK)];
    let rows = Table::of(work, shape);
    let parts = found.iter_mut().enumerate().collect();
    parallel::for_each(threads, parts, |(block, found): (usize, &mut Vec<_>)| {
        *found = rows.search(block * BLOCK..batches.min((block + 1) * BLOCK));
    });
    let exchanges = found.concat();
    make(work, &exchanges);
    exchanges.len()
}

/// What [`equal_sums`] takes for sets at most, in the blocks that are looked through at one time.
pub(super) fn most_bytes(rows: &Rows, round: Round, threads: usize) -> usize {
    let sets_of = |row: usize| MOST_SETS[rows.places(row).len().min(MEMBERS)];
    let block = BLOCK * round.rows_per_microbatch;
    let firsts = (0..rows.len()).step_by(block);
    let mut blocks: Vec<usize> = firsts
        .map(|first| (first..rows.len().min(first + block)).map(sets_of).sum())
        .collect();
    blocks.sort_unstable_by(|a, b| b.cmp(a));
    let sets: usize = blocks.iter().take(threads.max(1)).sum();
    sets * BYTES_OF_A_SET
}

/// Makes an exchange that chance picks out, whatever it does to the labels; from elsewhere a search
/// may end lower. Returns whether one was found.
pub(super) fn at_random(work: &mut Work, shape: Shape, stream: &mut Stream) -> bool {
    let rows = Table::of(work, shape);
    let search = Search::of(&rows, 0..work.totals.len(), 0.0);
    let sets = &search.all.sets;
    if sets.is_empty() {
        return false;
    }
    let mut draw = || sets[stream.below(sets.len() as u32) as usize];
    let pairs = (0..DRAWS).map(|_| (draw(), draw()));
    let mut other = pairs.filter(|&(one, other)| search.batch(one.row) != search.batch(other.row));
    let Some(pair) = other.find(|&(one, other)| search.fits(one, other)) else {
        return false;
    };
    make(work, &[pair]);
    true
}

/// Puts the sets into one another's rows.
fn make(work: &mut Work, exchanges: &[(Set, Set)]) {
    let mut coming: Vec<Option<(Set, Set)>> = vec![None; work.fronts.len()];
    for &(one, other) in exchanges {
        coming[one.row as usize] = Some((one, other));
        coming[other.row as usize] = Some((other, one));
    }
    let mut places: Vec<u32> = Vec::with_capacity(work.items.len());
    let mut fronts = Vec::with_capacity(work.fronts.len());
    let mut batch_of = Vec::with_capacity(work.items.len());
    for (row, coming) in coming.iter().enumerate() {
        fronts.push(places.len() as u32);
        let mine = work.row(row);
        let front = mine.start;
        match coming {
            None => places.extend(mine),
            Some((gone, new)) => {
                places.extend(mine.filter(|&place| !gone.contains(place - front)));
                let theirs = work.fronts[new.row as usize];
                let new = &new.members[..new.len as usize];
                places.extend(new.iter().map(|&member| theirs + u32::from(member)));
            }
        }
        batch_of.resize(places.len(), work.batch_of[front as usize]);
    }
    work.rearrange(0, &places);
    work.fronts = fronts;
    work.batch_of = batch_of;
    work.add_up();
}

/// The rows of a schedule while exchanges are looked for.
struct Table<'a> {
    work: &'a Work,
    shape: Shape,
    rows_per_batch: usize,
    /// Slots of all samples of each row.
    used: Vec<u32>,
}

impl Table<'_> {
    fn of(work: &Work, shape: Shape) -> Table<'_> {
        let mut table = Table {
            work,
            shape,
            rows_per_batch: work.fronts.len() / work.totals.len().max(1),
            used: Vec::new(),
        };
        let used = |row| work.row(row).map(|place| table.slot(place)).sum();
        table.used = (0..work.fronts.len()).map(used).collect();
        table
    }

    fn slot(&self, place: u32) -> u32 {
        self.shape.slot(self.work.lengths[place as usize])
    }

    fn space(&self, row: usize) -> u32 {
        self.shape.bounds.capacity - self.used[row]
    }

    fn rows_of_batch(&self, row: u32) -> Range<usize> {
        let first = row as usize / self.rows_per_batch * self.rows_per_batch;
        first..first + self.rows_per_batch
    }

    fn batch(&self, row: u32) -> usize {
        match self.rows_per_batch {
            1 => row as usize, // divisions take their time
            rows => row as usize / rows,
        }
    }

    fn total(&self, row: u32) -> i64 {
        self.work.totals[self.batch(row)]
    }

    /// The sets of a row; the empty one too, where there is space for others.
    fn sets(&self, row: usize, mut each: impl FnMut(Set)) {
        let places = self.work.row(row);
        let front = places.start;
        // A first sample that may lose a label by standing first stays.
        let first = front + u32::from(!self.work.leads.is_empty());
        let most = (front + 256).min(places.end);
        let stride = (most.saturating_sub(first) as usize)
            .div_ceil(MEMBERS)
            .max(1);
        let mut members = [0; MEMBERS];
        let mut count = 0;
        for place in (first..most).step_by(stride) {
            members[count] = place;
            count += 1;
        }
        let members = &members[..count];
        let with = |set: Set, place: u32| {
            let mut set = set;
            set.members[set.len as usize] = (place - front) as u8;
            set.len += 1;
            set.tokens += self.slot(place);
            set.labels += self.work.labels[place as usize];
            set
        };
        let none = Set {
            row: row as u32,
            ..Set::default()
        };
        if self.space(row) > 0 {
            each(none);
        }
        for (i, &a) in members.iter().enumerate() {
            let one = with(none, a);
            each(one);
            for (j, &b) in members.iter().enumerate().skip(i + 1) {
                let two = with(one, b);
                each(two);
                if count <= FOR_TRIPLES {
                    members[j + 1..].iter().for_each(|&c| each(with(two, c)));
                }
            }
        }
    }

    /// Exchanges between these microbatches.
    fn search(&self, batches: Range<usize>) -> Vec<(Set, Set)> {
        let rows = batches.start * self.rows_per_batch..batches.end * self.rows_per_batch;
        let totals = &self.work.totals[batches.clone()];
        let mean = totals.iter().sum::<i64>() as f64 / totals.len() as f64;
        let square = |row: usize| (self.total(row as u32) as f64 - mean).powi(2);
        let mean_square = rows.clone().map(square).sum::<f64>() / rows.len() as f64;
        // The others hold less than a thirtieth of the variance.
        let mut order: Vec<usize> = rows
            .filter(|&row| 30.0 * square(row) > mean_square)
            .collect();
        order.sort_by(|&a, &b| square(b).total_cmp(&square(a)));

        let mut search = Search::of(self, batches, mean);
        order
            .into_iter()
            .filter_map(|row| search.exchange(row))
            .collect()
    }
}

/// Sets by tokens and labels.
struct Index {
    sets: Vec<Set>,
    /// The labels of each: a search among them alone stays in the cache.
    labels: Vec<u32>,
    /// The different sums of tokens, rising.
    sums: Vec<u32>,
    /// Where the sets of each sum begin; one more entry.
    starts: Vec<u32>,
    /// The sums by ranges of tokens, each of `width`: the first sum that is not below the range.
    firsts: Vec<u32>,
    width: u32,
}

impl Index {
    /// Sorts the sets: by ranges of tokens, a few dozen sets in each, then inside these.
    fn of(sets: Vec<Set>) -> Index {
        let most = sets.iter().map(|set| set.tokens).max().unwrap_or(0);
        let width = most / (sets.len() as u32 / 16 + 1) + 1;
        let mut ends = vec![0u32; (most / width) as usize + 2];
        for set in &sets {
            ends[(set.tokens / width) as usize + 1] += 1;
        }
        for range in 1..ends.len() {
            ends[range] += ends[range - 1];
        }
        let mut sorted = vec![Set::default(); sets.len()];
        for set in sets {
            let end = &mut ends[(set.tokens / width) as usize];
            sorted[*end as usize] = set;
            *end += 1;
        }
        let (mut sums, mut starts, mut firsts) = (Vec::new(), vec![0], Vec::new());
        let mut start = 0;
        for &end in &ends[..ends.len() - 1] {
            firsts.push(sums.len() as u32);
            let range = &mut sorted[start..end as usize];
            range.sort_unstable_by_key(Set::order);
            for equal in range.chunk_by(|a, b| a.tokens == b.tokens) {
                sums.push(equal[0].tokens);
                starts.push(starts[starts.len() - 1] + equal.len() as u32);
            }
            start = end as usize;
        }
        Index {
            labels: sorted.iter().map(|set| set.labels).collect(),
            sets: sorted,
            sums,
            starts,
            firsts,
            width,
        }
    }

    /// The sum of so many tokens by its number; where there is none, an empty range at its place.
    fn find(&self, tokens: u32) -> Range<usize> {
        let first = |range: usize| match self.firsts.get(range) {
            Some(&first) => first as usize,
            None => self.sums.len(),
        };
        let range = (tokens / self.width) as usize;
        let sums = first(range)..first(range + 1);
        let sum = sums.start + self.sums[sums].partition_point(|&found| found < tokens);
        sum..sum + usize::from(self.sums.get(sum) == Some(&tokens))
    }

    /// The sets of these sums, of which there is at most one.
    fn sets_of(&self, sums: Range<usize>) -> Range<usize> {
        self.starts[sums.start] as usize..self.starts[sums.end] as usize
    }

    /// The sets with about as many labels as wanted, of these sums, of which there is at most one.
    fn near(&self, sums: Range<usize>, wanted: u32) -> &[Set] {
        let all = self.sets_of(sums);
        let at = all.start + self.labels[all.clone()].partition_point(|&labels| labels < wanted);
        &self.sets[all.start.max(at.saturating_sub(NEAR))..all.end.min(at + NEAR)]
    }
}

/// A search among some microbatches.
struct Search<'a> {
    table: &'a Table<'a>,
    /// The sets of all rows, by tokens and labels.
    all: Index,
    /// Those of rows with space.
    loose: Index,
    mean: f64,
    /// Microbatches that take part in an exchange.
    done: Vec<bool>,
    first_batch: usize,
}

/// The best exchange so far, and half of how much it changes the sum of squares.
type Best = (i64, Option<(Set, Set)>);

impl<'a> Search<'a> {
    fn of(table: &'a Table<'a>, batches: Range<usize>, mean: f64) -> Search<'a> {
        let rows = batches.start * table.rows_per_batch..batches.end * table.rows_per_batch;
        let mut sets = Vec::new();
        for row in rows {
            table.sets(row, |set| sets.push(set));
        }
        let is_loose = |set: &Set| table.space(set.row as usize) > 0;
        let loose: Vec<Set> = sets.iter().copied().filter(is_loose).collect();
        Search {
            table,
            loose: Index::of(loose),
            all: Index::of(sets),
            mean,
            done: vec![false; batches.len()],
            first_batch: batches.start,
        }
    }

    /// The exchange of this row that lowers the sum of squares most, if there is one.
    fn exchange(&mut self, row: usize) -> Option<(Set, Set)> {
        if self.done[self.batch(row as u32)] {
            return None;
        }
        // Half of what is missing: the other row is taken to be at the mean.
        let missing = (self.mean - self.table.total(row as u32) as f64) / 2.0;
        let space = self.table.space(row);
        let mut best: Best = (0, None);
        self.table.sets(row, |set| {
            let wanted = (f64::from(set.labels) + missing).max(0.0) as u32;
            let equal = self.all.find(set.tokens);
            self.try_all(set, self.all.near(equal.clone(), wanted), &mut best);
            if self.all.sets_of(equal.clone()).len() > 2 * NEAR {
                return; // enough to choose from
            }
            // A little more, and as much as evens out the space where there is a good deal of it.
            let half = self.all.find(set.tokens + space / 2).start;
            let more = equal.end..self.all.sums.len();
            let sums = more.clone().take(SUMS);
            for sum in sums.chain(
                more.skip(half.saturating_sub(equal.end).max(SUMS))
                    .take(SUMS),
            ) {
                if self.all.sums[sum] > set.tokens + space {
                    break;
                }
                self.try_all(set, self.all.near(sum..sum + 1, wanted), &mut best);
            }
            for sum in (0..self.loose.find(set.tokens).start).rev().take(SUMS) {
                self.try_all(set, self.loose.near(sum..sum + 1, wanted), &mut best);
            }
        });
        let (one, other) = best.1?;
        for set in [one, other] {
            let batch = self.batch(set.row);
            self.done[batch] = true;
        }
        Some((one, other))
    }

    fn batch(&self, row: u32) -> usize {
        self.table.batch(row) - self.first_batch
    }

    /// Tries to put the set in the place of these others.
    fn try_all(&self, set: Set, others: &[Set], best: &mut Best) {
        for &other in others {
            let gain = i64::from(other.labels) - i64::from(set.labels);
            let gap = self.table.total(set.row) - self.table.total(other.row);
            let change = change(gain, gap);
            let batch = self.batch(other.row);
            if change < best.0
                && !self.done[batch]
                && batch != self.batch(set.row)
                && self.fits(set, other)
            {
                *best = (change, Some((set, other)));
            }
        }
    }

    /// Whether each set can take the place of the other: no row goes over its bounds, the tokens of
    /// the two microbatches do not get more uneven, and no padding is added.
    fn fits(&self, one: Set, other: Set) -> bool {
        let table = self.table;
        let bounds = table.shape.bounds;
        let fits = |gone: Set, new: Set| {
            let row = gone.row as usize;
            let items = table.work.row(row).len() + new.len as usize - gone.len as usize;
            let used = table.used[row] - gone.tokens + new.tokens;
            (1..=bounds.limit as usize).contains(&items) && used <= bounds.capacity
        };
        if !fits(one, other) || !fits(other, one) {
            return false;
        }
        if one.tokens == other.tokens {
            return true;
        }
        let tokens = |set: Set| -> i64 {
            let rows = table.rows_of_batch(set.row);
            table.used[rows].iter().map(|&used| i64::from(used)).sum()
        };
        let more = i64::from(other.tokens) - i64::from(one.tokens);
        let size = |set, tokens| self.batch_size(set, tokens);
        more * (tokens(one) - tokens(other) + more) <= 0
            && size(one, other.tokens) + size(other, one.tokens)
                <= size(one, one.tokens) + size(other, other.tokens)
    }

    /// Positions in the rows of the set's microbatch, if the set had so many tokens.
    fn batch_size(&self, set: Set, tokens: u32) -> u64 {
        let table = self.table;
        let used = table
            .rows_of_batch(set.row)
            .map(|row| match row == set.row as usize {
                true => table.used[row] - set.tokens + tokens,
                false => table.used[row],
            });
        table
            .shape
            .size(table.rows_per_batch, used.max().unwrap_or(0))
    }
}
