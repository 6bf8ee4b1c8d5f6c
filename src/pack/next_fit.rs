//! Next fit: each item goes into the last row, or opens a new one.
//!
//! The right one when the order of the samples has to be kept (curricula, documents cut into
//! pieces); wasteful otherwise, since a row is closed by the first item that does not fit.
//! Without a limit of samples it never makes more than twice the optimal number of rows, because two
//! neighbouring rows together hold more than the capacity. The table in
//! [`super`] has it beside the others. O(n), one pass.

use super::{Arrival, Bounds, Rows};

/// Packs items, each with its size, in the order in which they come.
///
/// # Panics
///
/// If a size is 0 or above the capacity, or a row may hold no item.
///
/// # Examples
///
/// ```
/// use multipack::pack::{Bounds, arrivals, next_fit};
///
/// let bounds = Bounds { capacity: 8, limit: u32::MAX };
/// let rows = next_fit::pack(arrivals(&[5, 2, 3, 4]), bounds);
/// assert_eq!(rows.items, [0, 1, 2, 3]);
/// assert_eq!(rows.offsets, [0, 2, 4]); // 5 + 2, then 3 + 4
/// ```
pub fn pack(arrivals: impl ExactSizeIterator<Item = Arrival>, bounds: Bounds) -> Rows {
    let mut rows = Rows::new();
    rows.items.reserve(arrivals.len());
    let (mut used, mut start) = (0, 0);
    for (item, slot) in arrivals {
        let slot = bounds.checked(slot);
        let at = rows.items.len();
        if slot > bounds.capacity - used || (at - start) as u32 == bounds.limit {
            rows.offsets.push(at as u32);
            rows.tokens.push(used);
            (used, start) = (0, at);
        }
        rows.items.push(item);
        used += slot;
    }
    if !rows.items.is_empty() {
        rows.offsets.push(rows.items.len() as u32);
        rows.tokens.push(used);
    }
    rows
}
