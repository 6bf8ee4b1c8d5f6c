"""Settings from Axolotl's YAML files: what is followed, what is left alone, what is refused."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from multipack import Config, RowDataset
from multipack.integrations.axolotl import AxolotlSettings, from_yaml

LENGTHS = np.random.default_rng(0).integers(2, 65, 100).tolist()
SAMPLES = [{"input_ids": [number] * length} for number, length in enumerate(LENGTHS)]

PAIRS = "it trains on pairs or prompts, and packed batches are for causal language modelling"
KEEPS_NO_ORDER = "balance_labels moves samples between batches, so it keeps no order"
NO_FLATTENING = "it needs flash_attention or flex_attention"


def read(folder: Path, text: str, **keys: Any) -> AxolotlSettings:
    path = folder / "config.yml"
    path.write_text(textwrap.dedent(text))
    return from_yaml(path, **keys)


# ---- what is followed ----

UNPACKED = {
    "sequence_len": 512,
    "sample_packing": False,
    "eval_sample_packing": False,
    "sample_packing_bin_size": 200,
    "sample_packing_group_size": 100_000,
    "min_sample_len": 2,
    "drop_unlabelled": False,
    "incomplete_batches": "fill",
    "pad_to_multiple_of": 64,
    "seed": 42,
}
PACKED = {
    **UNPACKED,
    "sample_packing": True,
    "eval_sample_packing": True,
    "sample_packing_algorithm": "first_fit",
    "multipack_real_batches": True,
    "drop_unlabelled": True,
    "incomplete_batches": "drop",
    "pad_to_multiple_of": 512,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base_model: some", UNPACKED),
        ("sample_packing: true", PACKED),
        ("{sample_packing: true, flash_attention: true}", {"multipack_real_batches": False}),
        ("{sample_packing: true, attn_implementation: kernels-community/flash-attn3}",
         {"multipack_real_batches": False}),
        ("{sample_packing: true, flash_attention: true, multipack_real_batches: true}",
         {"multipack_real_batches": True}),
        ("{sample_packing: true, sequence_len: 1000}", {"pad_to_multiple_of": 1024}),
        ("{sample_packing: true, pad_to_multiple_of: 7, sequence_len: 20}",
         {"pad_to_multiple_of": 21}),
        ("{sample_packing: true, pad_to_sequence_len: false}", {"pad_to_multiple_of": 1}),
        ("{pad_to_multiple_of: 8}", {"pad_to_multiple_of": 8}),
        ("{sample_packing: true, eval_table_size: 5}", {"eval_sample_packing": False}),
        ("{sample_packing: true, eval_sample_packing: false}", {"eval_sample_packing": False}),
        ("{micro_batch_size: 3, batch_size: 12}", {"gradient_accumulation_steps": 4}),
        ("{micro_batch_size: 3, eval_batch_size: 5}", {"eval_batch_size": 5}),
        ("{sample_packing: true, sample_packing_sequentially: true}",
         {"sample_packing_algorithm": "next_fit", "sample_packing_bin_size": None}),
        ("{sample_packing: true, sample_packing_sequentially: true, curriculum_sampling: true}",
         {"sample_packing_sequentially": True}),
        ("curriculum_sampling: true", {"sample_packing_sequentially": True}),
        ("{batch_flattening: true, flash_attention: true}",
         {"batch_flattening": True, "pad_to_multiple_of": 1}),
        ("{batch_flattening: auto, flash_attention: true, micro_batch_size: 2}",
         {"batch_flattening": True}),
        ("{batch_flattening: auto, flash_attention: true}", {"batch_flattening": False}),
        ("{batch_flattening: auto, micro_batch_size: 2}", {"batch_flattening": False}),
        ("dataloader_drop_last: true", {"incomplete_batches": "drop"}),
        ("excess_length_strategy: Truncate", {"excess_length_strategy": "truncate"}),
        ("{seed: 7, data_seed: 9}", {"seed": 7, "data_seed": 9}),
        ("{balance_labels: true, label_balance_window_optim_steps: 32}",
         {"balance_labels": True, "label_balance_window_optim_steps": 32}),
        ("{streaming: true, sample_packing: true, pretrain_multipack_buffer_size: 50}",
         {"streaming_multipack_buffer_size": 50, "multipack_real_batches": None}),
        ("{group_by_length: true, sample_packing: true}", PACKED),
        ("{micro_batch_size: null, sample_packing: null}", UNPACKED),
        ("{dp_shard_size: 4, dp_replicate_size: 2, tensor_parallel_size: 8}", {"world_size": 8}),
    ],
)  # fmt: skip
def test_keys_and_defaults_mean_what_they_do_in_axolotl(
    text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    config = vars(read(tmp_path, text).config)

    assert {key: config[key] for key in expected} == expected


def test_what_the_file_leaves_to_the_caller_is_given(tmp_path: Path) -> None:
    settings = read(tmp_path, "{sample_packing: true}", world_size=4, padded_tail="last")

    assert (settings.config.world_size, settings.config.padded_tail) == (4, "last")


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("sample_packing: true", 1),
        ("{tensor_parallel_size: 4, context_parallel_size: 2}", 8),
        ("{tensor_parallel_size: null, sequence_parallel_degree: 2}", 2),
    ],
)
def test_processes_that_share_batches_are_counted(text: str, peers: int, tmp_path: Path) -> None:
    settings = read(tmp_path, text)

    assert settings.peers == peers
    assert settings.config.world_size == 1
    assert settings.ignored == ()


def test_ranks_that_are_not_those_of_the_file_are_refused(tmp_path: Path) -> None:
    assert read(tmp_path, "dp_shard_size: 4", world_size=8).config.world_size == 8
    with pytest.raises(ValueError) as caught:
        read(tmp_path, "{dp_shard_size: 2, dp_replicate_size: 2}", world_size=6)
    assert str(caught.value) == (
        "world_size is 6, but must be a multiple of 4, which is dp_shard_size times "
        f"dp_replicate_size in {tmp_path / 'config.yml'}"
    )


def test_the_evaluation_may_have_a_length_of_its_own(tmp_path: Path) -> None:
    settings = read(tmp_path, "{sequence_len: 64, eval_sequence_len: 32, sample_packing: true}")

    assert settings.eval_config == settings.config.replace(sequence_len=32)
    assert settings.sampler([30, 20], split="eval").config.sequence_len == 32
    assert settings.collator(split="eval").config.sequence_len == 32


def test_every_key_is_either_used_or_ignored(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        base_model: some/model
        datasets: [{path: some/data, type: alpaca}]
        sample_packing: true
        flash_attention: true
        learning_rate: 0.001
        val_set_size: 0.05
        """,
    )

    assert settings.used == {"sample_packing": True, "flash_attention": True}
    assert settings.ignored == ("base_model", "datasets", "learning_rate", "val_set_size")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("sample_paking", "sample_packing"), ("sequence_length", "sequence_len")],
)
def test_a_misspelt_key_is_told(key: str, meant: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"{key} is ignored; did you mean {meant}\?"):
        settings = read(tmp_path, f"{key}: 1")
    assert settings.ignored == (key,)


