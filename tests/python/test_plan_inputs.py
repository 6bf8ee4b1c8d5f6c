"""What a plan is made from: lengths and label counts in any form, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import multipack
from multipack import Config, plan

LENGTHS = [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS,
        tuple(LENGTHS),
        range(1, 13, 2),
        np.arange(1, 13)[::2],
        np.arange(1, 13, dtype=np.uint8)[::2],
        np.array(LENGTHS, np.uint16),
        np.array(LENGTHS, np.int32),
        np.array(LENGTHS, np.uint64),
        np.array(LENGTHS, ">i4"),
        np.array([LENGTHS, LENGTHS]).T[:, 0],
        torch.tensor(LENGTHS, dtype=torch.int16),
        torch.arange(1, 13)[::2],
        torch.tensor([LENGTHS, LENGTHS]).T[:, 1],
    ],
    ids=lambda lengths: f"{type(lengths).__name__} {getattr(lengths, 'dtype', '')}",
)
def test_lengths_in_any_form_give_the_same_plan(lengths: Any) -> None:
    assert plan(LENGTHS, sequence_len=12).digest == plan(lengths, sequence_len=12).digest


def test_lengths_may_be_expanded_or_read_only() -> None:
    constant = np.full(6, 4)
    constant.flags.writeable = False

    digest = plan([4] * 6, sequence_len=12).digest

    assert digest == plan(torch.tensor([4]).expand(6), sequence_len=12).digest
    assert digest == plan(constant, sequence_len=12).digest


@pytest.mark.parametrize(
    ("lengths", "kind", "text"),
    [
        ([1.5], TypeError, "lengths must hold integers, but is an array of float64"),
        (["3"], TypeError, "lengths must hold integers, but is an array of <U1"),
        ([True], TypeError, "lengths must hold integers, but is an array of bool"),
        (
            torch.tensor([3.0]),
            TypeError,
            "lengths must hold integers, but is a tensor of torch.float32",
        ),
        ([[3]], ValueError, "lengths has shape [1, 1], but must be one-dimensional"),
        (
            np.array([2**64 - 1], np.uint64),
            ValueError,
            "lengths holds 18446744073709551615, more than 9223372036854775807",
        ),
        ([[1], [2, 3]], TypeError, "lengths must be numbers, but is of lists of unequal lengths"),
        (None, TypeError, "lengths must hold integers, but is an array of object"),
        (
            torch.empty(3, dtype=torch.int64, device="meta"),
            ValueError,
            "multipack::plan runs on the CPU, but lengths is on meta: move it there with .cpu(), "
            "and the results back",
        ),
        ([3, -1], ValueError, "sample 1 has length -1, but a length is 0 or more tokens"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        plan(lengths, sequence_len=8)

    assert text == str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"label_counts": [1]},
            ValueError,
            "label_counts has 1 entries, but lengths has 2: give one entry per sample",
        ),
        (
            {"label_counts": [1, 1], "label_starts": [0, 1]},
            TypeError,
            "label_starts must hold bools, but is an array of int64",
        ),
        ({"split": "test"}, ValueError, "split is 'test', but must be 'train' or 'eval'"),
        ({"epoch": 0.5}, TypeError, "epoch is 0.5, but must be an integer"),
        ({"epoch": -1}, ValueError, "epoch is -1, but must be 0 or more"),
        (
            {"config": Config()},
            ValueError,
            "sequence_len is needed to plan: the most tokens of one sample",
        ),
    ],
)
def test_other_arguments_that_do_not_fit_are_refused(
    arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        plan([3, 4], **{"config": Config(sequence_len=8), **arguments})

    assert text == str(caught.value)


def test_label_counts_are_of_labels_that_enter_the_loss() -> None:
    counts, starts = multipack.label_counts([-100, 7, 8, 9, -100, 5], [0, 3, 5, 5, 6])

    assert counts.tolist() == [2, 0, 0, 0]
    assert starts.tolist() == [False, True, False, True]
    assert (torch.int64, torch.bool) == (counts.dtype, starts.dtype)


def test_label_counts_follow_the_first_label_and_truncation() -> None:
    labels = np.array([1, 2, 3, 4, 5], np.int32)
    labels.flags.writeable = False

    def counts(**keys: Any) -> list[int]:
        return multipack.label_counts(labels, [0, 5], Config(**keys))[0].tolist()

    assert counts(sequence_len=3) == [4]
    assert counts(mask_first_label=False) == [5]
    assert counts(sequence_len=3, excess_length_strategy="truncate") == [2]


def test_labels_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError) as caught:
        multipack.label_counts([0.5], [0, 1])

    assert str(caught.value) == "labels must be int32 or int64, but is an array of float64"
    with pytest.raises(ValueError, match="offsets"):
        multipack.label_counts([1, 2], [0, 3])


def test_settings_in_the_place_of_label_counts_are_named() -> None:
    for make in (plan, multipack.MultipackBatchSampler):
        with pytest.raises(
            TypeError, match=r"label_counts is a Config: write config=\.\.\. for it"
        ):
            make([3, 4], Config(sequence_len=8))  # type: ignore[arg-type]
