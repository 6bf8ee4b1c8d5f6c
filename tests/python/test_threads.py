"""All ops at once, from many threads: each answer is that of a call alone.

Every thread changes the number of its own torch threads between calls, so that pools are built
while others work in theirs, and none may wait for another or take its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from multipack import ops

THREADS, ROUNDS, SECONDS = 8, 8, 240

LENGTHS = torch.from_numpy(np.random.default_rng(0).integers(1, 900, 3000))
COUNTS = LENGTHS // 3
TOKENS = torch.arange(200 * 500)
OFFSETS = torch.arange(0, 201 * 500, 500)
ROWS = (TOKENS, OFFSETS, torch.arange(200), torch.tensor([0, 50, 200]))
SEGMENTS = (torch.arange(1500) // 70).reshape(1, -1).to(torch.int32)
BALANCED = """{"sequence_len": 4096, "balance_labels": true, "world_size": 2,
               "gradient_accumulation_steps": 2}"""


def attend() -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(600, heads, 8, generator=made, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    out = ops.attention(q, k, v, torch.tensor([0, 250, 260, 600]))
    out.square().sum().backward()
    return (out.detach(), q.grad, k.grad, v.grad)


def refuse() -> tuple[str]:
    with pytest.raises(IndexError) as caught:
        ops.collate(TOKENS, OFFSETS, torch.tensor([200]), torch.tensor([0, 1]))
    return (str(caught.value),)


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "plan": lambda: ops.plan(LENGTHS, COUNTS, None, BALANCED),
    "label_counts": lambda: ops.label_counts(TOKENS % 7 * 100 - 100, OFFSETS),
    "collate": lambda: ops.collate(*ROWS),
    "collate_list": lambda: ops.collate_list(list(TOKENS.split(500)), ROWS[3]),
    "pack_values": lambda: (ops.pack_values(TOKENS.float(), *ROWS[1:], pad=0.5),),
    "block_mask": lambda: (ops.block_mask(SEGMENTS),),
    "boundaries": lambda: (ops.boundaries(TOKENS.reshape(2, -1) % 500),),
    "attention": attend,
    "refused": refuse,
}


def is_same(found: Any, expected: Any) -> bool:
    """Whether tensors are equal, those of floats but for how their sums were ordered."""
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if expected.dtype == torch.float64:
        return torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    return torch.equal(found, expected)


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_as_before")
def test_calls_at_the_same_time_are_as_if_alone() -> None:
    torch.set_num_threads(1)
    expected = {name: call() for name, call in CALLS.items()}
    start = Barrier(THREADS)

    def work(number: int) -> list[str]:
        """Call everything, in another order than the others; return what came out wrong."""
        wrong, names = [], list(CALLS)
        start.wait(SECONDS)
        for turn in range(number, number + ROUNDS):
            torch.set_num_threads(1 + turn % 4)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                parts = zip(CALLS[name](), expected[name], strict=True)
                if not all(is_same(found, alone) for found, alone in parts):
                    wrong.append(f"{name} with {1 + turn % 4} threads")
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS), timeout=SECONDS))

    assert found == [[]] * THREADS
