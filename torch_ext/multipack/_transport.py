"""Batches on their way from a DataLoader worker to the main process.

Torch sends each tensor as a file in shared memory of its own: it is created, mapped on both sides,
its pages are made and faulted in one by one, and its descriptor travels through a socket. For the
tensors of a batch, some hundred kilobytes in all, that takes longer than to make them; and a pipe
holds 64 KiB, so that it would be filled and drained several times. Here a worker keeps a few files
in memory and writes each batch into one that is free:

    worker          file [lent] <- tensors, one after the other       queue <- (pid, fd), shapes
    main process    new tensors <- file of /proc/pid/fd, [free]

A file's pages are made once and then used again, and the queue carries a few hundred bytes: 0.03 ms
on either side for the 400 KB of 16,384 tokens. There are as many files as batches that are sent and
not yet received: those that the loader prefetches. They go when the worker ends, in whatever way.
The main process keeps nothing; what arrives is a plain dict of tensors with memory of their own.

Large tensors, such as masks, are left to torch, for the files would stay as large; and so is what
a batch hardly ever has: other dtypes, strides, gradients.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import get_worker_info

_MOST_BYTES = 16 << 20
# As the messages number them.
_DTYPES = (torch.int64, torch.int32, torch.float32, torch.bool, torch.uint8)
# What a file begins with: whether its batch is still to be read. The tensors follow.
_FREE, _LENT = bytes(8), bytes([1] * 8)

# The files of each process and thread: a forked child must not write into those of its parent.
_files: dict[tuple[int, int], list[int]] = {}


def sendable(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch; in a worker, as a dict that queues send through a file in memory."""
    return batch if get_worker_info() is None else _Sendable(batch)


class _Sendable(dict[str, Any]):
    """A batch that arrives as a plain dict."""

    def __copy__(self) -> _Sendable:
        return _Sendable(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _reduced(batch: _Sendable) -> tuple[Any, ...]:
    """Write a batch into a file, for a queue between processes: what it sends, it reads once."""
    others = dict(batch)
    places = []
    parts: list[Any] = [_LENT]
    for key, value in batch.items():
        if _goes_through_a_file(value):
            places.append((key, _DTYPES.index(value.dtype), tuple(value.shape)))
            parts.append(value.numpy())
            others[key] = None  # keeps its place among the keys
    try:
        file = _written(parts)
    except OSError:
        # No file, or no memory for it. An error here, in the thread of a queue, would be a batch
        # that never arrives.
        return batch.__reduce__()
    return _received, (os.getpid(), file, others, places)


ForkingPickler.register(_Sendable, _reduced)


def _received(pid: int, fd: int, others: dict[str, Any], places: list[Any]) -> dict[str, Any]:
    """Read the tensors back into the dict, and give the file back."""
    parts: list[Any] = [bytearray(len(_LENT))]
    for key, dtype, shape in places:
        others[key] = torch.empty(shape, dtype=_DTYPES[dtype])
        parts.append(others[key].numpy())
    file = os.open(_path(pid, fd), os.O_RDWR)
    try:
        _check_whole(parts, os.preadv(file, parts, 0))
        os.pwrite(file, _FREE, 0)
    finally:
        os.close(file)
    return others


def _written(parts: list[Any]) -> int:
    """Write into a file of this thread that holds no batch, and return it."""
    files = _files.setdefault((os.getpid(), threading.get_ident()), [])
    file = next((file for file in files if os.pread(file, len(_FREE), 0) == _FREE), None)
    if file is None:
        file = os.memfd_create("multipack")
        files.append(file)
    try:
        os.stat(_path(os.getpid(), file))  # not there where /proc is not
        _check_whole(parts, os.pwritev(file, parts, 0))
    except OSError:
        # What has been written would be kept as long as the file.
        files.remove(file)
        os.close(file)
        raise
    return file


def _path(pid: int, fd: int) -> str:
    """Return where a process finds an open file of another."""
    return f"/proc/{pid}/fd/{fd}"


def _goes_through_a_file(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.is_contiguous()
        and value.dtype in _DTYPES
        and not value.requires_grad
        and value.nbytes <= _MOST_BYTES
    )


def _check_whole(parts: list[Any], moved: int) -> None:
    """Refuse a file that did not take or give all bytes."""
    size = sum(memoryview(part).nbytes for part in parts)
    if moved != size:
        raise OSError(f"only {moved} of {size} bytes of a batch fit into memory")
