"""States of samplers and streams that were damaged: refused by field, and nothing has moved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from multipack import Collator, Config, MultipackBatchSampler, StreamingMultipack


def put(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with one value replaced; `...` takes it away."""
    changed = copy.deepcopy(state)
    *folders, name = path.split(".")
    place: Any = changed
    for key in folders:
        place = place[int(key) if isinstance(place, list) else key]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ("version", "1", ValueError, "the state has version '1', but this release reads version 1"),
        ("version", [1], ValueError, "the state has version [1], but this release reads version 1"),
        ("settings", 3, TypeError, "settings is 3, but must be a mapping"),
        ("epoch", 2**63, ValueError, f"epoch is {2**63}, which does not fit into 64 bits"),
        (
            "epoch",
            1 << 4096,
            ValueError,
            "epoch is an integer of 4097 bits, which does not fit into 64 bits",
        ),
        ("epoch", -1, ValueError, "epoch is -1, but must be 0 or more"),
        ("epoch", float("nan"), TypeError, "epoch is nan, but must be an integer"),
        ("epoch", "0", TypeError, "epoch is '0', but must be an integer"),
        ("position", 2**62, ValueError, f"position is {2**62}, but epoch 0 has 2 microbatches"),
        ("position", True, TypeError, "position is True, but must be an integer"),
        ("position", ..., TypeError, "position is None, but must be an integer"),
    ],
)
def test_a_sampler_refuses_a_damaged_state_and_stays_as_it_was(
    path: str, value: Any, error: type[Exception], text: str
) -> None:
    sampler = MultipackBatchSampler([3, 5, 2, 6], sequence_len=8)
    next(iter(sampler))
    state = sampler.state_dict()
    before = copy.deepcopy(state)

    with pytest.raises(error) as caught:
        sampler.load_state_dict(put(state, path, value))

    assert str(caught.value) == text
    assert sampler.state_dict() == before


@pytest.mark.parametrize("state", [None, 7, [], "state", b"", torch.zeros(2)], ids=repr)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_state_is_refused(state: Any, streaming: bool) -> None:
    config = Config(sequence_len=8)
    loaded: Any = MultipackBatchSampler([3, 5], config=config)
    if streaming:
        loaded = StreamingMultipack([], config, collator=Collator(config, attention="none"))

    with pytest.raises(TypeError, match=r"^the state is .+, but must be a mapping$"):
        loaded.load_state_dict(state)


def test_a_tensor_in_the_place_of_a_fact_differs_from_it() -> None:
    """Comparing it would have given a tensor, and no answer."""
    sampler = MultipackBatchSampler([3, 5, 2, 6], sequence_len=8)

    for path in ("settings.world_size", "lengths_digest"):
        with pytest.raises(
            ValueError, match=rf"{path.split('.')[-1]} was tensor\(\[1, 2\]\) and is now"
        ):
            sampler.load_state_dict(put(sampler.state_dict(), path, torch.tensor([1, 2])))


def test_a_long_text_in_a_state_is_not_repeated_in_the_error() -> None:
    sampler = MultipackBatchSampler([3, 5, 2, 6], sequence_len=8)

    with pytest.raises(ValueError) as caught:
        sampler.load_state_dict(put(sampler.state_dict(), "lengths_digest", "x" * 10_000_000))

    assert len(str(caught.value)) < 1000


STREAM = [{"input_ids": [i] * length} for i, length in enumerate([3, 5, 2, 6, 4, 4, 7])]


def stream_of(**keys: Any) -> StreamingMultipack:
    config = Config(sequence_len=8, world_size=2, streaming_multipack_buffer_size=4)
    return StreamingMultipack(STREAM, config, rank=0, collator=Collator(config, attention="none"))


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ("buffer", ..., ValueError, "the state has no 'buffer'"),
        ("buffer", None, TypeError, "buffer is None, but must be a mapping"),
        ("buffer.seed", 2**64, ValueError, f"seed is {2**64}, but must be from 0 to {2**64 - 1}"),
        ("buffer.seed", "1", TypeError, "seed is '1', but must be an integer"),
        ("buffer.batches", -5, ValueError, "batches is -5, but must be 0 or more"),
        ("buffer.labelled", 1, TypeError, "labelled is 1, but must be a bool or None"),
        ("buffer.carried", 8, TypeError, "carried is 8, but must be a list or a tuple"),
        (
            "buffer.carried",
            [8],
            TypeError,
            "an entry of carried is 8, but must be a list or a tuple",
        ),
        (
            "buffer.carried",
            [[1, 2, 3]],
            ValueError,
            "an entry of carried has 3 parts: a number and a sample",
        ),
        (
            "buffer.carried",
            [[1, 2]],
            TypeError,
            "sample 1 of the stream is a int, but a sample is a mapping with 'input_ids'",
        ),
        ("buffer.counts", [], TypeError, "counts is [], but must be a mapping"),
        ("buffer.counts.read", 0.5, TypeError, "read is 0.5, but must be an integer"),
        (
            "buffer.counts.read",
            2**63,
            ValueError,
            f"read is {2**63}, which does not fit into 64 bits",
        ),
        (
            "buffer.counts.truncated.count",
            -1,
            ValueError,
            "count of truncated is -1, but must be 0 or more",
        ),
        ("buffer.counts.dropped", {"x": 1}, TypeError, "x is 1, but must be a mapping"),
        ("shares", [0, 0, 0], ValueError, "shares is of worker 0, but there are 0"),
        ("shares", [0, 1], ValueError, "shares has 2 entries, but must have 3"),
        ("shares", "012", TypeError, "shares is '012', but must be a list or a tuple or None"),
        ("position", None, TypeError, "position is None, but must be an integer"),
    ],
)
def test_a_stream_refuses_a_damaged_state_and_stays_as_it_was(
    path: str, value: Any, error: type[Exception], text: str
) -> None:
    stream = stream_of()
    next(iter(stream))
    state = stream.state_dict()
    before = copy.deepcopy(state)

    with pytest.raises(error) as caught:
        stream.load_state_dict(put(state, path, value))

    assert str(caught.value) == text
    assert stream.state_dict() == before


def test_a_stream_that_was_read_further_than_it_goes_is_refused() -> None:
    stream = stream_of()
    next(iter(stream))
    stream.load_state_dict(put(stream.state_dict(), "buffer.counts.read", 2**62))

    with pytest.raises(ValueError, match=f"the stream ends after 7 samples, but {2**62} were read"):
        list(stream)
