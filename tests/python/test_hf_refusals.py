"""What `PackedTrainer` refuses or warns of: data, arguments, trainers and models, each by name.

The real Trainer is made each time, so that its own checks come first where they do for users.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import trainer_runs
import transformers
from resume_cases import LAYOUTS
from trainer_runs import packed
from transformers import Trainer, TrainingArguments

from multipack import Collator, Config
from multipack.integrations import _trainer_refusals
from multipack.integrations.hf import PackedTrainer


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


def test_a_plan_without_a_microbatch_is_an_error(tmp_path: Path) -> None:
    trainer = packed(tmp_path, trainer_runs.chats(1), config=LAYOUTS["padded"])
    with (
        pytest.warns(UserWarning, match="microbatch"),
        pytest.raises(ValueError, match="the plan of the training data is empty"),
    ):
        trainer.train()


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
