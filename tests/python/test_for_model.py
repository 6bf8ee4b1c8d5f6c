"""What `Collator.for_model` chooses for a model isolates it; the rest is refused by name."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import BY_LAYER, FAMILIES, WINDOW, make_model
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import multipack
from multipack import Collator, Config, IsolationError, verify_isolation

ROWS = [
    [{"input_ids": [(7 * r + 3 * s + t) % 90 + 3 for t in range(n)]} for s, n in enumerate(row)]
    for r, row in enumerate([[9, 5, 12], [14, 8]])
]
CONFIG = Config(sequence_len=16, multipack_real_batches=True, pad_to_multiple_of=32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


BOOL = {"attention": "bool"}
ADDITIVE = {"attention": "additive", "dtype": torch.float32}
MULTIPACK = {"attention": "multipack"}
CUT = {"cut_tail": True}
BOTH_WAYS = {"causal": False}
NOTHING = {
    "attention": "none",
    "dtype": None,
    "window": None,
    "causal": True,
    "position_start": 0,
    "cut_tail": False,
}


def check_chosen(collator: Collator, **expected: Any) -> None:
    """All that is not expected to be chosen is as in any collator."""
    assert {name: getattr(collator, name) for name in NOTHING} == NOTHING | expected


@pytest.mark.parametrize(
    ("family", "implementation", "expected"),
    [
        ("llama", "sdpa", BOOL),
        ("llama", "eager", ADDITIVE),
        ("llama", "multipack", MULTIPACK),
        ("qwen3", "sdpa", BOOL),
        ("mistral", "sdpa", BOOL | {"window": WINDOW}),
        ("mistral", "eager", ADDITIVE | {"window": WINDOW}),
        ("mistral", "multipack", MULTIPACK),
        ("gemma3_text", "sdpa", BOOL | {"window": BY_LAYER}),
        ("gemma3_text", "eager", ADDITIVE | {"window": BY_LAYER}),
        ("gemma3_text", "multipack", MULTIPACK),
        ("gpt_oss", "eager", ADDITIVE | {"window": BY_LAYER}),
        ("gemma2", "eager", ADDITIVE | {"window": BY_LAYER}),
        ("phi", "sdpa", BOOL),
        ("gpt_neox", "sdpa", BOOL),
        ("gpt2", "sdpa", BOOL | CUT),
        ("opt", "sdpa", BOOL | CUT),
        ("opt", "multipack", MULTIPACK | CUT),
        ("llama4_text", "sdpa", BOOL),
        ("bert", "sdpa", BOOL | CUT | BOTH_WAYS),
        ("bert", "eager", ADDITIVE | CUT | BOTH_WAYS),
        ("bert", "multipack", MULTIPACK | CUT | BOTH_WAYS),
        ("roberta", "sdpa", BOOL | CUT | BOTH_WAYS | {"position_start": 2}),
    ],
)
def test_what_is_chosen_isolates(
    family: str, implementation: str, expected: dict[str, Any]
) -> None:
    model = make_model(family, implementation)
    collator = Collator.for_model(model, CONFIG)
    check_chosen(collator, **expected)
    report = verify_isolation(model, collator(ROWS))
    assert report.samples == 5
    assert not report.random
    assert max(report.moved, report.differs) < 1e-5


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("opt", "sdpa"), ("bert", "sdpa"), ("roberta", "eager"), ("gpt_oss", "eager")],
)
def test_families_that_do_not_look_at_positions(family: str, implementation: str) -> None:
    """Why for_model prefers a mask to positions, with which these leak whatever they are told."""
    batch = Collator(CONFIG, attention="none")(ROWS)
    with pytest.raises(IsolationError, match="this model does not look there"):
        verify_isolation(make_model(family, implementation), {**batch, "use_cache": False})


def test_chunks_are_the_models_own_where_it_looks_at_positions() -> None:
    batch = Collator(CONFIG, attention="none")(ROWS)
    report = verify_isolation(make_model("llama4_text", "sdpa"), {**batch, "use_cache": False})
    assert report.moved == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mask_is_of_the_models_dtype(dtype: torch.dtype) -> None:
    model = copy.deepcopy(make_model("llama", "eager")).to(dtype)
    collator = Collator.for_model(model, CONFIG)
    check_chosen(collator, attention="additive", dtype=dtype)
    assert collator(ROWS)["attention_mask"].dtype == dtype
    verify_isolation(model, collator(ROWS))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_flash_attention_gets_boundaries(family: str, implementation: str) -> None:
    """Windows are the model's, which hands them to the kernel."""
    model = copy.deepcopy(make_model(family, "sdpa"))
    model.config._attn_implementation = implementation
    check_chosen(Collator.for_model(model, CONFIG), attention="flash")


