//! Rows into rounds: every rank gets the same number of microbatches, always.
//!
//! A *round* is one microbatch for every rank. Rows that do not fill the last round are left out,
//! or the fullest rows are split until they do, or rows are repeated with their labels masked:
//! [`Incomplete`]. Nothing here needs to know what the other ranks do, so no rank can be left
//! waiting.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::config::Incomplete;
use crate::pack::Rows;
use crate::{Error, Result, memory};

/// Most samples or rows that are repeated to fill the last round.
const MOST_REPEATS: usize = 1 << 24;

/// What a repeat takes, at most, until the plan is finished. A round of two million ranks for one
/// sample took 80 bytes for each, balanced or not.
const BYTES_OF_A_REPEAT: usize = 96;

/// Rows that fill whole rounds, in the order in which they are used.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// The rows; row r belongs to microbatch r / rows_per_microbatch.
    pub rows: Rows,
    /// How many items at the very end are repeats of earlier ones.
    pub repeated_items: usize,
    /// How many rows at the very end hold nothing but repeats.
    pub repeated_rows: usize,
    /// Rows that were left out.
    pub unused_rows: usize,
    /// Items that were left out with them.
    pub unused_items: Vec<u32>,
}

/// What has to be filled.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Rows of a microbatch.
    pub rows_per_microbatch: usize,
    /// Data-parallel ranks.
    pub world_size: usize,
    /// With a fixed number of items in a row, that number.
    pub items_per_row: Option<usize>,
    /// What to do with an incomplete last round.
    pub incomplete: Incomplete,
}

impl Schedule {
    /// Completes the last round of `rows`, whose items have the sizes `slots`.
    ///
    /// # Errors
    ///
    /// [`Error::TooFewMicrobatches`] when there are several ranks and dropping would leave nothing,
    /// [`Error::TooFewToSplit`] when there are fewer items than rows in a round, and
    /// [`Error::TooManyRepeats`] or [`Error::RepeatsOutOfMemory`] when filling it would take too much.
    pub fn complete(mut rows: Rows, slots: &[u32], round: Round) -> Result<Schedule> {
        let round_rows = round.rows_per_microbatch * round.world_size;
        let mut schedule = Schedule {
            rows: Rows::new(),
            repeated_items: 0,
            repeated_rows: 0,
            unused_rows: 0,
            unused_items: Vec::new(),
        };
        if rows.is_empty() {
            return Ok(schedule);
        }
        match round.incomplete {
            Incomplete::Drop => {
                let short = round
                    .items_per_row
                    .is_some_and(|items| rows.places(rows.len() - 1).len() < items);
                let complete = rows.len() - usize::from(short);
                let kept = complete - complete % round_rows;
                if kept == 0 && round.world_size > 1 {
                    return Err(Error::TooFewMicrobatches {
                        microbatches: complete / round.rows_per_microbatch,
                        world_size: round.world_size,
                    });
                }
                schedule.unused_rows = rows.len() - kept;
                schedule.unused_items = rows.items[rows.offsets[kept] as usize..].to_vec();
                rows.truncate(kept);
            }
            Incomplete::Split => {
                let wanted = rows.len().next_multiple_of(round_rows);
                if rows.items.len() < wanted {
                    return Err(Error::TooFewToSplit {
                        samples: rows.items.len(),
                        rows: wanted,
                        round: round_rows,
                    });
                }
                rows = split_fullest(&rows, slots, wanted)?;
            }
            Incomplete::Fill => {
                let (items, full_rows) = (rows.items.len(), rows.len());
                check_repeats(&rows, round, round_rows)?;
                if let Some(per_row) = round.items_per_row {
                    // The last row is short: it is topped up with the first items.
                    let missing = full_rows * per_row - items;
                    for at in 0..missing {
                        let item = rows.items[at % items];
                        rows.items.push(item);
                        rows.tokens[full_rows - 1] += slots[item as usize];
                    }
                    rows.offsets[full_rows] = rows.items.len() as u32;
                }
                schedule.repeated_rows = full_rows.next_multiple_of(round_rows) - full_rows;
                for at in 0..schedule.repeated_rows {
                    rows.items.extend_from_within(rows.places(at % full_rows));
                    rows.offsets.push(rows.items.len() as u32);
                    rows.tokens.push(rows.tokens[at % full_rows]);
                }
                schedule.repeated_items = rows.items.len() - items;
            }
        }
        schedule.rows = rows;
        Ok(schedule)
    }
}