# ---- what comes out ----


@pytest.mark.parametrize(
    ("text", "attention", "shape"),
    [
        ("{sample_packing: true, flash_attention: true}", "flash", (1, 128)),
        ("{sample_packing: true}", "bool", (2, 64)),
        ("{sample_packing: true, eager_attention: true}", "additive", (2, 64)),
        ("{sample_packing: true, flex_attention: true}", "flex", (1, 128)),
        ("{flash_attention: true}", "none", (2, 64)),
        ("{batch_flattening: true, flash_attention: true}", "flash", None),
    ],
)
def test_sampler_and_collator_make_the_batches(
    text: str, attention: str, shape: Any, tmp_path: Path
) -> None:
    sizes = "{sequence_len: 64, micro_batch_size: 2, "
    settings = read(tmp_path, text.replace("{", sizes))
    sampler, collator = settings.sampler(LENGTHS), settings.collator(pad_token_id=999)

    assert collator.attention == attention
    loader = DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=collator)
    expected = len(sampler)
    batches = list(loader)
    assert len(batches) == expected > 20
    assert shape in (None, tuple(batches[0]["input_ids"].shape))
    assert collator.pad_token_id == 999


def test_a_stream_is_packed_into_one_row(tmp_path: Path) -> None:
    settings = read(
        tmp_path, "{streaming: true, sample_packing: true, sequence_len: 64, micro_batch_size: 2}"
    )
    stream = settings.stream(SAMPLES, collator=settings.collator())

    assert next(iter(stream))["input_ids"].shape == (1, 128)
    with pytest.raises(ValueError, match="the file describes a stream, whose lengths are not know"):
        settings.sampler(LENGTHS)
    assert len(settings.sampler(LENGTHS, split="eval")) > 20
    with pytest.raises(ValueError, match="the file describes no stream: set streaming: true, or u"):
        read(tmp_path, "sample_packing: true").stream(SAMPLES, collator=settings.collator())


