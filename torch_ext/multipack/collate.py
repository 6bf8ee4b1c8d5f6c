"""From samples to the tensors that a model takes.

A `Collator` joins the samples of a microbatch end to end, one NumPy pass for each key, and hands
them to ``torch.ops.multipack.collate``, which lays them into rows and makes positions, labels,
boundaries and the mask in one more. Arrays and tensors cost one or two microseconds for each sample
and key. Python lists are the slow path: 30 ns for each token and key, nearly all of it spent on
taking ints apart. `multipack.PackedDataset` avoids both by reading flat buffers.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from multipack import ops
from multipack._arrays import integer
from multipack._config import Config, Split, capacity, checked_split, layout, make_config

Sample: TypeAlias = "Mapping[str, Any]"

IGNORED_LABEL = -100

_ATTENTION = ("none", "bool", "additive", "flash")
_ATTENTION_TO_COME = ("varlen", "flex", "multipack")
_MASK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOKEN_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


class Collator:
    """Makes a batch of samples, or of rows of samples, into a dict of tensors.

    For samples of 3 and 2 tokens in one row, with ``attention="flash"`` and
    ``pad_to_multiple_of=8``:

        >>> batch = Collator(attention="flash", pad_to_multiple_of=8)(
        ...     [{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}]
        ... )
        >>> batch["input_ids"]
        tensor([[11, 12, 13, 21, 22,  0,  0,  0]])
        >>> batch["labels"]
        tensor([[-100,   12,   13, -100,   22, -100, -100, -100]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
        >>> batch["cu_seq_lens_q"], batch["max_length_q"]
        (tensor([0, 3, 5, 8], dtype=torch.int32), 3)

    Args:
        config (Config): The settings: how samples lie in a batch, padding, alignment, truncation,
            the first label.
        attention (str): How the samples of a row are kept apart. There is no default, because the
            wrong one lets samples see each other and nothing fails:

            - ``"flash"``: `cu_seq_lens_q`, `cu_seq_lens_k` (int32 (S+1,)), `max_length_q`,
              `max_length_k` (int), as transformers' flash attention takes them;
            - ``"bool"``: `attention_mask`, bool (R, 1, L, L), True where a query may attend, for
              SDPA;
            - ``"additive"``: `attention_mask` (R, 1, L, L) of 0 and the dtype's minimum, for SDPA
              and eager attention;
            - ``"none"``: nothing beside `position_ids`; for padded batches of causal models, and
              for models that find the samples by their positions. Transformers' do so only with
              ``use_cache=False`` and without an `attention_mask`.
        pad_token_id (int): What fills the padding of `input_ids`.
        dtype (torch.dtype): Of an additive mask: float32 (the default), bfloat16 or float16.
        window (int): Sliding window of a mask: so many keys with the query's own.
        pad_values (Mapping): What fills the padding of further per-token keys, by key; 0 where not
            given.
        split (str): ``train``, or ``eval`` for batches of an evaluation, which may have another
            layout and size.
        **keys: Settings by name; they override those of `config`.

    Raises:
        TypeError: As for `Config`; if `pad_token_id` or `window` is not an integer.
        ValueError: As for `Config`; if `attention` is unknown, `window` is less than 1, or `dtype`
            or `window` have nothing to act on.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        attention: str,
        pad_token_id: int = 0,
        dtype: torch.dtype | None = None,
        window: int | None = None,
        pad_values: Mapping[str, float] | None = None,
        split: Split = "train",
        **keys: Any,
    ) -> None:
        if attention in _ATTENTION_TO_COME:
            raise ValueError(
                f"attention={attention!r} is not part of this version, which has "
                f"{_names(_ATTENTION)}"
            )
        if attention not in _ATTENTION:
            raise ValueError(f"attention is {attention!r}, but must be one of {_names(_ATTENTION)}")
        if attention == "additive":
            dtype = torch.float32 if dtype is None else dtype
            if dtype not in _MASK_DTYPES:
                raise ValueError(
                    f"dtype is {dtype}, but an additive mask is of {_names(_MASK_DTYPES)}"
                )
        elif dtype is not None:
            raise ValueError(f"dtype is that of an additive mask, but attention is {attention!r}")
        if window is not None and attention not in ("bool", "additive"):
            raise ValueError(
                f"window limits a mask, but attention={attention!r} makes none; set the window in "
                "the model"
            )
        if pad_token_id is None:
            raise TypeError(
                "pad_token_id is None, but must be an integer; where a tokenizer has none, any id "
                "will do: padding is neither seen by samples nor trained on"
            )
        self.config = make_config(config, keys)
        self.split = checked_split(split)
        self.attention = attention
        self.pad_token_id = integer("pad_token_id", pad_token_id)
        self.dtype = dtype
        self.window = None if window is None else integer("window", window, least=1)
        self.pad_values = dict(pad_values or {})

    def __call__(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]]) -> dict[str, Any]:
        """Collate one microbatch.

        A sample is a mapping with `input_ids` and, if it has them, `labels`: lists, one-dimensional
        NumPy arrays or tensors of integers. Without labels every token is supervised. An
        `attention_mask` of ones is taken and dropped, and so are `position_ids` that count from 0;
        both are made anew. Further keys with one number for each token are laid out like the
        tokens; those with one number for each sample are stacked in the order of samples.

        Args:
            batch: Samples, or rows of samples. Samples alone make one row, or, in the padded
                layout, a row each.

        Returns:
            dict[str, Any]: int64 (R, L) `input_ids`, `labels` and `position_ids`; the keys of
                `attention`; the further keys of the samples. All on the CPU, in memory of their
                own.

        Raises:
            TypeError: If a key holds something that cannot be collated; labels that are one number
                for each sample among it.
            ValueError: If there are no samples, a row is empty, keys of a sample differ in length,
                only some samples have a key, a sample holds padding, or one is longer than
                `sequence_len` and not to be truncated.
        """
        samples, row_offsets = join_rows(batch, self.config, self.split)
        keys = _shared_keys(samples)
        if "input_ids" not in keys:
            raise ValueError(f"the samples have no 'input_ids', but {_names(sorted(keys))}")
        tokens, lengths = _column(samples, "input_ids")
        labels = None
        if "labels" in keys:
            labels = _column_like(samples, "labels", lengths)
        if "attention_mask" in keys:
            _check_masks(samples, lengths)
        if "position_ids" in keys:
            _check_positions(samples, lengths)
        offsets = torch.from_numpy(_offsets(lengths))
        index = torch.arange(len(samples))
        result = lay_out(
            self,
            torch.from_numpy(tokens),
            offsets,
            None if labels is None else torch.from_numpy(labels),
            index,
            row_offsets,
        )
        for key in sorted(keys.difference(_TOKEN_KEYS)):
            if _is_number(samples[0][key]):
                result[key] = _stack(samples, key)
            else:
                result[key] = ops.pack_values(
                    torch.from_numpy(_column_like(samples, key, lengths, "iufb")),
                    offsets,
                    index,
                    row_offsets,
                    row_len=result["input_ids"].shape[1],
                    max_sample_len=self.config.sequence_len or 0,
                    align_samples_to=self.config.align_samples_to,
                    pad=self.pad_values.get(key, 0),
                )
        return result


