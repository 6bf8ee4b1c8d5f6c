"""What the tests of the ops share: batches made by hand, and their arguments.

The reference builds a batch row by row from slices and `torch.cat`, the way one would by hand; it
knows nothing of the library's way of doing it.
"""

import itertools

import torch
from torch import Tensor

from multipack import ops

OPS = torch.ops.multipack
FIGURE = [11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def flat(*lengths: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Return tokens 10, 11, … of so many samples, and their offsets."""
    tokens = torch.arange(10, 10 + sum(lengths), dtype=dtype)
    return tokens, torch.tensor([0, *lengths]).cumsum(0)


def one_row(*lengths: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of collate for samples of these lengths in one row."""
    return *flat(*lengths), torch.arange(len(lengths)), ints(0, len(lengths))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def reference_mask(
    segment_ids: Tensor, causal: bool, window: int | None, dtype: torch.dtype
) -> Tensor:
    query, key = segment_ids[:, None, :, None], segment_ids[:, None, None, :]
    allowed = query == key
    at = torch.arange(segment_ids.shape[1])
    distance = at[:, None] - at[None, :]
    if causal:
        allowed = allowed & (distance >= 0)
    if window is not None:
        allowed = allowed & (distance.abs() < window)
    if dtype == torch.bool:
        return allowed
    return torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)


def reference_collate(
    tokens: Tensor,
    offsets: Tensor,
    index: Tensor,
    row_offsets: Tensor,
    *,
    labels: Tensor | None = None,
    row_len: int = 0,
    max_sample_len: int = 0,
    pad_to_multiple_of: int = 1,
    align_samples_to: int = 1,
    pad_token_id: int = 0,
    position_start: int = 0,
    mask_first_label: bool = True,
    padded_tail: str = "own",
    attention_mask: str = "none",
    causal: bool = True,
    window: int | None = None,
    mask_dtype: torch.dtype | None = None,
) -> ops.Batch:
    labels = tokens if labels is None else labels
    limit = max_sample_len or 10**9

    def piece(source: Tensor, sample: int) -> Tensor:
        return source[offsets[sample] : offsets[sample + 1]][:limit].long()

    borders = row_offsets.tolist()
    rows = [index[a:b].tolist() for a, b in itertools.pairwise(borders)]
    rows = [[i for i in row if len(piece(tokens, i))] for row in rows]
    need = [sum(round_up(len(piece(tokens, i)), align_samples_to) for i in row) for row in rows]
    size = row_len or round_up(max(need, default=0), pad_to_multiple_of)
    tail_limit = max(align_samples_to, limit // align_samples_to * align_samples_to)

    batch: dict[str, list[Tensor]] = {"ids": [], "labels": [], "positions": [], "segments": []}
    true_lengths: list[int] = []
    slots: list[int] = []
    for row, used in zip(rows, need, strict=True):
        tail = size - used
        parts: dict[str, list[Tensor]] = {name: [] for name in batch}

        def add(parts, ids, row_labels, slot, number):
            padding = slot - len(ids)
            ignored = torch.full((padding,), -100)
            parts["ids"] += [ids, torch.full((padding,), pad_token_id)]
            parts["labels"] += [row_labels, ignored]
            parts["positions"].append(torch.arange(slot) + position_start)
            number = torch.full((len(ids),), number, dtype=torch.int32)
            parts["segments"] += [number, torch.zeros(padding, dtype=torch.int32)]

        for number, sample in enumerate(row, start=1):
            ids, its_labels = piece(tokens, sample), piece(labels, sample).clone()
            if mask_first_label:
                its_labels[0] = -100
            slot = round_up(len(ids), align_samples_to)
            merged = 0
            if padded_tail == "last" and number == len(row):
                merged = min(tail, max(0, tail_limit - slot))
            add(parts, ids, its_labels, slot + merged, number)
            # What is merged makes the padding inside the slot part of the segment.
            true_lengths.append(slot + merged if merged else len(ids))
            slots.append(slot + merged)
            tail -= merged
        while tail > 0:
            slot = min(tail, tail_limit)
            add(parts, ints(), ints(), slot, 0)
            if padded_tail != "none":
                true_lengths.append(min(slot, limit))
                slots.append(slot)
            tail -= slot
        for name, values in parts.items():
            dtype = torch.int32 if name == "segments" else torch.int64
            batch[name].append(torch.cat(values) if values else torch.zeros(0, dtype=dtype))

    def rectangle(name: str, dtype: torch.dtype) -> Tensor:
        return torch.stack(batch[name]) if rows else torch.zeros(0, size, dtype=dtype)

    def cumulative(values: list[int]) -> Tensor:
        return torch.tensor([0, *values]).cumsum(0).int()

    segment_ids = rectangle("segments", torch.int32)
    mask = torch.zeros(0, dtype=torch.bool)
    if attention_mask == "bool":
        mask = reference_mask(segment_ids, causal, window, torch.bool)
    elif attention_mask == "additive":
        mask = reference_mask(segment_ids, causal, window, mask_dtype or torch.float32)
    return ops.Batch(
        input_ids=rectangle("ids", torch.int64),
        labels=rectangle("labels", torch.int64),
        position_ids=rectangle("positions", torch.int64),
        segment_ids=segment_ids,
        cu_seqlens=cumulative(true_lengths),
        cu_seqlens_padded=cumulative(slots),
        max_seqlen=torch.tensor(max(true_lengths, default=0), dtype=torch.int32),
        attention_mask=mask,
    )


CONFIG = '{"sequence_len": 8, "micro_batch_size": 2, "world_size": 2}'
LENGTHS = ints(6, 11, 2, 8, 4, 4, 1, 7, 3, 5, 2, 2, 8, 8, 3, 1, 8, 8, 8, 8)
SEGMENT_IDS = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0], [1, 1, 0, 2, 0, 3, 3, 3]], dtype=torch.int32)

