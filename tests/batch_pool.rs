//! Nothing in this crate may start rayon's global pool: a process that forks after that hangs.
//!
//! Alone in its file, because whoever else in the process used the pool would be blamed on us.

use multipack::batch::{
    BatchSlices, Layout, LayoutOptions, MaskSlice, block_mask, boundaries, label_counts,
};
use multipack::{Config, Split, plan};

#[test]
fn the_global_pool_is_never_built() {
    // 4 rows of 64 samples of 1024 tokens, so that everything that may use threads does.
    let (samples, length) = (256, 1024);
    let tokens = vec![5i64; samples * length];
    let offsets: Vec<i64> = (0..=samples as i64).map(|i| i * length as i64).collect();
    let index: Vec<i64> = (0..samples as i64).collect();
    let rows = [0, 64, 128, 192, 256];
    let layout = Layout::new(
        tokens.len(),
        &offsets,
        &index,
        &rows,
        &LayoutOptions::default(),
    )
    .unwrap();

    let mut ids = vec![0; tokens.len()];
    let (mut labels, mut positions) = (ids.clone(), ids.clone());
    let mut segments = vec![0; tokens.len()];
    let out = BatchSlices {
        input_ids: &mut ids,
        labels: &mut labels,
        position_ids: &mut positions,
        segment_ids: &mut segments,
    };
    layout
        .fill(&tokens, None::<&[i64]>, 0, true, out, 4)
        .unwrap();
    layout.fill_values(&tokens, 0, &mut ids, 4);
    label_counts(&labels, &offsets, 0, true, 4).unwrap();
    boundaries(&positions, 4, 64 * length).unwrap();
    let mut mask = vec![0; 2 * 2048 * 2048];
    block_mask(
        &segments[..4096],
        2,
        2048,
        true,
        None,
        MaskSlice::Bool(&mut mask),
        4,
    )
    .unwrap();

    let lengths = vec![100; 300_000];
    let config = Config::from_json(r#"{"sequence_len": 1000, "balance_labels": true}"#).unwrap();
    plan(&lengths, None, None, &config, 0, Split::Train, 4).unwrap();

    assert!(rayon::ThreadPoolBuilder::new().build_global().is_ok());
}
