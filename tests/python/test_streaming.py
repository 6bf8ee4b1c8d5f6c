"""Packing a stream: every sample once, the same batches everywhere, a buffer at a time."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from streams import (
    LAYOUTS,
    LENGTHS,
    Samples,
    hugging_face,
    ids,
    quiet,
    samples_of,
    stream,
)
from torch.utils.data import DataLoader

# torch finds the workers too many for a small machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# ---- every sample once ----


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("keys", LAYOUTS, ids=repr)
def test_every_sample_comes_once_over_all_ranks_and_all_ranks_get_as_many_batches(
    keys: dict[str, Any], world_size: int
) -> None:
    made = [stream(world_size=world_size, rank=rank, **keys) for rank in range(world_size)]

    ranks = [ids(one) for one in made]

    seen = samples_of([batch for batches in ranks for batch in batches])
    left = {one.counts.unused_samples for one in made}
    assert len(left) == 1
    assert len(LENGTHS) - left.pop() == len(seen) == len(set(seen))
    assert len({len(batches) for batches in ranks}) == 1
    assert [one.counts.read for one in made] == [len(LENGTHS)] * world_size


def test_what_fills_no_round_waits_for_the_next_buffer() -> None:
    """Here no buffer of 3 rows fills rounds of 2 ranks; leaving one out each time is a third."""
    ranks = [
        ids(stream([8] * 12, world_size=2, rank=rank, streaming_multipack_buffer_size=3))
        for rank in (0, 1)
    ]

    assert [len(batches) for batches in ranks] == [6, 6]
    assert list(range(12)) == sorted(samples_of(ranks[0] + ranks[1]))


def test_a_buffer_too_small_for_a_round_grows_until_one_is_full() -> None:
    batches = [
        ids(stream([8] * 10, world_size=4, rank=rank, streaming_multipack_buffer_size=1))
        for rank in range(4)
    ]

    assert [len(one) for one in batches] == [2] * 4


def test_random_buffers_lose_and_double_nothing(seeded: np.random.Generator) -> None:
    """A packer that takes a sample out before it knows that it fits loses it."""
    for _ in range(25):
        lengths = seeded.integers(1, 11, int(seeded.integers(0, 30))).tolist()
        made = stream(
            lengths,
            sequence_len=10,
            streaming_multipack_buffer_size=int(seeded.integers(1, 10)),
        )

        assert list(range(len(lengths))) == sorted(samples_of(ids(made)))


def test_balancing_stays_inside_a_buffer_and_loses_nothing(seeded: np.random.Generator) -> None:
    """Labels are balanced buffer by buffer, and every sample still comes once."""
    lengths = [int(n) for n in seeded.integers(1, 9, 300)]
    keys = {"balance_labels": True, "streaming_multipack_buffer_size": 50, "world_size": 2}

    ranks = [quiet(stream(lengths, rank=rank, **keys)) for rank in (0, 1)]

    assert len(ranks[0]) == len(ranks[1])
    seen = Counter(sample for rank in ranks for sample in samples_of(ids(rank)))
    assert max(seen.values()) == 1
    assert len(seen) >= 300 - 2 * 8


def test_a_small_stream_is_packed_as_it_can_be() -> None:
    batches = ids(stream([7, 6, 2, 5], sequence_len=10))

    assert len(batches) == 3
    assert sorted(samples_of(batches)) == [0, 1, 2, 3]


def test_sequential_packing_keeps_the_order_of_the_stream_across_buffers() -> None:
    batches = ids(stream(sample_packing_sequentially=True))

    assert list(range(len(LENGTHS))) == samples_of(batches)


def test_no_sample_and_an_empty_stream_are_no_batch() -> None:
    assert ids(stream([])) == []


def test_a_generator_that_is_used_up_is_told() -> None:
    made = stream({"input_ids": [1, 2]} for _ in range(3))
    assert len(list(made)) == 1

    with pytest.warns(UserWarning) as caught:
        assert list(made) == []

    assert [str(warning.message) for warning in caught] == [
        "the stream gave no sample; a generator can be read once only: give an iterable that "
        "starts anew"
    ]


# ---- what is left at the end ----


def test_what_is_left_at_the_end_is_dropped_with_a_warning_and_counted() -> None:
    made = stream([8] * 7, world_size=3, rank=1)

    with pytest.warns(UserWarning) as caught:
        batches = list(made)

    assert len(batches) == 2
    assert [str(warning.message) for warning in caught] == [
        "the stream ended with 1 samples that do not fill a round of 3 ranks and are left out; "
        "incomplete_batches: fill keeps them"
    ]
    assert made.counts.unused_samples == 1


def test_what_is_left_at_the_end_can_be_filled_up_with_repeats_that_teach_nothing() -> None:
    ranks = [
        list(stream([8] * 7, world_size=3, rank=rank, incomplete_batches="fill"))
        for rank in range(3)
    ]

    assert [len(batches) for batches in ranks] == [3, 3, 3]
    together = [batch for batches in ranks for batch in batches]
    supervised = [
        int(batch["input_ids"][0, 0]) - 1 for batch in together if (batch["labels"] > 0).any()
    ]
    assert list(range(7)) == sorted(supervised)


def test_what_is_left_at_the_end_can_be_split() -> None:
    ranks = [
        ids(stream([4] * 8, world_size=3, rank=rank, incomplete_batches="split"))
        for rank in range(3)
    ]

    assert [len(batches) for batches in ranks] == [2, 2, 2]
    assert list(range(8)) == sorted(samples_of([batch for batches in ranks for batch in batches]))


def test_what_is_too_little_to_split_is_left_out() -> None:
    made = stream([8] * 4, world_size=3, rank=0, incomplete_batches="split")

    assert len(quiet(made)) == 1
    assert made.counts.unused_samples == 1


# ---- the same everywhere ----


def test_the_same_buffer_is_packed_alike_wherever_it_comes() -> None:
    """In another pass, behind other buffers, as another kind of array."""
    samples = [
        {"input_ids": torch.full((length,), number, dtype=torch.int32)}
        for number, length in enumerate(LENGTHS[:30], 1)
    ]
    alone = ids(stream(LENGTHS[:30]))

    twice = stream(samples)
    assert alone == ids(twice) == ids(twice)
    others = [{"input_ids": [7] * 8}] * 30
    assert alone == ids(stream(others + samples))[30:]


def test_tokens_and_seed_decide_the_order() -> None:
    lengths = [8] * 30
    first = ids(stream(lengths))

    def numbers(batches: list[list[list[int]]], first: int = 0) -> list[int]:
        return [batch[0][0] - first for batch in batches]

    assert sorted(numbers(first)) == list(range(1, 31)) != numbers(first)
    assert numbers(first) != numbers(ids(stream(lengths, seed=1)))
    assert numbers(first) != numbers(ids(stream(Samples(lengths, first=100))), first=100)
    assert ids(stream(lengths, seed=3)) == ids(stream(lengths, seed=9, data_seed=3))


def test_other_processes_make_the_same_batches() -> None:
    code = (
        "import multipack, numpy\n"
        "lengths = numpy.random.default_rng(0).integers(1, 9, 100)\n"
        "stream = multipack.StreamingMultipack(\n"
        "    [{'input_ids': [i] * n} for i, n in enumerate(lengths)], sequence_len=8,\n"
        "    streaming_multipack_buffer_size=30, collator=multipack.Collator(attention='none'))\n"
        "print([batch['input_ids'].tolist() for batch in stream])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "MULTIPACK_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "2"))
    }

    assert len(outputs) == 1
    assert len(outputs.pop()) > 100


# ---- DataLoader workers ----


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("keys", LAYOUTS, ids=repr)
def test_workers_give_the_order_of_a_single_process(keys: dict[str, Any], num_workers: int) -> None:
    keys = {"incomplete_batches": "fill", "world_size": 2, "rank": 1, **keys}

    loader = DataLoader(stream(**keys), batch_size=None, num_workers=num_workers)

    assert ids(stream(**keys)) == ids(loader)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_begin_every_epoch_anew(persistent: bool) -> None:
    loader = DataLoader(stream(), batch_size=None, num_workers=2, persistent_workers=persistent)

    assert ids(stream()) == ids(loader) == ids(loader)


class SharedEpoch(Samples):
    """Keeps its epoch where all workers can write it, slowly, as the streams of Hugging Face do."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self._epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        more = epoch - int(self._epoch)
        time.sleep(0.1)
        self._epoch += more

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in super().__iter__():
            yield {"input_ids": [int(self._epoch)] * len(sample["input_ids"])}


