"""Streams whose batches are told apart by their tokens: what the tests of them share."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch

from multipack import Collator, Config, StreamingMultipack

LENGTHS = np.random.default_rng(0).integers(1, 9, 85).tolist()

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2, "multipack_real_batches": True},
    {"micro_batch_size": 3, "sample_packing": False},
    {"micro_batch_size": 3, "sample_packing": False, "batch_flattening": True},
    {"sample_packing_sequentially": True},
    {"sample_packing_algorithm": "first_fit", "sample_packing_bin_size": 2},
]


class Samples:
    """Samples of given lengths, again for each pass; each token is the number of its sample + 1."""

    def __init__(self, lengths: list[int] = LENGTHS, first: int = 0) -> None:
        self.lengths = lengths
        self.first = first
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, length in enumerate(self.lengths, 1):
            self.read += 1
            yield {"input_ids": [self.first + number] * length}


class StatefulSamples(Samples):
    """The same, going on by itself from where it was."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in itertools.islice(super().__iter__(), self.at, None):
            self.at += 1
            yield sample
        self.at = 0


def stream(samples: Any = LENGTHS, **keys: Any) -> StreamingMultipack:
    """Make a stream of buffers of 30 samples."""
    of_lengths = isinstance(samples, list) and all(isinstance(n, int) for n in samples)
    iterable = Samples(samples) if of_lengths else samples
    keys = {"sequence_len": 8, "streaming_multipack_buffer_size": 30, **keys}
    collator = keys.pop("collator", None)
    if collator is None:
        settings = {key: value for key, value in keys.items() if key != "rank"}
        collator = Collator(Config(**settings), attention="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return StreamingMultipack(iterable, collator=collator, **keys)


def quiet(batches: Any, n: int | None = None) -> list[Any]:
    """Take batches, without the warning of what the stream leaves over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the stream (ended with|gave no sample)")
        return list(itertools.islice(batches, n))


def ids(batches: Any, n: int | None = None) -> list[list[list[int]]]:
    """Take the token ids of batches, which are enough to tell them apart."""
    return [batch["input_ids"].tolist() for batch in quiet(batches, n)]


def samples_of(batches: list[list[list[int]]]) -> list[int]:
    """The numbers of the samples in batches, each as often as it is there."""
    found = []
    for batch in batches:
        for row in batch:
            found += [token - 1 for token, _ in itertools.groupby(row) if token != 0]
    return found


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def hugging_face() -> Any:
    columns = {"input_ids": [[number + 1] * length for number, length in enumerate(LENGTHS)]}
    return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)
