"""Packing a stream: every sample once, the same batches everywhere, and resuming anywhere."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from multipack import Collator, Config, StreamingMultipack

# torch finds the workers too many for a small machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTHS = np.random.default_rng(0).integers(1, 9, 85).tolist()

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2, "multipack_real_batches": True},
    {"micro_batch_size": 3, "sample_packing": False},
    {"micro_batch_size": 3, "sample_packing": False, "batch_flattening": True},
    {"sample_packing_sequentially": True},
    {"sample_packing_algorithm": "first_fit", "sample_packing_bin_size": 2},
]


class Samples:
    """Samples of given lengths, again for each pass; each token is the number of its sample + 1."""

    def __init__(self, lengths: list[int] = LENGTHS, first: int = 0) -> None:
        self.lengths = lengths
        self.first = first
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, length in enumerate(self.lengths, 1):
            self.read += 1
            yield {"input_ids": [self.first + number] * length}


class StatefulSamples(Samples):
    """The same, going on by itself from where it was."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in itertools.islice(super().__iter__(), self.at, None):
            self.at += 1
            yield sample
        self.at = 0


def stream(samples: Any = LENGTHS, **keys: Any) -> StreamingMultipack:
    """Make a stream of buffers of 30 samples."""
    of_lengths = isinstance(samples, list) and all(isinstance(n, int) for n in samples)
    iterable = Samples(samples) if of_lengths else samples
    keys = {"sequence_len": 8, "streaming_multipack_buffer_size": 30, **keys}
    collator = keys.pop("collator", None)
    if collator is None:
        settings = {key: value for key, value in keys.items() if key != "rank"}
        collator = Collator(Config(**settings), attention="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return StreamingMultipack(iterable, collator=collator, **keys)


def quiet(batches: Any, n: int | None = None) -> list[Any]:
    """Take batches, without the warning of what the stream leaves over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the stream (ended with|gave no sample)")
        return list(itertools.islice(batches, n))


def ids(batches: Any, n: int | None = None) -> list[list[list[int]]]:
    """Take the token ids of batches, which are enough to tell them apart."""
    return [batch["input_ids"].tolist() for batch in quiet(batches, n)]


def samples_of(batches: list[list[list[int]]]) -> list[int]:
    """The numbers of the samples in batches, each as often as it is there."""
    found = []
    for batch in batches:
        for row in batch:
            found += [token - 1 for token, _ in itertools.groupby(row) if token != 0]
    return found


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
    assert len(ids(stream([7, 6, 2, 5], sequence_len=10))) == 3


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


def hugging_face() -> Any:
    columns = {"input_ids": [[number + 1] * length for number, length in enumerate(LENGTHS)]}
    return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)


# ---- resuming ----


@pytest.mark.parametrize("source", [Samples, StatefulSamples, hugging_face])
@pytest.mark.parametrize("keys", [{}, {"world_size": 2, "rank": 1}, LAYOUTS[2]], ids=repr)
def test_every_position_brings_back_exactly_the_rest(keys: dict[str, Any], source: Any) -> None:
    whole = ids(stream(source(), **keys))

    for position in range(len(whole) + 1):
        running = stream(source(), **keys)
        assert whole[:position] == ids(iter(running), position)
        again = stream(source(), **keys)
        again.load_state_dict(through_a_file(running.state_dict()))

        assert whole[position:] == ids(again)
        assert whole == ids(again)


@pytest.mark.parametrize("source", [Samples, StatefulSamples, hugging_face])
def test_a_pass_that_was_given_up_takes_nothing_from_the_next(source: Any) -> None:
    """An iterable that knows its position would go on from where the last pass stopped."""
    whole = ids(stream(source()))
    made = stream(source())

    assert whole[:1] == ids(iter(made), 1)
    assert whole[:28] == ids(iter(made), 28)
    state = made.state_dict()
    assert whole == ids(made)
    again = stream(source())
    again.load_state_dict(state)
    assert whole[28:30] == ids(iter(again), 2)
    again.load_state_dict(state, ignore_data_skip=True)
    assert whole == ids(again)


def test_a_stream_can_stop_twice_in_one_buffer() -> None:
    whole = ids(stream())
    seen: list[Any] = []
    state = None
    for n in (2, 3, 20, len(whole)):
        made = stream()
        if state is not None:
            made.load_state_dict(state)
        seen += ids(iter(made), n)
        state = through_a_file(made.state_dict())

    assert whole == seen


def test_the_sample_that_did_not_fit_is_not_lost_at_a_checkpoint() -> None:
    """A generator held it in a local variable, and the source was already past it."""
    keys: dict[str, Any] = {"sequence_len": 10, "sample_packing_sequentially": True}
    for size in (1, 2, 3):
        made = stream([6, 6, 3], streaming_multipack_buffer_size=size, **keys)
        first = ids(iter(made), 1)
        again = stream([6, 6, 3], streaming_multipack_buffer_size=size, **keys)
        again.load_state_dict(made.state_dict())

        assert samples_of(first + ids(again)) == [0, 1, 2]


def test_samples_that_wait_are_in_the_state_and_those_to_be_read_again_are_not() -> None:
    lengths = [8] * 7
    made = stream(lengths, world_size=2, rank=0, streaming_multipack_buffer_size=3)
    ids(iter(made), 2)

    buffer = made.state_dict()["buffer"]

    assert buffer["counts"]["read"] == 3
    ((number, sample),) = buffer["carried"]
    assert [number + 1] * 8 == sample["input_ids"]
    assert number < 3


def test_a_stream_that_knows_its_position_is_not_read_from_the_start() -> None:
    running = stream(StatefulSamples())
    ids(iter(running), 30)
    state = running.state_dict()
    source = StatefulSamples()
    again = stream(source)
    again.load_state_dict(state)
    assert state["buffer"]["counts"]["read"] == 30

    rest = ids(again)

    assert ids(stream())[30:] == rest
    assert state["buffer"]["source"] == {"at": 30}


def test_a_shuffled_hugging_face_stream_comes_back_exactly() -> None:
    """Its own state leaves out the samples that wait to be shuffled."""

    def shuffled() -> Any:
        return hugging_face().shuffle(seed=3, buffer_size=15)

    whole = stream(shuffled())
    epochs = [ids(whole), ids(whole)]
    assert epochs[0] != epochs[1]

    for position in (0, 5, 30, len(epochs[1]) - 1):
        running = stream(shuffled())
        running.set_epoch(1)
        ids(iter(running), position)
        again = stream(shuffled())
        again.load_state_dict(through_a_file(running.state_dict()))

        assert epochs[1][position:] == ids(again)


def test_further_keys_and_dtypes_survive_the_state() -> None:
    """Carried samples go through the state; their arrays come back as what they were."""

    def samples() -> Iterator[dict[str, Any]]:
        for number in range(9):
            yield {
                "input_ids": np.full(8, number, np.int32),
                "labels": torch.arange(8),
                "weights": np.linspace(0, 1, 8),
                "score": np.float32(number / 8),
            }

    class Again:
        def __iter__(self) -> Any:
            return samples()

    keys: dict[str, Any] = {"world_size": 2, "rank": 0, "streaming_multipack_buffer_size": 3}
    whole = quiet(stream(Again(), **keys))
    running = stream(Again(), **keys)
    quiet(iter(running), 2)
    again = stream(Again(), **keys)
    again.load_state_dict(through_a_file(running.state_dict()))

    for expected, found in zip(whole[2:], quiet(again), strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert value.dtype == found[key].dtype
            assert torch.equal(value, found[key])


class WithStates(IterableDataset[Any]):
    """What torchdata's StatefulDataLoader does in a worker: load, iterate, ask after each batch."""

    def __init__(self, inner: StreamingMultipack, states: list[Any] | None = None) -> None:
        self.inner = inner
        self.states = states

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        if self.states is not None and self.states[info.id] is not None:
            self.inner.load_state_dict(self.states[info.id])
        for batch in self.inner:
            yield info.id, batch["input_ids"].tolist(), self.inner.state_dict()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_state_of_each_worker_brings_back_its_share(num_workers: int) -> None:
    whole = ids(stream())

    for stopped in range(0, len(whole) + 1, 6):
        states: list[Any] = [None] * num_workers
        loader = DataLoader(WithStates(stream()), batch_size=None, num_workers=num_workers)
        for worker, _, state in quiet(iter(loader), stopped):
            states[worker] = through_a_file(state)

        resumed = DataLoader(WithStates(stream(), states), batch_size=None, num_workers=num_workers)
        shares: list[list[Any]] = [[] for _ in range(num_workers)]
        for worker, batch, _ in quiet(resumed):
            shares[worker].append(batch)

        # The loader goes on with the worker whose turn it is; its own order begins at worker 0.
        expected = [
            [whole[k] for k in range(len(whole)) if k >= stopped and k % num_workers == worker]
            for worker in range(num_workers)
        ]
        assert expected == shares


def test_a_position_loaded_before_workers_start_is_that_of_the_whole_loader() -> None:
    whole = ids(stream())
    for position in (1, 2, 3, 30):
        running = stream()
        ids(iter(running), position)
        again = stream()
        again.load_state_dict(running.state_dict())
        loader = DataLoader(again, batch_size=None, num_workers=2)

        assert whole[position:] == ids(loader)
        again.set_epoch(1)
        assert whole == ids(loader)


def test_a_position_that_only_workers_know_is_not_taken_for_the_start() -> None:
    """The copy in the main process has not moved: resuming from it would repeat everything."""
    made = stream()
    ids(iter(DataLoader(made, batch_size=None, num_workers=2)), 5)
    state = through_a_file(made.state_dict())
    fresh = stream()

    with pytest.raises(ValueError) as caught:
        fresh.load_state_dict(state)

    assert str(caught.value).startswith(
        "exact replay is unavailable: the stream was read by the workers of a DataLoader, which "
        "alone know how far they are; let torchdata's StatefulDataLoader keep their states, or use "
        "num_workers=0; go back"
    )
    fresh.load_state_dict(state, ignore_data_skip=True)
    assert ids(stream()) == ids(fresh)
    made.set_epoch(1)
    fresh.load_state_dict(made.state_dict())
    assert fresh.epoch == 1


def test_set_epoch_keeps_the_position_in_its_own_epoch() -> None:
    whole = ids(stream())
    running = stream()
    ids(running)
    ids(iter(running), 4)
    again = stream()
    again.load_state_dict(running.state_dict())

    again.set_epoch(1)
    assert whole[4:] == ids(again)
    assert again.epoch == 2


def test_the_iterable_is_told_the_epoch() -> None:
    told = []

    class Shuffled(Samples):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    made = stream(Shuffled())
    ids(made)
    ids(made)
    made.set_epoch(7)
    ids(made)

    assert told == [0, 1, 7]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"seed": 1}, "data_seed was 0 and is now 1"),
        ({"sequence_len": 16}, "sequence_len was 8 and is now 16"),
        ({"world_size": 2, "rank": 0}, "world_size was 1 and is now 2"),
        (
            {"streaming_multipack_buffer_size": 50},
            "streaming_multipack_buffer_size was 30 and is now 50",
        ),
    ],
    ids=repr,
)
def test_a_state_of_other_settings_is_refused(changed: dict[str, Any], text: str) -> None:
    running = stream()
    ids(iter(running), 3)
    made = stream(**changed)
    before = made.state_dict()

    with pytest.raises(ValueError) as caught:
        made.load_state_dict(running.state_dict())

    assert str(caught.value).startswith(
        f"the state belongs to another order of samples: {text}; go back to what was saved"
    )
    assert before == made.state_dict()
    made.load_state_dict(running.state_dict(), ignore_data_skip=True)
    assert ids(stream(**changed)) == ids(made)


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        stream().load_state_dict({})

    assert str(caught.value) == "the state has version None, but this release reads version 1"


