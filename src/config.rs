//! The settings of a plan and of its batches, validated once.
//!
//! [`Config`] is what every layer above speaks: Python mirrors it as a dataclass and hands it over
//! as JSON, the op `multipack::plan` takes that JSON, and a saved plan carries it.
//! [`Config::from_json`] checks each key by one table of rules and then the keys against one
//! another; [`crate::plan()`] checks once more, for settings that were made otherwise. A setting of
//! the wrong kind, out of range, misspelt, or at odds with another one is an error that names it;
//! nothing is clamped.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Error, Result};

/// The most tokens that a microbatch may hold: `cu_seqlens` is int32.
pub const MOST_TOKENS: u64 = i32::MAX as u64;

/// The longest JSON that is read: a thousand times what all settings take.
const MOST_BYTES: usize = 1 << 20;

/// The largest weight of a token beside a squared length. Beyond it costs would lose the lengths.
const MOST_WEIGHT: f64 = 1e12;

/// Which of the two kinds of passes over the data is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Training: another order each epoch.
    Train,
    /// Evaluation: its own batch size, the same order every time, nothing left out, never balanced.
    Eval,
}

/// How the samples of a microbatch lie in its tensors. Follows from the settings: see
/// [`Config::layout`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchLayout {
    /// Packed into one row of `micro_batch_size × sequence_len`.
    OneRow,
    /// Packed into `micro_batch_size` rows of `sequence_len` each.
    RealRows,
    /// `micro_batch_size` samples, each in a row of its own, padded to the longest.
    Padded,
    /// `micro_batch_size` samples end to end in one row, without padding.
    Flattened,
}

impl BatchLayout {
    /// Whether rows are packed up to a capacity, rather than given a fixed number of samples.
    pub fn is_packed(self) -> bool {
        matches!(self, BatchLayout::OneRow | BatchLayout::RealRows)
    }
}

/// Declares an enum of setting values together with the list of their names.
macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// The values as they are written in settings.
            pub const NAMES: &'static [&'static str] = &[$($text),+];
        }

        impl std::str::FromStr for $name {
            type Err = ();

            fn from_str(text: &str) -> std::result::Result<Self, ()> {
                match text { $($text => Ok(Self::$variant),)+ _ => Err(()) }
            }
        }
    };
}

choices! {
    /// How samples are put into rows. See [`crate::pack`] for when each is the right one.
    Algorithm {
        /// Longest first, into the fullest row that still has space: the densest.
        BestFitDecreasing = "best_fit_decreasing",
        /// Exact fills by random search: denser where best fit is poor.
        Tight = "tight",
        /// In seeded order, into the first row that still has space.
        FirstFit = "first_fit",
        /// In seeded order, into the last row, or a new one.
        NextFit = "next_fit",
    }
}

choices! {
    /// What happens to a sample longer than `sequence_len`.
    ExcessLength {
        /// It is left out, counted and reported.
        Drop = "drop",
        /// Its first `sequence_len` tokens are kept.
        Truncate = "truncate",
        /// It is an error.
        Raise = "raise",
    }
}

choices! {
    /// What happens to rows that do not fill a round of all ranks.
    Incomplete {
        /// They are left out: others each epoch, but for sequential packing, which leaves out the
        /// end.
        Drop = "drop",
        /// The fullest rows are split until a round is full.
        Split = "split",
        /// Rows are repeated, with all their labels at -100.
        Fill = "fill",
    }
}

choices! {
    /// What the padding after the last sample of a row belongs to.
    PaddedTail {
        /// Segments of its own, none longer than `sequence_len`.
        Own = "own",
        /// The last sample's segment; for causal models only.
        Last = "last",
        /// Nothing: `cu_seqlens` ends at the last real token. One row only.
        None = "none",
    }
}

choices! {
    /// What the work of a microbatch is measured by.
    BalanceCost {
        /// `padded` for the padded layout, else `tokens`.
        Auto = "auto",
        /// Real tokens.
        Tokens = "tokens",
        /// Rows × row length.
        Padded = "padded",
        /// `balance_cost_linear` × tokens + Σ length².
        Attention = "attention",
    }
}

