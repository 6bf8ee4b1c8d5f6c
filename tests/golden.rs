//! Plans that must never change without a new plan version: a resumed run depends on them.
//!
//! `tests/golden/plans.json` holds small plans whole and large ones by their digest. If a change of
//! the algorithms is meant, raise `PLAN_VERSION` and run `MULTIPACK_BLESS=1 cargo test --test
//! golden` to write the file anew.

use multipack::plan::PLAN_VERSION;
use multipack::{Config, Split, plan};
use serde_json::{Value, json};

#[path = "support/lengths.rs"]
mod lengths;
use lengths::{SEED, between, stream};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/plans.json");

/// Settings that between them use every algorithm, layout and policy.
const SETTINGS: &[&str] = &[
    r#"{"sequence_len": 64}"#,
    r#"{"sequence_len": 64, "seed": 1}"#,
    r#"{"sequence_len": 64, "micro_batch_size": 2, "world_size": 2, "gradient_accumulation_steps": 2}"#,
    r#"{"sequence_len": 64, "micro_batch_size": 2, "multipack_real_batches": true, "incomplete_batches": "fill"}"#,
    r#"{"sequence_len": 64, "sample_packing_bin_size": 2}"#,
    r#"{"sequence_len": 64, "sample_packing_algorithm": "tight"}"#,
    r#"{"sequence_len": 64, "sample_packing_algorithm": "tight", "sample_packing_group_size": 100}"#,
    r#"{"sequence_len": 64, "sample_packing": false, "batch_flattening": true, "micro_batch_size": 3}"#,
    r#"{"sequence_len": 64, "balance_labels": true, "balance_cost": "attention", "world_size": 2}"#,
    r#"{"sequence_len": 64, "sample_packing_algorithm": "first_fit", "sample_packing_bin_size": 3}"#,
    r#"{"sequence_len": 64, "sample_packing_algorithm": "next_fit", "sample_packing_group_size": 16}"#,
    r#"{"sequence_len": 64, "sample_packing_sequentially": true, "align_samples_to": 8}"#,
    r#"{"sequence_len": 64, "sample_packing": false, "micro_batch_size": 4, "world_size": 2}"#,
    r#"{"sequence_len": 64, "balance_labels": true, "world_size": 2}"#,
    r#"{"sequence_len": 64, "balance_labels": true, "sample_packing": false, "micro_batch_size": 4}"#,
    r#"{"sequence_len": 64, "world_size": 3, "incomplete_batches": "split", "excess_length_strategy": "truncate"}"#,
];

fn entry(settings: &str, n: usize, epoch: u64, split: Split) -> Value {
    let config = Config::from_json(settings).expect("valid settings");
    // Integers only, so that every platform makes the same; some samples are over-long.
    let mut stream = stream(SEED);
    let (lengths, labels): (Vec<i64>, Vec<i64>) = (0..n)
        .map(|_| {
            let length = between(&mut stream, 1, 81);
            (i64::from(length), i64::from(stream.below(length)))
        })
        .unzip();
    let labels: Vec<i64> = labels.into_iter().map(|labels| labels.min(64)).collect();
    let counts = config.balance_labels.then_some(&labels[..]);
    let plan = plan(&lengths, counts, None, &config, epoch, split, 1).expect("a plan");
    let mut entry = json!({
        "settings": settings, "samples": n, "epoch": epoch, "split": split, "digest": plan.report.digest,
    });
    if n <= 40 {
        entry["index"] = json!(plan.index);
        entry["row_offsets"] = json!(plan.row_offsets);
        entry["batch_offsets"] = json!(plan.batch_offsets);
    }
    entry
}

#[test]
fn plans_are_the_ones_of_this_version() {
    let mut plans = Vec::new();
    for settings in SETTINGS {
        plans.push(entry(settings, 40, 0, Split::Train));
        plans.push(entry(settings, 40, 1, Split::Train));
        plans.push(entry(settings, 40, 0, Split::Eval));
        plans.push(entry(settings, 20_000, 3, Split::Train));
    }
    let made = json!({"version": PLAN_VERSION, "plans": plans});
    if std::env::var_os("MULTIPACK_BLESS").is_some() {
        let text = serde_json::to_string(&made)
            .expect("JSON")
            .replace("{\"settings", "\n{\"settings");
        std::fs::write(FILE, text + "\n").expect("the golden file can be written");
    }
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(FILE).expect("the golden file"))
            .expect("JSON");

    assert_eq!(
        golden["version"], made["version"],
        "a new version needs new golden plans"
    );
    for (golden, made) in golden["plans"]
        .as_array()
        .expect("a list")
        .iter()
        .zip(&plans)
    {
        assert_eq!(golden, made);
    }
    assert_eq!(golden["plans"].as_array().map(Vec::len), Some(plans.len()));
}
