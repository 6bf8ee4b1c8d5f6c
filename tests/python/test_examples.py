"""The examples in Python: run as their first lines say, and stopped and continued.

Those in Rust have tests of their own, the one in C++ is run by test_cpp.py.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainer_runs

EXAMPLES = Path(__file__).parents[2] / "examples"

# How a docstring says that it is run, and in how many processes.
COMMAND = re.compile(
    r"^    (?:python|torchrun --nproc-per-node (\d)|accelerate launch --num-processes (\d)) "
    r"examples/(\w+)\.py(.*)$",
    re.MULTILINE,
)
COMMANDS = [
    (name, arguments.split(), int(torchrun or launch or 1))
    for path in sorted(EXAMPLES.glob("*.py"))
    for torchrun, launch, name, arguments in COMMAND.findall(path.read_text())
    if name != "label_balancing"  # takes half a minute; test_balance.py runs it on fewer samples
]


def test_every_example_says_how_it_is_run() -> None:
    """All but the module that they share."""
    told = {name for name, _, _ in COMMANDS}

    assert told | {"label_balancing", "made_up"} == {path.stem for path in EXAMPLES.glob("*.py")}


def run_command(folder: Path, name: str, arguments: list[str]) -> str:
    """Run an example as its command does, in a folder; return what it prints."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [f"examples/{name}.py", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(
    ("name", "arguments", "processes"), COMMANDS, ids=lambda value: str(value).strip("[]")
)
def test_an_example_runs_as_it_says(
    name: str, arguments: list[str], processes: int, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)

    printed = trainer_runs.run(run_command, processes, tmp_path, name, arguments)[0]

    if name == "axolotl_yaml":
        assert printed.startswith(
            "followed: sequence_len, sample_packing, balance_labels, micro_batch_size, "
            "gradient_accumulation_steps\n"
            "left to the loop: base_model, datasets, num_epochs, learning_rate\n"
        )
        first, last = re.findall(r"\d+\.\d+", printed.splitlines()[-1])
        assert float(last) < float(first)
    else:
        assert [path for path in (tmp_path / arguments[0]).rglob("*") if path.is_file()]


def train_by(name: str, folder: Path, keys: dict[str, Any]) -> dict[str, np.ndarray]:
    """Train as an example does, and return the weights."""
    sys.path.insert(0, str(EXAMPLES))
    trained = importlib.import_module(name).train(folder, **keys)
    return trainer_runs.weights(getattr(trained, "model", trained))


@pytest.mark.parametrize(
    ("name", "processes", "parts"),
    [
        ("accelerate_loop", 1, [{"steps": 3}, {"steps": 2}, {}]),
        ("accelerate_loop", 2, [{"steps": 3}, {"steps": 2}, {}]),
        ("hf_trainer", 1, [{"epochs": 1}, {}]),
        ("lightning_fit", 1, [{"epochs": 1}, {}]),
        ("lightning_fit", 2, [{"epochs": 1}, {}]),
        ("torchdata_loop", 1, [{"steps": 3}, {"steps": 2}, {}]),
        ("trl_sft", 1, [{"epochs": 1}, {}]),
    ],
)
def test_an_example_goes_on_where_it_was_stopped(
    name: str, processes: int, parts: list[dict[str, Any]], tmp_path: Path
) -> None:
    def run(folder: str, keys: dict[str, Any]) -> Any:
        keys = {"samples": 80, "epochs": 2} | keys
        return trainer_runs.run(train_by, processes, name, tmp_path / folder, keys)[0]

    whole = run("whole", {})
    for keys in parts:
        ended = run("parts", keys)

    assert all(np.isfinite(value).all() for value in whole.values())
    # Where the schedule of the learning rate follows the epochs, the first part had another one.
    if name not in ("hf_trainer", "trl_sft"):
        for key, value in whole.items():
            np.testing.assert_array_equal(ended[key], value, err_msg=key)
