//! How many items there are of each size.
//!
//! Lengths repeat: ten million samples have a few thousand distinct lengths. The best-fit packer
//! and the lower bound work on this count instead of on the items. O(n + largest size) where sizes
//! are dense enough for a table, else O(n log n) by sorting.

/// The distinct sizes, falling, each with the number of its items.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    pub fn of(sizes: impl ExactSizeIterator<Item = u32> + Clone) -> Histogram {
        let largest = sizes.clone().max().unwrap_or(0) as usize;
        let mut histogram = Histogram {
            sizes: Vec::new(),
            counts: Vec::new(),
        };
        if largest <= table_bound(sizes.len()) {
            let mut table = vec![0u32; largest + 1];
            sizes.for_each(|size| table[size as usize] += 1);
            for (size, &count) in table
                .iter()
                .enumerate()
                .rev()
                .filter(|&(_, &count)| count > 0)
            {
                histogram.sizes.push(size as u32);
                histogram.counts.push(count);
            }
        } else {
            let mut sorted: Vec<u32> = sizes.collect();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            for equal in sorted.chunk_by(|a, b| a == b) {
                histogram.sizes.push(equal[0]);
                histogram.counts.push(equal.len() as u32);
            }
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

    /// Panics unless every item fits into an empty row.
    pub(super) fn check(&self, bounds: super::Bounds) {
        for size in [self.sizes.first(), self.sizes.last()]
            .into_iter()
            .flatten()
        {
            bounds.checked(*size);
        }
    }

    /// From a size to the number of the largest class that is not above it: of the class itself
    /// where there is one. The number of classes where all are above it.
    pub(super) fn lookup(&self) -> impl Fn(u32) -> u32 + Send + Sync {
        let items: usize = self.counts.iter().map(|&count| count as usize).sum();
        let largest = self.sizes.first().copied().unwrap_or(0);
        let table = (largest as usize <= table_bound(items)).then(|| {
            let mut table = vec![self.len() as u32; largest as usize + 1];
            let mut above = largest as usize + 1;
            for (class, &size) in self.sizes.iter().enumerate() {
                table[size as usize..above].fill(class as u32);
                above = size as usize;
            }
            table
        });
        move |size| match &table {
            Some(table) => table[size.min(largest) as usize],
            None => self.sizes.partition_point(|&other| other > size) as u32,
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
