"""Balancing as Python sees it; the algorithms are tested in Rust."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import multipack
from multipack import Collator, Config, MultipackBatchSampler, PackedDataset, plan

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
    """Case C22: of 3 and 2 labelled tokens in a row, the first of each is predicted by nothing."""
    labels, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 3, 5])
    for masked, mean in ((True, 3.0), (False, 4.0)):
        config = Config(sequence_len=5, mask_first_label=masked, balance_labels=True)
        counts, starts = multipack.label_counts(labels, offsets, config)
        made = plan(offsets.diff(), counts, config, label_starts=starts)

        assert made.stats.after.mean_labels == mean


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1)])
def test_every_rank_can_tell_the_labels_of_a_step(world_size: int, accumulation: int) -> None:
    """Cases C26 and C27: microbatches of 3 and 30 labels are a step of 33, to whoever asks."""
    counts = torch.tensor([3, 30])
    config = Config(
        sequence_len=32,
        world_size=world_size,
        gradient_accumulation_steps=accumulation,
        balance_labels=True,
    )
    for rank in range(world_size):
        made = MultipackBatchSampler([32, 32], counts, config, rank=rank).plan
        starts = made.row_offsets[made.batch_offsets.long()].tolist()
        labels = [
            int(counts[made.index[start:end].long()].sum())
            for start, end in itertools.pairwise(starts)
        ]

        assert sorted(labels) == [3, 30]
        assert made.stats.after.step_label_std == 0.0


def test_shifted_labels_count_as_they_are() -> None:
    """The label at i is the target of position i; the last of a sample is -100."""
    labels, offsets = torch.tensor([-100, 7, 8, 9, -100]), torch.tensor([0, 3, 5])
    shifted = torch.tensor([7, 8, -100, -100, -100])

    counts, starts = multipack.label_counts(shifted, offsets, shifted=True)

    assert (counts.tolist(), starts.tolist()) == ([2, 0], [False, False])
    assert counts.tolist() == multipack.label_counts(labels, offsets)[0].tolist()


# ---- what comes out of the collator ----


def loaded(sampler: MultipackBatchSampler, **keys: Any) -> DataLoader[Any]:
    """The batches of a sampler over `chats`."""
    labels, offsets = chats(400)
    collator = Collator(sampler.config, attention="none", split=sampler.split)
    data = PackedDataset(labels.abs(), offsets, labels, collator=collator)
    return DataLoader(data, sampler=sampler, batch_size=None, **keys)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_batches_have_as_many_labels_as_were_planned(keys: dict[str, Any], masked: bool) -> None:
    made = sampler(mask_first_label=masked, incomplete_batches="fill", **keys)
    planned = made.plan.stats.after.mean_labels
    assert planned is not None

    total = 0
    for number, batch in enumerate(loaded(made)):
        made.check_batch(batch, number)
        total += int((batch["labels"][:, 1:] != -100).sum())

    other = MultipackBatchSampler(
        made._lengths, made._label_counts, made.config, rank=0, label_starts=made._label_starts
    )
    total += sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in loaded(other))
    assert total == round(planned * 2 * len(made))


def test_a_collator_that_changes_labels_is_found_out() -> None:
    made = sampler()
    for number, batch in enumerate(loaded(made, num_workers=2)):
        made.check_batch(batch)
        if number == 3:
            break
        made.consumed()
    planned = int((batch["labels"] != -100).sum())
    batch["labels"][0, batch["labels"][0].ne(-100).nonzero()[0]] = -100

    with pytest.raises(ValueError) as raised:
        made.check_batch(batch)
    assert str(raised.value) == (
        f"microbatch 3 of epoch 0 has {planned - 1} supervised tokens, but {planned} were planned: "
        "labels must not be changed after they are counted; count them as they come out of the "
        "collator"
    )
    with pytest.raises(ValueError, match="microbatch 4 of epoch 0"):
        made.check_batch(batch, 4)
    with pytest.raises(ValueError, match="neither 'labels' nor 'shift_labels'"):
        made.check_batch({"input_ids": batch["input_ids"]})
    with pytest.raises(IndexError, match="out of range"):
        made.check_batch(batch, 10_000)


def test_shifted_batches_are_checked_too() -> None:
    labels, offsets = torch.tensor([5, 6, -100, 7, -100]), torch.tensor([0, 3, 5])
    counts, starts = multipack.label_counts(labels, offsets, shifted=True)
    made = MultipackBatchSampler(offsets.diff(), counts, label_starts=starts, sequence_len=5)

    next(iter(made))
    made.check_batch({"shift_labels": labels[None]})
    with pytest.raises(ValueError, match="has 2 supervised tokens, but 3 were planned"):
        made.check_batch({"shift_labels": torch.tensor([[5, 6, -100, -100, -100]])})


# ---- what it is good for ----


def test_the_example_shows_even_steps_and_labels_of_equal_weight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(__file__).parents[2] / "examples" / "label_balancing.py"
    example = runpy.run_path(str(path))

    runs = example["main"](["--samples", "300"])

    given, balanced = runs["given"], runs["balanced"]
    assert len(given.norms) == len(balanced.norms) > 3
    assert example["spread"](balanced.labels) < 0.1 * example["spread"](given.labels)
    assert sum(balanced.weights) < sum(given.weights)
    assert sum(balanced.distances) < 0.5 * sum(given.distances)
    assert "gradient norm over the second half" in capsys.readouterr().out
