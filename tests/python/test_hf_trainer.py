"""`PackedTrainer` with the real Trainer: batches, losses, sizes, checkpoints, refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import trainer_runs
import transformers
from resume_cases import LAYOUTS
from transformers import Trainer, TrainerCallback, TrainingArguments

from multipack import Collator, Config
from multipack.integrations import _trainer_refusals
from multipack.integrations.hf import PackedTrainer


def packed(
    folder: Path,
    samples: Any = None,
    *,
    evaluation: Any = None,
    kind: type = PackedTrainer,
    model: Any = None,
    config: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Make a trainer; `arguments` are those of the Trainer, `config` those of the plan."""
    if samples is None:
        samples = trainer_runs.chats(24)
    if isinstance(samples, list):
        samples = datasets.Dataset.from_list(samples)
    return kind(
        model=trainer_runs.tiny_llama() if model is None else model,
        args=trainer_runs.arguments(folder, **arguments),
        train_dataset=samples,
        eval_dataset=evaluation,
        config=Config(**({"sequence_len": 24} | (config or {}))),
        **(given or {}),
    )


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


def test_samples_of_which_only_some_have_labels_are_refused(tmp_path: Path) -> None:
    samples = trainer_runs.chats(4)
    del samples[2]["labels"]
    trainer = PackedTrainer(
        model=trainer_runs.tiny_llama(),
        args=trainer_runs.arguments(tmp_path),
        train_dataset=samples,
        config=Config(sequence_len=24),
    )
    with pytest.raises(ValueError) as error:
        trainer.get_train_dataloader()
    assert str(error.value) == "3 of 4 samples have labels: give them to all, or to none"


def test_a_sample_without_tokens_is_refused_by_its_number(tmp_path: Path) -> None:
    trainer = PackedTrainer(
        model=trainer_runs.tiny_llama(),
        args=trainer_runs.arguments(tmp_path),
        train_dataset=[*trainer_runs.chats(3), {"text": "one"}],
        config=Config(sequence_len=24),
    )
    with pytest.raises(ValueError) as error:
        trainer.get_train_dataloader()
    assert str(error.value) == "sample 3 has no 'input_ids': tokenise the data set first"


@pytest.mark.parametrize("kind", ["list", "hugging face"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "shift_labels",
            "the samples have 'shift_labels', but models shift 'labels' by themselves: give labels "
            "in their place, which are [-100, *shift_labels[:-1]]",
        ),
        (
            "completion_mask",
            "the samples have 'completion_mask' and no labels: give labels, which are -100 where "
            "the mask is 0",
        ),
    ],
)
def test_labels_by_another_name_are_refused(
    name: str, text: str, kind: str, tmp_path: Path
) -> None:
    """The model takes no such argument, so that they would be left out, and all tokens learnt."""
    samples = [
        {"input_ids": sample["input_ids"], name: sample["labels"]}
        for sample in trainer_runs.chats(4)
    ]
    trainer = PackedTrainer(
        model=trainer_runs.tiny_llama(),
        args=trainer_runs.arguments(tmp_path),
        train_dataset=datasets.Dataset.from_list(samples) if kind != "list" else samples,
        config=Config(sequence_len=24),
    )
    with pytest.raises(ValueError) as error:
        trainer.get_train_dataloader()
    assert str(error.value) == text


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


def test_context_parallelism_takes_padded_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedTrainer, "get_cp_size", lambda self: 2)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 4))
    assert packed(tmp_path, config=LAYOUTS["padded"])._config().world_size == 2
    with pytest.raises(ValueError) as error:
        packed(tmp_path)
    assert str(error.value) == (
        "context parallelism (cp_size 2) attends over whole rows, so the samples of a row would "
        "see one another: set sample_packing and batch_flattening to False"
    )


def test_sequence_parallelism_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedTrainer, "get_sp_size", lambda self: 2)
    with pytest.raises(ValueError) as error:
        packed(tmp_path, config=LAYOUTS["padded"])
    assert str(error.value) == (
        "sequence parallelism (sp_size 2) exchanges batches between its ranks, which a plan does "
        "not know of: leave it out"
    )


def test_pipeline_parallelism_is_refused(tmp_path: Path) -> None:
    """The Trainer itself would broadcast the weights of one stage to the others."""
    model = trainer_runs.tiny_llama()
    model.config.distributed_config = SimpleNamespace(pp_size=2)  # as `from_pretrained` leaves it
    with pytest.raises(ValueError) as error:
        packed(tmp_path, model=model)
    assert str(error.value) == (
        "pipeline parallelism (pp_size 2) has stages, which the Trainer and Accelerate take for "
        "data-parallel ranks with the whole model: leave it out"
    )


