"""attn_implementation="multipack" in transformers' models: packed equals alone, or is refused.

The reference is each sample by itself through the same weights with transformers' own SDPA.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import multipack
from multipack.integrations.hf import register_attention

VOCABULARY = 97
TOLERANCE = 1e-5

SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
ROWS = {
    "one row": [[1, 9, 1, 1, 14, 2, 1]],
    "several rows": [[7, 1, 3], [1, 12], [5, 5, 1], [13]],
}


@pytest.fixture(autouse=True, scope="module")
def registered_on_one_thread() -> Iterator[None]:
    """Registered twice, which must do no harm; small tensors gain nothing from threads."""
    register_attention()
    register_attention()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def make_model(name: str, implementation: str) -> PreTrainedModel:
    """A small model in training mode; equal weights for every implementation."""
    model, config, settings = MODELS[name]
    torch.manual_seed(7)
    made = model._from_config(config(**SETTINGS, **settings), attn_implementation=implementation)
    return made.train()


@functools.cache
def make_rows(name: str) -> list[list[dict[str, list[int]]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [
            {"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()}
            for n in row
        ]
        for row in ROWS[name]
    ]


def collate(name: str, **keys: Any) -> dict[str, Any]:
    return multipack.Collator(attention="multipack", **keys)(make_rows(name))


def step(model: PreTrainedModel, batch: dict[str, Any], count: int) -> dict[str, Tensor]:
    """Logits, loss and gradients."""
    output = model(**batch, num_items_in_batch=count)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients}


def alone(name: str, rows_name: str) -> dict[str, Tensor]:
    """Each sample a batch of its own, summed; logits in the order of the samples."""
    model = make_model(name, "sdpa")
    samples = [sample["input_ids"] for row in make_rows(rows_name) for sample in row]
    count = sum(len(sample) - 1 for sample in samples)
    parts = []
    for sample in samples:
        ids = torch.tensor([sample])
        parts.append(step(model, {"input_ids": ids, "labels": ids}, count))
    total = {
        key: torch.stack([part[key] for part in parts]).sum(0)
        for key in parts[0]
        if key != "logits"
    }
    return {"logits": torch.cat([part["logits"][0] for part in parts]), **total}


def packed(name: str, rows_name: str, **keys: Any) -> dict[str, Tensor]:
    batch = collate(rows_name, **keys)
    count = int(batch["labels"].ne(-100).sum())
    found = step(make_model(name, "multipack"), batch, count)
    lengths = [sum(row) for row in ROWS[rows_name]]
    logits = [row[:length] for row, length in zip(found["logits"], lengths, strict=True)]
    return {**found, "logits": torch.cat(logits)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("rows_name", "keys"),
    [
        pytest.param("one row", {}, id="one-row"),
        pytest.param("several rows", {}, id="several-rows"),
        pytest.param("one row", {"pad_to_multiple_of": 48, "sequence_len": 14}, id="padded-own"),
        pytest.param(
            "one row", {"pad_to_multiple_of": 48, "padded_tail": "last"}, id="padded-last"
        ),
        pytest.param(
            "one row", {"pad_to_multiple_of": 48, "padded_tail": "none"}, id="padded-none"
        ),
    ],
)
def test_packed_equals_alone(name, rows_name, keys):
    found, expected = packed(name, rows_name, **keys), alone(name, rows_name)

    assert found.keys() == expected.keys()
    wrong = {
        key: difference
        for key in expected
        if not (difference := (found[key] - expected[key]).norm() / expected[key].norm())
        <= TOLERANCE
    }
    assert not wrong


def test_the_window_of_each_layer_is_used():
    """Gemma3 with its first layer's window opened gives something else."""
    model = make_model("gemma3", "multipack")
    batch = collate("one row")
    with torch.no_grad():
        before = model(**batch).logits
        windowed = model.model.layers[0].self_attn
        windowed.sliding_window = None
        after = model(**batch).logits
        windowed.sliding_window = 5
    assert (after - before).abs().max() > 1e-3


def test_dropout_of_the_model_is_drawn_in_training_only():
    torch.manual_seed(7)
    config = LlamaConfig(**SETTINGS, attention_dropout=0.5)
    model = LlamaForCausalLM._from_config(config, attn_implementation="multipack")
    batch = collate("one row")

    assert not model.train()(**batch).logits.equal(model(**batch).logits)
    assert model.eval()(**batch).logits.equal(model(**batch).logits)