def test_workers_do_not_write_over_one_anothers_epoch() -> None:
    """Two that set epoch 1 at once left datasets' stream at epoch 2, for all of them."""
    loader = DataLoader(
        stream(SharedEpoch([8] * 8)), batch_size=None, num_workers=2, persistent_workers=True
    )

    for epoch in range(3):
        assert [batch["input_ids"].unique().tolist() for batch in loader] == [[epoch]] * 8


def test_workers_that_read_an_epoch_again_say_so() -> None:
    made = stream(SharedEpoch([8] * 4))
    loader = DataLoader(made, batch_size=None, num_workers=1)
    list(loader)
    made.set_epoch(1)
    list(loader)

    with pytest.raises(UserWarning, match="epoch 1 of the stream is read again: workers that do"):
        list(loader)


def test_more_workers_than_batches_are_idle() -> None:
    loader = DataLoader(stream([8, 8]), batch_size=None, num_workers=4)

    assert ids(stream([8, 8])) == ids(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_hugging_face_stream_is_read_whole_by_every_worker(num_workers: int) -> None:
    """In a worker it yields that worker's files, of which the others would never see one."""
    made = stream(hugging_face())
    loader = DataLoader(made, batch_size=None, num_workers=num_workers)

    assert list(range(len(LENGTHS))) == sorted(samples_of(ids(loader)))


def test_a_stream_survives_spawned_workers() -> None:
    loader = DataLoader(stream(), batch_size=None, num_workers=1, multiprocessing_context="spawn")

    assert ids(stream()) == ids(loader)


# ---- memory ----


def test_no_more_than_a_buffer_is_held_or_read_ahead() -> None:
    held: list[weakref.ref[Any]] = []

    def samples() -> Iterator[dict[str, Any]]:
        for number in range(100_000):
            tokens = np.full(8, number)
            held.append(weakref.ref(tokens))
            yield {"input_ids": tokens}

    most = 0
    for number, _ in enumerate(
        itertools.islice(stream(samples(), streaming_multipack_buffer_size=50), 1000), 1
    ):
        most = max(most, sum(reference() is not None for reference in held[-200:]))
        assert len(held) <= number + 50

    assert most <= 51
    assert not any(reference() is not None for reference in held[:-200])
