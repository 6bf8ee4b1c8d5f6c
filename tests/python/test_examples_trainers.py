"""The examples with trainers, in a small setting."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainer_runs

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, folder: Path, keys: dict[str, Any]) -> dict[str, np.ndarray]:
    """Run an example and return the weights."""
    sys.path.insert(0, str(EXAMPLES))
    trained = importlib.import_module(name).train(folder, **keys)
    return trainer_runs.weights(getattr(trained, "model", trained))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_accelerate_example_goes_on_exactly(processes: int, tmp_path: Path) -> None:
    def run(folder: str, **keys: Any) -> Any:
        keys = {"samples": 80, "epochs": 2} | keys
        return trainer_runs.run(run_example, processes, "accelerate_loop", tmp_path / folder, keys)[
            0
        ]

    whole = run("whole")
    run("parts", steps=3)
    run("parts", steps=2)
    parts = run("parts")
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["hf_trainer", "trl_sft"])
def test_the_trainer_examples_train_and_go_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")  # TRL then tells nobody that it runs
    keys = {"samples": 80, "epochs": 2}
    for _ in range(2):
        (weights,) = trainer_runs.run(run_example, 1, name, tmp_path, keys)
        assert all(np.isfinite(value).all() for value in weights.values())
    assert len(list(tmp_path.glob("checkpoint-*/multipack.json"))) > 0