def test_a_stream_that_yields_other_samples_is_refused() -> None:
    running = stream()
    ids(iter(running), 30)
    for samples, text in (
        (
            Samples(first=1),
            "exact replay is unavailable: the stream yields other samples than before, among those "
            "from number 30 on; go back",
        ),
        (
            Samples(LENGTHS[:20]),
            "exact replay is unavailable: the stream ends after 20 samples, but 30 were read "
            "before; go back",
        ),
    ):
        made = stream(samples)
        made.load_state_dict(running.state_dict())

        with pytest.raises(ValueError) as caught:
            list(made)

        assert str(caught.value).startswith(text)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_goes_on_like_the_original(copied: Any) -> None:
    running = stream()
    ids(iter(running), 5)
    made = stream()
    made.load_state_dict(running.state_dict())

    assert ids(stream())[5:] == ids(copied(made))


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


# ---- samples ----


def test_samples_without_labels_are_supervised_whole() -> None:
    (batch,) = quiet(stream([3, 2]))

    assert (batch["labels"] != -100).sum() == 3


def test_labels_are_counted_and_kept() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [4, 5], "labels": [-100, -100]},
        {"input_ids": [6, 7], "labels": [6, -100]},
    ]
    made = StreamingMultipack(samples, sequence_len=8, collator=Collator(attention="none"))

    with pytest.warns(UserWarning) as caught:
        (batch,) = list(made)

    assert [str(warning.message) for warning in caught] == [
        "of the first 3 samples of the stream some are not kept whole: "
        "unlabelled: 2 (first: sample 1, longest: 2 tokens); `counts` goes on counting"
    ]
    assert batch["labels"].tolist() == [[-100, 2, 3]]