TWO_ROWS = (*flat(3, 2, 4, 0, 1), ints(4, 0, 2, 1, 3), ints(0, 2, 5))
COLLATE_SAMPLES = {
    "two samples": (one_row(3, 2), {}),
    "row of 8": (one_row(3, 2), {"row_len": 8}),
    "merged tail": (one_row(3, 2), {"row_len": 8, "padded_tail": "last"}),
    "no tail": (one_row(3, 2), {"row_len": 8, "padded_tail": "none"}),
    "cut tail": (one_row(3, 2), {"row_len": 16, "max_sample_len": 4}),
    "cut merged tail": (
        one_row(3, 2),
        {"row_len": 16, "max_sample_len": 4, "padded_tail": "last"},
    ),
    "two rows": (TWO_ROWS, {}),
    "two rows merged": (TWO_ROWS, {"row_len": 9, "padded_tail": "last"}),
    "truncated": (TWO_ROWS, {"max_sample_len": 2}),
    "multiple of 8": (TWO_ROWS, {"pad_to_multiple_of": 8, "pad_token_id": 7}),
    "aligned": (one_row(5, 7, 3), {"align_samples_to": 4}),
    "aligned with a tail": (
        one_row(5, 7, 3),
        {"align_samples_to": 4, "row_len": 32, "max_sample_len": 9},
    ),
    "positions from 2": (one_row(3, 2), {"position_start": 2, "row_len": 8}),
    "first labels kept": (TWO_ROWS, {"mask_first_label": False}),
    "own labels": (one_row(3, 2), {"labels": ints(-100, 5, 6, 7, -100)}),
    "bool mask": (TWO_ROWS, {"attention_mask": "bool", "row_len": 8}),
    "window": (TWO_ROWS, {"attention_mask": "bool", "window": 2}),
    "not causal": (
        TWO_ROWS,
        {"attention_mask": "additive", "causal": False, "window": 2, "row_len": 8},
    ),
    "half mask": (
        one_row(3, 2),
        {"attention_mask": "additive", "mask_dtype": torch.float16, "align_samples_to": 4},
    ),
    "brain mask": (one_row(3, 2), {"attention_mask": "additive", "mask_dtype": torch.bfloat16}),
    "only empty samples": (one_row(0, 0), {"row_len": 4}),
    "nothing": ((ints(), ints(0), ints(), ints(0)), {"row_len": 4, "attention_mask": "bool"}),
    "the same sample twice": ((*flat(3, 2), ints(1, 1), ints(0, 2)), {}),
    "the figure": (one_row(*FIGURE), {"row_len": 64}),
}


def assert_batches_equal(expected: ops.Batch, found: ops.Batch) -> None:
    for name, want, have in zip(ops.Batch._fields, expected, found, strict=True):
        torch.testing.assert_close(
            have, want, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert have.is_contiguous(), name


def strided(tensor: Tensor) -> Tensor:
    """Return equal values with another in between in memory."""
    return torch.stack([tensor, torch.full_like(tensor, 99)], dim=1)[:, 0]


def block_mask_elsewhere(segment_ids: Tensor, **options) -> Tensor:
    """Run the kernel for CUDA and all others, here on a CPU tensor."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return OPS.block_mask.default.redispatch(cuda, segment_ids, **options)
