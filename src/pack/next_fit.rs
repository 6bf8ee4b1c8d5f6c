//! Next fit: each item goes into the last row, or opens a new one.
//!
//! The right one when the order of the samples has to be kept (curricula, documents cut into
//! pieces); wasteful otherwise, since a row is closed by the first item that does not fit.
//! Without a limit of samples it never makes more than twice the optimal number of rows, because two neighbouring rows together hold more
//! than the capacity. O(n), one pass.

use super::{Bounds, Rows};

/// Packs the items of `order`, each of `slots[item]` tokens, in that order.
///
/// # Panics
///
/// If a slot is 0 or above the capacity, or a row may hold no item.
///
/// # Examples
///
/// ```
/// use multipack::pack::{Bounds, next_fit};
///
/// let bounds = Bounds { capacity: 8, limit: u32::MAX };
/// let rows = next_fit::pack(&[5, 2, 3, 4], &[0, 1, 2, 3], bounds);
/// assert_eq!(rows.items, [0, 1, 2, 3]);
/// assert_eq!(rows.offsets, [0, 2, 4]); // 5 + 2, then 3 + 4
/// ```
pub fn pack(slots: &[u32], order: &[u32], bounds: Bounds) -> Rows {
    let mut rows = Rows {
        items: order.to_vec(),
        ..Rows::new()
    };
    let (mut used, mut start) = (0, 0);
    let mut close = |used: u32, end: usize| {
        rows.offsets.push(end as u32);
        rows.tokens.push(used);
    };
    for (at, &item) in order.iter().enumerate() {
        let slot = bounds.checked(slots[item as usize]);
        if slot > bounds.capacity - used || (at - start) as u32 == bounds.limit {
            close(used, at);
            (used, start) = (0, at);
        }
        used += slot;
    }
    if !order.is_empty() {
        close(used, order.len());
    }
    rows
}
