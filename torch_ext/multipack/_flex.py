"""Block lists for FlexAttention, computed from where the samples begin.

FlexAttention wants to know, for each block of queries, which blocks of keys it must look at, and
which of those it may take as they are. `torch.nn.attention.flex_attention.create_block_mask` finds
that out by trying every query with every key. But what query q may see in a packed row is one run
of keys, from lo(q) to hi(q), and neither end ever falls as q goes on. So for a block of queries
from f to g

    some query sees some keys   of blocks  lo(f) // size       to  ceil(hi(g) / size)
    every query sees all keys   of blocks  ceil(lo(g) / size)  to  hi(f) // size

and only the first and the last query of each block have to be looked at. Seen from the keys it is
the same with the roles exchanged, which gives the lists for the backward. The lists are equal to
those of `create_block_mask`, entry by entry.

For L tokens in blocks of B that is O(L + (L / B)²), the size of the lists, where trying is O(L²) in
time and memory. `benches/python/batch_peers.py` has both side by side.
"""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from multipack._arrays import integer


def flex_block_mask(
    cu_seqlens: Tensor,
    *,
    rows: int = 1,
    block_size: int = 128,
    causal: bool = True,
    window: int | None = None,
) -> BlockMask:
    """Make the `BlockMask` of a packed batch for `torch.nn.attention.flex_attention`.

    For segments of 300 and 212 tokens in one row, blocks 0 to 3: the queries of block 2, tokens 256
    to 383, belong to both, so that they look at the keys of blocks 0 to 2 with a mask; those of
    block 1 see all of block 0, and their own block with a mask.

        >>> mask = multipack.flex_block_mask(torch.tensor([0, 300, 512], dtype=torch.int32))
        >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
        ([[[1, 1, 3, 2]]], [[[0, 1, 0, 0]]])

    Where samples are aligned give `cu_seqlens_padded`. The result passes through the workers of a
    DataLoader, and its `to` takes along what the mask function needs.

    Args:
        cu_seqlens (Tensor): (S + 1,) integers, from 0 to R * L, not falling: where the segments
            begin in the flattened rows. No segment lies in two rows.
        rows (int): R, the rows of the batch.
        block_size (int): Tokens of a block, of queries and of keys alike.
        causal (bool): Whether later keys are hidden.
        window (int | None): Where `causal`, a query sees so many keys, itself among them; otherwise
            the keys less than so far away on either side. None: no limit.

    Returns:
        BlockMask: Of shape (R, 1, L, L), on the device of `cu_seqlens`, for which it is waited once
            if that is not the CPU.

    Raises:
        ValueError: If `cu_seqlens` does not begin at 0, falls, or is no (S + 1,) of `rows` rows of
            equal length; if a number is less than 1.
        TypeError: If `cu_seqlens` does not hold integers, or an option is no integer.
    """
    rows, size = integer("rows", rows, least=1), integer("block_size", block_size, least=1)
    window = None if window is None else integer("window", window, least=1)
    segments, borders = _segments(cu_seqlens, rows)
    row_len = segments.shape[1]
    reach = row_len if window is None else min(window, row_len)

    blocks = -(-row_len // size)
    first = torch.arange(0, row_len, size, device=segments.device)
    last = (first + size).clamp_(max=row_len).sub_(1)
    row = torch.arange(rows, device=segments.device).unsqueeze(1) * row_len
    # Of the first and of the last token of each block: where its segment begins and ends.
    begin_first, end_first = (borders[segments[:, first] + side] - row for side in (0, 1))
    begin_last, end_last = (borders[segments[:, last] + side] - row for side in (0, 1))
    # The run of tokens at or before a token, and at or after it, that see each other with it.
    before_first = begin_first.maximum(first + 1 - reach)
    before_last = begin_last.maximum(last + 1 - reach)
    after_first, after_last = end_first.minimum(first + reach), end_last.minimum(last + reach)
    whole = first + size <= row_len

    if causal:
        here = (first.expand_as(begin_first), last.expand_as(begin_first))
        keys = _lists(before_first, before_last, here[0] + 1, here[1] + 1, size, whole, blocks)
        queries = _lists(here[0], here[1], after_first, after_last, size, whole, blocks)
    else:
        keys = _lists(before_first, before_last, after_first, after_last, size, whole, blocks)
        queries = keys  # who sees whom is mutual
    return _PackedBlockMask(
        (row_len, row_len),
        *keys,
        *queries,
        BLOCK_SIZE=(size, size),
        mask_mod=functools.partial(_may_attend, segments, causal, window),
    )


def _segments(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the segment of each token (R, L), and the checked borders as int64 (S + 1,)."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}, but must be int32 or int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, but must have one dimension, with "
            "one entry more than there are segments"
        )
    borders = cu_seqlens.long()
    on_cpu = borders.cpu()  # the one time that is waited for another device
    lengths = on_cpu.diff()
    start, tokens = int(on_cpu[0]), int(on_cpu[-1])
    if start != 0 or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens begins at {start} and has a step of {int(lengths.min())}, but must begin "
            "at 0 and not fall"
        )
    if tokens == 0 or tokens % rows != 0:
        raise ValueError(f"cu_seqlens ends at {tokens}, which {rows} rows cannot share equally")
    row_len = tokens // rows
    segments = torch.repeat_interleave(lengths)
    starts = torch.arange(0, tokens, row_len)
    inside = (on_cpu[segments[starts]] != starts).nonzero()
    if inside.numel() > 0:
        row = int(inside[0])
        segment = int(segments[row * row_len])
        raise ValueError(
            f"segment {segment} of cu_seqlens goes from {int(on_cpu[segment])} to "
            f"{int(on_cpu[segment + 1])}, across the start of row {row} at {row * row_len}: "
            f"say how many rows there are, if not {rows}"
        )
    return segments.view(rows, row_len).to(borders.device), borders


