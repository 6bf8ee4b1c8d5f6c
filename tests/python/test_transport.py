"""What a batch is after its way from a worker: the same, as a plain dict, whatever is in it."""

from __future__ import annotations

import os
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from multipack import Collator, PackedDataset, _transport
from multipack._transport import _Sendable, sendable

# Python warns of forks while there are threads, as torch has them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SENT: dict[str, Any] = {
    "int64": torch.tensor([[-(2**63), 0], [5, 2**63 - 1]]),
    "odd bytes": torch.tensor([True, False, True]),
    "int32": torch.arange(3, dtype=torch.int32),
    "float": torch.tensor([1.5, float("nan"), float("-inf")]),
    "bfloat16": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(2, 0, dtype=torch.int64),
    "strided": torch.arange(12).view(3, 4)[:, ::2],
    "large": torch.ones(1 << 25, dtype=torch.bool),
    "number": 7,
    "text": "some",
    "list": [torch.tensor([1, 2])],
}


class Made(Dataset[Any]):
    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sendable(self.batch)


def assert_same(expected: dict[str, Any], batch: dict[str, Any]) -> None:
    assert type(batch) is dict
    assert list(batch) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(batch[key], value, rtol=0, atol=0, equal_nan=True)
            assert batch[key].dtype == value.dtype
        else:
            assert type(batch[key]) is type(value)


def test_a_batch_arrives_as_it_was_sent() -> None:
    for batch in DataLoader(Made(SENT), batch_size=None, num_workers=1):
        assert_same(SENT, batch)
        assert batch["list"][0].equal(SENT["list"][0])


def test_what_needs_a_gradient_stays_with_torch() -> None:
    weight = torch.ones(2, requires_grad=True)

    assert received({"weight": weight})["weight"].requires_grad


def test_it_is_writable_and_no_tensor_lies_in_another() -> None:
    batch = received(SENT)

    written = ("int32", "odd bytes", "int64")
    for key in written:
        batch[key].zero_()
    assert_same({**SENT, **{key: torch.zeros_like(SENT[key]) for key in written}}, batch)


def received(batch: dict[str, Any]) -> Any:
    """Return what comes out of a queue between processes."""
    return pickle.loads(ForkingPickler.dumps(_Sendable(batch)))


def files_in_memory() -> int:
    """Return the open descriptors of this process, which each of its files is one of."""
    return len(os.listdir("/proc/self/fd"))


def test_a_file_in_memory_is_used_again() -> None:
    received(SENT)
    before = files_in_memory()
    for count in (10, 100_000, 1000):
        batch = {"ids": torch.arange(count)}
        sent = ForkingPickler.dumps(_Sendable(batch))
        assert len(sent) < 500
        assert_same(batch, pickle.loads(sent))

    assert files_in_memory() == before


def test_batches_that_are_on_their_way_do_not_touch_each_other() -> None:
    batches = [{"ids": torch.full((1000,), number)} for number in range(5)]
    sent = [ForkingPickler.dumps(_Sendable(batch)) for batch in batches]

    for place in (3, 0, 4, 1, 2):
        assert_same(batches[place], pickle.loads(sent[place]))


def test_a_forked_child_does_not_write_into_the_files_of_its_parent() -> None:
    batch = {"ids": torch.arange(1000)}
    received(batch)
    child = os.fork()
    if child == 0:
        ForkingPickler.dumps(_Sendable({"ids": torch.zeros(1000, dtype=torch.int64)}))
        os._exit(0)
    os.waitpid(child, 0)

    assert_same(batch, received(batch))


@pytest.mark.parametrize("fails", ["memfd_create", "stat", "pwritev"])
def test_without_room_for_a_file_torch_sends_the_tensors(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError("no room")

    monkeypatch.setattr(_transport, "_files", {})
    monkeypatch.setattr(os, fails, full)

    assert_same(SENT, received(SENT))


def test_a_file_that_could_not_be_written_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call takes 1024 parts at most."""
    monkeypatch.setattr(_transport, "_files", {})
    batch = {str(number): torch.tensor(number) for number in range(1100)}
    before = files_in_memory()
    for _ in range(3):
        reduced = _transport._reduced(_Sendable(batch))

        assert_same(batch, reduced[0](*reduced[1]))
    assert files_in_memory() == before


def test_a_batch_that_was_cut_is_not_taken_for_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write that takes only the first bytes, as of a full disk, is none."""
    monkeypatch.setattr(os, "pwritev", lambda file, parts, start: os.pwrite(file, parts[0], 0))

    assert_same(SENT, received(SENT))


def test_pickled_by_itself_a_batch_needs_no_file() -> None:
    """As when a wrapper keeps its batches on disk."""
    assert_same(SENT, pickle.loads(pickle.dumps(_Sendable(SENT))))


def test_outside_a_worker_nothing_is_wrapped() -> None:
    batch = Collator(attention="none")([{"input_ids": [1, 2]}])
    data = PackedDataset([1, 2], [0, 2], collator=Collator(attention="none"))

    assert type(batch) is type(data[[[0]]]) is dict


def test_what_a_wrapper_adds_in_a_worker_arrives_too() -> None:
    class Wrapper(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            batch = Collator(attention="none")([{"input_ids": [1, 2]}])
            batch["more"] = torch.tensor([index])
            return batch

    (batch,) = DataLoader(Wrapper(), batch_size=None, num_workers=1)

    assert sorted(batch) == ["input_ids", "labels", "more", "position_ids"]
    assert batch["more"].tolist() == [0]
