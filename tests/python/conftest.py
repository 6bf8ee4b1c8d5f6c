"""What the Python tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Samples = Callable[[list[int]], list[dict[str, Any]]]


@pytest.fixture
def samples() -> Samples:
    """Make samples of given lengths: sample i has the tokens 100·i, 100·i + 1, … as its labels."""

    def make(lengths: list[int]) -> list[dict[str, Any]]:
        return [
            {
                "input_ids": list(range(100 * i, 100 * i + length)),
                "labels": list(range(100 * i, 100 * i + length)),
            }
            for i, length in enumerate(lengths)
        ]

    return make


@pytest.fixture(params=range(20))
def seeded(request: pytest.FixtureRequest) -> np.random.Generator:
    """Give a generator for random inputs; the test's name has its seed."""
    return np.random.default_rng(request.param)