def _lists(
    low_first: Tensor,
    low_last: Tensor,
    high_first: Tensor,
    high_last: Tensor,
    size: int,
    whole: Tensor,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts and indices of the partial and of the full blocks that each block looks at.

    Args:
        low_first (Tensor): (R, n): where the run of the first token of each block begins.
        low_last (Tensor): Of the last token.
        high_first (Tensor): Where the run of the first token ends.
        high_last (Tensor): Of the last token.
        size (int): Tokens of a block.
        whole (Tensor): (n,) bool: not the shorter block at the end of a row, which is never full.
        blocks (int): n.
    """
    begin = low_first // size
    end = (high_last + size - 1) // size
    full_begin = (low_last + size - 1) // size
    full_end = high_first // size
    none_full = (full_end <= full_begin) | ~whole
    full_begin = torch.where(none_full, end, full_begin)
    full_end = torch.where(none_full, end, full_end)

    # Torch puts the blocks that a list names first, and all the others behind them; both rise.
    slots = torch.arange(blocks, device=begin.device, dtype=torch.int32)
    begin, end, full_begin, full_end = (
        bound.int().unsqueeze(-1) for bound in (begin, end, full_begin, full_end)
    )
    full_count = full_end - full_begin
    # Partial blocks are on both sides of the full ones.
    left = full_begin - begin
    count = left + end - full_end
    others = slots - count
    partial = torch.where(
        slots < count,
        torch.where(slots < left, slots + begin, slots - left + full_end),
        torch.where(
            others < begin,
            others,
            torch.where(others < begin + full_count, others + left, slots),
        ),
    )
    others = slots - full_count
    full = torch.where(
        slots < full_count,
        slots + full_begin,
        torch.where(others < full_begin, others, slots),
    )
    return (
        count.squeeze(-1).unsqueeze(1),
        partial.unsqueeze(1),
        full_count.squeeze(-1).unsqueeze(1),
        full.unsqueeze(1),
    )


def _may_attend(
    segments: Tensor,
    causal: bool,
    window: int | None,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    """Say whether a query may see a key: the mask function, behind its first three arguments."""
    allowed = segments[b, q_idx] == segments[b, kv_idx]
    if causal:
        allowed = allowed & (kv_idx <= q_idx)
    if window is not None:
        allowed = allowed & (kv_idx > q_idx - window)
        if not causal:
            allowed = allowed & (kv_idx < q_idx + window)
    return allowed


class _PackedBlockMask(BlockMask):
    """A block mask that moves to another device together with its mask function's segments."""

    def to(self, device: torch.device | str) -> BlockMask:
        moved = vars(super().to(device))
        segments, *options = cast("functools.partial[Tensor]", self.mask_mod).args
        moved["mask_mod"] = functools.partial(_may_attend, segments.to(device), *options)
        return _PackedBlockMask(**moved)
