"""Real models do with packed samples what they do with each alone: logits, loss, gradients.

One check, `check_equals_alone`, judges every route by which transformers' models can be told where
samples end, on Llama and Qwen3 with random weights in fp32. A check is only worth something if it
can fail, so the last section feeds it batches that leak in the ways in which public training code
has leaked, and wants it to notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

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


@functools.cache
def make_model(name: str, implementation: str) -> PreTrainedModel:
    """A small model in training mode; equal weights for both implementations."""
    torch.manual_seed(7)
    settings = {
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
ONE_ROW = make_rows([1, 9, 1, 1, 14, 2, 1])
SEVERAL_ROWS = make_rows([7, 1, 3], [1, 12], [5, 5, 1], [13])
PADDED = make_rows([7], [1], [12], [3])


def collate(rows: Rows, attention: str, **keys: Any) -> Batch:
    return multipack.Collator(attention=attention, **keys)(rows)


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


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Takes the gradients away from the model."""
    taken = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        taken[name] = parameter.grad
        parameter.grad = None
    return taken


def check_equals_alone(model: PreTrainedModel, rows: Rows, batch: Batch, align: int = 1) -> None:
    """Asserts that `model` does with a batch of `rows` what it does with each of the samples alone.

    The loss is the model's own, which shifts the labels by itself; it is summed and divided by the
    number of labels that can be predicted within their sample.
    """
    count = sum(label != -100 for row in rows for s in row for label in s["labels"][1:])
    logits, loss = [], torch.zeros(())
    for sample, _, _ in places(rows):
        alone = {name: torch.tensor([ids]) for name, ids in sample.items()}
        output = model(**alone, use_cache=False, num_items_in_batch=count)
        output.loss.backward()
        logits.append(output.logits[0].detach())
        loss += output.loss.detach()
    reference = gradients(model)

    output = model(**inputs(batch), num_items_in_batch=count)
    output.loss.backward()
    packed = gradients(model)

    found = {
        "logits": relative(
            torch.cat([output.logits[r, place].detach() for _, r, place in places(rows, align)]),
            torch.cat(logits),
        ),
        "loss": relative(output.loss.detach(), loss),
        **{f"gradient of {name}": relative(packed[name], reference[name]) for name in packed},
    }
    wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
    assert not wrong, f"packed differs from alone, more than {TOLERANCE}: {wrong}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("implementation", "attention"), ROUTES)
@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        pytest.param(ONE_ROW, {}, id="one-row"),
        pytest.param(SEVERAL_ROWS, {}, id="several-rows"),
        pytest.param(PADDED, {"sample_packing": False}, id="padded"),
        pytest.param(SEVERAL_ROWS, {"align_samples_to": 4}, id="aligned"),
    ],
)
def test_packed_equals_alone(
    name: str, implementation: str, attention: str, rows: Rows, keys: dict[str, Any]
) -> None:
    batch = collate(rows, attention, **keys)
    assert batch["input_ids"].shape[0] == len(rows)
    check_equals_alone(
        make_model(name, implementation), rows, batch, keys.get("align_samples_to", 1)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("implementation", "attention"), ROUTES)
@pytest.mark.parametrize(
    ("rows", "padded_tail"),
    [
        pytest.param(ONE_ROW, "own", id="one-row-own"),
        pytest.param(ONE_ROW, "last", id="one-row-last"),
        pytest.param(ONE_ROW, "none", id="one-row-none"),
        pytest.param(SEVERAL_ROWS, "own", id="several-rows-own"),
        pytest.param(SEVERAL_ROWS, "last", id="several-rows-last"),
    ],
)
def test_padded_tail_changes_nothing(
    name: str, implementation: str, attention: str, rows: Rows, padded_tail: str
) -> None:
    """Rows of 48: every tail is longer than `sequence_len`, so that it takes several segments."""
    model = make_model(name, implementation)
    keys = {"sequence_len": 14, "pad_to_multiple_of": 48, "padded_tail": padded_tail}
    batch = collate(rows, attention, **keys)
    assert batch["input_ids"].shape == (len(rows), 48)
    check_equals_alone(model, rows, batch)

    other_padding = collate(rows, attention, **keys, pad_token_id=5)
    assert not torch.equal(batch["input_ids"], other_padding["input_ids"])
    logits, other = forward(model, batch), forward(model, other_padding)
    for _, r, place in places(rows):
        assert torch.equal(logits[r, place], other[r, place])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("implementation", "attention"), ROUTES)
def test_a_sample_cannot_move_another(name: str, implementation: str, attention: str) -> None:
    """Each sample is changed in turn; only its own logits may move, and they must."""
    model = make_model(name, implementation)
    rows = SEVERAL_ROWS
    before = forward(model, collate(rows, attention))
    for changed, changed_row, changed_place in places(rows):
        other = {**changed, "input_ids": [1 + i % (VOCABULARY - 1) for i in changed["input_ids"]]}
        after_rows = [[other if sample is changed else sample for sample in row] for row in rows]
        after = forward(model, collate(after_rows, attention))
        for sample, r, place in places(rows):
            moved = float((after[r, place] - before[r, place]).abs().max())
            if sample is changed:
                assert moved > 1e-3
            else:
                assert moved <= 1e-6, f"row {changed_row} {changed_place} moved row {r} {place}"


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
@pytest.mark.parametrize("rows", [ONE_ROW, SEVERAL_ROWS], ids=["one-row", "several-rows"])
def test_the_check_notices_a_leak(
    name: str,
    implementation: str,
    attention: str,
    keys: dict[str, Any],
    spoil: Callable[[Batch], Batch],
    symptom: str,
    rows: Rows,
) -> None:
    model = make_model(name, implementation)
    batch = spoil(collate(rows, attention, **keys))
    with pytest.raises(AssertionError, match=f"packed differs from alone.*'{symptom}'"):
        check_equals_alone(model, rows, batch)
