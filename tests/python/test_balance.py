"""Balancing as Python sees it; the algorithms are tested in Rust."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import multipack
from multipack import Config, MultipackBatchSampler, plan

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2, "multipack_real_batches": True},
    {"micro_batch_size": 4, "sample_packing": False},
    {"micro_batch_size": 4, "sample_packing": False, "batch_flattening": True},
    {"balance_cost": "attention"},
]


def chats(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat labels and offsets of samples whose answers are of very different lengths."""
    rng = np.random.default_rng(20261130)
    lengths = rng.integers(2, 65, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels = rng.integers(0, 100, offsets[-1])
    for start, length in zip(offsets, lengths, strict=False):
        labels[start : start + rng.integers(0, length)] = -100
    return torch.from_numpy(labels), torch.from_numpy(offsets)


def sampler(n: int = 400, **keys: Any) -> MultipackBatchSampler:
    """A balanced sampler over chats."""
    labels, offsets = chats(n)
    config = Config(
        sequence_len=64,
        world_size=2,
        gradient_accumulation_steps=2,
        balance_labels=True,
        **keys,
    )
    counts, starts = multipack.label_counts(labels, offsets, config)
    return MultipackBatchSampler(offsets.diff(), counts, config, rank=1, label_starts=starts)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_balancing_lowers_the_spread_of_labels_and_keeps_the_rest(keys: dict[str, Any]) -> None:
    stats = sampler(**keys).plan.stats
    before, after = stats.before, stats.after

    assert before.microbatch_label_std is not None
    assert after.microbatch_label_std is not None
    assert after.microbatch_label_std < 0.9 * before.microbatch_label_std
    assert after.label_std_floor is not None
    assert after.label_std_floor <= after.microbatch_label_std
    assert before.step_label_std is not None
    assert after.step_label_std is not None
    assert after.step_label_std < 0.2 * before.step_label_std
    assert (before.rows, before.mean_labels) == (after.rows, after.mean_labels)
    assert after.padding_tokens <= before.padding_tokens
    assert "label std floor" in str(stats)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_a_balanced_schedule_resumes_exactly(keys: dict[str, Any]) -> None:
    whole = list(sampler(**keys))
    for position in (1, len(whole) // 2, len(whole) - 1):
        first = sampler(**keys)
        taken = list(itertools.islice(first, position))
        state = first.state_dict()

        second = sampler(**keys)
        second.load_state_dict(state)

        assert taken + list(second) == whole


def test_balancing_may_not_be_switched_between_save_and_load() -> None:
    saved = sampler().state_dict()
    labels, offsets = chats(400)
    counts, _ = multipack.label_counts(labels, offsets)
    plain = MultipackBatchSampler(
        offsets.diff(),
        counts,
        sequence_len=64,
        world_size=2,
        gradient_accumulation_steps=2,
        rank=1,
    )

    with pytest.raises(ValueError, match="balance_labels"):
        plain.load_state_dict(saved)


def test_counts_are_of_the_labels_that_enter_the_loss() -> None:
    """One row of 3 and 2 labelled tokens: the first of each sample is predicted by nothing."""
    labels, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 3, 5])
    for masked, mean in ((True, 3.0), (False, 4.0)):
        config = Config(sequence_len=5, mask_first_label=masked, balance_labels=True)
        counts, starts = multipack.label_counts(labels, offsets, config)
        made = plan(offsets.diff(), counts, config, label_starts=starts)

        assert made.stats.after.mean_labels == mean
