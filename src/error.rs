//! What can go wrong, as data and then as a sentence.
//!
//! There is one [`Error`] for the whole crate. Each variant carries the numbers that a caller needs
//! to find the fault: which sample, what was found, what was allowed. The sentence is lower case,
//! has no full stop, and ends with the remedy where there is one. [`Error::kind`] says which
//! exception class the sentence becomes on the other side of the bridge, so that Python raises
//! `ValueError`, `TypeError` or `IndexError` and C++ throws `c10::ValueError` and so on.

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of an [`Error`]: what Python raises and C++ throws for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// A value outside what is allowed: `ValueError`.
    Value,
    /// A wrong dtype or a wrong kind of setting: `TypeError`.
    Type,
    /// An index past the end of what it points into: `IndexError`.
    Index,
    /// A fault of our own, or too little memory: `RuntimeError`, as torch has it.
    Internal,
}

/// What went wrong, with the numbers needed to find it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- settings ----
    /// A setting that does not exist.
    ///
    /// The key is printed escaped: a C++ exception would end its sentence at a NUL.
    #[error(
        "unknown setting '{}'{}",
        key.escape_debug(),
        nearest.map_or(String::new(), |n| format!(", did you mean '{n}'?"))
    )]
    UnknownSetting {
        /// The key as given.
        key: String,
        /// The known key nearest to it, if one is near.
        nearest: Option<&'static str>,
    },
    /// A setting of the right kind whose value is not allowed.
    #[error("{key} is {found}, but must be {expected}")]
    SettingValue {
        /// The setting.
        key: &'static str,
        /// The value, as JSON.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// A setting of the wrong kind: a string for a number, a bool for an integer.
    #[error("{key} is {found}, but must be {expected}")]
    SettingType {
        /// The setting.
        key: &'static str,
        /// The value, as JSON.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// A setting that is given more than once.
    #[error("setting '{key}' is given twice: leave one out")]
    RepeatedSetting {
        /// The setting.
        key: &'static str,
    },
    /// Settings that exclude one another.
    #[error("{message}")]
    SettingConflict {
        /// Names the settings and the reason.
        message: String,
    },
    /// The settings are not a JSON object.
    #[error("the settings are not a JSON object: {message}")]
    SettingSyntax {
        /// The parser's words.
        message: String,
    },

    // ---- planning ----
    /// Two per-sample arrays of different lengths.
    #[error("{name} has {found} entries, but lengths has {expected}: give one entry per sample")]
    SampleCount {
        /// The argument.
        name: &'static str,
        /// Its entries.
        found: usize,
        /// The number of samples.
        expected: usize,
    },
    /// A negative length.
    #[error("sample {sample} has length {length}, but a length is 0 or more tokens")]
    NegativeLength {
        /// The sample.
        sample: usize,
        /// Its length.
        length: i64,
    },
    /// A label count below 0 or above the sample's length.
    #[error(
        "sample {sample} has {count} labels but {length} tokens: a label count is from 0 to the \
         length, after truncation if excess_length_strategy is truncate; multipack.label_counts \
         counts so"
    )]
    LabelCount {
        /// The sample.
        sample: usize,
        /// Its label count.
        count: i64,
        /// Its tokens, after truncation.
        length: i64,
    },
    /// More samples than a plan can number.
    #[error(
        "{found} samples are more than a plan can number, at most {}",
        u32::MAX
    )]
    TooManySamples {
        /// Samples given.
        found: usize,
    },
    /// An over-long sample under the policy `raise`.
    #[error(
        "sample {sample} has {length} tokens, more than sequence_len {bound}; raise sequence_len, \
         or set excess_length_strategy to drop or truncate"
    )]
    OverLong {
        /// The sample.
        sample: usize,
        /// Its tokens.
        length: i64,
        /// The most tokens allowed.
        bound: i64,
    },
    /// Fewer microbatches than ranks.
    #[error(
        "{} for {world_size} ranks: at least one each is needed; lower micro_batch_size or \
         sequence_len, use fewer ranks, or set incomplete_batches to fill",
        counted(*microbatches, "complete microbatch", "complete microbatches")
    )]
    TooFewMicrobatches {
        /// Complete microbatches in the epoch.
        microbatches: usize,
        /// Data-parallel ranks.
        world_size: usize,
    },

    // ---- tensors ----
    /// A tensor argument of the wrong dtype.
    #[error("{name} has dtype {found}, but must be {expected}")]
    TensorDtype {
        /// The argument, with the place in the list if it is one of a list.
        name: String,
        /// Its dtype, in torch's words.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// A tensor argument of the wrong shape.
    #[error("{name} has shape {found:?}, but must be {expected}")]
    TensorShape {
        /// The argument, with the place in the list if it is one of a list.
        name: String,
        /// Its shape.
        found: Vec<i64>,
        /// What is allowed.
        expected: &'static str,
    },
    /// A tensor argument that is not in main memory.
    #[error("{name} is on {found}, but must be on the CPU: move it there with .cpu()")]
    TensorDevice {
        /// The argument, with the place in the list if it is one of a list.
        name: String,
        /// Its device.
        found: String,
    },
    /// An unsigned entry of a tensor argument that is too large to be read as int64.
    #[error("{name}[{at}] is {found}, but must be {} or less", i64::MAX)]
    TensorValue {
        /// The argument.
        name: String,
        /// The place, counted along the flattened tensor.
        at: usize,
        /// What stands there.
        found: u64,
    },
    /// A sample with more or fewer labels than tokens, where each sample is a tensor of its own.
    #[error(
        "labels[{sample}] has {labels} entries, but input_ids[{sample}] has {tokens}: \
         give one label per token, -100 where it is not supervised"
    )]
    SampleLabels {
        /// The sample.
        sample: usize,
        /// Its labels.
        labels: usize,
        /// Its tokens.
        tokens: usize,
    },
    /// Rows of more or fewer samples than there are, where each sample is a tensor of its own.
    #[error(
        "row_offsets ends at {found}, but input_ids has {samples} tensors: the last row ends there"
    )]
    ListRows {
        /// The last entry of row_offsets.
        found: i64,
        /// Tensors of tokens.
        samples: usize,
    },
    /// Labels for more or fewer samples than there are, where each sample is a tensor of its own.
    #[error(
        "labels has {labels} tensors, but input_ids has {samples}: give one per sample, or no \
         labels at all"
    )]
    LabelledSamples {
        /// Tensors of labels.
        labels: usize,
        /// Tensors of tokens.
        samples: usize,
    },
    /// The environment asks for a number of threads that is none.
    #[error(
        "the environment variable MULTIPACK_NUM_THREADS is '{found}', but must be a positive \
         integer"
    )]
    ThreadCount {
        /// What the variable holds.
        found: String,
    },
    /// Torch refused, mostly for want of memory.
    #[error("torch: {message}")]
    Torch {
        /// The first line of its words.
        message: String,
    },

    // ---- batches ----
    /// An option of a batch out of range.
    #[error("{name} is {found}, but must be {expected}")]
    BatchOption {
        /// The option.
        name: &'static str,
        /// Its value.
        found: i64,
        /// What is allowed.
        expected: &'static str,
    },
    /// More or fewer labels than tokens.
    #[error(
        "labels has {labels} entries, but tokens has {tokens}: they share offsets, so give one per \
         token"
    )]
    LabelTokens {
        /// The labels.
        labels: usize,
        /// The tokens.
        tokens: usize,
    },
    /// Offsets without any entry.
    #[error("{name} is empty, but has one entry more than what it delimits: [0] for nothing")]
    EmptyOffsets {
        /// The argument.
        name: &'static str,
    },
    /// An offset below 0.
    #[error("offsets[{entry}] is {offset}, but an offset is 0 or more")]
    NegativeOffset {
        /// The place in offsets.
        entry: usize,
        /// What stands there.
        offset: i64,
    },
    /// An offset smaller than the one before it.
    #[error("offsets[{entry}] is {offset}, less than the {before} before it: offsets may not fall")]
    FallingOffsets {
        /// The place in offsets.
        entry: usize,
        /// What stands there.
        offset: i64,
        /// What stands before it.
        before: i64,
    },
    /// A sample that ends after the last token.
    #[error("offsets[{entry}] is {offset}, past the end of the {tokens} tokens")]
    OffsetPastTokens {
        /// The place in offsets.
        entry: usize,
        /// What stands there.
        offset: i64,
        /// The tokens, or labels, that there are.
        tokens: usize,
    },
    /// A sample that does not exist.
    #[error("index[{entry}] is {sample}, but samples are numbered from 0 and there are {samples}")]
    SampleIndex {
        /// The place in index.
        entry: usize,
        /// What stands there.
        sample: i64,
        /// The number of samples.
        samples: usize,
    },
    /// A first row that leaves samples out.
    #[error("row_offsets[0] is {found}, but the first row starts at 0")]
    RowsStart {
        /// What stands there.
        found: i64,
    },
    /// A last row that ends elsewhere than the samples.
    #[error(
        "row_offsets ends at {found}, but index has {samples} entries: the last row ends there"
    )]
    RowsEnd {
        /// Its last entry.
        found: i64,
        /// The samples of the microbatch.
        samples: usize,
    },
    /// A row without samples.
    #[error(
        "row {row} starts at {start} and ends at {end} of index: every row has at least one sample"
    )]
    EmptyRow {
        /// The row.
        row: usize,
        /// Its entry of row_offsets.
        start: i64,
        /// The next one.
        end: i64,
    },
    /// A row that needs more room than it was given.
    #[error(
        "row {row} needs {tokens} tokens, more than row_len {row_len}; raise row_len, or put fewer \
         samples in the row"
    )]
    RowTooLong {
        /// The row.
        row: usize,
        /// The tokens of its slots.
        tokens: usize,
        /// The tokens it may have.
        row_len: usize,
    },
    /// A batch that cu_seqlens cannot count.
    #[error(
        "a batch of shape ({rows}, {row_len}) has more tokens than the {} that int32 offsets can \
         count; use fewer or shorter rows",
        i32::MAX
    )]
    BatchTooLong {
        /// Its rows.
        rows: usize,
        /// The tokens of each, or of the first that is too long, as far as it was added up.
        row_len: usize,
    },
    /// A padded tail left out of cu_seqlens, with rows behind it.
    #[error(
        "padded_tail 'none' needs a batch of one row, but there are {rows}: cu_seqlens could not \
         say where the next row begins; use 'own'"
    )]
    TailLeftOut {
        /// The rows.
        rows: usize,
    },
    /// A padded tail merged into a sample that would see it.
    #[error(
        "padded_tail 'last' needs causal attention: without it the last sample attends to its \
         padding; use 'own'"
    )]
    TailMerged,
    /// A mask that would not fit in memory, or should not.
    #[error(
        "a mask of shape ({rows}, 1, {row_len}, {row_len}) takes {bytes} bytes, more than the \
         {limit} that a mask may take; use attention that reads cu_seqlens, or fewer or shorter \
         rows"
    )]
    MaskTooLarge {
        /// The rows of the batch.
        rows: usize,
        /// The tokens of each.
        row_len: usize,
        /// The bytes of the mask.
        bytes: u128,
        /// The most bytes of a mask.
        limit: u128,
    },

    /// Fewer samples than rows that they should be split over.
    #[error(
        "{samples} samples cannot be split over {rows} rows, the next multiple of the {round} rows \
         of a round of all ranks; use fewer ranks or a smaller micro_batch_size, or set \
         incomplete_batches to drop or fill"
    )]
    TooFewToSplit {
        /// Retained samples.
        samples: usize,
        /// Rows that are needed.
        rows: usize,
        /// Rows of a round.
        round: usize,
    },
    /// More repeats to fill a round than is sensible.
    #[error(
        "filling the last round of {} would repeat {repeats} samples or rows of the {rows} rows \
         that there are, more than {bound}; use fewer ranks or smaller batches",
        counted(*world_size, "rank", "ranks")
    )]
    TooManyRepeats {
        /// Repeated samples, or rows if these are more.
        repeats: usize,
        /// The most that are allowed.
        bound: usize,
        /// Data-parallel ranks.
        world_size: usize,
        /// Rows before any is repeated.
        rows: usize,
    },
    /// A label count that contradicts what is said of the first label.
    #[error(
        "sample {sample} has {count} labels of {length} tokens, but label_starts says that its \
         first token is {} label; multipack.label_counts gives both",
        if *start { "a" } else { "no" }
    )]
    LabelStart {
        /// The sample.
        sample: usize,
        /// Its label count.
        count: i64,
        /// Its tokens, after truncation.
        length: i64,
        /// Whether its first label is said to be supervised.
        start: bool,
    },
    /// A rank or a microbatch that does not exist.
    #[error("{name} is {found}, but {}", range(*end))]
    OutOfRange {
        /// The argument.
        name: &'static str,
        /// Its value.
        found: i64,
        /// One past the largest value allowed; 0 for a microbatch of an empty plan.
        end: i64,
    },
    /// Arrays that are not a plan.
    #[error("these arrays are no plan: {message}")]
    BrokenPlan {
        /// What is wrong.
        message: String,
    },

    // ---- the machine ----
    /// More repeats to fill a round than there is memory for.
    #[error(
        "not enough memory: filling the last round of {} would repeat {repeats} samples or rows, \
         and {bytes} bytes could not be had; use fewer ranks or smaller batches",
        counted(*world_size, "rank", "ranks")
    )]
    RepeatsOutOfMemory {
        /// Repeated samples, or rows if these are more.
        repeats: usize,
        /// How much was asked for.
        bytes: usize,
        /// Data-parallel ranks.
        world_size: usize,
    },
    /// More memory than there is, or than a limit allows.
    #[error("not enough memory: {bytes} bytes could not be had; use fewer samples or smaller rows")]
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
    },

    // ---- our own faults ----
    /// A panic or a broken invariant inside this crate.
    #[error("internal error: {message}; please report it")]
    Internal {
        /// What was seen.
        message: String,
    },
}

/// So many of something, as in "1 row" and "2 rows".
pub(crate) fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

impl Error {
    /// The exception class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::SettingType { .. } => ErrorKind::Type,
            Error::OutOfRange { .. } | Error::SampleIndex { .. } => ErrorKind::Index,
            Error::TensorDtype { .. } => ErrorKind::Type,
            Error::Torch { .. }
            | Error::OutOfMemory { .. }
            | Error::RepeatsOutOfMemory { .. }
            | Error::Internal { .. } => ErrorKind::Internal,
            _ => ErrorKind::Value,
        }
    }
}

/// What [`Error::OutOfRange`] allows. There is always a rank, but a plan may have no microbatches.
fn range(end: i64) -> String {
    match end {
        0 => "the plan is empty: it has no microbatches".into(),
        _ => format!("must be from 0 to {}", end - 1),
    }
}
