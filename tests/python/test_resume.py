"""Saved positions of the batch sampler: what they bring back, and which of them are refused."""

from __future__ import annotations

import io
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from multipack import MultipackBatchSampler, RowDataset

LENGTHS = np.random.default_rng(0).integers(1, 9, 60)

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2, "multipack_real_batches": True},
    {"micro_batch_size": 3, "sample_packing": False},
    {"micro_batch_size": 3, "sample_packing": False, "batch_flattening": True},
    {"sample_packing_algorithm": "next_fit", "incomplete_batches": "fill"},
    {"micro_batch_size": 4, "sample_packing": False, "incomplete_batches": "split"},
]

REMEDY = (
    "go back to what was saved, or load with ignore_data_skip=True, which starts the epoch anew: "
    "samples may then be repeated or skipped"
)


def sampler(lengths: Any = LENGTHS, **keys: Any) -> MultipackBatchSampler:
    return MultipackBatchSampler(lengths, **{"sequence_len": 8, **keys})


def six_batches(**keys: Any) -> MultipackBatchSampler:
    """Make a sampler of six microbatches a rank, each of one row of one sample."""
    return sampler([8] * 6 * keys.get("world_size", 1), **keys)


def take(batches: Any, n: int) -> list[Any]:
    return list(itertools.islice(batches, n))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(state: Any, *arguments: Any, **keys: Any) -> MultipackBatchSampler:
    made = sampler(*arguments, **keys)
    made.load_state_dict(through_a_file(state))
    return made


# ---- where it goes on ----


@pytest.mark.parametrize("rank", [0, 1, 2, "all"])
@pytest.mark.parametrize("keys", LAYOUTS, ids=repr)
def test_every_position_of_an_epoch_brings_back_exactly_its_rest(
    keys: dict[str, Any], rank: Any
) -> None:
    keys = {**keys, "world_size": 3, "rank": rank, "seed": 4}
    whole = sampler(**keys)
    epochs = [list(whole) for _ in range(3)]

    for position in range(len(epochs[1]) + 1):
        running = sampler(**keys)
        running.set_epoch(1)
        assert epochs[1][:position] == take(iter(running), position)

        again = resumed(running.state_dict(), **keys)

        left = [*epochs[1][position:], *epochs[2]]
        assert left == [*again, *([] if position == len(epochs[1]) else again)]


@pytest.mark.parametrize("keys", LAYOUTS, ids=repr)
def test_every_two_positions_in_one_epoch_bring_back_its_rest(keys: dict[str, Any]) -> None:
    whole = list(sampler(**keys))

    for first, second in itertools.combinations(range(1, len(whole)), 2):
        once = sampler(**keys)
        take(iter(once), first)
        twice = resumed(once.state_dict(), **keys)
        assert whole[first:second] == take(iter(twice), second - first)

        assert whole[second:] == list(resumed(twice.state_dict(), **keys))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rank", [1, "all"])
def test_what_was_consumed_comes_back_and_not_what_workers_fetched(
    rank: Any, num_workers: int
) -> None:
    """Workers run ahead by prefetch_factor batches each, which no model has seen."""
    keys: dict[str, Any] = {"world_size": 2, "rank": rank}
    expected = list(sampler(**keys))

    def loader(batches: MultipackBatchSampler) -> Any:
        return DataLoader(
            RowDataset(range(len(LENGTHS))),
            batch_sampler=batches,
            collate_fn=list,
            num_workers=num_workers,
            prefetch_factor=4 if num_workers else None,
        )

    ranks = 2 if rank == "all" else 1
    running = sampler(**keys)
    states = [running.state_dict()]
    for number, batch in enumerate(loader(running), 1):
        assert batch == expected[number - 1]
        if number % ranks == 0:
            running.consumed()
            states.append(running.state_dict())

    assert len(states) == len(expected) // ranks + 1
    for number, state in enumerate(states[:-1]):
        assert expected[number * ranks :] == list(loader(resumed(state, **keys)))
    following = sampler(**keys)
    following.set_epoch(1)
    assert list(following) == list(resumed(states[-1], **keys))


