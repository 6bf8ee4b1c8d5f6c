"""What the tests of the collator share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from multipack import Collator

IGNORED = -100
Sample = dict[str, Any]
Samples = Callable[[list[int]], list[Sample]]

# Sequences of token ids in every form that samples have them in.
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy int32": lambda ids: np.array(ids, np.int32),
    "numpy int64": lambda ids: np.array(ids, np.int64),
    "numpy uint64": lambda ids: np.array(ids, np.uint64),
    "numpy strided": lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
    "tensor int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "tensor int64": torch.tensor,
    "tensor strided": lambda ids: torch.tensor(ids).repeat_interleave(2)[::2],
    "list of tensors": lambda ids: [torch.tensor(i) for i in ids],
}


def collate(batch: Any, attention: str = "none", **keys: Any) -> dict[str, Any]:
    return Collator(attention=attention, **keys)(batch)


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a batch as lists, to compare whole batches."""
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }


def error_of(kind: type[Exception], batch: Any, **keys: Any) -> str:
    with pytest.raises(kind) as caught:
        collate(batch, **keys)
    return str(caught.value)