def test_samples_left_out_are_counted_through_all_buffers_and_told_once() -> None:
    lengths = [3, 9, 0, 8, 12, 3, 3, 11]
    made = stream(lengths, streaming_multipack_buffer_size=2)

    with pytest.warns(UserWarning) as caught:
        batches = ids(made)

    assert sorted(samples_of(batches)) == [0, 3, 5, 6]
    assert [str(warning.message) for warning in caught] == [
        "of the first 2 samples of the stream some are not kept whole: "
        "over_long: 1 (first: sample 1, longest: 9 tokens); `counts` goes on counting"
    ]
    assert {
        reason: (tally.count, tally.first, tally.longest)
        for reason, tally in made.counts.dropped.items()
        if tally.count
    } == {"over_long": (3, 1, 12), "too_short": (1, 2, 0)}
    assert made.counts.read == 8


def test_counts_go_on_after_resuming() -> None:
    lengths = [3, 9, 8, 8, 12, 3, 3, 11]
    running = stream(lengths, streaming_multipack_buffer_size=2)
    with pytest.warns(UserWarning, match="over_long: 1"):
        ids(iter(running), 2)
    again = stream(lengths, streaming_multipack_buffer_size=2)
    again.load_state_dict(running.state_dict())

    ids(again)

    tally = again.counts.dropped["over_long"]
    assert (tally.count, tally.first, tally.longest) == (3, 1, 12)


