"""Shape functions of the ops, for torch.compile and torch.export.

They say what an op returns without running it: shapes, dtypes, strides. The sizes that depend on
what the tensors hold are left open (`new_dynamic_size`); with a given `row_len` everything but
`cu_seqlens` is known, and a compiled program may go from samples to loss in one graph.

The C++ side names this module as the place of the shape functions, so they may live nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from multipack import _library as _library

Size: TypeAlias = Any  # int or torch.SymInt, which torch does not type as one
_FakeBatch: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Function = TypeVar("_Function", bound=Callable[..., object])


def _shape_of(op: str) -> Callable[[_Function], _Function]:
    """Register the function below as the shape function of `op`; typed, as torch's own is not."""
    register = torch.library.register_fake(f"multipack::{op}")
    return cast("Callable[[_Function], _Function]", register)


def _dynamic_size(least: int = 0) -> Size:
    return torch.library.get_ctx().new_dynamic_size(min=least)


def _on_cpu(op: str, **tensors: Tensor | Sequence[Tensor] | None) -> None:
    """Refuse what the op itself would refuse when it runs, in the same words."""
    for name, value in tensors.items():
        if value is None or isinstance(value, Tensor):
            named = {name: value}
        else:
            named = {f"{name}[{i}]": tensor for i, tensor in enumerate(value)}
        for argument, tensor in named.items():
            if tensor is not None and tensor.device.type != "cpu":
                raise ValueError(
                    f"multipack::{op} runs on the CPU, but {argument} is on {tensor.device}: "
                    "move it there with .cpu(), and the results back"
                )