@pytest.mark.parametrize(
    ("arguments", "config", "text"),
    [
        ({"train_sampling_strategy": "group_by_length"}, {}, "train_sampling_strategy is 'group_b"),
        ({"train_sampling_strategy": "sequential"}, {}, "train_sampling_strategy is 'sequential'"),
        ({"accelerator_config": {"split_batches": True}}, {}, "accelerator_config has split_batch"),
        ({"accelerator_config": {"dispatch_batches": True}}, {}, "accelerator_config has dispatch"),
        ({}, {"micro_batch_size": 4}, "the config has micro_batch_size 4, but the trainer's per_d"),
        ({}, {"world_size": 3}, "the config has world_size 3, but the trainer's number of data-pa"),
        ({"data_seed": 5}, {"data_seed": 6}, "the config has data_seed 6, but the trainer's data_"),
    ],
)
def test_what_excludes_a_plan_is_refused_by_name(
    arguments: dict[str, Any], config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        packed(tmp_path, config={"balance_labels": True, **config}, **arguments)
    assert str(error.value).startswith(text)


class LeftTokenizer:
    """Pads on the left."""

    padding_side = "left"
    pad_token_id = 0


def test_padding_on_the_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        packed(tmp_path, given={"processing_class": LeftTokenizer()})
    assert str(error.value) == (
        "the tokenizer pads on the left, but batches are padded on the right: set its padding_side "
        "to 'right'"
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("RewardTrainer", "reward models"),
        ("DPOTrainer", "preferences"),
        ("GRPOTrainer", "reinforcement learning"),
        ("MyDiffusionTrainer", "diffusion"),
    ],
)
def test_trainers_for_something_else_are_refused_by_name(
    name: str, what: str, tmp_path: Path
) -> None:
    other = type(name, (Trainer,), {})
    with pytest.raises(ValueError) as error:
        packed(tmp_path, kind=type("Mine", (PackedTrainer, other), {}))
    assert str(error.value).startswith(f"{name} is a trainer for {what}, but multipack packs")


def test_they_are_refused_before_their_own_errors(tmp_path: Path) -> None:
    """A trainer for preferences would first ask for pairs, or fail at the collator."""

    class DPOTrainer(Trainer):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise KeyError("chosen")

    with pytest.raises(ValueError, match="DPOTrainer is a trainer for preferences, but multipack"):
        packed(tmp_path, kind=type("Mine", (PackedTrainer, DPOTrainer), {}))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            transformers.LlamaForSequenceClassification,
            "LlamaForSequenceClassification learns one label for each sample, as reward models do, "
            "but multipack packs and balances the samples of causal language models",
        ),
        (
            transformers.LlamaForTokenClassification,
            "LlamaForTokenClassification learns classes of tokens, but multipack packs and "
            "balances the samples of causal language models",
        ),
    ],
)
def test_models_that_learn_something_else_are_refused(
    kind: type, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        packed(tmp_path, model=kind(trainer_runs.tiny_llama().config))
    assert str(error.value) == text


class OwnLoss(torch.nn.Module):
    """A model that is not told how many tokens a step has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = trainer_runs.tiny_llama()
        self.config = self.model.config

    def forward(self, input_ids: Any, labels: Any, position_ids: Any, attention_mask: Any) -> Any:
        """Run the model."""
        return self.model(
            input_ids=input_ids,
            labels=labels,
            position_ids=position_ids,
            attention_mask=attention_mask,
        )


def test_a_model_that_cannot_weigh_tokens_over_a_step_is_told(tmp_path: Path) -> None:
    given = {"data_collator": Collator(attention="bool")}
    with pytest.warns(UserWarning) as told:
        packed(tmp_path, model=OwnLoss(), given=given, gradient_accumulation_steps=4)
    assert str(told[0].message) == (
        "OwnLoss takes no num_items_in_batch, so the loss of a step is the mean of its 4 "
        "microbatches' means, and tokens in a microbatch with few labels weigh more than others: "
        "give the model's forward a **kwargs that reaches its loss, give compute_loss_func, or "
        "balance_labels, with which they differ little"
    )
    packed(tmp_path, model=OwnLoss(), given=given)  # one microbatch is its own step
    # As the warning says.
    balanced = {"balance_labels": True}
    packed(tmp_path, model=OwnLoss(), given=given, config=balanced, gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("is_encoder_decoder", True, "LlamaForCausalLM is an encoder with a decoder, but multi"),
        ("model_type", "diffusion_gemma", "LlamaForCausalLM is a diffusion model, but multipack"),
    ],
)
def test_models_that_are_not_causal_are_refused(
    key: str, value: Any, text: str, tmp_path: Path
) -> None:
    model = trainer_runs.tiny_llama()
    setattr(model.config, key, value)
    with pytest.raises(ValueError) as error:
        packed(tmp_path, model=model)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize("named", [False, True])
def test_a_stream_to_evaluate_on_is_refused(named: bool, tmp_path: Path) -> None:
    stream = datasets.Dataset.from_list(trainer_runs.chats(4)).to_iterable_dataset()
    with pytest.raises(TypeError) as error:
        packed(tmp_path, evaluation={"one": stream} if named else stream)
    assert str(error.value) == (
        "the data set is a stream, but an evaluation needs indices: give a map-style data set"
    )


def test_other_collators_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="data_collator is a function, but the batches of a plan"):
        packed(tmp_path, given={"data_collator": lambda batch: batch})


def test_a_trainer_without_the_methods_that_are_replaced_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(ImportError) as error:
        _trainer_refusals.refuse_other_versions()
    assert str(error.value) == (
        f"the Trainer of transformers {transformers.__version__} has no _run_epoch, which "
        "PackedTrainer replaces: install transformers 5.24"
    )


def test_a_plan_without_a_microbatch_is_an_error(tmp_path: Path) -> None:
    trainer = packed(tmp_path, trainer_runs.chats(1), config=LAYOUTS["padded"])
    with (
        pytest.warns(UserWarning, match="microbatch"),
        pytest.raises(ValueError, match="the plan of the training data is empty"),
    ):
        trainer.train()


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
    from multipack.integrations import _checkpoint

    there: list[list[str]] = []
    finish = _checkpoint.finish

    def look(folder: Any, state: Any) -> None:
        there.append(sorted(path.name for path in Path(tmp_path).glob("checkpoint-*")))
        finish(folder, state)

    monkeypatch.setattr(_checkpoint, "finish", look)
    packed(tmp_path, save_total_limit=1, **SAVED).train()
    assert all(len(names) == 2 for names in there[1:])
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


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