@pytest.mark.parametrize(
    ("family", "window"), [("llama", None), ("mistral", WINDOW), ("gemma3_text", BY_LAYER)]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
def test_flex_attention_gets_block_masks(family: str, window: Any) -> None:
    model = make_model(family, "flex_attention")
    collator = Collator.for_model(model, CONFIG)
    check_chosen(collator, attention="flex", window=window)
    with torch.compiler.set_stance("force_eager"):
        assert verify_isolation(model, collator(ROWS), limit=2).moved == 0


def test_a_window_that_no_sample_fills_is_left_out() -> None:
    for family in ("mistral", "gemma3_text"):
        model = make_model(family, "sdpa")
        short = Collator.for_model(model, sequence_len=WINDOW)
        check_chosen(short, attention="bool")
        rows = [[{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11, 12, 13]}]]
        verify_isolation(model, short(rows))
    unlimited = Collator.for_model(make_model("mistral", "sdpa"))
    check_chosen(unlimited, attention="bool", window=WINDOW)


def test_a_window_that_the_mask_lacks_is_noticed() -> None:
    """What for_model guards against: the mask replaces the model's own, window and all."""
    batch = Collator(CONFIG, attention="bool")(ROWS)
    with pytest.raises(IsolationError, match="has other logits in the batch than alone"):
        verify_isolation(make_model("mistral", "sdpa"), batch)


def test_masks_by_layer_type() -> None:
    collator = Collator(attention="bool", window={"full": None, "sliding": 2})
    masks = collator([[{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]])["attention_mask"]
    segments = torch.tensor([[1, 1, 1, 2, 2]])
    assert masks.keys() == {"full", "sliding"}
    assert torch.equal(masks["full"], multipack.block_mask(segments))
    assert torch.equal(masks["sliding"], multipack.block_mask(segments, window=2))
    assert not torch.equal(masks["full"], masks["sliding"])
    with pytest.raises(ValueError, match="window is 0, but must be 1 or more"):
        Collator(attention="bool", window={"sliding": 0})


# Positions and rotary embeddings.


@pytest.mark.parametrize(
    ("rope", "cut"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "linear", "factor": 2.0}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 16,
                "factor": 4.0,
            },
            True,
        ),
    ],
)
def test_the_tail_is_cut_where_factors_follow_the_longest_position(
    rope: dict[str, Any], cut: bool
) -> None:
    """A tail of 24 tokens would give the samples of at most 16 other factors; cut, it does not."""
    table = {k: tuple(v) if isinstance(v, list) else v for k, v in rope.items()}
    model = rotary_model(tuple(table.items()))
    rows = [[{"input_ids": list(range(3, 12))}, {"input_ids": list(range(20, 27))}]]
    config = Config(pad_to_multiple_of=40)
    collator = Collator.for_model(model, config)
    check_chosen(collator, attention="bool", cut_tail=cut)
    verify_isolation(model, collator(rows))
    if cut:
        with pytest.raises(IsolationError, match="factors that follow the longest position"):
            verify_isolation(model, Collator(config, attention="bool")(rows))


def rotary_model(rope: tuple[tuple[str, Any], ...], positions: int = 16) -> PreTrainedModel:
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in rope}
    settings = {"rope_parameters": {"rope_theta": 10000.0, **values}}
    config = LlamaConfig(
        **FAMILIES["llama"] | settings | {"max_position_embeddings": positions},
        initializer_range=0.5,
    )
    torch.manual_seed(7)
    return LlamaForCausalLM(config)