/// All settings, with their defaults. The Python class of this name has the same keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Most tokens of one sample, and the unit of the row capacity. Needed to plan.
    pub sequence_len: Option<u64>,
    /// Rows of a microbatch, or samples in the layouts with a fixed number of them.
    pub micro_batch_size: u64,
    /// The same for evaluation; none: as `micro_batch_size`.
    pub eval_batch_size: Option<u64>,
    /// Microbatches per rank and optimizer step.
    pub gradient_accumulation_steps: u64,
    /// Data-parallel ranks.
    pub world_size: u64,
    /// Whether rows are packed up to a capacity.
    pub sample_packing: bool,
    /// Without packing: samples end to end in one row instead of padded rows.
    pub batch_flattening: bool,
    /// Packed: `micro_batch_size` rows of `sequence_len` instead of one long row.
    pub multipack_real_batches: Option<bool>,
    /// How rows are packed.
    pub sample_packing_algorithm: Algorithm,
    /// Keep the dataset's order: next fit, no shuffling.
    pub sample_packing_sequentially: bool,
    /// Most samples in a row.
    pub sample_packing_bin_size: Option<u64>,
    /// Pack so many samples at a time.
    pub sample_packing_group_size: Option<u64>,
    /// Even out the supervised tokens.
    pub balance_labels: bool,
    /// Optimizer steps balanced together. The whole epoch is balanced at once, whatever this says: a
    /// window larger than 1 changes nothing.
    pub label_balance_window_optim_steps: u64,
    /// What the work of a microbatch is measured by.
    pub balance_cost: BalanceCost,
    /// Weight of a token beside Σ length² when `balance_cost` is `attention`.
    pub balance_cost_linear: f64,
    /// What happens to a sample longer than `sequence_len`.
    pub excess_length_strategy: ExcessLength,
    /// Shorter samples are dropped and counted; empty ones always.
    pub min_sample_len: u64,
    /// Drop samples without a supervised token, where label counts are given.
    pub drop_unlabelled: bool,
    /// What happens to rows that do not fill a round of all ranks, in training.
    pub incomplete_batches: Incomplete,
    /// A row's length is rounded up to a multiple of this.
    pub pad_to_multiple_of: u64,
    /// Pad every row to the capacity.
    pub pad_to_sequence_len: bool,
    /// Each sample's slot is rounded up to a multiple of this.
    pub align_samples_to: u64,
    /// Whether the first label of every sample is masked, so that no label crosses a border.
    pub mask_first_label: bool,
    /// What the padding at the end of a row belongs to.
    pub padded_tail: PaddedTail,
    /// `sample_packing` for evaluation; none: the same.
    pub eval_sample_packing: Option<bool>,
    /// Samples per buffer of a stream.
    pub streaming_multipack_buffer_size: u64,
    /// The seed of everything, unless `data_seed` is given.
    pub seed: u64,
    /// The seed of planning; none: `seed`.
    pub data_seed: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            sequence_len: None,
            micro_batch_size: 1,
            eval_batch_size: None,
            gradient_accumulation_steps: 1,
            world_size: 1,
            sample_packing: true,
            batch_flattening: false,
            multipack_real_batches: None,
            sample_packing_algorithm: Algorithm::BestFitDecreasing,
            sample_packing_sequentially: false,
            sample_packing_bin_size: None,
            sample_packing_group_size: None,
            balance_labels: false,
            label_balance_window_optim_steps: 1,
            balance_cost: BalanceCost::Auto,
            balance_cost_linear: 0.0,
            excess_length_strategy: ExcessLength::Drop,
            min_sample_len: 1,
            drop_unlabelled: true,
            incomplete_batches: Incomplete::Drop,
            pad_to_multiple_of: 1,
            pad_to_sequence_len: false,
            align_samples_to: 1,
            mask_first_label: true,
            padded_tail: PaddedTail::Own,
            eval_sample_packing: None,
            streaming_multipack_buffer_size: 10_000,
            seed: 0,
            data_seed: None,
        }
    }
}

/// What a key accepts.
#[derive(Clone, Copy)]
enum Accepts {
    /// An integer from 1 to [`MOST_TOKENS`].
    Count,
    /// An integer from 0.
    Seed,
    /// A number from 0 to [`MOST_WEIGHT`].
    Weight,
    Bool,
    Choice(&'static [&'static str]),
}

use Accepts::{Bool, Choice, Count, Seed, Weight};

