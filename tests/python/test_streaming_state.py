"""Stopping a stream anywhere and going on: what comes back, and what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from streams import (
    LAYOUTS,
    LENGTHS,
    Samples,
    StatefulSamples,
    hugging_face,
    ids,
    quiet,
    samples_of,
    stream,
    through_a_file,
)
from torch.utils.data import DataLoader, IterableDataset

from multipack import StreamingMultipack

# torch finds the workers too many for a small machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


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


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_pass_that_another_stream_gave_up_takes_nothing_either(shuffled: bool) -> None:
    """A Hugging Face stream keeps the state of its last iteration, where none begins again."""
    source = hugging_face()
    if shuffled:
        source = source.shuffle(seed=3, buffer_size=15)
    whole = ids(stream(source))
    ids(iter(stream(source)), 5)
    made = stream(source)

    assert whole[:5] == ids(iter(made), 5)
    assert whole == ids(made)


@pytest.mark.parametrize("count", [1, None], ids=["given up", "to the end"])
def test_a_pass_that_was_resumed_takes_nothing_from_others_of_its_epoch(count: int | None) -> None:
    """A Hugging Face stream that is sent to a position begins there again in the same epoch."""
    running = stream(hugging_face())
    whole = ids(running)
    running.set_epoch(0)
    ids(iter(running), 30)
    source = hugging_face()
    again = stream(source)
    again.load_state_dict(running.state_dict())
    rest = whole[30:]
    assert rest[:count] == ids(iter(again), count)

    other = stream(source)
    assert whole == ids(other)
    again.set_epoch(1)
    again.set_epoch(0)
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


class Untold(StatefulSamples):
    """Cannot say where it is."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return Samples.__iter__(self)

    def state_dict(self) -> dict[str, int]:
        if isinstance(self.state, Exception):
            raise self.state
        return {"at": self.state}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (NotImplementedError("none yet"), "NotImplementedError: none yet"),
        ((n for n in ()), "TypeError: cannot pickle 'generator' object"),
    ],
    ids=["raised", "not copied"],
)
def test_an_iterable_that_cannot_tell_its_state_is_read_again(state: Any, text: str) -> None:
    """Nobody may ever want the state: its fault must not end a training."""
    running = stream(Untold(state))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = ids(iter(running), 30)
        saved = through_a_file(running.state_dict())
        again = stream(Untold(state))
        again.load_state_dict(saved)
        rest = ids(again)

    assert {str(warning.message) for warning in caught} == {
        f"the state of the iterable cannot be had ({text}): resuming will read the stream from its "
        "start, and pass over what was read"
    }
    assert saved["buffer"]["source"] is None
    assert ids(stream()) == first + rest


@pytest.mark.filterwarnings("ignore:the state of the iterable cannot be had")
def test_an_iterable_that_cannot_tell_its_state_may_be_given_up() -> None:
    """As by a look at the first batch: there is no state to send it back to."""
    made = stream(Untold(NotImplementedError("none yet")))
    whole = ids(stream())

    assert whole[:1] == ids(iter(made), 1)
    assert whole == ids(made)


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
