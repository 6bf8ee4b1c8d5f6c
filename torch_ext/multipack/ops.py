"""The ops as typed functions: what goes in, what comes out, what is refused.

Each function here calls the op of the same name in ``torch.ops.multipack``, which TorchScript and
C++ programs call directly. They work on flat data: sample ``i`` is
``tokens[offsets[i]:offsets[i + 1]]``, and row ``r`` of a batch holds the samples
``index[row_offsets[r]:row_offsets[r + 1]]``. `Collator` and `PackedDataset` are the comfortable way
to the same tensors.

Arguments are CPU tensors, contiguous or not; only `attention` and `block_mask` work on any device.
Lengths, offsets and indices may have any integer dtype, token ids and labels are int32 or int64.
Results are new tensors that share no memory with the arguments. The number of threads is torch's,
or the environment variable ``MULTIPACK_NUM_THREADS`` where that is less (which `attention` does not
read); it changes no result.

Every function raises TypeError for a wrong dtype, ValueError for a wrong shape, device or value,
IndexError for an index out of range, each with a sentence that names the argument, what was found
and what is allowed. In TorchScript all of them arrive as ``torch.jit.Error``. Shapes below: N
samples, T tokens in all, M samples of a batch, R rows of L tokens, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import SymInt, Tensor
from typing_extensions import Unpack

from multipack import _fake as _fake

_ops = torch.ops.multipack


class Batch(NamedTuple):
    """A packed batch.

    For lengths 3 and 2 in one row of 8, each comment has the tensor's contents.
    """

    #: (R, L) int64: token ids, the pad id on padding.
    input_ids: Tensor
    #: (R, L) int64: not shifted, -100 where there is nothing to learn.
    labels: Tensor
    #: (R, L) int64: 0 1 2 0 1 0 1 2; the padded tail counts for itself.
    position_ids: Tensor
    #: (R, L) int32: 1 1 1 2 2 0 0 0; from 1 in every row, 0 on padding.
    segment_ids: Tensor
    #: (S + 1,) int32: 0 3 5 8; borders in the R * L flattened tokens.
    cu_seqlens: Tensor
    #: (S + 1,) int32: the same, or the borders of the slots where samples are aligned.
    cu_seqlens_padded: Tensor
    #: int32 without dimensions: 3; the longest segment, always on the CPU.
    max_seqlen: Tensor
    #: (R, 1, L, L) bool or float; (0,) bool where none was asked for.
    attention_mask: Tensor


class CollateOptions(TypedDict, total=False):
    """What `collate` and `collate_list` can be told; all have a default.

    They are passed on as they are given, and the defaults are the schema's: torch takes one or two
    microseconds to read an option, and for a dozen as long as to collate 8,000 tokens.
    """

    #: L; 0, the default: as long as the longest row, rounded up to `pad_to_multiple_of`.
    row_len: int | SymInt
    #: Longer samples are cut there, and no padded tail is longer; 0, the default: no limit.
    max_sample_len: int
    #: What L is a multiple of where `row_len` is 0; 1 by default.
    pad_to_multiple_of: int
    #: The slot of each sample is rounded up to a multiple of this; 1 by default.
    align_samples_to: int
    #: What stands in `input_ids` on padding; 0 by default.
    pad_token_id: int
    #: The position of the first token of each sample; 0 by default.
    position_start: int
    #: Set the first label of each sample to -100, so that no token is predicted from the sample
    #: before; True by default.
    mask_first_label: bool
    #: What `cu_seqlens` says of the padding at the end of a row: "own" segments, the default, part
    #: of the "last" sample's (causal attention only), or "none" (one row only).
    padded_tail: Literal["own", "last", "none"] | str
    #: "none", the default, "bool" (True: may attend) or "additive" (0 and the dtype's minimum).
    attention_mask: Literal["none", "bool", "additive"] | str
    #: Whether the mask, and the model, is causal; True by default.
    causal: bool
    #: How far a query sees in the mask, as for `block_mask`; None, the default: no limit.
    window: int | None
    #: Of an additive mask: float32, the default, bfloat16 or float16.
    mask_dtype: torch.dtype | None


_COLLATE_OPTIONS = ("labels", *CollateOptions.__annotations__)


class PlanTensors(NamedTuple):
    """A plan: samples in rows, rows in microbatches, each as offsets into the level below."""

    #: int64: sample numbers, row after row.
    index: Tensor  # type: ignore[assignment]  # instead of tuple.index
    #: (rows + 1,) int64: where each row begins in `index`.
    row_offsets: Tensor
    #: (microbatches + 1,) int64: where each microbatch begins among the rows; by microstep, then by
    #: rank.
    batch_offsets: Tensor
    #: uint8: the report, as JSON.
    report: Tensor


class Microbatch(NamedTuple):
    """The samples that one rank takes in one forward and backward."""

    #: (M,) int64: sample numbers.
    index: Tensor  # type: ignore[assignment]  # instead of tuple.index
    #: (R + 1,) int64: where each row begins in `index`.
    row_offsets: Tensor


class LabelCounts(NamedTuple):
    """What the planner wants to know of the labels."""

    #: (N,) int64: labels that enter the loss.
    counts: Tensor
    #: (N,) bool: whether the first label is supervised in the data.
    starts: Tensor


def resolve_config(config: str) -> str:
    """Check settings and fill in every default.

    Args:
        config (str): A JSON object with the keys of `Config`.

    Returns:
        str: The same as JSON, with all keys.

    Raises:
        ValueError: For an unknown key, with the nearest known one, or a value that is not allowed.
        TypeError: For a value of the wrong kind.
    """
    resolved: str = _ops.resolve_config.default(config)
    return resolved


def plan(
    lengths: Tensor,
    label_counts: Tensor | None,
    label_starts: Tensor | None,
    config: str,
    epoch: int = 0,
    evaluation: bool = False,
) -> PlanTensors:
    """Plan an epoch; see `multipack.plan` for the comfortable form.

    Args:
        lengths (Tensor): (N,) integers: tokens of each sample.
        label_counts (Tensor | None): (N,) integers: supervised tokens of each sample; None: every
            token is.
        label_starts (Tensor | None): (N,) bool: whether a sample's first label is supervised.
        config (str): Settings as JSON.
        epoch (int): 0 or more; another epoch has another order.
        evaluation (bool): Plan the evaluation split, which is never balanced and never leaves a
            sample out.

    Returns:
        PlanTensors: The plan; the same on every rank for the same arguments.

    Raises:
        ValueError: If a length or a count is impossible, if an over-long sample meets the policy
            ``raise``, or if there are fewer microbatches than ranks.
        TypeError: If a tensor has a wrong dtype.
    """
    return PlanTensors(
        *_ops.plan.default(lengths, label_counts, label_starts, config, epoch, evaluation)
    )


def microbatch(
    index: Tensor, row_offsets: Tensor, batch_offsets: Tensor, world_size: int, rank: int, k: int
) -> Microbatch:
    """Take one rank's microbatch out of a plan.

    Args:
        index (Tensor): The plan's.
        row_offsets (Tensor): The plan's.
        batch_offsets (Tensor): The plan's.
        world_size (int): Ranks that the plan was made for.
        rank (int): From 0 to `world_size` - 1.
        k (int): Which of the rank's microbatches, from 0.

    Returns:
        Microbatch: What `collate` wants.

    Raises:
        IndexError: If there is no such rank or microbatch.
        ValueError: If the tensors are no plan for so many ranks.
    """
    return Microbatch(
        *_ops.microbatch.default(index, row_offsets, batch_offsets, world_size, rank, k)
    )


def label_counts(
    labels: Tensor, offsets: Tensor, *, max_sample_len: int = 0, mask_first_label: bool = True
) -> LabelCounts:
    """Count the labels of each sample that really enter the loss.

    Args:
        labels (Tensor): (T,) int32 or int64, -100 where there is no supervision.
        offsets (Tensor): (N + 1,) integers: where each sample begins.
        max_sample_len (int): Count only so many labels of a sample; 0: all.
        mask_first_label (bool): Whether `collate` will mask the first label of each sample, so that
            it does not count.

    Returns:
        LabelCounts: The two arguments of `plan`.

    Raises:
        ValueError: If the offsets fall, or end past the labels.
        TypeError: If a tensor has a wrong dtype.
    """
    return LabelCounts(
        *_ops.label_counts.default(
            labels, offsets, max_sample_len=max_sample_len, mask_first_label=mask_first_label
        )
    )


def collate(
    tokens: Tensor,
    offsets: Tensor,
    index: Tensor,
    row_offsets: Tensor,
    *,
    labels: Tensor | None = None,
    **options: Unpack[CollateOptions],
) -> Batch:
    """Lay samples end to end in rows and make every tensor that a trainer needs.

    Under `torch.compile` give `row_len`: then all shapes but that of `cu_seqlens` are known.

    Args:
        tokens (Tensor): (T,) int32 or int64: the token ids of all samples.
        offsets (Tensor): (N + 1,) integers: where each sample begins; any start, not falling, the
            end at most T.
        index (Tensor): (M,) integers: the samples of the batch, in order; one may come twice.
        row_offsets (Tensor): (R + 1,) integers from 0 to M: where each row begins in `index`. No
            row is empty; an empty sample is passed over.
        labels (Tensor | None): (T,) int32 or int64, sharing the offsets; None: the tokens
            themselves.
        **options (CollateOptions): How rows are laid out, and the mask.

    Returns:
        Batch: The packed batch.

    Raises:
        ValueError: If the offsets fall or end past the tokens, if a row is empty or longer than
            `row_len`, if the batch has more than 2**31 - 1 tokens or the mask more than 8 GiB.
        IndexError: If an entry of `index` is no sample.
        TypeError: If a tensor has a wrong dtype; for an unknown option.
    """
    _refuse_unknown(options)
    return Batch(
        *_ops.collate.default(
            tokens,
            offsets,
            index,
            row_offsets,
            labels=labels,
            **options,
        )
    )


def collate_list(
    input_ids: Sequence[Tensor],
    row_offsets: Tensor,
    *,
    labels: Sequence[Tensor] | None = None,
    **options: Unpack[CollateOptions],
) -> Batch:
    """Collate samples that are one tensor each: all of them, in order.

    For TorchScript, C++ and data sets that have nothing flat. Under `torch.compile` it compiles
    anew for each length of the list, and torch gives up after eight; compile `collate` instead.

    Args:
        input_ids (Sequence[Tensor]): The samples, (length,) int32 or int64 each.
        row_offsets (Tensor): (R + 1,) integers from 0 to the number of samples.
        labels (Sequence[Tensor] | None): As long as `input_ids`, and each as long as its sample.
        **options (CollateOptions): As for `collate`.

    Returns:
        Batch: The packed batch.

    Raises:
        ValueError: As for `collate`, or if a sample has more or fewer labels than tokens.
        TypeError: If a tensor has a wrong dtype; for an unknown option.
    """
    _refuse_unknown(options)
    return Batch(
        *_ops.collate_list.default(
            input_ids,
            row_offsets,
            labels=labels,
            **options,
        )
    )


def _refuse_unknown(options: CollateOptions) -> None:
    for name in options:
        if name not in _COLLATE_OPTIONS:
            raise TypeError(f"there is no option {name!r}, but {', '.join(_COLLATE_OPTIONS)}")


def pack_values(
    values: Tensor,
    offsets: Tensor,
    index: Tensor,
    row_offsets: Tensor,
    *,
    row_len: int | SymInt = 0,
    max_sample_len: int = 0,
    pad_to_multiple_of: int = 1,
    align_samples_to: int = 1,
    pad: complex = 0,
) -> Tensor:
    """Lay other values, one for each token, out like the tokens.

    Values are data: gradients do not flow through.

    Args:
        values (Tensor): (T,) of any dtype.
        offsets (Tensor): As for `collate`.
        index (Tensor): As for `collate`.
        row_offsets (Tensor): As for `collate`.
        row_len (int | SymInt): As for `collate`.
        max_sample_len (int): As for `collate`.
        pad_to_multiple_of (int): As for `collate`.
        align_samples_to (int): As for `collate`.
        pad (complex): What stands where there is no token, a number of any kind that the dtype of
            the values can hold; floats may round it.

    Returns:
        Tensor: (R, L), of the dtype of the values.

    Raises:
        ValueError: As for `collate`, or if the dtype cannot hold `pad`.
        IndexError: If an entry of `index` is no sample.
    """
    packed: Tensor = _ops.pack_values.default(
        values,
        offsets,
        index,
        row_offsets,
        row_len=row_len,
        max_sample_len=max_sample_len,
        pad_to_multiple_of=pad_to_multiple_of,
        align_samples_to=align_samples_to,
        pad=pad,
    )
    return packed


def block_mask(
    segment_ids: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype | None = torch.bool,
) -> Tensor:
    """Make the dense attention mask of a packed batch, on the device that the segment ids are on.

    A query may attend to the keys of its own row that carry its segment id, where `causal` to none
    that is later. So every query may attend to itself, and no row of the mask is empty.

    Padding carries id 0, and so all padding of a row is one segment here, in slots and in the tail
    alike: it attends to earlier padding where `causal` and to all of the row's otherwise, never to
    tokens, nor they to it. `cu_seqlens` may cut the same padding into several segments or add it to
    the last sample; what padding computes is not used either way.

    On the CPU the memory of one mask of 32 MiB or more stays with the process when it is freed, for
    the next one, until the system is short of memory.

    Args:
        segment_ids (Tensor): (R, L) or (L,) integers, of which only equality counts.
        causal (bool): Whether later keys are hidden.
        window (int | None): Where `causal`, a query sees so many keys, itself among them; otherwise
            the keys less than so far away on either side. None: no limit.
        dtype (torch.dtype | None): bool (True: may attend), or float32, bfloat16 or float16 for a
            mask to add: 0, and the dtype's minimum. None: bool.

    Returns:
        Tensor: (R, 1, L, L), contiguous on the CPU. On other devices the rows begin at multiples of
            16 entries, as the kernels of SDPA for GPUs want them; a mask that is made on the CPU
            and moved there had better have an L that is such a multiple.

    Raises:
        ValueError: If there are not one or two dimensions, if `window` is less than 1, or if the
            mask would take more than 8 GiB.
        TypeError: If a dtype is none of those named, or if the segment ids are sparse.
    """
    mask: Tensor = _ops.block_mask.default(segment_ids, causal=causal, window=window, dtype=dtype)
    return mask


def boundaries(position_ids: Tensor) -> Tensor:
    """Find the segments of a batch that was packed elsewhere by its positions.

    A segment begins with each row, and wherever a position is not one more than the one before. For
    [[0, 1, 2], [0, 0, 1]] the borders are [0, 3, 4, 6].

    Args:
        position_ids (Tensor): (R, L) or (L,) integers, starting from any number.

    Returns:
        Tensor: (S + 1,) int32 `cu_seqlens` over the flattened positions.

    Raises:
        ValueError: If there are not one or two dimensions.
        TypeError: If the dtype is not an integer one.
    """
    borders: Tensor = _ops.boundaries.default(position_ids)
    return borders


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | SymInt | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attend within the segments of packed rows, exactly and without a mask.

    What `torch.nn.functional.scaled_dot_product_attention` gives with the mask of `block_mask`, for
    the sum of length² instead of T², and in memory that grows with T. With borders [0, 3, 5], token
    4 sees tokens 3 and 4, and token 2 sees 0, 1 and 2.

    On the CPU a fused kernel runs over segments, heads and blocks of queries; half precision is
    computed in float32. On CUDA the varlen kernels that torch ships do the work. Elsewhere, and
    for what those kernels do not take (float64, a window that reaches both ways), torch's own
    operations do, a block of queries at a time.

    It is differentiable once; asking for a second derivative is an error. Under autocast it runs
    in the lower precision.

    Args:
        q (Tensor): (T, H, D) float32, bfloat16, float16 or float64: the flattened tokens of all
            rows.
        k (Tensor): (T, H_kv, D); H is a multiple of H_kv, and query head h uses key head
            h // (H / H_kv).
        v (Tensor): As `k`.
        cu_seqlens (Tensor): (S + 1,) int32 or int64 borders from 0 to at most T, not falling: a
            segment may be empty, and tokens after the last border are in none. They see nothing;
            their output and gradients are 0. On the device of `q`, or on the CPU.
        max_seqlen (int | SymInt | None): The longest segment, or more. On CUDA it saves a wait for
            the device in every layer, and is trusted there, as the borders then are: too small a
            number gives wrong results.
        causal (bool): Whether later keys are hidden.
        window (int | None): Where `causal`, a query sees so many keys, itself among them; otherwise
            the keys less than so far away on either side. None: no limit.
        scale (float | None): What scores are multiplied by. None: 1 / sqrt(D).
        dropout_p (float): The chance that a weight is dropped, drawn from torch's generator.

    Returns:
        Tensor: (T, H, D), contiguous, like `q`.

    Raises:
        ValueError: If shapes or devices do not fit, if the borders do not start at 0, fall or go
            beyond T, if a segment is longer than `max_seqlen`, or if a number is out of range.
        TypeError: If dtypes differ or are none of those named, or if a tensor is sparse.
        NotImplementedError: If a second derivative is asked for.
    """
    out: Tensor = _ops.attention.default(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen=max_seqlen,
        causal=causal,
        window=window,
        scale=scale,
        dropout_p=dropout_p,
    )
    return out
