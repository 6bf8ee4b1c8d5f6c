"""Real models do with packed samples what they do with each alone: logits, loss, gradients.

One check, `check_equals_alone`, judges every route by which transformers' models can be told where
samples end, on families of docs/without-flash-attention.md, with random weights in fp32. A check is
only worth something if it can fail, so a section feeds it batches that leak in the ways in which
public training code has leaked, and wants it to notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from families import BY_LAYER, VOCABULARY, WINDOW, make_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

import multipack

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
    pytest.param("multipack", "multipack", id="multipack"),
]
MODELS = ["llama", "qwen3", "mistral", "gemma3_text", "phi", "gpt_neox", "gpt2"]

# The windows that a mask must have, since it replaces the model's own.
WINDOWS = {"mistral": WINDOW, "gemma3_text": BY_LAYER}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def collate(name: str, rows_name: str, attention: str, **keys: Any) -> Batch:
    if attention in ("bool", "additive", "flex"):
        keys["window"] = WINDOWS.get(name)
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
def run_alone(name: str, rows_name: str) -> Outcome:
    """The reference: each sample a batch of its own with SDPA, without padding and a mask."""
    model = make_model(name, "sdpa")
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
    name: str, implementation: str, rows_name: str, batch: Batch, align: int = 1
) -> None:
    """Asserts that a model does with a batch of these rows what it does with each sample alone."""
    packed = run_packed(make_model(name, implementation), rows_name, batch, align)
    alone = run_alone(name, rows_name)
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
        pytest.param(
            "one row", {"sample_packing": False, "batch_flattening": True}, id="flattened"
        ),
        pytest.param("several rows", {"align_samples_to": 4}, id="aligned"),
    ],
)
def test_packed_equals_alone(
    name: str, implementation: str, attention: str, rows_name: str, keys: dict[str, Any]
) -> None:
    batch = collate(name, rows_name, attention, **keys)
    assert batch["input_ids"].shape[0] == len(ROWS[rows_name])
    align = keys.get("align_samples_to", 1)
    check_equals_alone(name, implementation, rows_name, batch, align)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("implementation", "attention"), ROUTES)
def test_a_sample_cannot_move_another(name: str, implementation: str, attention: str) -> None:
    batch = inputs(collate(name, "several rows", attention))
    report = multipack.verify_isolation(make_model(name, implementation), batch)
    assert (report.samples, report.moved) == (9, 0)
    assert report.differs < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "phi", "gpt_neox"])
@pytest.mark.parametrize("rows_name", ["one row", "several rows"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_forward(name: str, rows_name: str) -> None:
    """Its backward does not exist on the CPU."""
    batch = collate(name, rows_name, "flex")
    with torch.compiler.set_stance("force_eager"):
        logits = forward(make_model(name, "flex_attention"), batch)
    packed = torch.cat([logits[r, place] for _, r, place in places(ROWS[rows_name])])
    alone = run_alone(name, rows_name).logits
    assert relative(packed, alone) <= TOLERANCE


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
    implementation: str, attention: str, rows_name: str, padded_tail: str
) -> None:
    """Some tails are longer than `sequence_len`, so that they take several segments."""
    model = make_model("mistral", implementation)
    keys = {"sequence_len": 14, "pad_to_multiple_of": 48, "padded_tail": padded_tail}
    batch = collate("mistral", rows_name, attention, **keys)
    assert batch["input_ids"].shape[1] == 48
    check_equals_alone("mistral", implementation, rows_name, batch)

    other_padding = collate("mistral", rows_name, attention, **keys, pad_token_id=5)
    assert not torch.equal(batch["input_ids"], other_padding["input_ids"])
    logits, other_logits = forward(model, batch), forward(model, other_padding)
    for _, r, place in places(ROWS[rows_name]):
        assert torch.equal(logits[r, place], other_logits[r, place])


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


@pytest.mark.parametrize("name", ["llama", "qwen3"])
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
    batch = spoil(collate(name, rows_name, attention, **keys))
    with pytest.raises(AssertionError, match=f"packed differs from alone.*'{symptom}'"):
        check_equals_alone(name, implementation, rows_name, batch)


# What supervision has got wrong elsewhere: the targets that really enter a model's loss.


def targets(samples: list[Sample], **keys: Any) -> list[int]:
    """The tokens, counted in the row, that a Llama's loss of these samples depends on."""
    batch = multipack.Collator(attention="bool", **keys)(samples)
    output = make_model("llama", "sdpa")(**batch)
    (gradient,) = torch.autograd.grad(output.loss, output.logits)
    predicting = gradient[0].abs().sum(-1).nonzero().flatten()
    return [int(token) + 1 for token in predicting]


def losses(samples: list[Sample]) -> torch.Tensor:
    """The sum of a Llama's loss over the targets of each sample alone."""
    model = make_model("llama", "sdpa")
    with torch.no_grad():
        alone = [{k: torch.tensor([v]) for k, v in s.items()} for s in samples]
        return torch.stack([model(**sample, num_items_in_batch=1).loss for sample in alone])


