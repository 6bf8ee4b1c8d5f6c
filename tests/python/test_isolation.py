"""`verify_isolation` finds every leak, names it, lets right batches pass and changes nothing.

The mistakes are those of public training code, on a small Llama of transformers; what needs no
transformer is tried on `_Words`, a table of logits for each token with leaks where a test wants
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_flash_attention_utils import _is_packed_sequence
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import multipack.integrations.hf
from multipack import IsolationError, IsolationReport, verify_isolation

Batch = dict[str, Any]
Call = Callable[[], IsolationReport]


def collate(rows: list[list[int]], attention: str, **keys: Any) -> Batch:
    """Rows of samples of these lengths, with tokens that all differ from their neighbours'."""
    samples = [
        [{"input_ids": [7 * r + 3 * s + t + 1 for t in range(n)]} for s, n in enumerate(row)]
        for r, row in enumerate(rows)
    ]
    return multipack.Collator(attention=attention, **keys)(samples)


multipack.integrations.hf.register_attention()


def llama(implementation: str = "sdpa", **keys: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attn_implementation": implementation,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | keys))


class _Words(nn.Module):
    """Logits that depend on each token alone, with leaks from token `source` to `target`."""

    def __init__(self, *leaks: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(97, 11)
        self.leaks = leaks
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.calls += 1
        logits = self.table(input_ids.flatten())
        leaked = logits.clone()
        leaks = self.leaks if len(logits) > max(sum(self.leaks, (0,))) else ()
        for source, target in leaks:
            leaked[target] += 0.01 * logits[source]
        return leaked.view(*input_ids.shape, -1)


# What passes.


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("implementation", "attention", "rows", "keys"),
    [
        ("sdpa", "bool", [[5, 1, 4]], {}),
        ("sdpa", "bool", [[5, 1, 4], [9], [3, 3]], {"pad_to_multiple_of": 16}),
        ("sdpa", "bool", [[5, 7, 3], [13]], {"align_samples_to": 4}),
        ("eager", "additive", [[5, 1, 4], [8]], {}),
        ("sdpa", "none", [[5, 1, 4], [8]], {}),
        ("sdpa", "flash", [[5, 7, 3], [13]], {"align_samples_to": 4}),
        ("sdpa", "none", [[5, 4]], {"pad_to_multiple_of": 16, "padded_tail": "last"}),
        ("sdpa", "flash", [[5, 4]], {"pad_to_multiple_of": 16, "padded_tail": "none"}),
        ("sdpa", "flash", [[5, 4], [6]], {"max_segments": 9}),
        ("sdpa", "none", [[5], [1], [9]], {"sample_packing": False}),
        ("multipack", "multipack", [[5, 1, 4], [8]], {}),
    ],
)
def test_right_batches_pass(
    implementation: str, attention: str, rows: list[list[int]], keys: Batch, training: bool
) -> None:
    model = llama(implementation).train(training)
    report = verify_isolation(model, {**collate(rows, attention, **keys), "use_cache": False})
    assert report.samples == report.compared == sum(len(row) for row in rows)
    assert report.moved == 0
    assert report.differs < 1e-6
    assert report.training == training


def test_the_report_says_what_was_checked() -> None:
    report = verify_isolation(_Words().eval(), collate([[3, 2]], "none"))
    assert str(report) == (
        "isolated: 2 samples in 1 row, evaluation mode; replacing any of them moved no other by "
        "more than 0.0e+00, and 2 run alone differed by at most 0.0e+00; tolerance 3.5e-04, "
        "5 forwards"
    )


# The mistakes that are known.


def ones_mask(batch: Batch) -> Batch:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def sample_numbers(batch: Batch) -> Batch:
    """C33: 1 1 1 2 2, taken for a mask of ones."""
    return {**batch, "attention_mask": (batch["position_ids"] == 0).cumsum(-1)}


def zeros_and_ones(batch: Batch) -> Batch:
    return {**batch, "attention_mask": (batch["attention_mask"] == 0).float()}


def running_positions(batch: Batch) -> Batch:
    length = batch["input_ids"].shape[1]
    return {**batch, "position_ids": torch.arange(length).expand_as(batch["input_ids"])}


def plain_causal(batch: Batch) -> Batch:
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"]).tril()}


def one_key_too_many(batch: Batch) -> Batch:
    """The first token of the second sample sees the last one of the first."""
    mask = batch["attention_mask"].clone()
    mask[0, 0, 5, 4] = True
    return {**batch, "attention_mask": mask}


def unchanged(batch: Batch) -> Batch:
    return batch


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("rows", [[[5, 4, 6]], [[5, 4, 6], [9, 3]]], ids=["one-row", "two-rows"])
@pytest.mark.parametrize(
    ("implementation", "attention", "spoil", "message"),
    [
        pytest.param(
            "sdpa", "none", ones_mask, "an attention_mask of two dimensions", id="ones-mask"
        ),
        pytest.param(
            "eager", "none", sample_numbers, "an attention_mask of two dimensions", id="numbers"
        ),
        pytest.param("sdpa", "none", unchanged, "with use_cache=False", id="cache"),
        pytest.param("sdpa", "flash", unchanged, "with use_cache=False", id="boundaries-sdpa"),
        pytest.param("eager", "bool", unchanged, "attention='additive'", id="bool-mask-eager"),
        pytest.param("sdpa", "additive", zeros_and_ones, "of 0 and 1", id="zeros-and-ones-sdpa"),
        pytest.param("eager", "additive", zeros_and_ones, "of 0 and 1", id="zeros-and-ones-eager"),
        pytest.param("sdpa", "bool", plain_causal, "leaks into", id="plain-causal"),
        pytest.param("sdpa", "bool", one_key_too_many, "leaks into", id="one-key-too-many"),
    ],
)
def test_known_mistakes_are_found_and_named(
    implementation: str,
    attention: str,
    spoil: Callable[[Batch], Batch],
    message: str,
    rows: list[list[int]],
    training: bool,
) -> None:
    """C30, C33, C58, and what else makes transformers mix the samples of a row."""
    model = llama(implementation).train(training)
    with pytest.raises(IsolationError, match=message) as raised:
        verify_isolation(model, spoil(collate(rows, attention)))
    source, target = raised.value.source, raised.value.target
    assert source is not None
    assert target is not None
    assert (source.row, source.number) != (target.row, target.number)
    assert source.row == target.row
    assert raised.value.size > 0.01


def test_the_message_names_the_pair_the_size_and_the_remedy() -> None:
    with pytest.raises(IsolationError) as raised:
        verify_isolation(llama(), ones_mask(collate([[3, 2]], "none")))
    assert str(raised.value) == (
        "sample 0 of row 0 leaks into sample 1 of row 0, whose logits moved by "
        f"{raised.value.size:.1e} of their norm when its tokens were replaced, more than the "
        "tolerance 3.5e-04; beside an attention_mask of two dimensions transformers does not look "
        "for samples in position_ids: leave it out"
    )


def flash_like(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Flash attention as transformers calls it: by positions, it finds samples in one row only."""
    assert attention_mask is None
    rows, _, length, _ = query.shape
    bounds = torch.arange(rows + 1) * length
    if cu_seq_lens_q is not None:
        bounds = cu_seq_lens_q
    elif position_ids is not None and _is_packed_sequence(position_ids, rows):
        bounds = multipack.boundaries(position_ids)
    flat = [x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value)]
    parts = [
        nn.functional.scaled_dot_product_attention(
            *(x[:, :, start:end] for x in flat), is_causal=True, enable_gqa=True
        )
        for start, end in itertools.pairwise(bounds.tolist())
    ]
    joined = torch.cat(parts, 2)[0].unflatten(1, (rows, length))
    return joined.permute(1, 2, 0, 3), None


@pytest.fixture
def flash_model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_like", flash_like)
    model = llama()
    model.config._attn_implementation = "flash_like"
    return model


def test_several_rows_without_boundaries_leak_in_flash_attention(
    flash_model: PreTrainedModel,
) -> None:
    """C37: one row is found by its positions, two are not, unless the boundaries come along."""
    one, two = [[3, 1]], [[3, 1], [2, 2]]
    assert verify_isolation(flash_model, collate(one, "none")).samples == 2
    assert verify_isolation(flash_model, collate(two, "flash")).samples == 4
    with pytest.raises(IsolationError, match="samples in a single row only"):
        verify_isolation(flash_model, collate(two, "none"))


def test_positions_that_do_not_start_anew() -> None:
    """C31: with the mask right, and with the boundaries given or right, positions are looked at."""
    expected = "^sample 1 of row 0 starts at position 3, one after the sample before it: "
    batch = running_positions(collate([[3, 2]], "bool"))
    with pytest.raises(IsolationError, match=expected):
        verify_isolation(llama(), batch)
    batch = running_positions(collate([[3, 2]], "flash"))
    with pytest.raises(IsolationError, match=expected):
        verify_isolation(llama(), batch)
    batch = running_positions(collate([[3, 2]], "none"))
    with pytest.raises(IsolationError, match=r"^nothing tells samples apart"):
        verify_isolation(llama(), batch)
    with pytest.raises(IsolationError, match=expected):
        verify_isolation(llama(), batch, cu_seqlens=torch.tensor([0, 3, 5]))


def test_what_does_not_depend_on_tokens_shows_alone() -> None:
    """A window that the mask lacks: no leak between samples, but not the model's attention."""
    batch = collate([[9, 5]], "bool")
    shorter = {**batch, "attention_mask": batch["attention_mask"].triu(-2)}
    with pytest.raises(IsolationError, match=r"^sample 0 of row 0 has other logits") as raised:
        verify_isolation(llama(), shorter)
    assert raised.value.source is None


def test_rotary_factors_of_the_longest_sample() -> None:
    """In a batch with a sample of 20 tokens, the short ones get its factors; afterwards none."""
    model = llama(
        max_position_embeddings=8,
        initializer_range=0.3,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    rotary = model.model.rotary_emb
    before = rotary.inv_freq
    with pytest.raises(IsolationError, match="factors that follow the longest position"):
        verify_isolation(model, collate([[5, 20]], "bool"))
    assert rotary.inv_freq is before
    assert rotary.max_seq_len_cached == 8
    assert verify_isolation(model, collate([[5, 8]], "bool")).compared == 2


# Which pairs are checked, at what cost.


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_every_ordered_pair_is_checked_and_named(count: int) -> None:
    batch = collate([[2] * count], "none")
    for source in range(count):
        for target in set(range(count)) - {source}:
            with pytest.raises(IsolationError) as raised:
                verify_isolation(_Words((2 * source, 2 * target + 1)), batch)
            error = raised.value
            assert error.source is not None
            assert error.target is not None
            assert (error.source.number, error.target.number) == (source, target)


def test_leaks_between_rows_are_named() -> None:
    batch = collate([[3, 2], [4, 1]], "none")
    with pytest.raises(IsolationError, match=r"^sample 1 of row 0 leaks into sample 0 of row 1, "):
        verify_isolation(_Words((4, 6)), batch)


def test_what_depends_on_the_whole_batch_is_a_leak() -> None:
    class _Centred(_Words):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            logits = super().forward(input_ids)
            return logits - logits.mean((0, 1))

    with pytest.raises(IsolationError, match="leaks into"):
        verify_isolation(_Centred(), collate([[4, 4], [8]], "none"))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 17])
@pytest.mark.parametrize("limit", [0, 2, 32])
@pytest.mark.parametrize("training", [True, False])
def test_the_number_of_forwards(count: int, limit: int, training: bool) -> None:
    model = _Words().train(training)
    report = verify_isolation(model, collate([[2] * count], "none"), limit=limit)
    assert report.compared == min(count, limit)
    expected = 1 + 2 * math.ceil(math.log2(count)) + report.compared + training
    assert report.forwards == model.calls == expected


def test_padding_may_be_reached_but_reaches_nothing() -> None:
    batch = collate([[3, 2]], "none", pad_to_multiple_of=8)
    assert verify_isolation(_Words((1, 6)), batch).samples == 2
    with pytest.raises(IsolationError, match=r"^padding 2 of row 0 leaks into sample 1 of row 0, "):
        verify_isolation(_Words((6, 4)), batch)


# Models of other kinds.


class _Attention(nn.Module):
    """One layer of plain torch, causal by the mask that it is given."""

    def __init__(self, result: Callable[[torch.Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.Embedding(97, 16)
        self.result = result

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any,
    ) -> Any:
        x = self.words(input_ids)[:, None]
        if isinstance(attention_mask, torch.Tensor):
            y = nn.functional.scaled_dot_product_attention(x, x, x, attention_mask)
        else:
            y = flex_attention(x, x, x, block_mask=attention_mask)
        return self.result(y[:, 0] @ self.words.weight.T)


@pytest.mark.parametrize(
    "result",
    [
        lambda logits: logits,
        lambda logits: (logits, None),
        lambda logits: {"logits": logits},
        lambda logits: logits.flatten(0, 1),
    ],
    ids=["tensor", "tuple", "mapping", "flat"],
)
def test_plain_torch_models(result: Callable[[torch.Tensor], Any]) -> None:
    batch = collate([[4, 2], [3, 3]], "bool")
    assert verify_isolation(_Attention(result), batch).compared == 4
    with pytest.raises(IsolationError, match=r"leaks into sample \d of row \d, .*3\.5e-04$"):
        verify_isolation(_Attention(result), plain_causal(batch))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention() -> None:
    batch = collate([[4, 2], [3, 3]], "none")
    segment = (batch["position_ids"] == 0).cumsum(-1)

    def isolated(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (segment[b, q] == segment[b, k]) & (k <= q)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    batch["attention_mask"] = create_block_mask(isolated, 2, None, 6, 6, device="cpu")
    assert verify_isolation(_Attention(), batch).compared == 4
    batch["attention_mask"] = create_block_mask(causal, 2, None, 6, 6, device="cpu")
    with pytest.raises(IsolationError, match="leaks into"):
        verify_isolation(_Attention(), batch)


def test_dropout_is_no_leak_and_hides_none() -> None:
    model = llama(attention_dropout=0.5).train()
    report = verify_isolation(model, collate([[5, 4]], "bool"))
    assert report.random
    assert ", and 2 run alone, in evaluation mode because of dropout, differed" in str(report)
    assert model.training
    with pytest.raises(IsolationError, match="leaks into"):
        verify_isolation(model, plain_causal(collate([[5, 4]], "bool")))
    assert not verify_isolation(model.eval(), collate([[5, 4]], "bool")).random


def test_the_tolerance_follows_the_dtype() -> None:
    batch = collate([[5, 4]], "bool")
    expected = {torch.float64: 1.5e-8, torch.float32: 3.5e-4, torch.bfloat16: 0.088}
    for dtype, tolerance in expected.items():
        report = verify_isolation(llama().to(dtype), batch)
        assert report.tolerance == pytest.approx(tolerance, rel=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert verify_isolation(llama(), batch).tolerance == pytest.approx(0.088, rel=0.05)
    assert verify_isolation(llama(), batch, tolerance=0.01).tolerance == 0.01


# What stays as it was.


class _Counting(_Words):
    """Has buffers that change in training, and draws random numbers."""

    def __init__(self, *leaks: tuple[int, int]) -> None:
        super().__init__(*leaks)
        self.norm = nn.BatchNorm1d(11)
        self.frozen = nn.Dropout().eval()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = super().forward(input_ids)
        self.norm(logits.flatten(0, 1) + torch.rand(11))
        return logits


@pytest.mark.parametrize("leaks", [(), ((0, 4),)], ids=["isolated", "leaking"])
def test_the_model_and_the_random_numbers_are_left_alone(leaks: tuple[tuple[int, int]]) -> None:
    model = _Counting(*leaks).train()
    model.frozen.eval()
    model.table.weight.grad = torch.full_like(model.table.weight, 3.0)
    batch = collate([[3, 2]], "none")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch_before = {name: value.clone() for name, value in batch.items()}
    generator = torch.get_rng_state()
    if leaks:
        with pytest.raises(IsolationError):
            verify_isolation(model, batch)
    else:
        verify_isolation(model, batch)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for name, value in batch.items():
        assert torch.equal(value, batch_before[name]), name
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    assert model.table.weight.requires_grad
    assert bool((model.table.weight.grad == 3).all())
    assert torch.is_grad_enabled()


def test_use_cache_is_the_models() -> None:
    model = llama()
    with pytest.raises(IsolationError, match="use_cache=False"):
        verify_isolation(model, collate([[5, 4]], "none"))
    assert model.config.use_cache is True
    model.config.use_cache = False
    verify_isolation(model, collate([[5, 4]], "none"))
    assert model.config.use_cache is False


# What is refused.


class _Constant(_Words):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return super().forward(torch.zeros_like(input_ids))


class _NotANumber(_Words):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return super().forward(input_ids) / torch.zeros(11)


class _Pooled(_Words):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return super().forward(input_ids)[:, 0]


class _Nothing(_Words):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: verify_isolation(_Words(), {"ids": torch.ones(1, 2)}),
            TypeError,
            "the batch must be a mapping with input_ids of shape (R, L)",
        ),
        (
            lambda: verify_isolation(_Words(), collate([[3, 2]], "none"), limit=-1),
            ValueError,
            "limit is -1, but must be 0 or more",
        ),
        (
            lambda: verify_isolation(_Words(), collate([[3, 2]], "none"), tolerance=math.nan),
            ValueError,
            "tolerance is nan, but must be finite and not negative",
        ),
        (
            lambda: verify_isolation(
                _Words(), collate([[3, 2]], "none"), cu_seqlens=torch.tensor([0, 3, 6])
            ),
            ValueError,
            "cu_seqlens must rise from 0 to 5 tokens at most, but are [0, 3, 6]",
        ),
        (
            lambda: verify_isolation(_Words(), collate([[5]], "none")),
            IsolationError,
            "nothing tells samples apart in a batch of one row of 5 tokens, since its position_ids "
            "never start anew; if it holds several samples, give cu_seqlens, and if it holds one, "
            "take another batch",
        ),
        (
            lambda: verify_isolation(_Constant(), collate([[3, 2]], "none")),
            ValueError,
            "the logits do not depend on input_ids, so no leak could be seen",
        ),
        (
            lambda: verify_isolation(_NotANumber(), collate([[3, 2]], "none")),
            ValueError,
            "the logits of sample 0 of row 0 are not finite and can't be compared",
        ),
        (
            lambda: verify_isolation(_Pooled(), collate([[3, 2]], "none")),
            TypeError,
            "the model returned logits of shape (1, 11) for input_ids of shape (1, 5), but there "
            "must be some for each token",
        ),
        (
            lambda: verify_isolation(_Nothing(), collate([[3, 2]], "none")),
            TypeError,
            "the model returned NoneType without logits: wrap it so that it returns a tensor "
            "(R, L, V)",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(
    call: Call, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value) == message