def test_samples_that_change_the_factors_of_others_are_warned_about() -> None:
    model = rotary_model((("rope_type", "dynamic"), ("factor", 2.0)))
    message = (
        "LlamaForCausalLM has dynamic rotary embeddings: in a batch with a sample of more than 16 "
        "tokens, all others get its factors, and other logits than alone; sequence_len is 32"
    )
    with pytest.warns(UserWarning) as warned:
        Collator.for_model(model, sequence_len=32)
    assert str(warned[0].message) == message
    assert warned[0].filename == __file__
    Collator.for_model(model, sequence_len=16)


def test_models_that_number_positions_from_two() -> None:
    """C40: RoBERTa's positions begin behind its padding id; the tail has positions too."""
    model = make_model("roberta", "sdpa")
    collator = Collator.for_model(model, pad_to_multiple_of=8)
    batch = collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, 2, 3, 4]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
    verify_isolation(model, batch)


@pytest.mark.parametrize(("family", "room"), [("gpt2", 64), ("opt", 64), ("roberta", 62)])
def test_samples_longer_than_the_table_of_positions_are_refused(family: str, room: int) -> None:
    model = make_model(family, "sdpa")
    Collator.for_model(model, sequence_len=room)
    with pytest.raises(ValueError, match=f"has learned positions for {room} tokens") as raised:
        Collator.for_model(model, sequence_len=room + 1)
    assert str(raised.value).endswith(f"sequence_len is {room + 1}: set it to {room} or less")


def test_the_padding_id_is_the_models() -> None:
    assert Collator.for_model(make_model("roberta", "sdpa")).pad_token_id == 1
    assert Collator.for_model(make_model("llama", "sdpa")).pad_token_id == 0
    assert Collator.for_model(make_model("roberta", "sdpa"), pad_token_id=7).pad_token_id == 7


# Layouts and wrappers.


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "mamba2", "bamba"])
def test_causal_models_need_nothing_for_padded_batches(family: str) -> None:
    model = make_model(family, "eager")
    collator = Collator.for_model(model, sample_packing=False)
    check_chosen(collator)
    rows = [[sample] for row in ROWS for sample in row]
    assert verify_isolation(model, collator(rows)).samples == 5


def test_others_need_a_mask_for_padded_batches() -> None:
    model = make_model("bert", "sdpa")
    collator = Collator.for_model(model, sample_packing=False)
    check_chosen(collator, attention="bool", causal=False, cut_tail=True)
    verify_isolation(model, collator([[sample] for row in ROWS for sample in row]))


def test_the_layout_is_that_of_the_split() -> None:
    model = make_model("llama", "sdpa")
    config = Config(eval_sample_packing=False)
    assert Collator.for_model(model, config).attention == "bool"
    assert Collator.for_model(model, config, split="eval").attention == "none"


