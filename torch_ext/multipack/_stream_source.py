"""The samples of an iterable from any place on, in whatever way it can get there.

An iterable that knows its own position is asked for it behind every buffer, and goes on from there;
any other is read from its start, and what was read before is passed over. The streams of Hugging
Face need some care: they deal their samples out to DataLoader workers, share their epoch between
them, and once told where to begin, begin there in every pass.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as worker_module

from multipack._samples import token_array
from multipack._state import unavailable

Sample: TypeAlias = "dict[str, Any]"


@runtime_checkable
class _Stateful(Protocol):
    """An iterable that knows its own position."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Source:
    """An iterable of samples, read pass after pass.

    Args:
        iterable (Iterable): If it has `state_dict` and `load_state_dict`, these are used.
    """

    def __init__(self, iterable: Iterable[Mapping[str, Any]]) -> None:
        self.iterable = iterable
        # Where the iterable began a pass that has not come to its end, in a list of one.
        self._origin: list[Any] | None = None

    @property
    def has_epochs(self) -> bool:
        """Whether the iterable is told the epoch."""
        return hasattr(self.iterable, "set_epoch")

    def samples(self, epoch: int, read: int, state: Any) -> Iterator[Mapping[str, Any]]:
        """Return the samples of an epoch from a place on; advance it within `as_if_alone`.

        Args:
            epoch (int): The epoch.
            read (int): How many are behind the place.
            state: What `state` returned there, if the iterable is to go on from it; None: what is
                behind is read again and passed over.

        Raises:
            ValueError: If there are fewer samples than that.
        """
        iterable: Any = self.iterable
        knows_its_position = isinstance(iterable, _Stateful)
        if self.has_epochs:
            _own_epoch(iterable)
            iterable.set_epoch(epoch)
        with as_if_alone():
            if knows_its_position:
                # It would go on from where a pass was given up, and samples would be lost.
                if self._origin is None:
                    self._origin = [_origin_of(iterable)]
                else:
                    _send_back(iterable, self._origin[0])
                if state is not None:
                    iterable.load_state_dict(state)
                    source: Iterator[Mapping[str, Any]] = iter(iterable)
                    if _is_hugging_face(iterable):
                        # It would begin there whenever this epoch is read again.
                        first = list(itertools.islice(source, 1))
                        _send_back(iterable, self._origin[0])
                        source = itertools.chain(first, source)
                    return source
            source = iter(iterable)
            passed_over = sum(1 for _ in itertools.islice(source, read))
        if passed_over < read:
            raise unavailable(
                f"the stream ends after {passed_over} samples, but {read} were read before"
            )
        return source

    def state(self) -> Any:
        """Return a copy of the iterable's own state, or None if it has none, or cannot tell it."""
        return _state_of(self.iterable)

    def end(self) -> None:
        """Take note that the pass has come to its end, where the iterable begins anew by itself."""
        self._origin = None


def checked(sample: Any, number: int) -> Sample:
    """Return a sample of the stream with its tokens and labels as arrays, as many of each.

    Raises:
        TypeError: If it is no mapping, or its tokens or labels are not integers.
        ValueError: If it has no tokens, or another number of labels.
    """
    if not isinstance(sample, Mapping):
        raise TypeError(
            f"sample {number} of the stream is a {type(sample).__name__}, but a sample is a "
            "mapping with 'input_ids'"
        )
    if "input_ids" not in sample:
        raise ValueError(
            f"sample {number} of the stream has no 'input_ids', but {', '.join(sorted(sample))}"
        )
    found = dict(sample)
    for key in found.keys() & {"input_ids", "labels"}:
        found[key] = np.asarray(token_array(found[key], key, number))
    tokens, labels = len(found["input_ids"]), len(found.get("labels", found["input_ids"]))
    if tokens != labels:
        raise ValueError(
            f"sample {number} of the stream has {tokens} input_ids but {labels} labels: give one "
            "for each token"
        )
    return found


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Hide from the iterable that it runs in a DataLoader worker.

    Streams of Hugging Face would yield each worker its own samples, but here all workers read all.
    """
    info, worker_module._worker_info = worker_module._worker_info, None
    try:
        yield
    finally:
        worker_module._worker_info = info


def _own_epoch(iterable: Any) -> None:
    """Give the iterable of a worker an epoch of its own.

    The streams of Hugging Face keep theirs in memory that all workers share, and `set_epoch` adds
    the difference to it: two workers at once add it twice, and read another epoch than was meant.
    """
    epoch = getattr(iterable, "_epoch", None)
    if get_worker_info() is not None and isinstance(epoch, torch.Tensor):
        iterable._epoch = epoch.clone()


def _state_of(iterable: Iterable[Any]) -> Any:
    """Return a copy of the state of an iterable, or None if it has none, or cannot tell it.

    It is asked for whether or not anything will be saved, so that its fault must not end the pass.
    """
    if not isinstance(iterable, _Stateful):
        return None
    try:
        return copy.deepcopy(iterable.state_dict())
    except Exception as error:  # whatever the code of others may raise
        warnings.warn(
            f"the state of the iterable cannot be had ({type(error).__name__}: {error}): resuming "
            "will read the stream from its start, and pass over what was read",
            stacklevel=4,
        )
        return None


def _origin_of(iterable: Any) -> Any:
    """Return a copy of the state that the next iteration begins with.

    It is what the streams of Hugging Face were told to begin with: their own state stays where the
    last iteration stopped, though the next one starts anew.
    """
    if _is_hugging_face(iterable):
        return copy.deepcopy(iterable._starting_state_dict)
    return _state_of(iterable)


def _send_back(iterable: Any, origin: Any) -> None:
    """Let the next iteration begin where `_origin_of` said; what could not tell stays as it is."""
    if origin is not None or _is_hugging_face(iterable):
        iterable.load_state_dict(origin)


def _is_hugging_face(iterable: Any) -> bool:
    """Whether it keeps where it is to begin apart from where it is."""
    return hasattr(iterable, "_starting_state_dict")