def join_rows(batch: Sequence[Any], config: Config, split: Split) -> tuple[list[Any], torch.Tensor]:
    """Flatten a microbatch, and say where each row of the tensors begins in it.

    Args:
        batch: Items (samples or their indices), or lists of items.
        config (Config): Its layout says whether items without rows make one row, or a row each.
        split (str): ``train`` or ``eval``.

    Returns:
        tuple[list, torch.Tensor]: The items, and int64 (R+1,) offsets of the rows.

    Raises:
        TypeError: If items and lists of items are mixed.
        ValueError: If there are no items, or items without rows in the layout of real rows.
    """
    if len(batch) == 0:
        raise ValueError("the microbatch is empty, but a batch has at least one sample")
    kind = layout(config, split)
    in_rows = [isinstance(row, list | tuple) for row in batch]
    if all(in_rows):
        items = list(itertools.chain.from_iterable(batch))
        sizes = [len(row) for row in batch]
    elif any(in_rows):
        raise TypeError("the microbatch mixes samples and rows of samples: give either")
    elif kind == "real_rows":
        raise ValueError(
            "multipack_real_batches has several rows, but the microbatch is a list of samples: "
            "give a list of rows, as the sampler yields them"
        )
    else:
        items = list(batch)
        sizes = [len(items)]
    if kind == "padded":
        sizes = [1] * len(items)
    return items, torch.tensor([0, *itertools.accumulate(sizes)])