/// One rule per key; the one place that says what a single value may be.
const RULES: &[(&str, Accepts)] = &[
    ("sequence_len", Count),
    ("micro_batch_size", Count),
    ("eval_batch_size", Count),
    ("gradient_accumulation_steps", Count),
    ("world_size", Count),
    ("sample_packing", Bool),
    ("batch_flattening", Bool),
    ("multipack_real_batches", Bool),
    ("sample_packing_algorithm", Choice(Algorithm::NAMES)),
    ("sample_packing_sequentially", Bool),
    ("sample_packing_bin_size", Count),
    ("sample_packing_group_size", Count),
    ("balance_labels", Bool),
    ("label_balance_window_optim_steps", Count),
    ("balance_cost", Choice(BalanceCost::NAMES)),
    ("balance_cost_linear", Weight),
    ("excess_length_strategy", Choice(ExcessLength::NAMES)),
    ("min_sample_len", Count),
    ("drop_unlabelled", Bool),
    ("incomplete_batches", Choice(Incomplete::NAMES)),
    ("pad_to_multiple_of", Count),
    ("pad_to_sequence_len", Bool),
    ("align_samples_to", Count),
    ("mask_first_label", Bool),
    ("padded_tail", Choice(PaddedTail::NAMES)),
    ("eval_sample_packing", Bool),
    ("streaming_multipack_buffer_size", Count),
    ("seed", Seed),
    ("data_seed", Seed),
];

impl Accepts {
    fn expected(self) -> String {
        match self {
            Count => format!("an integer from 1 to {MOST_TOKENS}"),
            Seed => format!("an integer from 0 to {}", u64::MAX),
            Weight => format!("a number from 0 to {MOST_WEIGHT:e}"),
            Bool => "true or false".into(),
            Choice(names) => format!("one of {}", names.join(", ")),
        }
    }

    fn check(self, key: &'static str, value: &Value) -> Result<()> {
        let (kind, range) = match self {
            Count => (
                is_integer(value),
                value
                    .as_u64()
                    .is_some_and(|v| (1..=MOST_TOKENS).contains(&v)),
            ),
            Seed => (is_integer(value), value.is_u64()),
            Weight => (
                value.is_number(),
                value
                    .as_f64()
                    .is_some_and(|v| (0.0..=MOST_WEIGHT).contains(&v)),
            ),
            Bool => (value.is_boolean(), true),
            Choice(names) => (
                value.is_string(),
                value.as_str().is_some_and(|v| names.contains(&v)),
            ),
        };
        let (found, expected) = (shown(&value.to_string()), self.expected());
        match (kind, range) {
            (true, true) => Ok(()),
            (true, false) => Err(Error::SettingValue {
                key,
                found,
                expected,
            }),
            (false, _) => Err(Error::SettingType {
                key,
                found,
                expected,
            }),
        }
    }
}

