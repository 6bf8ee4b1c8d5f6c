"""A plain loop, killed again and again, ends with the weights of one that was left alone.

The loop is the example's. Its processes are killed from outside, once a random checkpoint has been
written and a random moment later: wherever they are then, in a step, in a worker or in a save.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Running, run
from resume_cases import cases, name, settings

from multipack import Config

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "torch_loop.py")
SIZES = {"sequence_len": 64, "micro_batch_size": 4}
KILLS = 3


def train(rank: int, folder: Path, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train from the last checkpoint, if there is one; return the weights."""
    loop = runpy.run_path(EXAMPLE)["train"]
    config = Config(**SIZES, **settings(case))
    # About five steps an epoch.
    samples = 5 * case["processes"] * case["accumulation"] * (17 if config.sample_packing else 4)
    model = loop(config, folder, epochs=2, workers=case["workers"], save_every=1, samples=samples)
    return {key: value.numpy() for key, value in model.state_dict().items()}


def train_until_killed(rank: int, folder: Path, case: dict[str, Any], saves: int) -> None:
    """Train, but die between writing a checkpoint and giving it its name."""
    replace, left = Path.replace, iter(range(saves))

    def killing(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    Path.replace = killing
    train(rank, folder, case)


def steps_done(folder: Path) -> int:
    """Return the optimizer steps that the checkpoint holds, 0 if there is none."""
    checkpoint = folder / "checkpoint.pt"
    if not checkpoint.exists():
        return 0
    return torch.load(checkpoint, weights_only=True)["schedule"]["last_epoch"]


def assert_equal(expected: list[Any], weights: list[Any]) -> None:
    for ours, theirs in zip(expected, weights, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].tobytes() == theirs[key].tobytes(), key


@pytest.mark.parametrize("case", cases(), ids=name)
def test_a_killed_run_ends_with_the_same_weights(case: dict[str, Any], tmp_path: Path) -> None:
    processes = case["processes"]
    expected = run(train, processes, tmp_path / "whole", case)
    total = steps_done(tmp_path / "whole")
    folder = tmp_path / "killed"
    random_ = random.Random(name(case))

    for target in sorted(random_.sample(range(1, total), KILLS)):
        with Running(train, processes, folder, case) as running:
            while running.alive() and steps_done(folder) < target:
                time.sleep(0.005)
            time.sleep(random_.uniform(0.0, 0.05))

    assert steps_done(folder) >= KILLS
    assert_equal(expected, run(train, processes, folder, case))


def test_killed_while_a_checkpoint_is_written_the_one_before_still_works(tmp_path: Path) -> None:
    case = cases()[0]
    expected = run(train, 1, tmp_path / "whole", case)
    folder = tmp_path / "killed"

    with Running(train_until_killed, 1, folder, case, 4) as running:
        while running.alive():
            time.sleep(0.01)

    assert (folder / "checkpoint.partial").exists()
    assert steps_done(folder) == 4
    assert_equal(expected, run(train, 1, folder, case))
