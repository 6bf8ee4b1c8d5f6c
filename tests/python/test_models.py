"""Real models do with packed samples what they do with each alone: logits, loss, gradients.

One check, `check_equals_alone`, judges every route by which transformers' models can be told where
samples end, on Llama and Qwen3 with random weights in fp32. A check is only worth something if it
can fail, so the last section feeds it batches that leak in the ways in which public training code
has leaked, and wants it to notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import multipack

VOCABULARY = 97
TOLERANCE = 1e-5

Sample = dict[str, list[int]]
Rows = list[list[Sample]]
Batch = dict[str, Any]

# What `attention` of the collator, and with which implementation of the model, isolates samples.
ROUTES = [
    pytest.param("sdpa", "bool", id="bool-sdpa"),
    pytest.param("sdpa", "additive", id="additive-sdpa"),
    pytest.param("eager", "additive", id="additive-eager"),
    pytest.param("sdpa", "none", id="positions-sdpa"),
    pytest.param("eager", "none", id="positions-eager"),
    pytest.param("sdpa", "flash", id="flash-arguments-sdpa"),
]
MODELS = ["llama", "qwen3"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def make_model(name: str, implementation: str) -> PreTrainedModel:
    """A small model in training mode; equal weights for both implementations."""
    torch.manual_seed(7)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "attn_implementation": implementation,
    }
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings)).train()
    return Qwen3ForCausalLM(Qwen3Config(**settings)).train()


def make_rows(*lengths: list[int], seed: int = 0) -> Rows:
    """Rows of samples of these lengths, each supervised in its second half, every third wholly."""
    generator = torch.Generator().manual_seed(seed)
    rows: Rows = []
    number = 0
    for row in lengths:
        rows.append([])
        for length in row:
            ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
            prompt = 0 if number % 3 == 0 else length // 2
            rows[-1].append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
            number += 1
    return rows


# Lengths 1 stand at the start, inside and at the end of a row, and side by side.
ROWS = {
    "one row": make_rows([1, 9, 1, 1, 14, 2, 1]),
    "several rows": make_rows([7, 1, 3], [1, 12], [5, 5, 1], [13]),
    "a sample in each row": make_rows([7], [1], [12], [3]),
}


def collate(rows_name: str, attention: str, **keys: Any) -> Batch:
    return multipack.Collator(attention=attention, **keys)(ROWS[rows_name])


def forward(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(batch)).logits


def inputs(batch: Batch) -> Batch:
    """The batch as the model wants it: under a cache it would not look at the position ids."""
    return {"use_cache": False, **batch}


def places(rows: Rows, align: int = 1) -> Iterator[tuple[Sample, int, slice]]:
    """Each sample with its row and its place in the row, in slots of a multiple of `align`."""
    for r, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample["input_ids"])
            yield sample, r, slice(start, end)
            start = -(-end // align) * align


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference."""
    return float((value - reference).norm() / reference.norm())


