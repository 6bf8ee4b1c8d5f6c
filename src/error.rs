//! What can go wrong, as data and then as a sentence.
//!
//! There is one [`Error`] for the whole crate. Each variant carries the numbers that a caller needs to find the
//! fault: which sample, what was found, what was allowed. The sentence is lower case, has no full stop, and ends with
//! the remedy where there is one. [`Error::kind`] says which exception class the sentence becomes on the other side of
//! the bridge, so that Python raises `ValueError`, `TypeError` or `IndexError` and C++ throws `c10::ValueError` and so on.

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
    /// A fault of our own: `RuntimeError`.
    Internal,
}

/// What went wrong, with the numbers needed to find it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- settings ----
    /// A setting that does not exist.
    #[error("unknown setting '{key}'{}", nearest.map_or(String::new(), |n| format!(", did you mean '{n}'?")))]
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
        expected: &'static str,
    },
    /// A setting of the wrong kind: a string for a number, a bool for an integer.
    #[error("{key} is {found}, but must be {expected}")]
    SettingType {
        /// The setting.
        key: &'static str,
        /// The value, as JSON.
        found: String,
        /// What is allowed.
        expected: &'static str,
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
        "sample {sample} has label count {count}, but only {most} of its tokens can be supervised: \
         count with multipack.label_counts and the same settings"
    )]
    LabelCount {
        /// The sample.
        sample: usize,
        /// Its label count.
        count: i64,
        /// The most that its (truncated) length allows.
        most: i64,
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
        "{microbatches} complete microbatches for {world_size} ranks: at least one each is needed; lower \
         micro_batch_size or sequence_len, use fewer ranks, or set incomplete_batches to fill"
    )]
    TooFewMicrobatches {
        /// Complete microbatches in the epoch.
        microbatches: usize,
        /// Data-parallel ranks.
        world_size: usize,
    },

    // ---- our own faults ----
    /// A panic or a broken invariant inside this crate.
    #[error("internal error: {message}; please report it")]
    Internal {
        /// What was seen.
        message: String,
    },
}

impl Error {
    /// The exception class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::SettingType { .. } => ErrorKind::Type,
            Error::Internal { .. } => ErrorKind::Internal,
            _ => ErrorKind::Value,
        }
    }
}