@_shape_of("plan")
def _plan(
    lengths: Tensor,
    label_counts: Tensor | None,
    label_starts: Tensor | None,
    config: str,
    epoch: int = 0,
    evaluation: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _on_cpu("plan", lengths=lengths, label_counts=label_counts, label_starts=label_starts)
    return (
        lengths.new_empty(_dynamic_size(), dtype=torch.int64),
        lengths.new_empty(_dynamic_size(1), dtype=torch.int64),
        lengths.new_empty(_dynamic_size(1), dtype=torch.int64),
        lengths.new_empty(_dynamic_size(1), dtype=torch.uint8),
    )


@_shape_of("microbatch")
def _microbatch(
    index: Tensor, row_offsets: Tensor, batch_offsets: Tensor, world_size: int, rank: int, k: int
) -> tuple[Tensor, Tensor]:
    _on_cpu("microbatch", index=index, row_offsets=row_offsets, batch_offsets=batch_offsets)
    return (
        index.new_empty(_dynamic_size(), dtype=torch.int64),
        index.new_empty(_dynamic_size(1), dtype=torch.int64),
    )


@_shape_of("label_counts")
def _label_counts(
    labels: Tensor, offsets: Tensor, *, max_sample_len: int = 0, mask_first_label: bool = True
) -> tuple[Tensor, Tensor]:
    _on_cpu("label_counts", labels=labels, offsets=offsets)
    samples = offsets.shape[0] - 1
    return (
        labels.new_empty(samples, dtype=torch.int64),
        labels.new_empty(samples, dtype=torch.bool),
    )


@_shape_of("collate")
def _collate(
    tokens: Tensor,
    offsets: Tensor,
    index: Tensor,
    row_offsets: Tensor,
    *,
    labels: Tensor | None = None,
    row_len: Size = 0,
    attention_mask: str = "none",
    mask_dtype: torch.dtype | None = None,
    **layout: object,
) -> _FakeBatch:
    _on_cpu(
        "collate",
        tokens=tokens,
        offsets=offsets,
        index=index,
        row_offsets=row_offsets,
        labels=labels,
    )
    return _batch(row_offsets, row_len, attention_mask, mask_dtype)


@_shape_of("collate_list")
def _collate_list(
    input_ids: Sequence[Tensor],
    row_offsets: Tensor,
    *,
    labels: Sequence[Tensor] | None = None,
    row_len: Size = 0,
    attention_mask: str = "none",
    mask_dtype: torch.dtype | None = None,
    **layout: object,
) -> _FakeBatch:
    _on_cpu("collate_list", input_ids=input_ids, row_offsets=row_offsets, labels=labels)
    return _batch(row_offsets, row_len, attention_mask, mask_dtype)


def _batch(
    row_offsets: Tensor, row_len: Size, attention_mask: str, mask_dtype: torch.dtype | None
) -> _FakeBatch:
    rows = row_offsets.shape[0] - 1
    size = (rows, _row_len(row_len))
    # At least one segment: a batch of nothing is not worth an unknown that may be 1, which
    # attention cannot guard on.
    borders = _dynamic_size(2)
    if attention_mask == "none":
        mask = row_offsets.new_empty(0, dtype=torch.bool)
    else:
        default = torch.bool if attention_mask == "bool" else torch.float32
        mask = row_offsets.new_empty((rows, 1, size[1], size[1]), dtype=mask_dtype or default)
    return (
        row_offsets.new_empty(size, dtype=torch.int64),
        row_offsets.new_empty(size, dtype=torch.int64),
        row_offsets.new_empty(size, dtype=torch.int64),
        row_offsets.new_empty(size, dtype=torch.int32),
        row_offsets.new_empty(borders, dtype=torch.int32),
        row_offsets.new_empty(borders, dtype=torch.int32),
        row_offsets.new_empty((), dtype=torch.int32),
        mask,
    )


def _row_len(row_len: Size) -> Size:
    # A symbolic length is never the 0 that stands for "as long as the longest": torch specialises
    # on 0.
    return _dynamic_size() if isinstance(row_len, int) and row_len == 0 else row_len


@_shape_of("pack_values")
def _pack_values(
    values: Tensor,
    offsets: Tensor,
    index: Tensor,
    row_offsets: Tensor,
    *,
    row_len: Size = 0,
    **layout: object,
) -> Tensor:
    _on_cpu("pack_values", values=values, offsets=offsets, index=index, row_offsets=row_offsets)
    return values.new_empty((row_offsets.shape[0] - 1, _row_len(row_len)))


@_shape_of("block_mask")
def _block_mask(
    segment_ids: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    rows = segment_ids.shape[0] if segment_ids.dim() == 2 else 1
    row_len = segment_ids.shape[-1]
    mask_dtype = dtype or torch.bool
    if segment_ids.device.type == "cpu":
        return segment_ids.new_empty((rows, 1, row_len, row_len), dtype=mask_dtype)
    # Elsewhere each row begins at a multiple of 16 entries, as the kernels of GPUs want it.
    stride = (row_len + 15) // 16 * 16
    return segment_ids.new_empty((rows, 1, row_len, stride), dtype=mask_dtype)[..., :row_len]


@_shape_of("boundaries")
def _boundaries(position_ids: Tensor) -> Tensor:
    _on_cpu("boundaries", position_ids=position_ids)
    return position_ids.new_empty(_dynamic_size(1), dtype=torch.int32)


def _beside(q: Tensor, cu_seqlens: Tensor, **tensors: Tensor) -> None:
    """Refuse tensors on another device than `q`, in the words of the op.

    One on the meta device sends the whole call here, and what is returned for a `q` in memory would
    be memory that nobody has written.
    """
    if cu_seqlens.device.type != "cpu":
        tensors["cu_seqlens"] = cu_seqlens
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, but q is on {q.device}")


@_shape_of("attention")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: Size | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    _beside(q, cu_seqlens, k=k, v=v)
    return q.new_empty(q.shape)


@_shape_of("_attention_forward")
def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Size | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _beside(q, cu_seqlens, k=k, v=v)
    tokens, heads, _ = q.shape
    arithmetic = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        q.new_empty(q.shape),
        q.new_empty((heads, tokens), dtype=arithmetic),
        q.new_empty(2 if dropout_p > 0 else 0, dtype=torch.int64),
    )


@_shape_of("_attention_backward")
def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    random: Tensor,
    cu_seqlens: Tensor,
    *options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    _beside(q, cu_seqlens, k=k, v=v, grad_out=grad_out)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