class Outcome(NamedTuple):
    """What a model makes of some samples."""

    logits: torch.Tensor
    """(T, V): the samples in order, padding left out."""
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(model: PreTrainedModel, batch: Batch, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and loss; gradients are added to what the model holds.

    The loss is the model's own, which shifts the labels by itself, summed and divided by `count`.
    """
    output = model(**inputs(batch), num_items_in_batch=count)
    output.loss.backward()
    return output.logits.detach(), output.loss.detach()


def take_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The gradients, which the model then no longer has."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def labels_in_loss(rows: Rows) -> int:
    """Labels that can be predicted within their sample."""
    return sum(label != -100 for row in rows for s in row for label in s["labels"][1:])


@functools.cache
def run_alone(model: PreTrainedModel, rows_name: str) -> Outcome:
    """The reference: each sample a batch of its own, without padding and without a mask."""
    rows = ROWS[rows_name]
    logits, losses = [], []
    for sample, _, _ in places(rows):
        batch = {name: torch.tensor([values]) for name, values in sample.items()}
        sample_logits, loss = step(model, batch, labels_in_loss(rows))
        logits.append(sample_logits[0])
        losses.append(loss)
    return Outcome(torch.cat(logits), torch.stack(losses).sum(), take_gradients(model))


def run_packed(model: PreTrainedModel, rows_name: str, batch: Batch, align: int = 1) -> Outcome:
    """The same samples in one batch."""
    rows = ROWS[rows_name]
    logits, loss = step(model, batch, labels_in_loss(rows))
    real = torch.cat([logits[r, place] for _, r, place in places(rows, align)])
    return Outcome(real, loss, take_gradients(model))


def check_equals_alone(
    model: PreTrainedModel, rows_name: str, batch: Batch, align: int = 1
) -> None:
    """Asserts that `model` does with a batch of these rows what it does with each sample alone."""
    packed = run_packed(model, rows_name, batch, align)
    alone = run_alone(model, rows_name)
    differences = {
        "logits": relative(packed.logits, alone.logits),
        "loss": relative(packed.loss, alone.loss),
        **{
            f"gradient of {name}": relative(gradient, alone.gradients[name])
            for name, gradient in packed.gradients.items()
        },
    }
    wrong = {what: value for what, value in differences.items() if not value <= TOLERANCE}
    assert not wrong, f"packed differs from alone, more than {TOLERANCE}: {wrong}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("implementation", "attention"), ROUTES)
@pytest.mark.parametrize(
    ("rows_name", "keys"),
    [
        pytest.param("one row", {}, id="one-row"),
        pytest.param("several rows", {}, id="several-rows"),
        pytest.param("a sample in each row", {"sample_packing": False}, id="padded"),
        pytest.param("several rows", {"align_samples_to": 4}, id="aligned"),
    ],
)
def test_packed_equals_alone(
    name: str, implementation: str, attention: str, rows_name: str, keys: dict[str, Any]
) -> None:
    batch = collate(rows_name, attention, **keys)
    assert batch["input_ids"].shape[0] == len(ROWS[rows_name])
    align = keys.get("align_samples_to", 1)
    check_equals_alone(make_model(name, implementation), rows_name, batch, align)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("implementation", "attention"), ROUTES)
@pytest.mark.parametrize(
    ("rows_name", "padded_tail"),
    [
        pytest.param("one row", "own", id="one-row-own"),
        pytest.param("one row", "last", id="one-row-last"),
        pytest.param("one row", "none", id="one-row-none"),
        pytest.param("several rows", "own", id="several-rows-own"),
        pytest.param("several rows", "last", id="several-rows-last"),
    ],
)
def test_padded_tail_changes_nothing(
    name: str, implementation: str, attention: str, rows_name: str, padded_tail: str
) -> None:
    """Some tails are longer than `sequence_len`, so that they take several segments."""
    model = make_model(name, implementation)
    keys = {"sequence_len": 14, "pad_to_multiple_of": 48, "padded_tail": padded_tail}
    batch = collate(rows_name, attention, **keys)
    assert batch["input_ids"].shape[1] == 48
    check_equals_alone(model, rows_name, batch)

    other_padding = collate(rows_name, attention, **keys, pad_token_id=5)
    assert not torch.equal(batch["input_ids"], other_padding["input_ids"])
    logits, other_logits = forward(model, batch), forward(model, other_padding)
    for _, r, place in places(ROWS[rows_name]):
        assert torch.equal(logits[r, place], other_logits[r, place])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("implementation", "attention"), ROUTES)
def test_a_sample_cannot_move_another(name: str, implementation: str, attention: str) -> None:
    """Each sample is changed in turn; its own logits move, those of the others do not."""
    model = make_model(name, implementation)
    batch = collate("several rows", attention)
    before = forward(model, batch)
    for _, changed_row, changed in places(ROWS["several rows"]):
        ids = batch["input_ids"].clone()
        ids[changed_row, changed] = 1 + ids[changed_row, changed] % (VOCABULARY - 1)
        after = forward(model, {**batch, "input_ids": ids})
        for _, r, place in places(ROWS["several rows"]):
            moved = float((after[r, place] - before[r, place]).abs().max())
            if (r, place) == (changed_row, changed):
                assert moved > 1e-3
            else:
                assert moved <= 1e-6, f"row {changed_row} {changed} moved row {r} {place}"


# Leaks: each spoils a right batch as a user might, and the check has to notice.


def plain_causal(batch: Batch) -> Batch:
    """Positions restart, but attention reaches over the border."""
    rows, length = batch["input_ids"].shape
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return {**batch, "attention_mask": mask.expand(rows, 1, length, length)}


def one_key_too_many(batch: Batch) -> Batch:
    """The smallest leak: the first token of the second sample sees the last one of the first."""
    start = int((batch["position_ids"][0] == 0).nonzero()[1])
    mask = batch["attention_mask"].clone()
    mask[0, 0, start, start - 1] = True
    return {**batch, "attention_mask": mask}


def positions_that_go_on(batch: Batch) -> Batch:
    """One sequence, as far as the position ids tell."""
    rows, length = batch["input_ids"].shape
    return {**batch, "position_ids": torch.arange(length).expand(rows, length)}


def all_ones_mask(batch: Batch) -> Batch:
    """The tokenizer's mask: with it, transformers does not look at the position ids."""
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def with_cache(batch: Batch) -> Batch:
    """The model's default, under which transformers does not look at the position ids either."""
    return {**batch, "use_cache": True}


def unchanged(batch: Batch) -> Batch:
    """The leak is in how the batch was made, or in the model that it is given to."""
    return batch


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("implementation", "attention", "keys", "spoil", "symptom"),
    [
        pytest.param("sdpa", "bool", {}, plain_causal, "logits", id="plain-causal"),
        pytest.param("sdpa", "bool", {}, one_key_too_many, "logits", id="one-key-too-many"),
        pytest.param("eager", "bool", {}, unchanged, "logits", id="bool-mask-eager"),
        pytest.param("sdpa", "none", {}, positions_that_go_on, "logits", id="positions-go-on"),
        pytest.param("sdpa", "none", {}, all_ones_mask, "logits", id="all-ones-mask"),
        pytest.param("sdpa", "none", {}, with_cache, "logits", id="with-cache"),
        pytest.param(
            "sdpa", "bool", {"mask_first_label": False}, unchanged, "loss", id="label-over-border"
        ),
    ],
)
@pytest.mark.parametrize("rows_name", ["one row", "several rows"])
def test_the_check_notices_a_leak(
    name: str,
    implementation: str,
    attention: str,
    keys: dict[str, Any],
    spoil: Callable[[Batch], Batch],
    symptom: str,
    rows_name: str,
) -> None:
    model = make_model(name, implementation)
    batch = spoil(collate(rows_name, attention, **keys))
    with pytest.raises(AssertionError, match=f"packed differs from alone.*'{symptom}'"):
        check_equals_alone(model, rows_name, batch)
