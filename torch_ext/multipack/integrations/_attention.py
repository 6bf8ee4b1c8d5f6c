"""`multipack.attention` as an attention implementation of Hugging Face transformers.

    multipack.integrations.hf.register_attention()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="multipack")
    model(input_ids=..., position_ids=..., labels=..., cu_seq_lens_q=..., cu_seq_lens_k=...,
          max_length_q=..., max_length_k=...)

The model hands the borders of a batch through to every layer, as it does for flash attention, and
no mask is made. So rows of any length train without flash attention, for the sum of length².

Two functions are registered: one that transformers calls in each layer in place of attention, and
one that it calls once for each forward in place of making a mask. Whatever would be attention of
another kind is refused by name in one of them: a mask, attention sinks, a cap on scores, a cache.
Nothing falls back to plain causal attention over the row, which would let samples see each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multipack.ops import attention

NAME = "multipack"

# What models hand to their attention and this one has no place for.
_NOT_TAKEN = {
    "block_indices": "sparse attention",
    "head_mask": "a mask over heads",
    "indices": "sparse attention",
    "position_bias": "a bias on scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "a cap on scores",
}


def register_attention() -> None:
    """Make ``attn_implementation="multipack"`` known to transformers, for all models.

    Batches must then bring `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, as
    ``Collator(attention="multipack")`` makes them; several rows are one row after another in them.
    Layers with a sliding window use it. Calling this twice does no harm.

    In a forward of the model, these raise ValueError: a batch without borders, an
    `attention_mask`, a cache with earlier tokens, and what `multipack.attention` cannot do.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_no_mask)


def _make_no_mask(
    *,
    attention_mask: Tensor | None = None,
    config: Any = None,
    use_vmap: bool = False,
    **_: object,
) -> None:
    """Stand in for the mask of a forward: there is none, and asking for one is refused."""
    _refuse_mask(attention_mask)
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError(
            'attn_implementation="multipack" has no attention in chunks (attention_chunk_size '
            f"{config.attention_chunk_size}): use another implementation for this model"
        )
    if use_vmap:
        raise ValueError(
            'attn_implementation="multipack" cannot apply the mask function that this model adds: '
            "use another implementation for it"
        )


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool = False,
    **other: object,
) -> tuple[Tensor, None]:
    """Attend in one layer: `query` (R, H, L, D) to `key` and `value` (R, H_kv, L, D).

    Returns:
        tuple: (R, L, H, D), and None in place of the weights.
    """
    _refuse_mask(attention_mask)
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(
            'attn_implementation="multipack" needs the borders of the samples: pass cu_seq_lens_q, '
            "cu_seq_lens_k, max_length_q and max_length_k to the model, as "
            'Collator(attention="multipack") makes them'
        )
    for name, what in _NOT_TAKEN.items():
        if other.get(name) is not None:
            raise ValueError(
                f'attn_implementation="multipack" has no {name} ({what}), which '
                f"{type(module).__name__} asks for: use another implementation for this model"
            )
    if output_attentions:
        raise ValueError(
            'attn_implementation="multipack" does not make the weights that output_attentions asks '
            'for: use attn_implementation="eager"'
        )
    rows, _, length, _ = query.shape
    if key.shape[2] != length or cu_seq_lens_k.shape != cu_seq_lens_q.shape:
        raise ValueError(
            f"queries are {length} tokens long and keys {key.shape[2]}: "
            'attn_implementation="multipack" attends within packed samples, and takes neither a '
            'cache nor another sequence; to generate, call model.set_attn_implementation("sdpa")'
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    out = attention(
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        cu_seq_lens_q,
        max_seqlen=max_length_q,
        causal=is_causal,
        window=sliding_window,
        scale=scaling,
        dropout_p=dropout,
    )
    return out.view(rows, length, *out.shape[1:]), None


def _refuse_mask(attention_mask: Tensor | None) -> None:
    if attention_mask is not None:
        raise ValueError(
            'attn_implementation="multipack" reads the borders of the samples from cu_seq_lens_q, '
            "and takes no attention_mask: leave it out of the batch"
        )
