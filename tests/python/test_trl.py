"""TRL's SFTTrainer on packed batches: its labels, its loss, its numbers, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import trainer_runs
from resume_cases import LAYOUTS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from multipack import Config
from multipack.integrations.trl import PackedSFTTrainer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}a {% generation %}"
    "{{ message.content }} <eos> {% endgeneration %}{% else %}u {{ message.content }} {% endif %}"
    "{% endfor %}"
)


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "u", "a", *(f"w{i}" for i in range(50))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = TEMPLATE
    return made


def text(rng: np.random.Generator, longest: int) -> str:
    return " ".join(f"w{i}" for i in rng.integers(0, 50, rng.integers(1, longest)))


def completions(n: int = 24) -> datasets.Dataset:
    rng = np.random.default_rng(3)
    return datasets.Dataset.from_list(
        [{"prompt": text(rng, 12) + " ", "completion": text(rng, 12)} for _ in range(n)]
    )


def conversations(n: int = 24) -> datasets.Dataset:
    rng = np.random.default_rng(4)
    roles = ("user", "assistant", "user", "assistant")
    return datasets.Dataset.from_list(
        [{"messages": [{"role": r, "content": text(rng, 6)} for r in roles]} for _ in range(n)]
    )


def sft(
    folder: Path, data: Any, *, stock: bool = False, evaluation: Any = None, **keys: Any
) -> Any:
    """Make an SFTTrainer, packed or `stock`."""
    config = keys.pop("config", {"sequence_len": 32})
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_length": 32,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": 11,
    }
    known = {field.name for field in dataclasses.fields(SFTConfig)}
    defaults = {key: value for key, value in defaults.items() if key in known}
    arguments = {
        "model": trainer_runs.tiny_llama(),
        "args": SFTConfig(output_dir=str(folder), **(defaults | keys)),
        "train_dataset": data,
        "eval_dataset": evaluation,
        "processing_class": tokenizer(),
    }
    if stock:
        return SFTTrainer(**arguments)
    return PackedSFTTrainer(config=Config(**config), **arguments)


def samples_in(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and labels of each sample in a batch."""
    found = []
    for tokens, labels, positions in zip(
        *(batch[key].tolist() for key in ("input_ids", "labels", "position_ids")), strict=True
    ):
        starts = [i for i, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if any(label != -100 for label in labels[start:end]):
                found.append((tokens[start:end], labels[start:end]))
    return found


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (completions(), {"completion_only_loss": True}),
        (conversations(), {"assistant_only_loss": True}),
    ],
    ids=["completion only", "assistant only"],
)
def test_masked_labels_are_those_of_the_sft_trainer(
    data: Any, keys: dict[str, Any], tmp_path: Path
) -> None:
    stock = sft(tmp_path, data, stock=True, **keys)
    expected = [(row["input_ids"], row["labels"]) for row in stock.train_dataset]
    masked = sum(label == -100 for _, labels in expected for label in labels)
    assert 0 < masked < sum(len(labels) for _, labels in expected)
    assert all(labels[0] == -100 for _, labels in expected)
    trainer = sft(tmp_path, data, config={"sequence_len": 32, "incomplete_batches": "fill"}, **keys)
    found = [sample for batch in trainer.get_train_dataloader() for sample in samples_in(batch)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_the_sft_trainer_on_the_same_samples(layout: str, tmp_path: Path) -> None:
    one_step = {
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "gradient_accumulation_steps": 12,
    }
    ends = []
    for stock in (True, False):
        config = {"sequence_len": 32, "incomplete_batches": "fill", "balance_labels": True}
        trainer = sft(
            tmp_path, completions(), stock=stock, config=config | LAYOUTS[layout], **one_step
        )
        output = trainer.train()
        assert output.global_step == 1
        ends.append((output.training_loss, trainer_runs.weights(trainer.model)))
        if not stock:
            tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)
            assert trainer._total_train_tokens == tokens
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    for name, value in ends[0][1].items():
        np.testing.assert_allclose(ends[1][1][name], value, atol=1e-5, err_msg=name)


def test_the_evaluation_loss_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    data = completions(19)
    losses = [
        sft(
            tmp_path,
            completions(),
            evaluation=data,
            config={"sequence_len": 32} | keys,
            per_device_eval_batch_size=size,
        ).evaluate()["eval_loss"]
        for keys, size in zip(LAYOUTS.values(), (1, 3, 4, 2), strict=True)
    ]
    assert losses == [pytest.approx(losses[0], rel=1e-5)] * 4


def test_resumed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    ends = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        trainer = sft(
            tmp_path,
            completions(),
            num_train_epochs=2,
            save_strategy="steps",
            save_steps=3,
            include_num_input_tokens_seen="non_padding",
        )
        trainer.train(resume_from_checkpoint=resume)
        ends.append(trainer_runs.weights(trainer.model))
        assert trainer.state.global_step > 3
        sampler = trainer._train_plan
        tokens = 0
        for epoch in range(2):
            sampler.set_epoch(epoch)
            tokens += sampler.plan.stats.after.mean_unpadded_length * len(sampler)
        assert trainer.state.num_input_tokens_seen == pytest.approx(tokens)
    for name, value in ends[0].items():
        np.testing.assert_array_equal(ends[1][name], value, err_msg=name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"packing": True}, "packing is set, but multipack packs in the SFTTrainer's place: lea"),
        ({"padding_free": True}, "padding_free is set, but multipack packs in the SFTTrainer's "),
        (
            {"max_length": 16},
            "max_length is 16, less than sequence_len 32: set sequence_len to 16, or max_length to "
            "32 or None",
        ),
    ],
)
def test_the_sft_trainer_s_own_packing_and_cutting_are_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        sft(tmp_path, completions(), **keys)
    assert str(error.value).startswith(message)


def test_args_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as error:
        PackedSFTTrainer(
            trainer_runs.tiny_llama(),
            trainer_runs.arguments(tmp_path),
            config=Config(sequence_len=32),
        )
    assert str(error.value) == "args is a TrainingArguments, but must be a trl.SFTConfig"


@pytest.mark.parametrize("longest", [32, 40, None])
def test_the_config_decides_about_samples_that_are_too_long(
    longest: int | None, tmp_path: Path
) -> None:
    """The SFTTrainer would cut them to `max_length`, whatever the strategy is."""
    long = {"prompt": "w1 ", "completion": " ".join(f"w{i}" for i in range(45))}
    data = datasets.concatenate_datasets([completions(), datasets.Dataset.from_list([long])])

    def tokens(strategy: str) -> list[Any]:
        config = {"sequence_len": 32, "excess_length_strategy": strategy}
        trainer = sft(
            tmp_path, data, config={**config, "incomplete_batches": "fill"}, max_length=longest
        )
        assert trainer.args.max_length is None
        loader = trainer.get_train_dataloader()
        return [ids for batch in loader for ids, _ in samples_in(batch)]

    with pytest.warns(UserWarning, match="of 25 samples 1 dropped"):
        dropped = tokens("drop")
    assert len(dropped) == 24
    with pytest.warns(UserWarning, match="of 25 samples 1 cut"):
        cut = tokens("truncate")
    assert len(cut) == 25
    assert max(map(len, cut)) == 32
    with pytest.raises(ValueError, match="sample 24 has 47 tokens"):
        tokens("raise")
