"""Where in a stream a process is, and how that is saved and read again.

A stream cannot be asked for its sample number n, so that a position is more than a number: the
samples that were carried over from the buffer before are part of it, and so is the iterable's own
state, if it has one. What is read may come from anywhere, and is believed only as far as checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from multipack._arrays import integer, shown
from multipack._state import refuse_other_kinds
from multipack._stats import NO_SAMPLES, Tally
from multipack._stream_source import Sample, checked

VERSION = 1


@dataclasses.dataclass(frozen=True)
class StreamCounts:
    """What became of the samples of a stream, up to the end of the buffer at hand."""

    read: int = 0
    """Samples taken from the stream."""
    dropped: Mapping[str, Tally] = dataclasses.field(default_factory=dict)
    """Samples left out, by reason: ``over_long``, ``too_short``, ``unlabelled``."""
    truncated: Tally = NO_SAMPLES
    """Samples cut to `sequence_len`."""
    unused_samples: int = 0
    """Retained samples at the end of the stream that fill no round of ranks."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a buffer begins."""

    counts: StreamCounts = StreamCounts()
    carried: tuple[tuple[int, Sample], ...] = ()
    """Samples of the buffer before, with their numbers in the stream."""
    batches: int = 0
    """Microbatches of this rank before the buffer."""
    labelled: bool | None = None
    """Whether samples have labels; None: none was read yet."""
    source: Any = None
    """The state of the iterable, behind what was read; None: it has none, or nothing was read."""


@dataclasses.dataclass
class Pass:
    """One iteration over the stream."""

    epoch: int = 0
    mark: Mark = Mark()
    position: int = 0
    """Microbatches of this rank that are done."""
    seed: int | None = None
    """Of the buffer that begins at the mark; None: it was not read yet."""
    counts: StreamCounts = StreamCounts()
    shares: tuple[int, int, int] | None = None
    """A DataLoader worker's number, how many there are, and the microbatch that number 0 began
    with; None: in no worker."""


def sample_to_state(sample: Sample) -> dict[str, Any]:
    """Write a sample as plain data; arrays that are no tokens as tensors, to keep their dtype."""

    def plain(key: str, value: Any) -> Any:
        if key in ("input_ids", "labels") or isinstance(value, np.generic):
            return value.tolist()
        return torch.tensor(value) if isinstance(value, np.ndarray) else value

    return {key: plain(key, value) for key, value in sample.items()}


def pass_from(state: Mapping[str, Any]) -> Pass:
    """Read a state. It may come from anywhere, so nothing in it is taken to be what it should be.

    Raises:
        TypeError: If a part is of the wrong kind; the text names it.
        ValueError: If a part is missing or out of range.
    """
    buffer = _part(state, "buffer", Mapping)
    if (seed := _get(buffer, "seed")) is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is {shown(seed)}, but must be an integer")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {shown(seed)}, but must be from 0 to {(1 << 64) - 1}")
    counts = _counts_from(_part(buffer, "counts", Mapping))
    carried = []
    for entry in _part(buffer, "carried", list, tuple):
        refuse_other_kinds("an entry of carried", entry, list, tuple)
        if len(entry) != 2:
            raise ValueError(f"an entry of carried has {len(entry)} parts: a number and a sample")
        number = integer("the number of a carried sample", entry[0], least=0)
        carried.append((number, checked(entry[1], number)))
    shares = _part(state, "shares", list, tuple, type(None))
    if shares is not None:
        if len(shares) != 3:
            raise ValueError(f"shares has {len(shares)} entries, but must have 3")
        worker, workers, base = (integer("an entry of shares", share, least=0) for share in shares)
        if worker >= workers:
            raise ValueError(f"shares is of worker {worker}, but there are {workers}")
        shares = (worker, workers, base)
    return Pass(
        epoch=integer("epoch", _get(state, "epoch"), least=0),
        mark=Mark(
            counts=counts,
            carried=tuple(carried),
            batches=integer("batches", _get(buffer, "batches"), least=0),
            labelled=_part(buffer, "labelled", bool, type(None)),
            source=_get(buffer, "source"),
        ),
        position=integer("position", _get(state, "position"), least=0),
        seed=seed,
        counts=counts,
        shares=shares,
    )


def _counts_from(state: Mapping[str, Any]) -> StreamCounts:
    dropped = _part(state, "dropped", Mapping)
    return StreamCounts(
        read=integer("read", _get(state, "read"), least=0),
        dropped={str(reason): _tally_from(dropped, reason) for reason in dropped},
        truncated=_tally_from(state, "truncated"),
        unused_samples=integer("unused_samples", _get(state, "unused_samples"), least=0),
    )


def _tally_from(state: Mapping[str, Any], name: str) -> Tally:
    tally = _part(state, name, Mapping)

    def number(key: str) -> int | None:
        value = _get(tally, key)
        return None if value is None else integer(f"{key} of {name}", value, least=0)

    return Tally(number("count") or 0, number("first"), number("longest"))


def _part(state: Mapping[str, Any], key: str, *kinds: type) -> Any:
    """Return a part of a state that must be of one of these kinds."""
    value = _get(state, key)
    refuse_other_kinds(key, value, *kinds)
    return value


def _get(state: Mapping[str, Any], key: str) -> Any:
    """Return a part of a state that must be there."""
    if key not in state:
        raise ValueError(f"the state has no {key!r}")
    return state[key]
