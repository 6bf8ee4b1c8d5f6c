"""What lies between the data sets that a Trainer is given and the batches of a plan.

Lengths and labels of data sets without Arrow buffers, for which every sample is read once; samples
with those keys alone that the model takes; and whole microbatches, as accelerate wants to see them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from multipack._config import Config
from multipack._plan import count_labels
from multipack._samples import token_array
from multipack.collate import Collator


def is_stream(dataset: Any) -> bool:
    """Whether there is a data set, and it has no indices."""
    if isinstance(dataset, IterableDataset | datasets.IterableDataset):
        return True
    return dataset is not None and not hasattr(dataset, "__getitem__")


def measure(dataset: Any, config: Config) -> tuple[Any, Any, Any]:
    """Read through a data set for lengths, label counts and label starts, 1000 samples at a time.

    Raises:
        ValueError: If a sample has no `input_ids`, labels by another name, or only some have any.
    """
    lengths, counts, starts = [], [], []
    for first in range(0, len(dataset), 1000):
        samples = [dataset[i] for i in range(first, min(first + 1000, len(dataset)))]
        numbers = range(first, first + len(samples))
        for number, sample in zip(numbers, samples, strict=True):
            if "input_ids" not in sample:
                raise ValueError(f"sample {number} has no 'input_ids': tokenise the data set first")
            refuse_other_labels(sample)
        sizes = [len(sample["input_ids"]) for sample in samples]
        lengths += sizes
        labels = [
            np.asarray(token_array(sample["labels"], "labels", number))
            for number, sample in zip(numbers, samples, strict=True)
            if "labels" in sample
        ]
        if labels:
            flat = torch.from_numpy(np.concatenate(labels).astype(np.int64))
            offsets = torch.tensor([0, *np.cumsum([len(part) for part in labels])])
            found, started = count_labels(flat, offsets, config)
            counts.append(found)
            starts.append(started)
    if not counts:
        return lengths, None, None
    labelled = sum(len(part) for part in counts)
    if labelled != len(lengths):
        raise ValueError(
            f"{labelled} of {len(lengths)} samples have labels: give them to all, or to none"
        )
    return lengths, torch.cat(counts), torch.cat(starts)


def refuse_other_labels(keys: Container[str]) -> None:
    """Refuse what says by another name which tokens are supervised: the model takes no such key.

    Raises:
        ValueError: If there are labels that are moved to where they are predicted, or a mask of
            TRL's in place of labels.
    """
    if "shift_labels" in keys:
        raise ValueError(
            "the samples have 'shift_labels', but models shift 'labels' by themselves: give labels "
            "in their place, which are [-100, *shift_labels[:-1]]"
        )
    for mask in ("completion_mask", "assistant_masks"):
        if mask in keys and "labels" not in keys:
            raise ValueError(
                f"the samples have {mask!r} and no labels: give labels, which are -100 where the "
                "mask is 0"
            )


class Microbatches(Dataset[Any]):
    """Whole microbatches, for accelerate."""

    # Nothing was repeated to fill the last batch up, so accelerate is to cut nothing off.
    total_dataset_length = 0

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: Any) -> Any:
        return self.dataset.__getitems__(batch)


class Keys(Dataset[Any]):
    """A data set whose samples have some of the keys only."""

    def __init__(self, dataset: Any, keys: frozenset[str]) -> None:
        self.dataset = dataset
        self.keys = keys

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return _only(self.keys, self.dataset[index])


class KeysCollated:
    """A collator of samples of which the model takes some of the keys only; None: all."""

    def __init__(self, collator: Collator, keys: frozenset[str] | None) -> None:
        self.collator = collator
        self.keys = keys

    def __call__(self, batch: list[Any]) -> dict[str, Any]:
        rows: list[Any] = [
            self._kept(row) if isinstance(row, Mapping) else [self._kept(sample) for sample in row]
            for row in batch
        ]
        return self.collator(rows)

    def _kept(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        refuse_other_labels(sample)
        return sample if self.keys is None else _only(self.keys, sample)


def _only(keys: frozenset[str], sample: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sample.items() if key in keys}
