"""`PackedTrainer` with the real Trainer: its batches, losses, gradients, sizes and ranks."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import trainer_runs
from resume_cases import LAYOUTS
from trainer_runs import packed
from transformers import TrainingArguments

from multipack import Collator, Config
from multipack.integrations.hf import PackedTrainer

# Gradients are read off the weights after one step of plain gradient descent.
ONE_STEP: dict[str, Any] = {
    "num_train_epochs": 1,
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


def one_step(
    folder: Path, samples: Any, layout: str, balanced: bool, **arguments: Any
) -> tuple[int, float, dict[str, np.ndarray]]:
    """Train one step on all samples; return the number of steps, the loss and the gradients."""
    config = {**LAYOUTS[layout], "balance_labels": balanced, "incomplete_batches": "fill"}
    trainer = packed(folder, samples, config=config, **ONE_STEP, **arguments)
    before = trainer_runs.weights(trainer.model)
    output = trainer.train()
    after = trainer_runs.weights(trainer.model)
    return output.global_step, output.training_loss, {n: before[n] - after[n] for n in before}


def check_gradients(found: tuple[Any, ...], samples: Any) -> None:
    steps, loss, gradients = found
    assert steps == 1
    assert loss == pytest.approx(trainer_runs.each_alone(samples)[0], rel=1e-5)
    trainer_runs.check_gradients(gradients, samples)


@pytest.mark.parametrize("balanced", [False, True], ids=["plain", "balanced"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_loss_and_gradients_of_its_samples_each_alone(
    layout: str, balanced: bool, tmp_path: Path
) -> None:
    samples = trainer_runs.chats(24)
    samples[0]["labels"] = samples[0]["input_ids"]  # its first label has nothing to predict it
    found = one_step(tmp_path, samples, layout, balanced, gradient_accumulation_steps=12)
    check_gradients(found, samples)


def test_steps_over_two_ranks_have_the_same_loss_and_gradients(tmp_path: Path) -> None:
    samples = trainer_runs.chats(24)
    results = trainer_runs.run(steps_of_all_layouts, 2, tmp_path, samples)
    for layout in LAYOUTS:
        (steps, one, gradients), (other_steps, other, other_gradients) = (
            result[layout] for result in results
        )
        assert steps == other_steps
        # What a Trainer returns as its loss is that of one rank, in parts of the mean over both.
        check_gradients((steps, (one + other) / 2, gradients), samples)
        for name, value in gradients.items():
            np.testing.assert_array_equal(other_gradients[name], value)


def steps_of_all_layouts(folder: Path, samples: Any) -> dict[str, Any]:
    return {
        layout: one_step(folder, samples, layout, True, gradient_accumulation_steps=6)
        for layout in LAYOUTS
    }


def evaluations(folder: Path, samples: Any) -> dict[str, float]:
    losses = {}
    for layout, keys in LAYOUTS.items():
        data = datasets.Dataset.from_list(samples)
        trainer = packed(
            folder, evaluation=data, config=keys, per_device_eval_batch_size=3, num_train_epochs=1
        )
        losses[layout] = trainer.evaluate()["eval_loss"]
    return losses


def test_the_evaluation_loss_is_the_mean_over_tokens_in_every_layout(tmp_path: Path) -> None:
    samples = trainer_runs.chats(19, seed=5)
    expected = trainer_runs.each_alone(samples)[0]
    for losses in (
        evaluations(tmp_path, samples),
        *trainer_runs.run(evaluations, 2, tmp_path, samples),
    ):
        assert losses == {layout: pytest.approx(expected, rel=1e-5) for layout in LAYOUTS}


def epoch_of(loader: Any) -> Counter[tuple[int, ...]]:
    """Return the samples in the batches of a loader, found by their positions."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in loader:
        for tokens, positions, labels in zip(
            batch["input_ids"].tolist(),
            batch["position_ids"].tolist(),
            batch["labels"].tolist(),
            strict=True,
        ):
            starts = [i for i, position in enumerate(positions) if position == 0]
            for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
                if any(label != -100 for label in labels[start:end]):
                    found[tuple(tokens[start:end])] += 1
    return found


def loaders_of_all_layouts(folder: Path, samples: Any) -> dict[str, Any]:
    result = {}
    for layout, keys in LAYOUTS.items():
        trainer = packed(folder, samples, config=keys, dataloader_num_workers=1)
        loader = trainer.get_train_dataloader()
        result[layout] = (len(loader), epoch_of(loader))
    return result


