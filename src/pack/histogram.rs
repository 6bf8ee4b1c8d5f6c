//! How many items there are of each size.
//!
//! Lengths repeat: ten million samples have a few thousand distinct lengths. The best-fit packer
//! and the lower bound work on this count instead of on the items. O(n + largest size) where sizes
//! are dense enough for a table, else O(n log n) by sorting.

use crate::parallel;

/// Items for one piece of a count or a sort: fewer are done before a thread is woken.
const PIECE: usize = 1 << 17;

/// The distinct sizes, falling, each with the number of its items.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Distinct sizes in tokens, falling.
    pub sizes: Vec<u32>,
    /// Items of each size.
    pub counts: Vec<u32>,
}

impl Histogram {
    /// Counts the sizes. Every size is at least 1.
    ///
    /// ```
    /// use multipack::pack::Histogram;
    ///
    /// let histogram = Histogram::of([3, 5, 3].into_iter());
    /// assert_eq!(histogram.sizes, [5, 3]);
    /// assert_eq!(histogram.counts, [1, 2]);
    /// ```
    pub fn of(sizes: impl ExactSizeIterator<Item = u32> + Clone + Send + Sync) -> Histogram {
        Histogram::by_pieces(sizes, 1).0
    }

    /// Counts the sizes in pieces, at most one for each thread, and returns beside the whole what
    /// each piece has of each class.
    pub(super) fn by_pieces(
        sizes: impl ExactSizeIterator<Item = u32> + Clone + Send + Sync,
        threads: usize,
    ) -> (Histogram, Vec<Vec<u32>>) {
        let bound = table_bound(sizes.len());
        // A table for each piece must not outgrow the items.
        let pieces = threads.min(sizes.len() / PIECE).max(1);
        let piece = sizes.len().div_ceil(pieces);
        let mut tables: Vec<Option<Vec<u32>>> = vec![None; pieces];
        let parts = tables.iter_mut().enumerate().collect();
        parallel::for_each(
            threads,
            parts,
            |(number, table): (usize, &mut Option<_>)| {
                *table = tally(sizes.clone().skip(number * piece).take(piece), bound);
            },
        );
        let Some(tables) = tables.into_iter().collect::<Option<Vec<Vec<u32>>>>() else {
            let histogram = Histogram::sparse(sizes.collect());
            let counts = histogram.counts.clone();
            return (histogram, vec![counts]);
        };
        let longest = tables.iter().map(Vec::len).max().unwrap_or(0);
        let mut histogram = Histogram::default();
        for size in (1..longest).rev() {
            let count = tables.iter().filter_map(|table| table.get(size)).sum();
            if count > 0 {
                histogram.sizes.push(size as u32);
                histogram.counts.push(count);
            }
        }
        let of_piece = |table: &Vec<u32>| {
            let count = |&size: &u32| table.get(size as usize).copied().unwrap_or(0);
            histogram.sizes.iter().map(count).collect()
        };
        let pieces = tables.iter().map(of_piece).collect();
        (histogram, pieces)
    }

    fn sparse(mut sizes: Vec<u32>) -> Histogram {
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let mut histogram = Histogram::default();
        for equal in sizes.chunk_by(|a, b| a == b) {
            histogram.sizes.push(equal[0]);
            histogram.counts.push(equal.len() as u32);
        }
        histogram
    }

    /// Distinct sizes.
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// For each size up to the largest, the number of the largest class that is not above it: of
    /// the class itself where there is one, the number of classes where all are above it. None
    /// where sizes are too sparse for a table.
    pub(super) fn table(&self) -> Option<Vec<u32>> {
        let items: usize = self.counts.iter().map(|&count| count as usize).sum();
        let largest = self.sizes.first().copied().unwrap_or(0) as usize;
        (largest <= table_bound(items)).then(|| {
            let mut table = vec![self.len() as u32; largest + 1];
            let mut above = largest + 1;
            for (class, &size) in self.sizes.iter().enumerate() {
                table[size as usize..above].fill(class as u32);
                above = size as usize;
            }
            table
        })
    }

    /// From a size to the number of the largest class that is not above it, as in [`Self::table`].
    pub(super) fn lookup(&self) -> impl Fn(u32) -> u32 + Send + Sync + use<> {
        let table = self.table();
        let largest = self.sizes.first().copied().unwrap_or(0);
        let sizes = match table {
            Some(_) => Vec::new(),
            None => self.sizes.clone(),
        };
        move |size| match &table {
            Some(table) => table[size.min(largest) as usize],
            None => sizes.partition_point(|&other| other > size) as u32,
        }
    }

    /// A number of rows that no packing can beat; see [`super::lower_bound`].
    pub(super) fn lower_bound(&self, bounds: super::Bounds) -> u64 {
        let capacity = u64::from(bounds.capacity);
        let classes = || self.sizes.iter().zip(&self.counts);
        // Running sums over the falling sizes: items and tokens of the classes before each.
        let (mut items, mut tokens) = (vec![0u64], vec![0u64]);
        for (&size, &count) in classes() {
            items.push(items[items.len() - 1] + u64::from(count));
            tokens.push(tokens[tokens.len() - 1] + u64::from(size) * u64::from(count));
        }
        let all_tokens = tokens[self.len()];
        let above = |bound: u64| self.sizes.partition_point(|&size| u64::from(size) > bound);
        let half = above(capacity / 2);

        let mut best = all_tokens.div_ceil(capacity);
        for (class, &size) in self.sizes.iter().enumerate() {
            let most = (bounds.capacity / size).min(bounds.limit);
            best = best.max(items[class + 1].div_ceil(u64::from(most)));
        }
        for class in half..self.len() {
            let threshold = u64::from(self.sizes[class]);
            let alone = above(capacity - threshold).min(half);
            let beside = items[half] - items[alone];
            let free = beside * capacity - (tokens[half] - tokens[alone]);
            let small = tokens[class + 1] - tokens[half];
            best = best.max(items[half] + small.saturating_sub(free).div_ceil(capacity));
        }
        best
    }
}

/// The largest size for which a table of all sizes is worth its memory.
fn table_bound(items: usize) -> usize {
    (4 * items).max(1 << 10)
}

/// How many there are of each size, up to the largest; none if one is above `bound`.
fn tally(sizes: impl Iterator<Item = u32>, bound: usize) -> Option<Vec<u32>> {
    let mut table = vec![0u32; bound.min(1 << 12) + 1];
    let counted = sizes.map(|size| size as usize).try_for_each(|size| {
        if size >= table.len() {
            if size > bound {
                return None;
            }
            table.resize(bound.min(2 * size) + 1, 0);
        }
        table[size] += 1;
        Some(())
    });
    counted.map(|()| table)
}