# ---- what is refused ----


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("rl: dpo", "rl", PAIRS),
        ("reward_model: true", "reward_model", PAIRS),
        ("process_reward_model: true", "process_reward_model", PAIRS),
        ("diffusion:", "diffusion",
         "its attention is not causal, and its labels are not known after tokenisation"),
        ("{balance_labels: true, curriculum_sampling: true}", "curriculum_sampling",
         KEEPS_NO_ORDER),
        ("{sample_packing: true, balance_labels: true, sample_packing_sequentially: true}",
         "sample_packing_sequentially", KEEPS_NO_ORDER),
        ("{sample_packing: true, curriculum_sampling: true}", "curriculum_sampling",
         "packing keeps the order with sample_packing_sequentially: true only"),
        ("group_by_length: true", "group_by_length",
         "samples are shuffled, or balanced, and never sorted by length"),
        ("padding_side: left", "padding_side", "rows are padded on the right"),
        ("accelerator_config: {split_batches: true}", "accelerator_config",
         "whole batches are dealt out to ranks: leave split_batches and dispatch_batches false"),
        ("accelerator_config: {dispatch_batches: true}", "accelerator_config",
         "whole batches are dealt out to ranks: leave split_batches and dispatch_batches false"),
        ("label_balance_window_optim_steps: 8", "label_balance_window_optim_steps",
         "it needs balance_labels: true"),
        ("{streaming: true, sample_packing: true, balance_labels: true, "
         "label_balance_window_optim_steps: 8}", "label_balance_window_optim_steps",
         "the buffers of a stream do not say where optimizer steps begin"),
        ("{streaming: true, balance_labels: true}", "balance_labels",
         "without sample_packing it needs the lengths of all samples"),
        ("{pretraining_dataset: [{path: a}], balance_labels: true}", "balance_labels",
         "without sample_packing it needs the lengths of all samples"),
        ("{pretraining_dataset: [{path: a}, {path: b}], sample_packing: true}",
         "pretraining_dataset", "with sample_packing it can be one data set only"),
        ("{streaming: true, sample_packing: true, pretrain_multipack_attn: false}",
         "pretrain_multipack_attn", "false would let samples attend to one another"),
        ("{streaming: true, streaming_multipack_buffer_size: 5, pretrain_multipack_buffer_size: 5}",
         "pretrain_multipack_buffer_size",
         "it is the old name of streaming_multipack_buffer_size: give either"),
        ("{context_parallel_size: 2, sequence_parallel_degree: 4}", "sequence_parallel_degree",
         "it is the old name of context_parallel_size: give either"),
        ("{sample_packing: true, eval_sample_packing: true, eval_table_size: 5}",
         "eval_table_size", "it needs eval_sample_packing: false"),
        ("{sample_packing: true, do_causal_lm_eval: true}", "do_causal_lm_eval",
         "it needs eval_sample_packing: false"),
        ("{sample_packing: true, context_parallel_size: 2, micro_batch_size: 2}",
         "context_parallel_size", "with sample_packing it needs micro_batch_size: 1"),
        ("{sample_packing: true, batch_flattening: true, flash_attention: true}",
         "batch_flattening", "it needs sample_packing: false"),
        ("batch_flattening: true", "batch_flattening", NO_FLATTENING),
        ("{batch_size: 8, gradient_accumulation_steps: 4}", "batch_size",
         "it is set beside gradient_accumulation_steps: give either"),
        ("{batch_size: 8, micro_batch_size: 3}", "batch_size",
         "it is no multiple of micro_batch_size"),
        ("xformers_attention: true", "xformers_attention",
         "it is a patch of Axolotl's own, which is not here"),
        ("attn_implementation: paged", "attn_implementation",
         "'paged' is none of eager, sdpa, flex_attention, flash_attention_2, flash_attention_3"),
        ("sample_packing: perhaps", "sample_packing", "'perhaps' is neither true nor false"),
        ("{sample_packing: true, sequence_parallel_degree: 2, micro_batch_size: 2}",
         "context_parallel_size", "with sample_packing it needs micro_batch_size: 1"),
        ("tensor_parallel_size: 0", "tensor_parallel_size", "0 is no integer of 1 or more"),
        ("sequence_len: many", "sequence_len", "'many' is no integer of 1 or more"),
        ("accelerator_config: 1", "accelerator_config", "1 is no mapping"),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_refused_by_name(
    text: str, key: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, text)

    assert str(caught.value) == (
        f"{tmp_path / 'config.yml'} asks for what is not possible: {key}: {reason}"
    )


def test_every_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"rl: {PAIRS}; group_by_length: samples are shuffled"):
        read(tmp_path, "{rl: kto, group_by_length: true}")


@pytest.mark.parametrize("steps", ["0", "-1", "1.5", "true"])
def test_a_window_is_a_number_of_steps(steps: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="must be an integer from 1 to"):
        read(tmp_path, f"{{balance_labels: true, label_balance_window_optim_steps: {steps}}}")


@pytest.mark.parametrize(
    ("text", "found"), [("[1, 2]", "holds a list"), ("", "holds a NoneType"), ("{", "is not YAML")]
)
def test_what_is_no_mapping_is_refused(text: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=found):
        read(tmp_path, text)


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, "sample_packing: true\nseed: 1\nsample_packing: false\n")
    assert str(caught.value) == (
        f"{tmp_path / 'config.yml'} has the key 'sample_packing' twice, in line 1 and in line 3: "
        "leave one out"
    )
    with pytest.raises(ValueError, match="has the key 'split_batches' twice, in line 1 and in lin"):
        read(tmp_path, "accelerator_config: {split_batches: true, split_batches: false}")


def test_what_an_anchor_repeats_is_not_given_twice(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        a: &a {path: some, type: alpaca}
        datasets: [*a, {<<: *a, type: other}]
        seed: 3
        """,
    )
    assert settings.config.seed == 3


def test_all_of_axolotls_settings_are_ours(tmp_path: Path) -> None:
    """Whatever is read is validated as any other settings."""
    with pytest.raises(ValueError, match='excess_length_strategy is "cut", but must be'):
        read(tmp_path, "excess_length_strategy: cut")
    assert isinstance(read(tmp_path, "{}").config, Config)