def test_over_long_samples_can_be_cut() -> None:
    made = stream([9, 3, 12], excess_length_strategy="truncate")

    with pytest.warns(UserWarning, match="truncated: 2"):
        batches = ids(made)

    assert Counter({1: 8, 2: 3, 3: 8}) == Counter(
        token for batch in batches for row in batch for token in row if token
    )


def test_a_cut_sample_that_waits_is_counted_once() -> None:
    made = stream(
        [9, 9, 9, 9, 9],
        excess_length_strategy="truncate",
        world_size=2,
        rank=0,
        streaming_multipack_buffer_size=1,
        incomplete_batches="fill",
    )

    with pytest.warns(UserWarning, match="truncated: 1"):
        ids(made)

    assert made.counts.truncated.count == 5


def test_an_over_long_sample_can_be_an_error() -> None:
    made = stream([3] * 50 + [9], excess_length_strategy="raise")

    with pytest.raises(ValueError) as caught:
        list(made)

    assert str(caught.value) == (
        "sample 50 of the stream has 9 tokens, more than sequence_len 8; raise sequence_len, or "
        "set excess_length_strategy to drop or truncate"
    )


@pytest.mark.parametrize(
    ("samples", "kind", "text"),
    [
        (
            [[1, 2]],
            TypeError,
            "sample 0 of the stream is a list, but a sample is a mapping with 'input_ids'",
        ),
        ([{"ids": [1]}], ValueError, "sample 0 of the stream has no 'input_ids', but ids"),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            ValueError,
            "sample 0 of the stream has 2 input_ids but 1 labels: give one for each token",
        ),
        (
            [{"input_ids": [1, 2], "labels": [1, 2]}] * 45 + [{"input_ids": [1]}],
            ValueError,
            "sample 45 of the stream has no 'labels', but sample 0 has: give them to all samples, "
            "or to none",
        ),
        (
            [{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}],
            ValueError,
            "sample 0 of the stream has no 'labels', but sample 1 has: give them to all samples, "
            "or to none",
        ),
        (
            [{"input_ids": [1]}, {"input_ids": [[1, 2]]}],
            TypeError,
            "input_ids of sample 1 has shape (1, 2), but must be one number for each token, of "
            "shape (2,)",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_sample_is_refused_by_its_number(
    samples: Any, kind: type[Exception], text: str
) -> None:
    made = stream(iter(samples))

    with pytest.raises(kind) as caught:
        list(made)

    assert text == str(caught.value)


# ---- settings ----


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        (
            {"label_balance_window_optim_steps": 32},
            ValueError,
            "label_balance_window_optim_steps is 32, but must be 1 for a stream: the buffers of a "
            "stream do not say where optimizer steps begin",
        ),
        (
            {"balance_labels": True, "sample_packing": False},
            ValueError,
            "balance_labels with sample_packing: false needs all lengths at once, which a stream "
            "does not have: pack it, or use MultipackBatchSampler",
        ),
        (
            {"sequence_len": None},
            ValueError,
            "sequence_len is needed to plan: the most tokens of one sample",
        ),
        (
            {"world_size": 2},
            ValueError,
            "rank is needed when world_size is 2: this rank's number",
        ),
        ({"world_size": 2, "rank": 2}, ValueError, "rank is 2, but must be from 0 to 1"),
        ({"rank": "all"}, TypeError, "rank is 'all', but must be an integer"),
        (
            {"collator": Collator(attention="none", split="eval")},
            ValueError,
            "the collator is for split 'eval', but a stream is for training; evaluate with "
            "MultipackBatchSampler",
        ),
    ],
    ids=repr,
)
def test_what_a_stream_cannot_do_is_refused_at_once(
    keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        stream(**keys)

    assert text == str(caught.value)


def test_what_is_no_iterable_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        StreamingMultipack(3, sequence_len=8, collator=list)  # type: ignore[arg-type]

    assert str(caught.value) == "iterable is a int, but must yield samples one by one"


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (
            {},
            {"mask_first_label": False},
            "mask_first_label is True for the stream, but False for the collator",
        ),
        (
            {"align_samples_to": 4},
            {},
            "align_samples_to is 4 for the stream, but 1 for the collator",
        ),
        (
            {"sample_packing": False},
            {"sample_packing": False, "batch_flattening": True},
            "layout is 'padded' for the stream, but 'flattened' for the collator",
        ),
        ({}, {"sequence_len": 16}, "sequence_len is 8 for the stream, but 16 for the collator"),
        (
            {"excess_length_strategy": "truncate"},
            {"excess_length_strategy": "truncate"},
            "sequence_len is 8 for the stream, but None for the collator",
        ),
    ],
)
def test_a_collator_that_would_make_other_batches_is_refused(
    ours: dict[str, Any], theirs: dict[str, Any], text: str
) -> None:
    config, collator = Config(sequence_len=8, **ours), Collator(attention="none", **theirs)

    with pytest.raises(ValueError) as caught:
        StreamingMultipack([], config, collator=collator)

    assert str(caught.value) == f"{text}: give both the same config"


def test_a_collator_need_not_know_what_it_does_not_use() -> None:
    made = stream([3, 2], collator=Collator(attention="flash", pad_to_multiple_of=8))

    assert [tuple(batch["input_ids"].shape) for batch in made] == [(1, 8)]


def test_the_settings_of_the_collator_are_those_of_the_stream() -> None:
    collator = Collator(attention="none", sequence_len=8, pad_to_multiple_of=4)

    made = StreamingMultipack(Samples([3, 2]), collator=collator)

    assert collator.config == made.config
    assert [tuple(batch["input_ids"].shape) for batch in made] == [(1, 8)]


def test_any_function_of_rows_is_a_collator() -> None:
    made = stream([3, 2, 8], collator=lambda rows: {"rows": [len(row) for row in rows]})

    assert sorted(batch["rows"] for batch in made) == [[1], [2]]