def test_every_sample_is_trained_on_once_over_all_ranks(tmp_path: Path) -> None:
    samples = [
        {"input_ids": [9] * (3 + i % 5) + [i], "labels": [-100] * (3 + i % 5) + [i]}
        for i in range(48)
    ]
    everything = Counter(tuple(sample["input_ids"]) for sample in samples)
    for layout in LAYOUTS:
        config = Config(sequence_len=24, **LAYOUTS[layout])
        assert config.incomplete_batches == "drop"
    first, second = trainer_runs.run(loaders_of_all_layouts, 2, tmp_path, samples)
    for layout in LAYOUTS:
        assert first[layout][0] == second[layout][0]
        together = first[layout][1] + second[layout][1]
        assert together <= everything
        # Samples that fill no round of ranks are left out, which packing may do.
        assert layout not in ("padded", "flattened") or together == everything


@pytest.mark.parametrize(
    ("layout", "rows"), [("one_row", 1), ("real_rows", 4), ("padded", 4), ("flattened", 1)]
)
def test_the_loader_hands_out_rows_as_asked_for(layout: str, rows: int, tmp_path: Path) -> None:
    config = dict(LAYOUTS[layout])
    if layout == "one_row":
        config["multipack_real_batches"] = False  # or a model with masks gets real rows
    trainer = packed(tmp_path, config=config, per_device_train_batch_size=4)
    batch = next(iter(trainer.get_train_dataloader()))
    assert {value.shape[0] for value in batch.values()} == {rows}
    # Nothing sees the padding at the end of a row, so that a causal model needs no mask there.
    assert ("attention_mask" in batch) == (layout != "padded")


def test_a_model_with_dense_masks_gets_rows_of_one_sequence_and_flash_gets_one_row(
    tmp_path: Path,
) -> None:
    assert packed(tmp_path)._collator("train").config.multipack_real_batches is True
    flash = Collator(attention="flash")
    trainer = packed(tmp_path, given={"data_collator": flash})
    assert trainer._collator("train").config.multipack_real_batches is False
    assert "cu_seq_lens_q" in next(iter(trainer.get_train_dataloader()))


def test_lists_of_samples_work_as_data_sets_do(tmp_path: Path) -> None:
    samples = [{**sample, "source": "a"} for sample in trainer_runs.chats(24)]
    plans = []
    for data in (samples, datasets.Dataset.from_list(samples)):
        trainer = PackedTrainer(
            model=trainer_runs.tiny_llama(),
            args=trainer_runs.arguments(tmp_path),
            train_dataset=data,
            config=Config(sequence_len=24, balance_labels=True),
        )
        batches = list(trainer.get_train_dataloader())
        assert set(batches[0]) == {"input_ids", "labels", "position_ids", "attention_mask"}
        plans.append([batch["input_ids"].tolist() for batch in batches])
    assert plans[0] == plans[1]


@pytest.mark.parametrize("kind", ["list", "hugging face"])
def test_predictions_are_of_each_sample_in_order(kind: str, tmp_path: Path) -> None:
    samples = trainer_runs.chats(7)
    trainer = packed(tmp_path, per_device_eval_batch_size=3)
    output = trainer.predict(datasets.Dataset.from_list(samples) if kind != "list" else samples)
    assert len(output.predictions) == len(samples)
    for sample, logits, labels in zip(samples, output.predictions, output.label_ids, strict=True):
        length = len(sample["input_ids"])
        alone = trainer.model(input_ids=torch.tensor([sample["input_ids"]])).logits[0]
        np.testing.assert_allclose(logits[:length], alone.detach().numpy(), atol=1e-5)
        assert labels[1:length].tolist() == sample["labels"][1:]
        assert (labels[length:] == -100).all()


def test_the_order_follows_the_trainer_s_seed(tmp_path: Path) -> None:
    def first(**keys: Any) -> Any:
        trainer = packed(tmp_path, **keys)
        return next(iter(trainer.get_train_dataloader()))["input_ids"].tolist()

    assert first(seed=1) == first(seed=2, data_seed=1) != first(seed=2)


class OutOfMemory(torch.nn.Module):
    """Runs out of memory with more than 2 rows, as a GPU would."""

    def __init__(self) -> None:
        super().__init__()
        self.model = trainer_runs.tiny_llama()
        self.config = self.model.config
        self.seen: list[int] = []

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        """Run the model, if it fits."""
        self.seen.append(len(input_ids))
        if len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory.")
        return self.model(input_ids=input_ids, **kwargs)


