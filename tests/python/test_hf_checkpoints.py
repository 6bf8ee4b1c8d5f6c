"""Checkpoints of `PackedTrainer`: where in the data they were taken, and which are whole.

Each case changes something between two trainings, or damages what the first has left.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainer_runs
from trainer_runs import packed
from transformers import TrainerCallback

from multipack.integrations import _checkpoint


def positions(folder: Path) -> dict[int, tuple[int, int]]:
    """Return the epoch and position that each checkpoint of a folder holds, by its step."""
    found = {}
    for path in folder.glob("checkpoint-*/multipack.json"):
        state = json.loads(path.read_text())["sampler"]
        found[int(path.parent.name.split("-")[1])] = (state["epoch"], state["position"])
    return found


def test_epochs_of_different_lengths_are_trained_and_resumed_exactly(tmp_path: Path) -> None:
    def train(folder: Path, **resume: Any) -> tuple[Any, dict[str, np.ndarray]]:
        trainer = packed(
            folder,
            trainer_runs.chats(60),
            config={"sample_packing_algorithm": "next_fit", "multipack_real_batches": False},
            per_device_train_batch_size=1,
            gradient_accumulation_steps=3,
            num_train_epochs=3,
            save_strategy="steps",
            save_steps=5,
        )
        trainer.train(**resume)
        return trainer, trainer_runs.weights(trainer.model)

    trainer, whole = train(tmp_path)
    counts = []
    for epoch in range(3):
        trainer._train_plan.set_epoch(epoch)
        counts.append(len(trainer._train_plan))
    assert len(set(counts)) > 1, "the case needs epochs of different lengths"
    steps = [-(-count // 3) for count in counts]
    assert trainer.state.global_step == sum(steps)
    assert trainer.state.epoch == 3.0
    expected = {}
    for step in range(5, sum(steps) + 1, 5):
        epoch = sum(step >= sum(steps[: e + 1]) for e in range(3))
        expected[step] = (epoch, 3 * (step - sum(steps[:epoch])))
    found = positions(tmp_path)
    assert {step: found[step] for step in expected} == expected
    last = tmp_path / f"checkpoint-{max(expected) - 5}"
    assert found[max(expected) - 5][0] == 2, "the case needs a checkpoint in the last epoch"
    _, resumed = train(tmp_path, resume_from_checkpoint=str(last))
    for name in whole:
        np.testing.assert_array_equal(resumed[name], whole[name])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for 4 steps in 2 epochs, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    packed(folder, **SAVED).train()
    return folder


SAVED: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 1,
}


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    """Copy the checkpoints, to be changed."""
    shutil.copytree(trained, tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"data_seed": 3}, ["data_seed was 11 and is now 3"]),
        ({"per_device_train_batch_size": 1}, ["micro_batch_size was 2 and is now 1"]),
        (
            {"samples": trainer_runs.chats(24, seed=4)},
            ["lengths_digest was '", "label_counts_digest was '"],
        ),
        (
            {"config": {"sequence_len": 30, "balance_labels": True}},
            ["sequence_len was 24 and is now 30", "balance_labels was False and is now True"],
        ),
    ],
)
def test_resuming_another_order_is_refused_with_every_difference(
    change: dict[str, Any], texts: list[str], saved: Path
) -> None:
    trainer = packed(saved, **(SAVED | change))
    with pytest.raises(ValueError) as error:
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    assert str(error.value).startswith("the state belongs to another order of samples: ")
    for text in texts:
        assert text in str(error.value)


def test_ignore_data_skip_resumes_without_looking_at_the_position(saved: Path) -> None:
    trainer = packed(saved, ignore_data_skip=True, **(SAVED | {"data_seed": 3}))
    trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    assert trainer.state.global_step == trainer._train_plan.total_steps(2)


def test_changed_texts_of_the_same_lengths_are_a_warning(saved: Path) -> None:
    samples = trainer_runs.chats(24)
    samples[0]["input_ids"][0] += 1
    with pytest.warns(UserWarning, match="fingerprint was .* and is now"):
        packed(saved, samples, **SAVED).train(resume_from_checkpoint=str(saved / "checkpoint-1"))


def test_a_checkpoint_from_before_multipack_is_resumed_by_its_epoch(
    saved: Path, trained: Path
) -> None:
    (saved / "checkpoint-1" / "multipack.json").unlink()
    trainer = packed(saved, **SAVED)
    trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    whole = json.loads((trained / "checkpoint-2" / "trainer_state.json").read_text())
    again = json.loads((saved / "checkpoint-2" / "trainer_state.json").read_text())
    assert again["epoch"] == whole["epoch"]
    again_at = positions(saved)
    assert again_at == {step: at for step, at in positions(trained).items() if step in again_at}


def spoil(checkpoint: Path, how: str) -> None:
    if how == "cut off":
        os.truncate(checkpoint / "optimizer.pt", 10)
    elif how == "missing":
        (checkpoint / "model.safetensors").unlink()
    elif how == "unfinished":
        (checkpoint / "multipack.json").write_text('{"whole": false}')
    elif how == "before multipack":
        (checkpoint / "multipack.json").unlink()
        (checkpoint / "trainer_state.json").unlink()


@pytest.mark.parametrize("how", ["cut off", "missing", "unfinished", "before multipack"])
@pytest.mark.parametrize("asked", ["newest", "by name"])
def test_a_newest_checkpoint_that_is_not_whole_is_passed_over_aloud(
    how: str, asked: str, saved: Path
) -> None:
    numbers = sorted(positions(saved))
    newest, before = (saved / f"checkpoint-{number}" for number in numbers[:-3:-1])
    spoil(newest, how)
    begun = []

    class Begin(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

    trainer = packed(saved, given={"callbacks": [Begin()]}, **SAVED)
    with pytest.warns(UserWarning) as told:
        trainer.train(resume_from_checkpoint=True if asked == "newest" else str(newest))
    texts = [str(warning.message) for warning in told]
    assert any(
        text.startswith(f"{newest} is not whole: ")
        and text.endswith(f"; resuming from {before} instead")
        for text in texts
    ), texts
    assert begun == numbers[-2:-1]


def test_an_earlier_checkpoint_that_is_not_whole_is_an_error_if_asked_for(saved: Path) -> None:
    spoil(saved / "checkpoint-1", "cut off")
    with pytest.raises(ValueError) as error:
        packed(saved, **SAVED).train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    assert "is not whole: optimizer.pt had" in str(error.value)
    assert "resume from another checkpoint, or delete multipack.json" in str(error.value)


def test_no_whole_checkpoint_at_all_is_an_error(saved: Path) -> None:
    for checkpoint in saved.glob("checkpoint-*"):
        spoil(checkpoint, "unfinished")
    with pytest.raises(ValueError, match="and there is no whole checkpoint before it"):
        packed(saved, **SAVED).train(resume_from_checkpoint=True)


def test_old_checkpoints_are_deleted_only_when_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    there: list[list[str]] = []
    finish = _checkpoint.finish

    def look(folder: Any, state: Any) -> None:
        there.append(sorted(path.name for path in Path(tmp_path).glob("checkpoint-*")))
        finish(folder, state)

    monkeypatch.setattr(_checkpoint, "finish", look)
    packed(tmp_path, save_total_limit=1, **SAVED).train()
    assert all(len(names) == 2 for names in there[1:])
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1