class _Adapter(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = model

    def get_base_model(self) -> nn.Module:
        return self.base


def test_wrappers_are_looked_through() -> None:
    model = make_model("mistral", "sdpa")
    wrapped = [nn.DataParallel(model), torch.compile(model), _Adapter(torch.compile(model))]
    for wrapper in wrapped:
        check_chosen(Collator.for_model(wrapper, CONFIG), attention="bool", window=WINDOW)


def test_the_other_options_are_the_collators() -> None:
    """A new option of the collator must be taken here too, or be one that for_model chooses."""
    options = set(inspect.signature(Collator).parameters) - {"config"}
    taken = set(inspect.signature(Collator.for_model).parameters) - {"config", "model"}
    assert options - taken == set(NOTHING)
    collator = Collator.for_model(
        make_model("gemma3_text", "sdpa"),
        CONFIG,
        outputs=["seq_idx", "cu_seqlens"],
        max_segments=16,
        pad_values={"kind": 3},
        split="eval",
        pad_to_multiple_of=64,
    )
    rows = [[{**sample, "kind": sample["input_ids"]} for sample in row] for row in ROWS]
    batch = pickle.loads(pickle.dumps(collator))(rows)
    assert batch["seq_idx"].shape == (2, 64)
    assert len(batch["cu_seqlens"]) == 17
    assert batch["kind"][0, -1] == 3
    assert collator.split == "eval"


# What is refused.

STATE = "can't keep packed samples apart: a state or a convolution runs along the row"


@pytest.mark.parametrize(
    ("family", "implementation", "message"),
    [
        ("mamba2", "eager", f"^Mamba2ForCausalLM {STATE}"),
        ("bamba", "sdpa", f"^BambaForCausalLM {STATE}"),
        ("falcon_h1", "sdpa", f"^FalconH1ForCausalLM {STATE}"),
        ("minimax", "sdpa", r"^MiniMaxForCausalLM .* has layers of type linear_attention"),
        ("bloom", "eager", "^BloomForCausalLM .* its ALiBi bias is counted along the row"),
        ("xglm", "multipack", "^XGLMForCausalLM computes attention by itself"),
        ("gemma2", "multipack", r"^Gemma2ForCausalLM caps its attention scores .* for which attn"),
        ("gpt_oss", "multipack", r"^GptOssForCausalLM has attention sinks .* for which attn"),
        ("llama4_text", "multipack", r"^Llama4ForCausalLM attends in chunks .* for which attn"),
    ],
)
def test_what_cannot_isolate_is_refused_by_name(
    family: str, implementation: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Collator.for_model(make_model(family, implementation), CONFIG)


@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_h1", "minimax"])
def test_what_is_refused_does_leak(family: str) -> None:
    model = make_model(family, "eager")
    batch = Collator(CONFIG, attention="additive")(ROWS)
    if family == "mamba2":
        del batch["attention_mask"]  # which it takes for one of two dimensions
    with pytest.raises(IsolationError, match="leaks into"):
        verify_isolation(model, batch)


def test_state_space_layers_do_not_start_anew_on_the_cpu() -> None:
    """Told where samples begin, Bamba and Falcon H1 refuse it, and Mamba 2 runs on all the same."""
    batch = Collator(CONFIG, attention="none", outputs=["seq_idx"])(ROWS)
    for family in ("bamba", "falcon_h1"):
        with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
            verify_isolation(make_model(family, "eager"), batch)
    with pytest.raises(IsolationError, match="leaks into"):
        verify_isolation(make_model("mamba2", "eager"), batch)


def test_the_whole_sentence() -> None:
    with pytest.raises(ValueError) as raised:
        Collator.for_model(make_model("bamba", "sdpa"), CONFIG)
    assert str(raised.value) == (
        "BambaForCausalLM can't keep packed samples apart: a state or a convolution runs along the "
        "row (layers of type linear_attention), and nothing but the kernels of separate packages "
        "for GPUs starts it anew at seq_idx; train it on padded batches (sample_packing: false), "
        "which a causal model runs from left to right"
    )


def test_chunks_are_refused_where_a_sample_may_fill_one() -> None:
    model = make_model("llama4_text", "sdpa")
    check_chosen(Collator.for_model(model, sequence_len=16), attention="bool")
    for keys in ({}, {"sequence_len": 17}):
        with pytest.raises(ValueError, match=r"^Llama4ForCausalLM attends in chunks of 16 tokens"):
            Collator.for_model(model, **keys)


def test_encoder_decoders_are_refused() -> None:
    sizes = {"vocab_size": 97, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ffn = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads, **ffn))
    with pytest.raises(ValueError, match=r"^BartForConditionalGeneration is an encoder-decoder: "):
        Collator.for_model(model)


def test_unknown_attention_is_refused() -> None:
    model = copy.deepcopy(make_model("llama", "sdpa"))
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(
        ValueError, match=r"attn_implementation='paged\|sdpa', but packing is known"
    ):
        Collator.for_model(model)


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError) as raised:
        Collator.for_model(nn.Linear(2, 2))
    assert str(raised.value) == (
        "Linear is not a model of transformers, whose config would say what its attention takes: "
        "choose attention=... yourself, and try it with verify_isolation"
    )