/// Refuses to fill a last round with more repeats than anyone can want, or than there is memory for.
fn check_repeats(rows: &Rows, round: Round, round_rows: usize) -> Result<()> {
    let missing = rows.len().next_multiple_of(round_rows) - rows.len();
    // The last row is topped up; and then come the first rows, again and again.
    let items = match round.items_per_row {
        Some(per_row) => rows.len().saturating_mul(per_row),
        None => rows.items.len(),
    };
    let repeats = (items - rows.items.len())
        .saturating_add((missing / rows.len()).saturating_mul(items))
        .saturating_add(rows.offsets[missing % rows.len()] as usize);
    if repeats.max(missing) > MOST_REPEATS {
        return Err(Error::TooManyRepeats {
            repeats: repeats.max(missing),
            bound: MOST_REPEATS,
            world_size: round.world_size,
            rows: rows.len(),
        });
    }
    memory::ensure(repeats.max(missing), BYTES_OF_A_REPEAT).map_err(|error| match error {
        Error::OutOfMemory { bytes } => Error::RepeatsOutOfMemory {
            repeats: repeats.max(missing),
            bytes,
            world_size: round.world_size,
        },
        other => other,
    })
}

/// Splits the fullest row of at least two items in two even parts, until there are `wanted` rows.
/// O(n + rows log rows).
fn split_fullest(rows: &Rows, slots: &[u32], wanted: usize) -> Result<Rows> {
    let tokens = |places: Range<usize>| -> u32 {
        rows.items[places]
            .iter()
            .map(|&item| slots[item as usize])
            .sum()
    };
    let mut parts: Vec<(Range<usize>, u32)> = (0..rows.len())
        .map(|row| (rows.places(row), rows.tokens[row]))
        .collect();
    // Fullest first; of equal ones the earliest row.
    let entry = |number: usize, tokens: u32| (tokens, Reverse(number));
    let mut fullest: BinaryHeap<_> = parts
        .iter()
        .enumerate()
        .filter(|(_, (places, _))| places.len() > 1)
        .map(|(number, &(_, tokens))| entry(number, tokens))
        .collect();
    while parts.len() < wanted {
        let Some((total, Reverse(number))) = fullest.pop() else {
            return Err(Error::Internal {
                message: "no row is left to split".into(),
            });
        };
        let places = parts[number].0.clone();
        // The border nearest to half of the tokens, with at least one item on each side.
        let (mut middle, mut before) = (places.start + 1, tokens(places.start..places.start + 1));
        while middle + 1 < places.end {
            let next = before + tokens(middle..middle + 1);
            if next.abs_diff(total - next) >= before.abs_diff(total - before) {
                break;
            }
            (middle, before) = (middle + 1, next);
        }
        parts[number] = (places.start..middle, before);
        parts.push((middle..places.end, total - before));
        for number in [number, parts.len() - 1] {
            let (places, tokens) = &parts[number];
            if places.len() > 1 {
                fullest.push(entry(number, *tokens));
            }
        }
    }
    // In the order of the rows that they come from, so that a sequence of samples stays one.
    parts.sort_unstable_by_key(|(places, _)| places.start);
    let mut split = Rows::new();
    for (places, tokens) in parts {
        split.push(&rows.items[places], tokens);
    }
    Ok(split)
}