def test_a_state_at_the_end_of_an_epoch_may_say_so_in_either_way() -> None:
    whole = six_batches()
    epochs = [list(whole) for _ in range(2)]
    state = six_batches().state_dict()

    for position in ({"epoch": 0, "position": 6}, {"epoch": 1, "position": 0}):
        made = six_batches()
        made.load_state_dict({**state, "plan_digest": None, **position})
        assert epochs[1] == list(made)


# ---- what it is compared by ----


def test_every_field_that_differs_is_named_with_both_values() -> None:
    running = sampler(world_size=2, rank=0, seed=5, sequence_len=8)
    take(iter(running), 3)
    made = sampler(world_size=3, rank="all", seed=6, sequence_len=16, micro_batch_size=2)
    before, following = made.state_dict(), list(made)
    made.set_epoch(0)

    with pytest.raises(ValueError) as caught:
        made.load_state_dict(running.state_dict())

    assert str(caught.value) == (
        "the state belongs to another order of samples: order was 'rank' and is now 'all'; "
        "sequence_len was 8 and is now 16; micro_batch_size was 1 and is now 2; world_size was 2 "
        f"and is now 3; data_seed was 5 and is now 6; {REMEDY}"
    )
    assert before == made.state_dict()
    assert following == list(made)


def test_another_order_of_the_same_lengths_is_refused() -> None:
    state = sampler([3, 4, 5, 6]).state_dict()

    with pytest.raises(ValueError, match=r"lengths_digest was '[0-9a-f]{32}' and is now"):
        resumed(state, [4, 3, 5, 6])


def test_another_plan_of_the_same_inputs_is_refused() -> None:
    """As a release with other algorithms, or a fault, would make it."""
    state = six_batches().state_dict()

    for field, value in (("plan_version", 0), ("plan_digest", "0" * 32)):
        with pytest.raises(ValueError, match=f"{field} was '?{value}'? and is now"):
            six_batches().load_state_dict({**state, field: value})


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ("a1", "a1", None),
        (None, "a1", None),
        ("a1", None, None),
        (
            "a1",
            "b2",
            "the data set's fingerprint was 'a1' and is now 'b2'; lengths and label counts are "
            "the same, so the order is too, but the texts may be others",
        ),
    ],
)
def test_another_fingerprint_alone_is_warned_about(before: Any, now: Any, text: Any) -> None:
    running = six_batches(fingerprint=before)
    expected = take(iter(running), 6)
    made = six_batches(fingerprint=now)
    state = {**running.state_dict(), "epoch": 0, "position": 2}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.load_state_dict({**state, "plan_digest": None})

    assert [str(warning.message) for warning in caught] == ([] if text is None else [text])
    assert expected[2:] == list(made)


# ---- without a position ----


@pytest.mark.parametrize("key", ["epoch", "position"])
def test_a_state_that_lacks_a_number_is_refused(key: str) -> None:
    state = six_batches().state_dict()
    del state[key]

    with pytest.raises(TypeError) as caught:
        six_batches().load_state_dict(state)

    assert str(caught.value) == f"{key} is None, but must be an integer"


def test_more_consumed_than_yielded_makes_the_position_unknown_and_stops_nothing() -> None:
    made = six_batches()
    batches = iter(made)
    take(batches, 2)
    text = "3 microbatches were said to be consumed when the iteration had yielded 2"

    with pytest.warns(UserWarning) as caught:
        made.consumed(3)
    take(batches, 2)
    made.consumed()
    state = through_a_file(made.state_dict())

    assert [str(warning.message) for warning in caught] == [
        f"states of this iteration will not hold a position: {text}"
    ]
    assert (state["epoch"], state["position"], state["replay_error"]) == (0, None, text)
    fresh = six_batches()
    with pytest.raises(ValueError) as refused:
        fresh.load_state_dict(state)
    assert str(refused.value) == f"exact replay is unavailable: {text}; {REMEDY}"
    assert fresh.state_dict() == six_batches().state_dict()


def test_a_new_iteration_knows_its_position_again() -> None:
    made = six_batches()
    with pytest.warns(UserWarning, match="will not hold a position"):
        made.consumed()
    expected = list(made)

    take(iter(made), 3)
    made.consumed(2)

    state = made.state_dict()
    assert (state["epoch"], state["position"], state["replay_error"]) == (1, 2, None)
    assert len(expected) == 6


