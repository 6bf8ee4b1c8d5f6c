"""A killed training of the real Trainer goes on exactly: its weights are those of one never killed.

Each case trains for two epochs in one go. Then it trains again, is killed with SIGKILL somewhere,
goes on from the last checkpoint, is killed while it writes a checkpoint, and goes on to the end.
Dropout is on, so that the random state must be right too.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resume_cases
import trainer_runs

CASES = resume_cases.cases()


@pytest.mark.parametrize("case", CASES, ids=resume_cases.name)
def test_a_killed_training_goes_on_to_the_bit(case: dict[str, Any], tmp_path: Path) -> None:
    processes = case["processes"]
    rng = random.Random(resume_cases.name(case))
    whole = trainer_runs.run(train, processes, tmp_path / "whole", case)
    at = rng.randrange(whole[0]["first saved at"] + 1, whole[0]["events"] * 2 // 3)
    folder = tmp_path / "killed"
    killer = rng.randrange(processes)
    trainer_runs.run(train, processes, folder, case, (killer, "event", at), killed=True)
    trainer_runs.run(train, processes, folder, case, (0, "save", 1), killed=True)
    ended = trainer_runs.run(train, processes, folder, case)

    assert ended[0]["began at step"] > 0
    assert any("is not whole" in text for text in ended[0]["warnings"])
    for one, other in zip(whole, ended, strict=True):
        assert one["weights"].keys() == other["weights"].keys()
        for name, value in one["weights"].items():
            np.testing.assert_array_equal(other["weights"][name], value, err_msg=name)
    start = trainer_runs.weights(trainer_runs.tiny_llama())
    assert not np.array_equal(start["lm_head.weight"], whole[0]["weights"]["lm_head.weight"])


def train(
    folder: Path, case: dict[str, Any], kill: tuple[int, str, int] | None = None
) -> dict[str, Any]:
    """Train two epochs, from the last checkpoint if there is one.

    Args:
        folder: For the checkpoints.
        case: Of `resume_cases`.
        kill: The rank that kills itself; ``event`` or ``save``; at which of them.
    """
    import warnings

    import datasets
    import torch
    from transformers import TrainerCallback

    from multipack import Config
    from multipack.integrations.hf import PackedTrainer

    rank = int(os.environ.get("RANK", "0"))
    seen = {"event": 0, "save": 0, "began at step": 0, "first saved at": 0}

    def count(kind: str) -> None:
        seen[kind] += 1
        if kill == (rank, kind, seen[kind]):
            os.kill(os.getpid(), signal.SIGKILL)

    class Counter(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen["began at step"] = state.global_step

        def on_save(self, *_: Any, **__: Any) -> None:
            seen["first saved at"] = seen["first saved at"] or seen["event"]

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            count("event")

        on_substep_end = on_step_end = on_step_begin

    keys = resume_cases.settings(case)
    for key in ("world_size", "gradient_accumulation_steps"):
        del keys[key]  # these are the trainer's to know
    trainer = PackedTrainer(
        model=trainer_runs.tiny_llama(dropout=0.1),
        args=trainer_runs.arguments(
            folder,
            num_train_epochs=2,
            gradient_accumulation_steps=case["accumulation"],
            dataloader_num_workers=case["workers"],
            save_strategy="steps",
            save_steps=8 // case["accumulation"],
        ),
        train_dataset=datasets.Dataset.from_list(trainer_runs.chats(72)),
        config=Config(sequence_len=24, **keys),
        callbacks=[Counter()],
    )
    save = torch.save

    def save_half(obj: Any, path: Any) -> None:
        """Write all of a file, or half of it and die."""
        save(obj, path)
        if str(path).endswith("optimizer.pt"):
            if kill == (rank, "save", seen["save"] + 1):
                os.truncate(path, os.path.getsize(path) // 2)
            count("save")

    torch.save = save_half
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    return {
        "weights": trainer_runs.weights(trainer.model),
        "events": seen["event"],
        "began at step": seen["began at step"],
        "first saved at": seen["first saved at"],
        "warnings": [str(warning.message) for warning in told],
    }