def test_the_plan_follows_the_batch_size_that_fits(tmp_path: Path) -> None:
    model = OutOfMemory()
    trainer = packed(
        tmp_path,
        model=model,
        evaluation=datasets.Dataset.from_list(trainer_runs.chats(8, seed=1)),
        given={"data_collator": Collator(attention="bool")},
        remove_unused_columns=False,
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        num_train_epochs=1,
    )
    trainer.train()
    steps = len(trainer._train_plan)
    tried, trained = model.seen[:-steps], model.seen[-steps:]
    assert tried in ([4], [4, 3])  # accelerate halves the size, or takes a tenth off
    assert trained == [2] * steps
    assert trainer._train_plan.config.micro_batch_size == 2
    assert trainer.state.global_step == len(trainer._train_plan)
    evaluated = trainer.get_eval_dataloader()
    assert evaluated.batch_sampler.config.eval_batch_size == 2


def arguments_on_two_gpus(folder: Path, **keys: Any) -> TrainingArguments:
    args = trainer_runs.arguments(folder, **keys)
    assert args.device.type == "cpu"
    args._n_gpu = 2
    return args


def test_two_gpus_in_one_process_get_twice_the_rows(tmp_path: Path) -> None:
    def trainer(attention: str = "bool", **config: Any) -> PackedTrainer:
        return PackedTrainer(
            model=trainer_runs.tiny_llama(),
            args=arguments_on_two_gpus(tmp_path, per_device_eval_batch_size=3),
            train_dataset=datasets.Dataset.from_list(trainer_runs.chats(40)),
            eval_dataset=datasets.Dataset.from_list(trainer_runs.chats(40)),
            data_collator=Collator(attention=attention),
            config=Config(sequence_len=24, **config),
        )

    made = trainer()
    batch = next(iter(made.get_train_dataloader()))
    assert {value.shape[0] for value in batch.values()} == {4}
    assert next(iter(made.get_eval_dataloader()))["input_ids"].shape[0] == 6
    # Each half, as DataParallel scatters them, isolates its samples as the whole does.
    model = made.model.eval()
    with torch.no_grad():
        whole = model(**batch).logits
        for half in range(2):
            part = {key: value.chunk(2)[half] for key, value in batch.items()}
            torch.testing.assert_close(model(**part).logits, whole.chunk(2)[half])
    with pytest.raises(ValueError) as error:
        trainer(multipack_real_batches=False)
    assert str(error.value) == (
        "2 GPUs in one process share a batch by its rows, but this one has one row: start a "
        "process for each GPU with torchrun, or set multipack_real_batches and an attention with "
        "masks"
    )
    with pytest.raises(ValueError, match="this one has attention='flash', whose borders run"):
        trainer("flash")
    with pytest.raises(ValueError, match="this one has one row"):
        trainer(sample_packing=False, batch_flattening=True)


def test_peers_in_tensor_parallelism_get_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedTrainer, "get_tp_size", lambda self: 2)
    batches = []
    for process in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(TrainingArguments, "world_size", property(lambda self: 4))
            patch.setattr(TrainingArguments, "process_index", property(lambda self, p=process: p))
            trainer = packed(tmp_path)
            batches.append([b["input_ids"].tolist() for b in trainer.get_train_dataloader()])
            assert trainer._train_plan.config.world_size == 2
    assert batches[0] == batches[1] != batches[2] == batches[3]


def test_the_loader_s_length_needs_no_other_rank(tmp_path: Path) -> None:
    assert trainer_runs.run(length_on_one_rank, 2, tmp_path)[0] > 0


def length_on_one_rank(folder: Path) -> int:
    import torch.distributed as dist

    trainer = packed(folder, evaluation=datasets.Dataset.from_list(trainer_runs.chats(9)))
    length = 0
    if dist.get_rank() == 0:
        length = len(trainer.get_train_dataloader()) * len(trainer.get_eval_dataloader())
    dist.barrier()
    return length


def test_ranks_with_different_data_are_told_apart_at_the_start(tmp_path: Path) -> None:
    for text in trainer_runs.run(train_on_different_data, 2, tmp_path):
        assert text.startswith("the ranks do not agree: lengths: ")


def train_on_different_data(folder: Path) -> str:
    samples = trainer_runs.chats(24, seed=int(os.environ["RANK"]))
    trainer = packed(folder, samples, num_train_epochs=1)
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return "nothing"
