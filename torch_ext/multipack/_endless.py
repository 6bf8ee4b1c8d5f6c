"""A stream pass after pass, for a trainer that counts steps and has no epochs.

Such a trainer goes on by passing over the microbatches that it was trained on, so that its state is
their number and what tells this stream from another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from multipack._arrays import integer
from multipack._state import refuse_differences, refuse_other_version, unavailable
from multipack._stream_state import VERSION, Pass
from multipack.streaming import StreamingMultipack


class Endless(IterableDataset[dict[str, Any]]):
    """A stream, pass after pass as if it were one, for a trainer that counts steps and no epochs.

    The order is that of a single process with any number of workers: each goes on in the next pass
    with the microbatch whose turn it has. What gives nothing when it is read again, as a generator
    does, has come to its end.

    Args:
        stream (StreamingMultipack): The passes.
    """

    def __init__(self, stream: StreamingMultipack) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield microbatches from the start of epoch 0.

        Raises:
            ValueError: If there is none.
        """
        stream, info, before = self.stream, get_worker_info(), 0
        for epoch in itertools.count():
            shares = None if info is None else (info.id, info.num_workers, -before)
            stream._go_to(Pass(epoch=epoch, shares=shares))
            yield from stream
            if stream._passed == 0:
                break
            before += stream._passed
        if before == 0:
            raise ValueError(
                "the stream gave no microbatch: what is retained of it does not fill one round of "
                f"{stream.config.world_size} ranks, see its warnings"
            )

    @property
    def first_digest(self) -> int:
        """A hash of the first buffer, whichever process has read it; -1: none has."""
        return int(self.stream._first_samples)

    def state_at(self, position: int) -> dict[str, Any]:
        """Return the state after so many microbatches of this rank, as plain data."""
        identity = self.stream._identity()
        return {"version": VERSION, **identity, "position": position, "samples": self.first_digest}

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return how many microbatches of a rank are done in a state.

        Raises:
            TypeError: If it is no state.
            ValueError: If it was saved with other settings; the text names each.
        """
        refuse_other_version(state, VERSION)
        refuse_differences(state, self.stream._identity())
        return integer("position", state.get("position"), least=0)

    def check_samples(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other samples. Only behind the first microbatch is it known.

        Raises:
            ValueError: If it is one.
        """
        # A state that was saved before anything was read says nothing.
        if state.get("samples", -1) not in (-1, self.first_digest):
            raise unavailable(
                "the stream yields other samples than before, or in another order, among the first "
                f"{self.stream.config.streaming_multipack_buffer_size}"
            )
