//! The obvious version of each packing algorithm: slow, short, and easy to believe.
#![allow(dead_code)] // each test binary uses a part

use multipack::pack::Bounds;

/// Rows as lists of item numbers.
pub type NaiveRows = Vec<Vec<u32>>;

/// Places one item after the other; `choose` picks a row among those with space for it.
fn place(
    slots: &[u32],
    order: &[u32],
    bounds: Bounds,
    choose: impl Fn(&mut dyn Iterator<Item = (usize, u32)>) -> Option<usize>,
) -> NaiveRows {
    let mut rows: NaiveRows = Vec::new();
    let mut used: Vec<u32> = Vec::new();
    for &item in order {
        let slot = slots[item as usize];
        let mut fitting = (0..rows.len())
            .filter(|&r| rows[r].len() < bounds.limit as usize)
            .map(|r| (r, bounds.capacity - used[r]))
            .filter(|&(_, free)| free >= slot);
        let row = choose(&mut fitting).unwrap_or_else(|| {
            rows.push(Vec::new());
            used.push(0);
            rows.len() - 1
        });
        rows[row].push(item);
        used[row] += slot;
    }
    rows
}

/// Largest first, each item into the fullest row that has space.
pub fn best_fit_decreasing(slots: &[u32], bounds: Bounds) -> NaiveRows {
    let mut order: Vec<u32> = (0..slots.len() as u32).collect();
    order.sort_by_key(|&item| std::cmp::Reverse(slots[item as usize]));
    place(slots, &order, bounds, |rows| {
        rows.min_by_key(|&(_, free)| free).map(|(row, _)| row)
    })
}

/// In order, each item into the earliest row that has space.
pub fn first_fit(slots: &[u32], order: &[u32], bounds: Bounds) -> NaiveRows {
    place(slots, order, bounds, |rows| rows.next().map(|(row, _)| row))
}

/// In order, each item into the last row or a new one.
pub fn next_fit(slots: &[u32], order: &[u32], bounds: Bounds) -> NaiveRows {
    let mut rows: NaiveRows = Vec::new();
    let mut used = 0;
    for &item in order {
        let slot = slots[item as usize];
        match rows.last_mut() {
            Some(row) if used + slot <= bounds.capacity && row.len() < bounds.limit as usize => {
                row.push(item);
                used += slot;
            }
            _ => {
                rows.push(vec![item]);
                used = slot;
            }
        }
    }
    rows
}

/// The fewest rows possible, by trying everything: up to about 9 items.
pub fn optimum(slots: &[u32], bounds: Bounds) -> usize {
    fn search(rest: &[u32], rows: &mut Vec<(u32, u32)>, bounds: Bounds, best: &mut usize) {
        if rows.len() >= *best {
            return;
        }
        let Some((&slot, rest)) = rest.split_first() else {
            *best = rows.len();
            return;
        };
        for r in 0..rows.len() {
            if rows[r].0 + slot <= bounds.capacity && rows[r].1 < bounds.limit {
                rows[r] = (rows[r].0 + slot, rows[r].1 + 1);
                search(rest, rows, bounds, best);
                rows[r] = (rows[r].0 - slot, rows[r].1 - 1);
            }
        }
        rows.push((slot, 1));
        search(rest, rows, bounds, best);
        rows.pop();
    }
    let mut best = slots.len() + usize::from(slots.is_empty());
    if slots.is_empty() {
        return 0;
    }
    search(slots, &mut Vec::new(), bounds, &mut best);
    // The search keeps strictly better answers only; one row for each item is always possible.
    best.min(slots.len())
}
