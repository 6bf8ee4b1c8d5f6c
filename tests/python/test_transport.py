"""What a batch is after its way from a worker: the same, as a plain dict, whatever is in it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from multipack import Collator, PackedDataset
from multipack._transport import _Sendable, sendable

# Python warns of forks while there are threads, as torch has them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SENT: dict[str, Any] = {
    "int32 in int64": torch.tensor([[-(2**31), 0], [5, 2**31 - 1]]),
    "int64": torch.tensor([2**31, -7]),
    "int64 below": torch.tensor([-(2**31) - 1]),
    "int16 in int64": torch.tensor([-(2**15), 2**15 - 1]),
    "more than int16": torch.tensor([2**15, 0]),
    "odd bytes": torch.tensor([True, False, True]),
    "int32": torch.arange(3, dtype=torch.int32),
    "float": torch.tensor([1.5, float("nan"), float("-inf")]),
    "bfloat16": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(2, 0, dtype=torch.int64),
    "strided": torch.arange(12).view(3, 4)[:, ::2],
    "large": torch.arange(1 << 18),
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

    assert pickle.loads(pickle.dumps(_Sendable(weight=weight)))["weight"].requires_grad


def test_it_is_writable_and_no_tensor_lies_in_another() -> None:
    received = pickle.loads(pickle.dumps(_Sendable(SENT)))

    written = ("int32", "odd bytes", "int32 in int64")
    for key in written:
        received[key].zero_()
    assert_same({**SENT, **{key: torch.zeros_like(SENT[key]) for key in written}}, received)


def test_few_bytes_are_sent() -> None:
    """Ids and labels as int32, positions as int16; no tensor takes a file of its own."""
    batch = Collator(attention="flash")([{"input_ids": list(range(100_000, 108_000))}])

    assert len(pickle.dumps(_Sendable(batch))) < (4 + 4 + 2) * 8000 + 1000


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