def test_gradient_checkpointing():
    model = make_model("llama", "multipack")
    batch = collate("one row")
    expected = step(model, batch, 20)
    # Older versions of transformers have another name for it.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")()
    found = step(model, batch, 20)
    getattr(model, f"{kind}_checkpointing_disable")()

    for key in expected:
        torch.testing.assert_close(found[key], expected[key])


def test_the_model_compiles_in_one_graph():
    torch.compiler.reset()
    model = make_model("llama", "multipack")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = {**collate("several rows"), "use_cache": False}

    torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)


# What cannot isolate, or would be another attention, is refused by name.


def refused(model: PreTrainedModel, **batch: Any) -> str:
    with pytest.raises(ValueError) as raised:
        model(**batch)
    return str(raised.value)


def test_a_batch_without_borders_is_refused():
    batch = collate("one row")
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        less = {name: value for name, value in batch.items() if name != key}
        assert refused(make_model("llama", "multipack"), **less) == (
            'attn_implementation="multipack" needs the borders of the samples: pass '
            "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k to the model, as "
            'Collator(attention="multipack") makes them'
        )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("shape", [(1, 29), (1, 1, 29, 29)])
def test_a_mask_is_refused(name, shape):
    mask = torch.ones(shape, dtype=torch.bool)

    assert refused(make_model(name, "multipack"), **collate("one row"), attention_mask=mask) == (
        'attn_implementation="multipack" reads the borders of the samples from cu_seq_lens_q, and '
        "takes no attention_mask: leave it out of the batch"
    )


def test_generation_is_refused():
    """Its first step has no borders, and the later ones a cache besides."""
    model = make_model("llama", "multipack")
    # Or, with older versions of transformers, that it takes no mask.
    with pytest.raises(ValueError, match="the borders of the samples"):
        model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)

    batch = collate("one row")
    # The same with the name of the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cached = {name: DynamicCache(config=model.config)}
    model(**batch, **cached, use_cache=True)
    step_batch = {**batch, "input_ids": batch["input_ids"][:, :1]}
    for key in ("labels", "position_ids"):
        del step_batch[key]
    assert refused(model, **step_batch, **cached) == (
        'queries are 1 tokens long and keys 30: attn_implementation="multipack" attends within '
        "packed samples, and takes neither a cache nor another sequence; to generate, call "
        'model.set_attn_implementation("sdpa")'
    )


def test_weights_are_not_made():
    assert refused(
        make_model("llama", "multipack"), **collate("one row"), output_attentions=True
    ) == (
        'attn_implementation="multipack" does not make the weights that output_attentions asks '
        'for: use attn_implementation="eager"'
    )


@pytest.mark.parametrize(
    ("model", "config", "text"),
    [
        (
            GptOssForCausalLM,
            GptOssConfig(**SETTINGS),
            'attn_implementation="multipack" has no s_aux (attention sinks), which GptOssAttention '
            "asks for: use another implementation for this model",
        ),
        (
            Gemma2ForCausalLM,
            Gemma2Config(**SETTINGS),
            'attn_implementation="multipack" has no softcap (a cap on scores), which '
            "Gemma2Attention asks for: use another implementation for this model",
        ),
        (
            Llama4ForCausalLM,
            Llama4TextConfig(**SETTINGS, attention_chunk_size=8),
            'attn_implementation="multipack" has no attention in chunks (attention_chunk_size 8): '
            "use another implementation for this model",
        ),
    ],
)
def test_another_kind_of_attention_is_refused(model, config, text):
    made = model._from_config(config, attn_implementation="multipack")

    assert refused(made, **collate("one row")) == text


def test_an_encoder_attends_both_ways():
    settings = {key: SETTINGS[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}

    def make(implementation: str) -> PreTrainedModel:
        torch.manual_seed(7)
        config = BertConfig(**settings, num_attention_heads=4, intermediate_size=96)
        return BertModel._from_config(config, attn_implementation=implementation).eval()

    batch = collate("one row")
    del batch["labels"]

    found = make("multipack")(**batch).last_hidden_state[0]

    model = make("sdpa")
    expected = [
        model(input_ids=torch.tensor([sample["input_ids"]])).last_hidden_state[0]
        for sample in make_rows("one row")[0]
    ]
    torch.testing.assert_close(found, torch.cat(expected))
