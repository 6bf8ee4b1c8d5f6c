//! Padded batches: even in tokens, without a single padding token more.
//!
//! The longest sample of a microbatch, its head, decides what the batch costs. Heads stay, and the
//! other samples are dealt anew, each to the batch with the fewest tokens so far whose head is at
//! least as long: the second longest of all batches among these, then the third longest, and so on,
//! each time longest first. There is always such a batch, because the sample came from one. So the
//! padded sizes stay what they were, and the samples inside even out.
//!
//! Before that, one batch in [`SHARE`] with the longest heads gives its head to its neighbour in the
//! order of heads and takes that one's second sample for it, unless that is the longer of the two:
//! two long samples in one batch need less padding than in two.
//!
//! All this inside blocks of the seeded order, so that who meets whom is another matter in each
//! epoch. O(n log n).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::work::Work;

/// Batches for each one whose head moves to another. With 32 the padding falls by 5 % on long-tailed
/// lengths; more would cost evenness.
const SHARE: usize = 32;

/// Deals the places from `start` to `end` anew, of which each microbatch has `count`.
pub(super) fn even_tokens(work: &mut Work, start: usize, end: usize, count: usize) {
    let lengths = &work.lengths;
    let length = |place: u32| lengths[place as usize];
    let sort = |places: &mut [u32]| places.sort_by_key(|&place| Reverse(length(place)));
    let mut batches: Vec<Vec<u32>> = (start as u32..end as u32)
        .collect::<Vec<u32>>()
        .chunks(count)
        .map(|places| {
            let mut places = places.to_vec();
            sort(&mut places);
            places
        })
        .collect();
    batches.sort_by_key(|places| Reverse(length(places[0])));
    if count > 1 {
        let moved = batches.len() / SHARE / 2 * 2;
        for pair in batches[..moved].chunks_exact_mut(2) {
            let (second, head) = (pair[0][1], pair[1][0]);
            if length(second) <= length(head) {
                (pair[0][1], pair[1][0]) = (head, second);
                sort(&mut pair[1]);
            }
        }
        batches.sort_by_key(|places| Reverse(length(places[0])));
    }

    // Batches fall by their heads from here on.
    let mut layers: Vec<Vec<u32>> = (0..count)
        .map(|rank| batches.iter().map(|places| places[rank]).collect())
        .collect();
    let heads = layers[0].clone();
    let mut tokens: Vec<u64> = heads.iter().map(|&head| length(head).into()).collect();
    let mut dealt: Vec<Vec<u32>> = heads.iter().map(|&head| vec![head]).collect();
    for layer in &mut layers[1..] {
        sort(layer);
        let mut open: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::with_capacity(heads.len());
        let mut admitted = 0;
        for &place in layer.iter() {
            while admitted < heads.len() && length(heads[admitted]) >= length(place) {
                open.push(Reverse((tokens[admitted], admitted)));
                admitted += 1;
            }
            if let Some(Reverse((_, batch))) = open.pop() {
                dealt[batch].push(place);
                tokens[batch] += u64::from(length(place));
            }
        }
    }
    work.rearrange(start, &dealt.concat());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positions in all batches of two before and after, of 64 batches that begin with these and
    /// are all of 10 and 1 tokens else.
    fn sizes(first: [u32; 4]) -> (u32, u32) {
        let mut lengths = first.to_vec();
        (2..64).for_each(|_| lengths.extend([10, 1]));
        let mut work = Work {
            items: (0..128).collect(),
            labels: vec![0; 128],
            leads: Vec::new(),
            fronts: (0..128).step_by(2).collect(),
            batch_of: (0..128).map(|place| place / 2).collect(),
            totals: vec![0; 64],
            lengths: lengths.clone(),
        };
        even_tokens(&mut work, 0, 128, 2);

        let mut items = work.items.clone();
        items.sort_unstable();
        assert!(items.into_iter().eq(0..128));
        for (&item, &length) in work.items.iter().zip(&work.lengths) {
            assert_eq!(lengths[item as usize], length);
        }
        let size = |lengths: &[u32]| {
            let twos = lengths.chunks(2);
            twos.map(|two| 2 * two[0].max(two[1])).sum::<u32>()
        };
        (size(&lengths), size(&work.lengths))
    }

    #[test]
    fn a_head_moves_to_the_next_batch_only_where_that_saves_padding() {
        // 100 takes in 50, and 5 and 1 are left together: a batch of 5 where there was one of 50.
        assert_eq!((1540, 1450), sizes([100, 5, 50, 1]));
        // It would give 90 for 50, to which the other batch would then be padded.
        assert_eq!((1540, 1540), sizes([100, 90, 50, 1]));
    }
}
