"""Data sets that take the microbatches of a sampler as indices.

`RowDataset` wraps any map-style data set and returns rows of samples, for a `Collator`.
`PackedDataset` holds all tokens in flat buffers and returns finished batches: no Python object is
made for a token, and nothing of the data set is copied but what enters the batch. Both pass
through the workers of a DataLoader, forked or spawned.

    loader = DataLoader(RowDataset(dataset), batch_sampler=sampler, collate_fn=collator)

    packed = PackedDataset.from_arrow(dataset, collator=collator)
    loader = DataLoader(packed, sampler=sampler, batch_size=None)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from multipack._arrays import Integers, int64_tensor, token_tensor, value_tensor
from multipack._config import Config
from multipack._microbatch import Microbatch
from multipack._plan import Repeat, count_labels
from multipack._samples import PAIR
from multipack._transport import sendable
from multipack.collate import (
    IGNORED_LABEL,
    Collator,
    check_padded_keys,
    join_rows,
    lay_out,
    spread,
)


class RowDataset(Dataset[Any]):
    """A map-style data set that takes rows of indices.

    For ``dataset[i] == {"input_ids": [i]}``, ``RowDataset(dataset)[[[0, 2], [1]]]`` is
    ``[[{"input_ids": [0]}, {"input_ids": [2]}], [{"input_ids": [1]}]]``.

    The samples of a microbatch are fetched in one call where the data set has `__getitems__`, as
    those of Hugging Face have. Repeated samples, which the sampler marks by `Repeat`, come with
    labels that are all -100.

    Args:
        dataset: Anything with `__getitem__` and `__len__` whose items are mappings.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Samples in the data set."""
        return len(self.dataset)

    def __getitem__(self, batch: int | Sequence[Any]) -> Any:
        """Return the sample of an index, or the samples of a microbatch as `__getitems__` does."""
        return self.__getitems__(batch) if isinstance(batch, list) else self.dataset[batch]

    def __getitems__(self, batch: Sequence[Any]) -> list[Any]:
        """Return the samples of a microbatch.

        Args:
            batch: Indices, or rows of indices.

        Returns:
            list: Samples, or rows of samples, in the places of their indices.

        Raises:
            ValueError: If the sampler was given fewer or more lengths than there are samples.
        """
        if isinstance(batch, Microbatch) and hasattr(self.dataset, "__len__"):
            batch.check_data(len(self.dataset))
        in_rows = len(batch) > 0 and isinstance(batch[0], list)
        rows = batch if in_rows else [batch]
        flat = [index for row in rows for index in row]
        if hasattr(self.dataset, "__getitems__"):
            samples = self.dataset.__getitems__(flat)
        else:
            samples = [self.dataset[index] for index in flat]
        if any(isinstance(index, Repeat) for index in flat):
            samples = _with_repeats_masked(flat, list(samples))
        following = iter(samples)
        filled = [[next(following) for _ in row] for row in rows]
        items = filled if in_rows else filled[0]
        return batch.filled(items) if isinstance(batch, Microbatch) else items


class PackedDataset(Dataset[dict[str, Any]]):
    """Tokens in flat buffers: a microbatch of indices in, a finished batch out.

        >>> tokens = torch.tensor([11, 12, 13, 21, 22])
        >>> data = PackedDataset(tokens, [0, 3, 5], collator=Collator(attention="none"))
        >>> data[[[1, 0]]]["input_ids"]
        tensor([[21, 22, 11, 12, 13]])

    A DataLoader hands it whole microbatches with ``sampler=sampler, batch_size=None``.

    Args:
        tokens: (T,) int32 or int64, as a tensor or an array, a read-only memory map among them: all
            samples, end to end. Viewed, not copied.
        offsets: (N+1,) integers: where each sample begins in `tokens`; they need not begin at 0 nor
            end at T.
        labels: As `tokens`; None: every token is supervised.
        collator (Collator): Makes the batch.
        values (Mapping): Further keys of the batch, such as `loss_weights`: (T,) numbers, as
            tensors or arrays, one for each token. Viewed as well.

    Raises:
        TypeError: If tokens or labels are not int32 or int64, or the offsets are not integers.
        ValueError: If tokens, labels and values differ in shape, or the offsets fall or leave the
            tokens.
    """

    def __init__(
        self,
        tokens: Integers,
        offsets: Integers,
        labels: Integers | None = None,
        *,
        collator: Collator,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        buffers = _Buffers(
            token_tensor("tokens", tokens),
            None if labels is None else token_tensor("labels", labels),
            {key: value_tensor(key, (values or {})[key]) for key in _checked_keys(values or ())},
        )
        named = {} if buffers.labels is None else {"labels": buffers.labels}
        for name, column in {**named, **buffers.values}.items():
            if column.shape != buffers.tokens.shape:
                raise ValueError(
                    f"tokens has shape {tuple(buffers.tokens.shape)}, but {name} has "
                    f"{tuple(column.shape)}: give one for each token"
                )
        borders = int64_tensor("offsets", offsets)
        _check_offsets(borders, buffers.tokens.numel())
        first, last = int(borders[0]), int(borders[-1])
        self._arrow: Any = None
        from_zero = np.asarray(borders - first, np.int64)
        self._set(collator, [buffers.part(first, last)], from_zero, np.zeros(1, np.int64))

    @classmethod
    def from_arrow(
        cls, dataset: Any, *, collator: Collator, columns: Sequence[str] = ()
    ) -> PackedDataset:
        """View the tokens of a Hugging Face data set where Arrow keeps them.

        The columns `input_ids` and, if there is one, `labels` are viewed in memory or in mapped
        files, through slices, shuffles, selections and concatenations; eight bytes are kept for
        each sample. Columns that are not named are not read, except that an `attention_mask` is
        checked to be all ones. Where the data set has several chunks, the samples of a microbatch
        are gathered before they are laid out, at about a microsecond for each.

        Args:
            dataset (datasets.Dataset): One split, whose columns are lists of int32 or int64.
            collator (Collator): Makes the batch.
            columns (Sequence[str]): Further columns for the batch, such as `loss_weights`: lists of
                integers or floats, one for each token.

        Returns:
            PackedDataset: The samples of `dataset`, in its order. Pickled, as for spawned workers,
                it is as large as the pickled `dataset`.

        Raises:
            TypeError: If it is no such data set, or a column is of another type.
            ValueError: If there is no `input_ids`, or a sample is null, holds a null, has padding,
                or has labels of another length.
        """
        from multipack import _arrow

        columns = _checked_keys(columns)
        read = _arrow.read(dataset, columns)
        buffers = [
            _Buffers(
                token_tensor("input_ids", chunk["input_ids"]),
                token_tensor("labels", chunk["labels"]) if "labels" in chunk else None,
                {key: value_tensor(key, chunk[key]) for key in columns},
            )
            for chunk in read.chunks
        ]
        self = cls.__new__(cls)
        self._arrow = dataset
        self._set(collator, buffers, read.offsets, read.first_samples, read.mapping)
        return self

    def _set(
        self,
        collator: Collator,
        buffers: list[_Buffers],
        offsets: npt.NDArray[np.int64],
        first_samples: npt.NDArray[np.int64],
        mapping: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.collator = _checked(collator)
        check_padded_keys(collator, buffers[0].values)
        self._buffers = buffers
        # Arrays, here and below: what is small takes NumPy a fifth of torch's time.
        self._tokens = [part.tokens.numpy() for part in buffers]
        self._labels = [part.labels.numpy() for part in buffers if part.labels is not None]
        # Where each sample begins, counted through all buffers.
        self._offsets = offsets
        # The first sample of each buffer.
        self._first_samples = first_samples
        # The sample behind each index; None: the sample of that number.
        self._mapping = mapping

    def __len__(self) -> int:
        """Samples in the data set."""
        return len(self._offsets) - 1 if self._mapping is None else len(self._mapping)

    def __getitem__(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Return a finished batch.

        Args:
            batch: A microbatch as the sampler yields it: indices, or rows of indices. The labels
                of a `Repeat` are all -100.

        Returns:
            dict[str, Any]: What the collator makes of these samples.

        Raises:
            IndexError: If an index is out of range.
            TypeError: If it is a single index.
            ValueError: As for `Collator`; if the sampler was given other lengths than these samples
                have.
        """
        if not isinstance(batch, Sequence):
            raise TypeError(
                f"a microbatch is a list of samples or of rows, not {batch!r}: give the DataLoader "
                "sampler=sampler and batch_size=None"
            )
        if isinstance(batch, Microbatch):
            batch.check_data(len(self))
        collator = self.collator
        samples, row_offsets = join_rows(batch, collator.config, collator.split)
        places = self._physical(samples)
        if isinstance(batch, Microbatch):
            batch.check_lengths((self._offsets[places + 1] - self._offsets[places]).tolist())
        repeats = [entry for entry, sample in enumerate(samples) if isinstance(sample, Repeat)]
        if len(self._buffers) > 1 or repeats:
            buffers, offsets = self._gathered(places, repeats)
            index = torch.from_numpy(np.arange(len(samples)))
        else:
            buffers, offsets = self._buffers[0], torch.from_numpy(self._offsets)
            index = torch.from_numpy(places)
        made = lay_out(collator, buffers.tokens, offsets, buffers.labels, index, row_offsets)
        for key, values in buffers.values.items():
            spread(collator, made, key, values, offsets, index, row_offsets)
        return sendable(made)

    def __getitems__(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Return a finished batch, as `__getitem__` does."""
        return self[batch]

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrow data travels as the data set, which names a mapped file instead of sending it.
        if self._arrow is not None:
            columns = list(self._buffers[0].values)
            return partial(PackedDataset.from_arrow, collator=self.collator, columns=columns), (
                self._arrow,
            )
        (buffers,) = self._buffers
        arguments = (buffers.tokens, self._offsets, buffers.labels)
        return partial(PackedDataset, collator=self.collator, values=buffers.values), arguments

    @property
    def lengths(self) -> torch.Tensor:
        """int64 (N,): tokens of each sample, for the sampler."""
        lengths = np.diff(self._offsets)
        return torch.from_numpy(lengths if self._mapping is None else lengths[self._mapping])

    def label_counts(self, config: Config | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the labels of each sample that enter the loss.

        Args:
            config (Config): As for `multipack.label_counts`; None: the collator's.

        Returns:
            tuple[torch.Tensor, torch.Tensor]: int64 (N,) counts and bool (N,) starts, for the
            sampler.
        """
        config = self.collator.config if config is None else config
        borders = [*self._first_samples.tolist(), len(self._offsets) - 1]
        parts = []
        for buffers, first, last in zip(self._buffers, borders[:-1], borders[1:], strict=True):
            labels = buffers.tokens if buffers.labels is None else buffers.labels
            offsets = torch.from_numpy(self._offsets[first : last + 1] - self._offsets[first])
            parts.append(count_labels(labels, offsets, config))
        counts, starts = (torch.cat(columns) for columns in zip(*parts, strict=True))
        if self._mapping is not None:
            mapping = torch.from_numpy(self._mapping)
            counts, starts = counts[mapping], starts[mapping]
        return counts, starts

    def _physical(self, samples: list[int]) -> npt.NDArray[np.int64]:
        """Return where samples lie in the buffers."""
        if min(samples) < 0 or max(samples) >= len(self):
            wrong = next(sample for sample in samples if not 0 <= sample < len(self))
            raise IndexError(
                f"sample {wrong} is out of range: the data set has {len(self)} samples"
            )
        index = np.array(samples)
        return index if self._mapping is None else self._mapping[index]

    def _gathered(
        self, places: npt.NDArray[np.int64], repeats: list[int]
    ) -> tuple[_Buffers, torch.Tensor]:
        """Copy the samples of a microbatch together, with the labels of repeats at -100."""
        chunks = np.searchsorted(self._first_samples, places, side="right") - 1
        bases = self._offsets[self._first_samples[chunks]]
        starts, ends = self._offsets[places] - bases, self._offsets[places + 1] - bases
        spans = list(zip(chunks.tolist(), starts.tolist(), ends.tolist(), strict=True))
        offsets = np.zeros(len(places) + 1, np.int64)
        np.cumsum(ends - starts, out=offsets[1:])

        tokens = _joined([self._tokens[chunk][start:end] for chunk, start, end in spans])
        labels = None
        if self._labels:
            labels = _joined([self._labels[chunk][start:end] for chunk, start, end in spans])
        elif repeats:
            labels = tokens.copy()
        for entry in repeats:
            assert labels is not None
            labels[offsets[entry] : offsets[entry + 1]] = IGNORED_LABEL
        gathered = _Buffers(
            torch.from_numpy(tokens),
            None if labels is None else torch.from_numpy(labels),
            {
                key: torch.cat(
                    [self._buffers[chunk].values[key][start:end] for chunk, start, end in spans]
                )
                for key in self._buffers[0].values
            },
        )
        return gathered, torch.from_numpy(offsets)


@dataclasses.dataclass(frozen=True)
class _Buffers:
    """Tokens end to end, their labels if they have some, and further values of each token."""

    tokens: torch.Tensor
    labels: torch.Tensor | None
    values: dict[str, torch.Tensor]

    def part(self, start: int, end: int) -> _Buffers:
        return _Buffers(
            self.tokens[start:end],
            None if self.labels is None else self.labels[start:end],
            {key: column[start:end] for key, column in self.values.items()},
        )


def _joined(parts: list[Any]) -> npt.NDArray[Any]:
    """Return parts of one array, or of several alike, end to end."""
    if parts[0].strides != (parts[0].itemsize,):
        return np.concatenate(parts)
    # For short ones np.concatenate takes twice the time.
    return np.frombuffer(bytearray().join(parts), parts[0].dtype)


def _checked_keys(keys: Iterable[str]) -> list[str]:
    """Return the names of further values, which may not be those that every batch has."""
    for key in keys:
        if key in ("input_ids", "labels", "attention_mask", "position_ids"):
            raise ValueError(f"{key!r} is not a further key of a batch: leave it out")
    return list(dict.fromkeys(keys))


def _check_offsets(offsets: torch.Tensor, tokens: int) -> None:
    """Refuse offsets that are not a rising walk through the tokens."""
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(
            f"offsets has shape {tuple(offsets.shape)}, but must have one dimension, with one "
            "entry more than there are samples"
        )
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel() > 0:
        sample = int(falls[0])
        raise ValueError(
            f"offsets fall from {int(offsets[sample])} to {int(offsets[sample + 1])} "
            f"at sample {sample}"
        )
    if int(offsets[0]) < 0 or int(offsets[-1]) > tokens:
        raise ValueError(
            f"offsets go from {int(offsets[0])} to {int(offsets[-1])}, but there are "
            f"{tokens} tokens"
        )


def _with_repeats_masked(flat: list[int], samples: list[Any]) -> list[Any]:
    """Return the samples, the repeats among them with labels that are all -100.

    Where no sample has labels, which are the tokens then, all get them, because a batch may not
    have both. Where only some have, the others stay as they are, for the collator to refuse.
    """
    prefixes = PAIR if any("chosen_input_ids" in sample for sample in samples) else ("",)
    labelled = any(prefix + "labels" in sample for sample in samples for prefix in prefixes)
    masked = []
    for index, sample in zip(flat, samples, strict=True):
        labels = {}
        for prefix in prefixes:
            if prefix + "input_ids" not in sample:
                continue  # for the collator to refuse
            tokens = sample[prefix + "input_ids"]
            if isinstance(index, Repeat):
                labels[prefix + "labels"] = [IGNORED_LABEL] * len(tokens)
            elif not labelled:
                labels[prefix + "labels"] = tokens
        masked.append({**sample, **labels})
    return masked


def _checked(collator: Any) -> Collator:
    """Refuse what cannot lay out a batch from flat buffers."""
    if not isinstance(collator, Collator):
        raise TypeError(
            f"collator must be a multipack.Collator, but is a {type(collator).__name__}: it has to "
            "lay out batches from the flat buffers"
        )
    return collator