def lay_out(
    collator: Collator,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    labels: torch.Tensor | None,
    index: torch.Tensor,
    row_offsets: torch.Tensor,
) -> dict[str, Any]:
    """Collate from flat buffers; see `multipack.ops.collate` for the arguments.

    Returns:
        dict[str, Any]: As from a call of the collator, without further keys.

    Raises:
        ValueError: If a sample is longer than `sequence_len` and not to be truncated, or as for the
            op.
        IndexError: If an index is out of range.
    """
    config = collator.config
    _check_lengths(offsets, index, config)
    mask = collator.attention if collator.attention in ("bool", "additive") else "none"
    made = ops.collate(
        tokens,
        offsets,
        index,
        row_offsets,
        labels=labels,
        row_len=capacity(config, collator.split) if config.pad_to_sequence_len else 0,
        max_sample_len=config.sequence_len or 0,
        pad_to_multiple_of=config.pad_to_multiple_of,
        align_samples_to=config.align_samples_to,
        pad_token_id=collator.pad_token_id,
        mask_first_label=config.mask_first_label,
        padded_tail=config.padded_tail,
        attention_mask=mask,
        window=collator.window,
        mask_dtype=collator.dtype,
    )
    batch: dict[str, Any] = {
        "input_ids": made.input_ids,
        "labels": made.labels,
        "position_ids": made.position_ids,
    }
    if mask != "none":
        batch["attention_mask"] = made.attention_mask
    elif collator.attention == "flash":
        # The kernel wants the slots that the tokens lie in, which alignment makes wider.
        longest = int(made.max_seqlen)
        if config.align_samples_to > 1:
            longest = int(made.cu_seqlens_padded.diff().max())
        for side in ("q", "k"):
            batch[f"cu_seq_lens_{side}"] = made.cu_seqlens_padded
            batch[f"max_length_{side}"] = longest
    return batch


def _check_lengths(offsets: torch.Tensor, index: torch.Tensor, config: Config) -> None:
    """Refuse over-long samples, which the planner leaves out: its lengths were others."""
    bound = config.sequence_len
    if bound is None or config.excess_length_strategy == "truncate":
        return
    lengths = offsets[index + 1] - offsets[index]
    if int(lengths.max()) > bound:
        sample = int((lengths > bound).nonzero()[0])
        raise ValueError(
            f"sample {sample} of the microbatch has {int(lengths[sample])} tokens, more than "
            f"sequence_len {bound}; plan with the lengths of this data, raise sequence_len, or "
            "set excess_length_strategy to truncate"
        )


def _names(names: Sequence[Any]) -> str:
    return ", ".join(str(name) for name in names)