/// The entries of a JSON object in their order; a map would keep the last one of each key.
struct Given(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Given;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Given, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Given(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// A text as it is printed in an error: whole, unless it is a long one.
fn shown(text: &str) -> String {
    const MOST: usize = 100;
    let count = text.chars().count();
    if count <= MOST {
        return text.to_owned();
    }
    let start: String = text.chars().take(MOST).collect();
    format!("{start}… ({count} characters)")
}

/// An integer of any size. JSON integers beyond 64 bits arrive as floats without a fraction.
fn is_integer(value: &Value) -> bool {
    value.is_u64() || value.is_i64() || value.as_f64().is_some_and(|v| v.abs() >= 1e18)
}

impl Config {
    /// Reads settings from a JSON object; absent keys and nulls take their defaults.
    ///
    /// ```
    /// use multipack::Config;
    ///
    /// let config = Config::from_json(r#"{"sequence_len": 4096, "micro_batch_size": 2}"#)?;
    /// assert_eq!(config.micro_batch_size, 2);
    /// assert_eq!(config.gradient_accumulation_steps, 1);
    ///
    /// let error = Config::from_json(r#"{"sequence_length": 4096}"#).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "unknown setting 'sequence_length', did you mean 'sequence_len'?"
    /// );
    /// # Ok::<(), multipack::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::UnknownSetting`], [`Error::RepeatedSetting`], [`Error::SettingType`],
    /// [`Error::SettingValue`] and [`Error::SettingConflict`], each naming the key;
    /// [`Error::SettingSyntax`] for what is no JSON object, or is larger than a mebibyte.
    pub fn from_json(text: &str) -> Result<Config> {
        // Of a string in the place of the object it would repeat all.
        let syntax = |e: serde_json::Error| Error::SettingSyntax {
            message: shown(&e.to_string()),
        };
        if text.len() > MOST_BYTES {
            return Err(Error::SettingSyntax {
                message: format!("{} bytes, more than {MOST_BYTES}", text.len()),
            });
        }
        let Given(given) = serde_json::from_str(text).map_err(syntax)?;
        let mut settings = Config::default().to_map();
        let mut seen = Vec::with_capacity(RULES.len());
        for (key, value) in given {
            let Some((name, rule)) = RULES.iter().find(|(name, _)| *name == key) else {
                return Err(Error::UnknownSetting {
                    nearest: nearest_key(&key),
                    key: shown(&key),
                });
            };
            if seen.contains(name) {
                return Err(Error::RepeatedSetting { key: name });
            }
            seen.push(*name);
            if value.is_null() {
                continue;
            }
            rule.check(name, &value)?;
            settings.insert(key, value);
        }
        let config: Config = serde_json::from_value(settings.into()).map_err(syntax)?;
        config.check_together()?;
        Ok(config)
    }

    /// Checks every setting, for those that did not come from [`Config::from_json`].
    pub(crate) fn check(&self) -> Result<()> {
        let settings = self.to_map();
        for (name, rule) in RULES {
            match settings.get(*name) {
                // A weight that is no finite number is written as null, too.
                Some(Value::Null) if !matches!(rule, Weight) => continue,
                Some(value) => rule.check(name, value)?,
                None => continue,
            }
        }
        self.check_together()
    }

    /// All settings as a JSON object, in a fixed order: equal settings give equal text.
    pub fn to_json(&self) -> String {
        Value::Object(self.to_map()).to_string()
    }

    /// The settings that differ from the defaults, as a JSON object in a fixed order.
    ///
    /// Digests are made of this, so that a release with a further setting does not change them.
    pub fn to_short_json(&self) -> String {
        let defaults = Config::default().to_map();
        let mut settings = self.to_map();
        settings.retain(|key, value| defaults.get(key) != Some(value));
        Value::Object(settings).to_string()
    }

    fn to_map(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            other => unreachable!("settings are plain numbers, strings and bools: {other:?}"),
        }
    }

    /// Refuses settings that exclude one another or would have no effect.
    fn check_together(&self) -> Result<()> {
        let conflict = |message: String| Err(Error::SettingConflict { message });
        if self.balance_labels && self.sample_packing_sequentially {
            return conflict(
                "balance_labels moves samples between batches, so it cannot keep the order of \
                 sample_packing_sequentially"
                    .into(),
            );
        }
        if self.batch_flattening && self.sample_packing {
            return conflict(
                "batch_flattening lays a fixed number of samples end to end, so it needs \
                 sample_packing: false"
                    .into(),
            );
        }
        let packs_eval = self.eval_sample_packing.unwrap_or(self.sample_packing);
        if self.multipack_real_batches == Some(true) && !self.sample_packing && !packs_eval {
            return conflict(
                "multipack_real_batches shapes packed rows, so it needs sample_packing: true"
                    .into(),
            );
        }
        let orderly = [Algorithm::BestFitDecreasing, Algorithm::NextFit];
        if self.sample_packing_sequentially && !orderly.contains(&self.sample_packing_algorithm) {
            return conflict(
                "sample_packing_sequentially keeps the dataset's order by next fit, so another \
                 sample_packing_algorithm has no place beside it"
                    .into(),
            );
        }
        let Some(sequence_len) = self.sequence_len else {
            return Ok(());
        };
        if self.min_sample_len > sequence_len {
            return conflict(format!(
                "min_sample_len {} is more than sequence_len {sequence_len}: no sample could be kept",
                self.min_sample_len
            ));
        }
        for (key, batch_size) in [
            ("micro_batch_size", self.micro_batch_size),
            (
                "eval_batch_size",
                self.eval_batch_size.unwrap_or(self.micro_batch_size),
            ),
        ] {
            let slot = sequence_len.next_multiple_of(self.align_samples_to);
            if batch_size.saturating_mul(slot) > MOST_TOKENS {
                let aligned = match slot == sequence_len {
                    true => String::new(),
                    false => format!(", rounded up to {slot} by align_samples_to,"),
                };
                return conflict(format!(
                    "{key} {batch_size} × sequence_len {sequence_len}{aligned} is more than \
                     {MOST_TOKENS} tokens, the most that the int32 cu_seqlens of one microbatch can \
                     count"
                ));
            }
        }
        for split in [Split::Train, Split::Eval] {
            let layout = self.layout(split);
            let capacity = self.capacity(split)?;
            let bounded = layout.is_packed() || self.pad_to_sequence_len;
            if bounded && !capacity.is_multiple_of(self.align_samples_to) {
                return conflict(format!(
                    "align_samples_to {} must divide the row capacity {capacity}",
                    self.align_samples_to
                ));
            }
            let rows = match layout {
                BatchLayout::RealRows | BatchLayout::Padded => self.batch_size(split),
                BatchLayout::OneRow | BatchLayout::Flattened => 1,
            };
            if self.padded_tail == PaddedTail::None && rows > 1 {
                return conflict(format!(
                    "padded_tail: none leaves the tail out of cu_seqlens, which one row alone can do, \
                     but a microbatch has {rows} rows"
                ));
            }
        }
        Ok(())
    }

    /// How the samples of a microbatch lie in its tensors.
    pub fn layout(&self, split: Split) -> BatchLayout {
        let packed = match split {
            Split::Train => self.sample_packing,
            Split::Eval => self.eval_sample_packing.unwrap_or(self.sample_packing),
        };
        match (packed, self.multipack_real_batches.unwrap_or(false)) {
            (true, false) => BatchLayout::OneRow,
            (true, true) => BatchLayout::RealRows,
            (false, _) if self.batch_flattening => BatchLayout::Flattened,
            (false, _) => BatchLayout::Padded,
        }
    }

    /// Rows of a microbatch, or samples in the layouts with a fixed number of them.
    pub fn batch_size(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.micro_batch_size,
            Split::Eval => self.eval_batch_size.unwrap_or(self.micro_batch_size),
        }
    }

    /// Microbatches of a rank in an optimizer step. Evaluation has no steps: each stands alone.
    pub fn accumulation(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.gradient_accumulation_steps,
            Split::Eval => 1,
        }
    }

    /// Most tokens of a row.
    ///
    /// # Errors
    ///
    /// [`Error::SettingConflict`] without a `sequence_len`.
    pub fn capacity(&self, split: Split) -> Result<u64> {
        let sequence_len = self.require_sequence_len()?;
        Ok(match self.layout(split) {
            BatchLayout::OneRow | BatchLayout::Flattened => self.batch_size(split) * sequence_len,
            BatchLayout::RealRows | BatchLayout::Padded => sequence_len,
        })
    }

    /// The work of a microbatch in a layout: of its tokens, of their lengths squared, or of the
    /// positions in its rows.
    pub(crate) fn work(
        &self,
        layout: BatchLayout,
        tokens: f64,
        squares: impl FnOnce() -> f64,
        positions: f64,
    ) -> f64 {
        match (self.balance_cost, layout) {
            (BalanceCost::Attention, _) => self.balance_cost_linear * tokens + squares(),
            (BalanceCost::Padded, _) | (BalanceCost::Auto, BatchLayout::Padded) => positions,
            (BalanceCost::Tokens | BalanceCost::Auto, _) => tokens,
        }
    }

    /// `sequence_len`, or an error that asks for it.
    pub(crate) fn require_sequence_len(&self) -> Result<u64> {
        self.sequence_len.ok_or(Error::SettingConflict {
            message: "sequence_len is needed to plan: the most tokens of one sample".into(),
        })
    }

    /// The seed of planning.
    pub fn planning_seed(&self) -> u64 {
        self.data_seed.unwrap_or(self.seed)
    }
}

/// What other tools call our settings.
const ALIASES: &[(&str, &str)] = &[
    ("batch_size", "micro_batch_size"),
    ("max_length", "sequence_len"),
    ("max_seq_len", "sequence_len"),
    ("max_seq_length", "sequence_len"),
    ("packing", "sample_packing"),
    ("per_device_eval_batch_size", "eval_batch_size"),
    ("per_device_train_batch_size", "micro_batch_size"),
    ("seq_len", "sequence_len"),
    ("seqlen", "sequence_len"),
];

/// The known key that `key` stands for elsewhere, or the nearest one by edit distance, if at most a
/// third of it differs.
fn nearest_key(key: &str) -> Option<&'static str> {
    if key.len() > 100 {
        return None;
    }
    if let Some((_, name)) = ALIASES.iter().find(|(alias, _)| *alias == key) {
        return Some(name);
    }
    let (distance, name) = RULES
        .iter()
        .map(|(name, _)| (edit_distance(key, name), *name))
        .min()?;
    (3 * distance <= key.len().max(name.len())).then_some(name)
}

/// Levenshtein's distance between two short names, in bytes.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
