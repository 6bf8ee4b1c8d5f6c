"""What a model of transformers needs from a `Collator` to keep samples apart; or why it cannot.

The choice is read off the model: its config for the attention implementation, windows and rotary
embedding; its modules for what configs do not say, such as layers that carry a state along the row
and tables of positions. Nothing is run, so it costs milliseconds whatever the model's size, and
whether the result isolates is left for `verify_isolation` to try.

The rules, each from trying transformers 5.24's models packed and alone:

- sdpa takes a bool mask, eager attention an additive one in the model's dtype: a mask of four
  dimensions reaches every layer as it is, with a cache and without. The model then applies no
  window of its own, so that the mask has it; where layers have different windows, a dict of masks
  by layer type reaches them, as it does in `generate`.
- Flash attention and ``"multipack"`` take boundaries, FlexAttention a block mask. They only work in
  model classes that leave attention to transformers' interface: others compute attention by
  themselves, whatever implementation is asked for.
- In the padded layout a causal model needs nothing: the only border is at the padded tail, which
  nothing sees. So models with a state can be trained in that layout, and only there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from multipack._config import Config, Split, layout

MASK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Layers in which a token sees what a mask lets it see.
_ATTENTION_LAYERS = ("attention", "full_attention", "sliding_attention", "chunked_attention")


def unwrapped(model: nn.Module) -> Any:
    """The model of transformers inside of adapters, compilation and parallel wrappers.

    Returns:
        nn.Module: What has a config with an attention implementation; None if nothing has.
    """
    inner: Any = model
    while isinstance(inner, nn.Module):
        base: Any = getattr(inner, "get_base_model", None)
        if base is not None:
            inner = base()
        elif hasattr(getattr(inner, "config", None), "_attn_implementation"):
            return inner
        else:
            inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
    return None


def choose(model: nn.Module, config: Config, split: Split) -> dict[str, Any]:
    """Return the keyword arguments of a `Collator` for this model.

    Raises:
        TypeError: If it is not a model of transformers.
        ValueError: If it cannot keep the samples of a row apart, or has no position for the last
            token of a sample of `sequence_len`.
    """
    inner = unwrapped(model)
    if inner is None:
        raise TypeError(
            f"{type(model).__name__} is not a model of transformers, whose config would say what "
            "its attention takes: choose attention=... yourself, and try it with verify_isolation"
        )
    text = inner.config.get_text_config()
    name, implementation = type(inner).__name__, str(text._attn_implementation)
    if inner.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder: its decoder looks at all of the encoder's row, so that "
            "packed samples would see each other; a Collator packs for decoders and for encoders"
        )
    causal = _is_causal(inner, name)
    longest = config.sequence_len
    chosen: dict[str, Any] = {"pad_token_id": _pad_token(text)}
    if not causal:
        chosen["causal"] = False
    chosen |= _positions(inner, name, longest)
    if _follows_the_longest(text, name, longest):
        chosen["cut_tail"] = True
    if causal and layout(config, split) == "padded" and implementation in ("sdpa", "eager"):
        return chosen | {"attention": "none"}
    _refuse_what_masks_do_not_hold(inner, text, name)
    return chosen | _attention(inner, text, name, implementation, causal, longest)


def _attention(
    inner: Any, text: Any, name: str, implementation: str, causal: bool, longest: int | None
) -> dict[str, Any]:
    """The attention and what belongs to its kind."""
    interface = getattr(inner, "_supports_attention_backend", False)
    if "flash" in implementation and "|" not in implementation:
        return {"attention": "flash"}
    if implementation == "multipack":
        if not interface:
            raise ValueError(
                f"{name} computes attention by itself, whatever attn_implementation says, so that "
                'boundaries do not reach it: load it with attn_implementation="eager"'
            )
        _refuse_what_multipack_lacks(inner, text, name)
        return {"attention": "multipack"}
    kinds = {"sdpa": "bool", "eager": "additive", "flex_attention": "flex"}
    if implementation not in kinds:
        raise ValueError(
            f"{name} has attn_implementation={implementation!r}, but packing is known to work with "
            f"multipack, flash_attention_2 and 3, {', '.join(kinds)}"
        )
    _refuse_chunks(text, name, longest)
    chosen: dict[str, Any] = {"attention": kinds[implementation]}
    if implementation == "eager":
        dtype = next((p.dtype for p in inner.parameters() if p.dtype in MASK_DTYPES), None)
        chosen["dtype"] = dtype or torch.float32
    window = _window(text, causal, longest)
    if window is not None:
        chosen["window"] = window
    return chosen


def _refuse_what_multipack_lacks(inner: Any, text: Any, name: str) -> None:
    """Refuse kinds of attention that ``"multipack"`` would refuse at the first forward."""
    cap = getattr(text, "attn_logit_softcapping", None)
    chunk = getattr(text, "attention_chunk_size", None)
    sinks = next((path for path, _ in inner.named_parameters() if path.endswith("sinks")), None)
    if cap is not None:
        what = f"caps its attention scores (attn_logit_softcapping {cap})"
    elif chunk is not None:
        what = f"attends in chunks (attention_chunk_size {chunk})"
    elif sinks is not None:
        what = f"has attention sinks ({sinks})"
    else:
        return
    raise ValueError(
        f'{name} {what}, for which attn_implementation="multipack" has nothing: load it with '
        'attn_implementation="eager"'
    )


def _window(text: Any, causal: bool, longest: int | None) -> int | dict[str, int | None] | None:
    """The window of all layers, or by layer type where they differ; None if it hides nothing."""
    window = getattr(text, "sliding_window", None)
    if window is None or (longest is not None and longest <= window):
        return None
    # Transformers counts the distance, with itself or, on both sides, without.
    window = int(window) if causal else int(window) + 1
    types = set(getattr(text, "layer_types", None) or ["sliding_attention"])
    if types == {"sliding_attention"}:
        return window
    if "sliding_attention" not in types:
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(types)}


def _refuse_chunks(text: Any, name: str, longest: int | None) -> None:
    """Refuse attention in chunks of a sample, unless no sample is longer than one."""
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and (longest is None or longest > chunk):
        raise ValueError(
            f"{name} attends in chunks of {chunk} tokens, which no mask of a Collator has: set "
            f'sequence_len to {chunk} or less, or use attention="none" and call the model with '
            "use_cache=False, so that it makes its own mask"
        )


def _refuse_what_masks_do_not_hold(inner: Any, text: Any, name: str) -> None:
    """Refuse layers that reach from sample to sample whatever the mask says."""
    remedy = (
        "; train it on padded batches (sample_packing: false), which a causal model runs from left "
        "to right"
    )
    types = getattr(text, "layer_types", None) or []
    other = next((kind for kind in types if kind not in _ATTENTION_LAYERS), None)
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    convolution = next((n for n, m in decoder.named_modules() if isinstance(m, nn.Conv1d)), None)
    if getattr(inner, "_is_stateful", False) or convolution is not None:
        what = "a state or a convolution runs along the row"
        if other or convolution:
            what += f" ({f'layers of type {other}' if other else convolution})"
        raise ValueError(
            f"{name} can't keep packed samples apart: {what}, and nothing but the kernels of "
            f"separate packages for GPUs starts it anew at seq_idx{remedy}"
        )
    if other is not None:
        raise ValueError(
            f"{name} can't keep packed samples apart: it has layers of type {other}, to which "
            f"masks and boundaries do not apply{remedy}"
        )
    attention = getattr(text, "attn_config", None)
    if text.model_type == "bloom" or getattr(attention or text, "alibi", False):
        raise ValueError(
            f"{name} can't keep packed samples apart: its ALiBi bias is counted along the row, for "
            f"rows of one sample{remedy}"
        )
    if not any("position_ids" in inspect.signature(m.forward).parameters for m in (inner, decoder)):
        raise ValueError(
            f"{name} takes no position_ids, so that positions would go on from sample to "
            f"sample{remedy}"
        )


def _is_causal(inner: Any, name: str) -> bool:
    """Whether attention looks back only; by default it does."""
    found = {
        module.is_causal for _, module in inner.named_modules() if hasattr(module, "is_causal")
    }
    if len(found) > 1:
        raise ValueError(
            f"{name} has causal and other attention, but a batch has one mask for both: choose "
            "attention=... yourself, and try it with verify_isolation"
        )
    return bool(found.pop()) if found else True


def _positions(inner: Any, name: str, longest: int | None) -> dict[str, Any]:
    """Where positions start, and, with a table of them, that the tail does not run out of it."""
    for path, module in inner.named_modules():
        leaf = path.rpartition(".")[2]
        if not isinstance(module, nn.Embedding) or not (leaf == "wpe" or "position" in leaf):
            continue
        # RoBERTa and its kin number from behind the padding id; OPT and BART do that inside.
        start = 0 if module.padding_idx is None else module.padding_idx + 1
        room = module.num_embeddings - start - int(getattr(module, "offset", 0))
        if longest is not None and longest > room:
            raise ValueError(
                f"{name} has learned positions for {room} tokens ({path}), but sequence_len is "
                f"{longest}: set it to {room} or less"
            )
        return {"position_start": start, "cut_tail": True} if start else {"cut_tail": True}
    return {}


def _follows_the_longest(text: Any, name: str, longest: int | None) -> bool:
    """Whether the rotary factors of all tokens follow the largest position of the batch."""
    settings = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    for rope in nested or [settings]:
        kind = str(rope.get("rope_type", ""))
        if kind == "longrope" or "dynamic" in kind:
            bound = rope.get("original_max_position_embeddings", text.max_position_embeddings)
            if longest is not None and longest > bound:
                warnings.warn(
                    f"{name} has {kind} rotary embeddings: in a batch with a sample of more than "
                    f"{bound} tokens, all others get its factors, and other logits than alone; "
                    f"sequence_len is {longest}",
                    stacklevel=4,
                )
            return True
    return False


def _pad_token(text: Any) -> int:
    """The model's padding id; where it has none, any will do."""
    pad = getattr(text, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else 0
