"""What the Python tests share."""

from __future__ import annotations

import subprocess
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


@pytest.fixture(scope="session")
def another_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give variables under which torch's C++ side says that it is version 2.99."""
    folder = tmp_path_factory.mktemp("another_torch")
    (folder / "version.c").write_text(
        "unsigned long long aoti_torch_abi_version(void) { return 2ULL << 56 | 99ULL << 48; }"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "lib.so", "version.c"], cwd=folder, check=True)
    return {"LD_PRELOAD": str(folder / "lib.so")}