def test_the_last_token_is_not_trained_to_predict_the_next_sample() -> None:
    """C45: two targets, 12 and 22, and the loss of the samples apart."""
    samples = [{"input_ids": ids, "labels": ids} for ids in ([11, 12], [21, 22])]
    batch = multipack.Collator(attention="bool")(samples)
    assert batch["labels"].tolist() == [[-100, 12, -100, 22]]
    assert targets(samples) == [1, 3]
    with torch.no_grad():
        loss = make_model("llama", "sdpa")(**batch).loss
    torch.testing.assert_close(2 * loss, losses(samples).sum(), rtol=TOLERANCE, atol=0)
    assert targets(samples, mask_first_label=False) == [1, 2, 3]


def test_answers_stay_in_their_place_behind_other_samples() -> None:
    """C46: of samples of 5 and 4 tokens, the tokens [3, 5) and [2, 4) are supervised."""
    samples = [
        {"input_ids": [11, 12, 13, 14, 15], "labels": [-100, -100, -100, 14, 15]},
        {"input_ids": [21, 22, 23, 24], "labels": [-100, -100, 23, 24]},
    ]
    assert targets(samples) == [3, 4, 7, 8]


def test_the_first_token_of_an_answer_is_trained() -> None:
    """C47: a prompt of one token, and an answer of four."""
    sample = {"input_ids": [11, 12, 13, 14, 15], "labels": [-100, 12, 13, 14, 15]}
    assert targets([sample]) == [1, 2, 3, 4]
    assert targets([sample, sample]) == [1, 2, 3, 4, 6, 7, 8, 9]


# Masks in attention.


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_padding_attends_to_something(dtype: torch.dtype, backend: SDPBackend) -> None:
    """C55: no row of the mask is empty, and nothing comes out that is not finite."""
    keys = {} if dtype == torch.bool else {"dtype": dtype}
    attention = "additive" if keys else "bool"
    batch = multipack.Collator(attention=attention, pad_to_multiple_of=5, **keys)(
        [{"input_ids": [1, 2, 3]}]
    )
    mask = batch["attention_mask"]
    allowed = mask if dtype == torch.bool else mask == 0
    assert allowed.any(-1).all()
    torch.manual_seed(0)
    kind = torch.float32 if dtype == torch.bool else dtype
    query, key, value = (torch.randn(1, 2, 5, 8, dtype=kind, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        out.float().square().sum().backward()
    for tensor in (out, query.grad, key.grad, value.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_additive_mask_masks_like_a_bool_one(implementation: str) -> None:
    """C58: 0 where it may attend and the minimum elsewhere, not 1 and 0."""
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    additive = multipack.Collator(attention="additive")(samples)
    of_bools = multipack.Collator(attention="bool")(samples)
    mask = additive["attention_mask"]
    assert mask.unique().tolist() == [torch.finfo(torch.float32).min, 0]
    assert torch.equal(mask == 0, of_bools["attention_mask"])
    logits = forward(make_model("llama", implementation), additive)
    expected = forward(make_model("llama", "sdpa"), of_bools)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_masks_of_ones_are_not_passed_on() -> None:
    """C30: each sample comes with its own, and a mask of two dimensions would end isolation."""
    samples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in ([11, 12, 13], [21, 22])
    ]
    others = [{"input_ids": [14, 15, 16], "attention_mask": [1, 1, 1]}, samples[1]]
    model = make_model("llama", "sdpa")
    for attention in ("bool", "additive", "none"):
        collator = multipack.Collator(attention=attention)
        batch = collator(samples)
        assert "attention_mask" not in batch or batch["attention_mask"].shape == (1, 1, 5, 5)
        logits, changed = forward(model, batch), forward(model, collator(others))
        assert torch.equal(logits[:, 3:], changed[:, 3:])
        assert not torch.allclose(logits[:, :3], changed[:, :3])


def test_positions_and_borders_are_both_right() -> None:
    """C31: positions alone do not stop attention, and borders alone do not restart positions."""
    samples = [{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}]
    batch = multipack.Collator(attention="flash")(samples)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    model = make_model("gpt2", "multipack")
    right = forward(model, batch)
    going_on = forward(model, positions_that_go_on(batch))
    assert torch.equal(right[:, :3], going_on[:, :3])
    assert not torch.allclose(right[:, 3:], going_on[:, 3:])
    joined = {"cu_seq_lens_q": torch.tensor([0, 5], dtype=torch.int32), "max_length_q": 5}
    joined |= {"cu_seq_lens_k": joined["cu_seq_lens_q"], "max_length_k": 5}
    assert not torch.allclose(right[:, 3:], forward(model, batch | joined)[:, 3:])


def test_the_second_row_has_borders_too() -> None:
    """C37: rows of 3 and 1, and of 2 and 2, tokens."""
    rows = [[{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]]
    rows.append([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
    batch = multipack.Collator(attention="multipack")(rows)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]
    assert batch["max_length_q"] == 3
    model = make_model("llama", "multipack")
    logits = forward(model, batch)
    for changed, others in ((slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2))):
        ids = batch["input_ids"].clone()
        ids[1, changed] += 30
        moved = forward(model, {**batch, "input_ids": ids})
        assert torch.equal(moved[1, others], logits[1, others])
        assert torch.equal(moved[0], logits[0])