@pytest.mark.parametrize(
    ("n", "kind", "text"),
    [
        (-1, ValueError, "n is -1, but must be 0 or more"),
        (0.5, TypeError, "n is 0.5, but must be an integer"),
    ],
)
def test_a_consumption_that_is_no_count_is_refused(n: Any, kind: type, text: str) -> None:
    made = six_batches()
    take(iter(made), 2)

    with pytest.raises(kind) as caught:
        made.consumed(n)

    assert text == str(caught.value)


def test_ignoring_the_position_starts_the_saved_epoch_anew_whatever_the_settings() -> None:
    running = six_batches()
    list(running)
    take(iter(running), 4)
    made = sampler(seed=7)
    made.load_state_dict(running.state_dict(), ignore_data_skip=True)

    expected = sampler(seed=7)
    expected.set_epoch(1)
    assert list(expected) == list(made)


@pytest.mark.parametrize(
    ("state", "epoch"),
    [
        ({}, 2),
        ({"epoch": 1.75}, 1),
        ({"epoch": None}, 2),
        ({"epoch": float("nan")}, 2),
        ({"version": 9, "epoch": 3}, 3),
    ],
    ids=repr,
)
def test_any_state_can_be_ignored(state: dict[str, Any], epoch: int) -> None:
    made = six_batches()
    made.set_epoch(2)
    take(iter(made), 3)

    made.load_state_dict(state, ignore_data_skip=True)

    assert (made.epoch, made.state_dict()["position"]) == (epoch, 0)


# ---- states that a trainer kept without this sampler ----


@pytest.mark.parametrize("rank", [0, "all"])
@pytest.mark.parametrize(
    ("state", "epoch", "done"),
    [
        ({"epoch": 0}, 0, 0),
        ({"epoch": 1 + 2 / 6}, 1, 2),
        ({"epoch": 1, "batches": 2}, 1, 2),
        ({"epoch": 2.0}, 2, 0),
        ({"epoch": 1, "batches": 6}, 2, 0),
        ({"epoch": 2 - 1e-9}, 2, 0),
    ],
    ids=repr,
)
def test_a_number_of_epochs_is_a_position(
    state: dict[str, Any], epoch: int, done: int, rank: Any
) -> None:
    keys: dict[str, Any] = {"world_size": 2, "rank": rank, "gradient_accumulation_steps": 2}
    expected = six_batches(**keys)
    expected.set_epoch(epoch)
    made = six_batches(**keys)

    made.load_state_dict(state)

    assert list(expected)[done * (2 if rank == "all" else 1) :] == list(made)


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        (
            {"epoch": 1.5},
            ValueError,
            "exact replay is unavailable: 3 microbatches into epoch 1 is not the end of an "
            f"optimizer step of 4; {REMEDY}",
        ),
        (
            {"epoch": 0, "batches": 1},
            ValueError,
            "exact replay is unavailable: 1 microbatches into epoch 0 is not the end of an "
            f"optimizer step of 4; {REMEDY}",
        ),
        (
            {"epoch": 0.3},
            ValueError,
            "exact replay is unavailable: the saved epoch 0.3 is 1.800 microbatches into epoch 0, "
            f"which has 6, and not a whole number of them; {REMEDY}",
        ),
        (
            {"epoch": float("nan")},
            ValueError,
            f"exact replay is unavailable: the saved epoch is nan; {REMEDY}",
        ),
        ({"epoch": None}, TypeError, "epoch is None, but must be a number"),
        ({"epoch": True}, TypeError, "epoch is True, but must be a number"),
        ({"epoch": -1, "batches": 0}, ValueError, "epoch is -1, but must be 0 or more"),
        (
            {"epoch": 0, "batches": 7},
            ValueError,
            "position is 7, but epoch 0 has 6 microbatches",
        ),
    ],
    ids=repr,
)
def test_a_number_of_epochs_that_is_no_position_is_refused(
    state: dict[str, Any], kind: type, text: str
) -> None:
    made = six_batches(gradient_accumulation_steps=4)
    before = made.state_dict()

    with pytest.raises(kind) as caught:
        made.load_state_dict(state)

    assert text == str(caught.value)
    assert before == made.state_dict()
