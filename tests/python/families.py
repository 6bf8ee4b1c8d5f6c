"""Small models of transformers' families, with random weights: two layers, a few heads of 8."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import multipack.integrations.hf

multipack.integrations.hf.register_attention()

VOCABULARY = 97
WINDOW = 6
BY_LAYER = {"full_attention": None, "sliding_attention": WINDOW}

_ROTARY = {"max_position_embeddings": 64}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES | _ROTARY | _GROUPED,
    "qwen3": _SIZES | _ROTARY | _GROUPED,
    "mistral": _SIZES | _ROTARY | _GROUPED | {"sliding_window": WINDOW},
    "gemma3_text": _SIZES | _ROTARY | _GROUPED | _MIXED,
    "gemma2": _SIZES | _ROTARY | _GROUPED | _MIXED,
    "gpt_oss": _SIZES
    | _ROTARY
    | _GROUPED
    | _MIXED
    | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "phi": _SIZES | _ROTARY,
    "gpt_neox": _SIZES | _ROTARY,
    "gpt2": _GPT2 | _NO_DROPOUT,
    "opt": _SIZES | _ROTARY | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bert": _SIZES | _ROTARY | _NO_DROPOUT_BERT,
    "roberta": _SIZES | _ROTARY | _NO_DROPOUT_BERT | {"pad_token_id": 1},
    "llama4_text": _SIZES
    | _ROTARY
    | _GROUPED
    | {"attention_chunk_size": 16, "moe_layers": [], "intermediate_size_mlp": 48},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "xglm": {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4}
    | {"ffn_dim": 48},
    "minimax": _SIZES | _ROTARY | _GROUPED | {"num_local_experts": 2},
    "mamba2": _SIZES | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "bamba": _SIZES | _MAMBA | {"num_key_value_heads": 2, "attn_layer_indices": [1]},
    "falcon_h1": _SIZES | _GROUPED | _MAMBA | {"mamba_d_ssm": 64},
}


@functools.cache
def make_model(family: str, implementation: str, **settings: Any) -> PreTrainedModel:
    """A model in training mode; equal weights for all implementations of a family.

    They are drawn wide, so that attention is far from even and each token counts.
    """
    config = CONFIG_MAPPING[family](**FAMILIES[family] | {"initializer_range": 0.2} | settings)
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    return model.train()