def _offsets(lengths: list[int]) -> npt.NDArray[np.int64]:
    """Where each sample begins: for lengths 3 and 2, [0, 3, 5]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _shared_keys(samples: list[Any]) -> frozenset[str]:
    """Return the keys, which all samples must have."""
    for number, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"sample {number} is a {type(sample).__name__}, but a sample is a mapping with "
                "'input_ids'"
            )
    keys = frozenset(samples[0])
    for number, sample in enumerate(samples):
        if sample.keys() != keys:
            key = min(keys.symmetric_difference(sample))
            has, lacks = (number, 0) if key in sample else (0, number)
            raise ValueError(
                f"sample {lacks} has no '{key}', but sample {has} has: give it to all samples, or "
                "to none"
            )
    return keys


def _column(
    samples: list[Sample], key: str, kinds: str = "iu"
) -> tuple[npt.NDArray[Any], list[int]]:
    """Join what the samples hold under a key, and return the length of each."""
    parts = [token_array(sample[key], key, number, kinds) for number, sample in enumerate(samples)]
    return np.concatenate(parts), [len(part) for part in parts]


def _column_like(
    samples: list[Sample], key: str, lengths: list[int], kinds: str = "iu"
) -> npt.NDArray[Any]:
    """Join what the samples hold under a key, which must be one number for each token."""
    joined, found = _column(samples, key, kinds)
    if found != lengths:
        sample = next(i for i, length in enumerate(lengths) if found[i] != length)
        raise ValueError(
            f"sample {sample} has {lengths[sample]} input_ids but {found[sample]} {key}: "
            "give one for each token"
        )
    return joined


def token_array(values: Any, key: str, sample: int, kinds: str = "iu") -> Any:
    """Return what a sample holds under a key, one number for each token, for NumPy to join.

    Args:
        values: A list, an array or a tensor.
        key (str): The key, for errors.
        sample (int): The sample's number, for errors.
        kinds (str): The NumPy kinds that are allowed.

    Returns:
        array.array | np.ndarray: One-dimensional; integers are int32 or int64.

    Raises:
        TypeError: If it is something else.
    """
    if isinstance(values, list):
        try:
            # 24 ns a token on lists of about 100 ints; np.asarray takes 31, torch.tensor 118.
            buffer = array("q")
            buffer.fromlist(values)
            return buffer
        except (TypeError, OverflowError):
            pass  # not all are ints of 64 bits: what they are is NumPy's to find out
    if isinstance(values, torch.Tensor):
        try:
            values = values.numpy()
        except (TypeError, RuntimeError):  # another device, a dtype unknown to NumPy, a gradient
            raise TypeError(
                f"{key} of sample {sample} is a {values.dtype} tensor on {values.device}, but "
                "samples are collated on the CPU, without gradients, from dtypes that NumPy has; "
                "convert it, and move the finished batch"
            ) from None
    try:
        part = np.asarray(values)
    except ValueError:  # nested lists of unequal lengths
        part = np.empty(0, object)
    if part.ndim != 1 and part.dtype.kind in kinds:
        wanted = f"one number for each token, of shape ({part.shape[-1] if part.ndim else 'L'},)"
        raise TypeError(f"{key} of sample {sample} has shape {part.shape}, but must be {wanted}")
    if part.dtype.kind not in kinds and (part.size > 0 or part.dtype == object):
        kind = "integers" if kinds == "iu" else "numbers, one for each token or one for the sample"
        found = type(values).__name__
        if isinstance(values, np.ndarray):
            found = f"an array of {part.dtype}"
        raise TypeError(
            f"{key} of sample {sample} is {found}, but must hold {kind}; drop the key if no model "
            "takes it"
        )
    if part.dtype.kind in "iu" or part.size == 0:
        return part if part.dtype == np.int32 else part.astype(np.int64, copy=False)
    return part.astype(np.float32) if isinstance(values, list) and part.dtype.kind == "f" else part


def _check_masks(samples: list[Sample], lengths: list[int]) -> None:
    """Refuse padding in samples, which would be trained on."""
    masks = [sample["attention_mask"] for sample in samples]
    # Counting takes a fifth of joining, which is left to find out what is wrong.
    if all(
        isinstance(mask, list) and len(mask) == mask.count(1) == length
        for mask, length in zip(masks, lengths, strict=True)
    ):
        return
    joined = _column_like(samples, "attention_mask", lengths, "iub")
    if not (joined == 1).all():
        sample, token = _place(int(np.argmax(joined != 1)), lengths)
        raise ValueError(
            f"sample {sample} has attention_mask 0 at token {token}, but samples come without "
            "padding: tokenise with padding=False, or cut the padding off"
        )


def _check_positions(samples: list[Sample], lengths: list[int]) -> None:
    """Refuse positions that are not those that the batch will have."""
    positions = _column_like(samples, "position_ids", lengths)
    expected = np.arange(len(positions)) - np.repeat(_offsets(lengths)[:-1], lengths)
    if not np.array_equal(positions, expected):
        place = int(np.argmax(positions != expected))
        sample, token = _place(place, lengths)
        raise ValueError(
            f"sample {sample} has position_ids {positions[place]} at token {token}, but positions "
            "are made anew and count from 0: drop the key"
        )


def _place(token: int, lengths: list[int]) -> tuple[int, int]:
    """Return which sample a token of the joined samples is in, and where in it."""
    offsets = _offsets(lengths)
    sample = int(np.searchsorted(offsets, token, side="right")) - 1
    return sample, token - int(offsets[sample])


def _is_number(value: Any) -> bool:
    """Whether a value is one number, of Python, NumPy or torch."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.ndim == 0 and (isinstance(value, torch.Tensor) or value.dtype.kind in "biuf")
    return isinstance(value, int | float)


def _stack(samples: list[Sample], key: str) -> torch.Tensor:
    """Return one number for each sample, as torch makes them of Python numbers."""
    values = [sample[key] for sample in samples]
    for number, value in enumerate(values):
        if not _is_number(value):
            raise TypeError(
                f"{key} of sample {number} is {type(value).__name__}, but sample 0 has one number "
                "there"
            )
    return torch.tensor([value.item() if hasattr(value, "item") else value for value in values])
