"""Batches on their way from a DataLoader worker to the main process.

Torch sends each tensor as a file in shared memory: it is created, mapped on both sides, its pages
are faulted in one by one, and its descriptor travels through a socket of its own. For the tensors
of a batch, some hundred kilobytes in all, that takes longer than to make them. Here they go through
the pipe of the batch, in one piece, int64 values as int16 or int32 where they fit. What arrives is
a plain dict of the same tensors.

Large tensors, such as masks, are left to torch: a pipe copies what shared memory does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import get_worker_info

_MOST_BYTES = 1 << 20
_ALIGNED = 16


def sendable(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch; in a worker, as a dict that is sent in one piece."""
    return batch if get_worker_info() is None else _Sendable(batch)


class _Sendable(dict[str, Any]):
    """A batch that pickles into a plain dict."""

    def __copy__(self) -> _Sendable:
        return _Sendable(self)

    def __reduce__(self) -> tuple[Any, ...]:
        others = dict(self)
        places = []
        start = 0
        for key, value in self.items():
            if _goes_through_the_pipe(value):
                sent = _narrowest(value)
                places.append((key, start, sent, value.dtype, tuple(value.shape)))
                others[key] = None  # keeps its place among the keys
                start += -(-value.numel() * sent.itemsize // _ALIGNED) * _ALIGNED
        data = bytearray(start)
        for key, first, sent, _, shape in places:
            part = torch.frombuffer(data, dtype=sent, count=math.prod(shape), offset=first)
            part.copy_(self[key].reshape(-1))
        return _received, (others, places, data)


def _goes_through_the_pipe(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and value.numel() > 0
        and value.nbytes <= _MOST_BYTES
    )


def _narrowest(tensor: torch.Tensor) -> torch.dtype:
    """Return int16 or int32 for int64 values that all fit, and else the dtype that there is."""
    if tensor.dtype == torch.int64:
        low, high = map(int, tensor.aminmax())
        for dtype in (torch.int16, torch.int32):
            if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
                return dtype
    return tensor.dtype


def _received(others: dict[str, Any], places: list[Any], data: bytearray) -> dict[str, Any]:
    """Put the tensors back into the dict, each with memory that no other uses."""
    for key, start, sent, dtype, shape in places:
        values = torch.frombuffer(data, dtype=sent, count=math.prod(shape), offset=start)
        others[key] = values.to(dtype).view(shape)
    return others
