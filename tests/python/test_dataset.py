"""Data sets that take microbatches as indices, alone and under a DataLoader."""

from __future__ import annotations

import itertools
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import multipack
from multipack import Collator, MultipackBatchSampler, PackedDataset, Repeat, RowDataset

IGNORED = -100
Sample = dict[str, Any]
Samples = Callable[[list[int]], list[Sample]]

LENGTHS = [3, 5, 2, 6, 4, 4, 1, 7, 8, 2, 6, 3]


def flat(samples: list[Sample], key: str) -> torch.Tensor:
    return torch.tensor([value for sample in samples for value in sample[key]])


def offsets_of(samples: list[Sample]) -> list[int]:
    return np.cumsum([0] + [len(sample["input_ids"]) for sample in samples]).tolist()


def packed(samples: list[Sample], collator: Collator, labels: bool = True) -> PackedDataset:
    return PackedDataset(
        flat(samples, "input_ids"),
        offsets_of(samples),
        flat(samples, "labels") if labels else None,
        collator=collator,
    )


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


# ---- rows of samples ----


class Fetching:
    """A data set that can fetch several samples at once, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        self.asked.append(indices)
        return [{"input_ids": [index] * 2} for index in indices]


def test_rows_of_indices_become_rows_of_samples(samples: Samples) -> None:
    made = samples([1, 2, 3])
    data = RowDataset(made)

    assert len(data) == 3
    assert data.__getitems__([[0, 2], [1]]) == [[made[0], made[2]], [made[1]]]
    assert data.__getitems__([2, 0]) == [made[2], made[0]]
    assert data[[[1]]] == [[made[1]]]
    assert data[1] == made[1]


def test_the_samples_of_a_microbatch_are_fetched_in_one_call() -> None:
    fetching = Fetching()

    rows = RowDataset(fetching).__getitems__([[0, 2], [1]])

    assert rows == [[{"input_ids": [0, 0]}, {"input_ids": [2, 2]}], [{"input_ids": [1, 1]}]]
    assert fetching.asked == [[0, 2, 1]]


def test_repeats_lose_their_labels(samples: Samples) -> None:
    made = samples([2, 3])

    rows = RowDataset(made).__getitems__([[0, 1], [Repeat(1)]])

    assert rows[0] == made
    assert rows[1] == [{**made[1], "labels": [IGNORED] * 3}]
    assert made == samples([2, 3])


def test_repeats_lose_their_labels_where_samples_have_none() -> None:
    made = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]

    rows = RowDataset(made).__getitems__([[0], [Repeat(1)]])

    assert rows == [
        [{"input_ids": [5, 6], "labels": [5, 6]}],
        [{"input_ids": [7, 8, 9], "labels": [IGNORED] * 3}],
    ]


def test_a_repeated_pair_loses_the_labels_of_both_sides() -> None:
    made = [
        {"chosen_input_ids": [1, 2], "rejected_input_ids": [3]},
        {"chosen_input_ids": [4], "rejected_input_ids": [5, 6]},
    ]

    rows = RowDataset(made).__getitems__([[0, Repeat(1)]])

    assert Collator(attention="none", mask_first_label=False)(rows)["labels"].tolist() == [
        [1, 2, 3, IGNORED, IGNORED, IGNORED]
    ]


# ---- flat buffers ----


def test_a_repeat_does_not_hide_that_a_sample_has_no_labels() -> None:
    """Filled with its tokens, such a sample would be trained on whole."""
    made = [{"input_ids": [1, 2], "labels": [-100, 2]}] * 2 + [{"input_ids": [7, 8]}]

    rows = RowDataset(made).__getitems__([[0, Repeat(1), 2]])

    assert rows[0][1]["labels"] == [-100, -100]
    assert "labels" not in rows[0][2]
    with pytest.raises(ValueError, match="sample 2 has no 'labels', but sample 0 has"):
        Collator(attention="none")(rows)


def test_only_a_collator_lays_out_flat_buffers() -> None:
    tokens = torch.tensor([1, 2])
    with pytest.raises(TypeError, match=r"collator must be a multipack\.Collator, but is a func"):
        PackedDataset(tokens, [0, 2], collator=lambda batch: batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["none", "bool", "flash"])
@pytest.mark.parametrize("labels", [False, True])
def test_a_batch_is_that_of_the_samples(samples: Samples, attention: str, labels: bool) -> None:
    made = samples(LENGTHS)
    collator = Collator(sequence_len=8, attention=attention, multipack_real_batches=True)
    data = packed(made, collator, labels)
    if not labels:
        made = [{"input_ids": sample["input_ids"]} for sample in made]

    for rows in ([[0]], [[3, 1], [11, 0, 2]], [[5, 5]]):
        assert same(data[rows], collator([[made[i] for i in row] for row in rows]))


@pytest.mark.parametrize("flattened", [False, True])
def test_a_fixed_number_of_samples_comes_as_a_list(samples: Samples, flattened: bool) -> None:
    made = samples(LENGTHS)
    collator = Collator(attention="flash", sample_packing=False, batch_flattening=flattened)

    assert same(packed(made, collator)[[4, 0]], collator([made[4], made[0]]))


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize(
    ("keys", "batch"),
    [
        ({}, [[1, 0, Repeat(2)]]),
        ({"multipack_real_batches": True}, [[1, 0], [Repeat(1), Repeat(0)]]),
        ({"sample_packing": False}, [1, Repeat(0)]),
        ({"sample_packing": False, "batch_flattening": True}, [Repeat(1), Repeat(0)]),
    ],
    ids=repr,
)
def test_repeats_have_no_labels_either_way(
    samples: Samples, keys: dict[str, Any], batch: list[Any], labels: bool
) -> None:
    made = samples([3, 5, 2])
    collator = Collator(attention="flash", **keys)

    found = packed(made, collator, labels)[batch]

    assert same(found, collator(RowDataset(made).__getitems__(batch)))
    repeated = [sample for row in batch for sample in (row if isinstance(row, list) else [row])]
    kept = sum(len(made[i]["labels"]) - 1 for i in repeated if not isinstance(i, Repeat))
    assert int((found["labels"] != IGNORED).sum()) == kept


def test_lengths_and_label_counts_are_for_the_sampler(samples: Samples) -> None:
    made = samples([3, 1, 4])
    made[2]["labels"] = [IGNORED, IGNORED, 7, IGNORED]
    data = packed(made, Collator(attention="none"))

    counts, starts = data.label_counts()

    assert data.lengths.tolist() == [3, 1, 4]
    assert counts.tolist() == [2, 0, 1]
    assert starts.tolist() == [True, True, False]
    kept, _ = data.label_counts(multipack.Config(mask_first_label=False))
    assert kept.tolist() == [3, 1, 1]


def test_offsets_may_begin_and_end_inside_the_tokens() -> None:
    """As those of a slice of a larger array do."""
    tokens = torch.arange(10)
    data = PackedDataset(tokens, np.array([2, 4, 7], np.uint8), collator=Collator(attention="none"))

    assert len(data) == 2
    assert data.lengths.tolist() == [2, 3]
    assert data[[[1, 0]]]["input_ids"].tolist() == [[4, 5, 6, 2, 3]]
    assert data.label_counts()[0].tolist() == [1, 2]


@pytest.mark.parametrize("batch", [[[1, 0]], [[1, Repeat(0)]]], ids=["plain", "repeat"])
def test_tokens_may_be_a_column_of_an_array(batch: list[list[int]]) -> None:
    table = np.arange(12).reshape(6, 2)
    collator = Collator(attention="none")
    data = PackedDataset(table[:, 0], [0, 2, 5], table[:, 1], collator=collator)
    dense = PackedDataset(table[:, 0].copy(), [0, 2, 5], table[:, 1].copy(), collator=collator)

    assert same(data[batch], dense[batch])


@pytest.mark.parametrize("batch", [[[0, 2], [1]], [[2, Repeat(0)], [1]]], ids=["plain", "repeat"])
def test_further_values_are_laid_out_like_the_tokens(batch: list[list[int]]) -> None:
    tokens, offsets = np.arange(10, 20), [1, 4, 6, 9]
    values = {
        "kind": np.arange(10, dtype=np.int32),
        "noise": torch.arange(10).bfloat16(),
        "loss_weights": np.arange(10),
    }
    collator = Collator(
        attention="none", multipack_real_batches=True, pad_values={"kind": -1, "noise": 0.5}
    )
    data = PackedDataset(tokens, offsets, collator=collator, values=values)
    samples = [
        {"input_ids": tokens[i:j], **{key: column[i:j] for key, column in values.items()}}
        for i, j in itertools.pairwise(offsets)
    ]

    made = pickle.loads(pickle.dumps(data))[batch]

    expected = collator(RowDataset(samples).__getitems__(batch))
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        assert made[key].dtype == value.dtype
        assert torch.equal(made[key], value)
    assert made["kind"].min() == -1


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        (
            {"labels": [1, 2]},
            ValueError,
            "'labels' is not a further key of a batch: leave it out",
        ),
        (
            {"kind": [1]},
            ValueError,
            "tokens has shape (2,), but kind has (1,): give one for each token",
        ),
        (
            {"kind": ["a", "b"]},
            TypeError,
            "kind must hold numbers, but is an array of <U1",
        ),
    ],
)
def test_further_values_that_do_not_fit_are_refused(
    values: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        PackedDataset([1, 2], [0, 2], collator=Collator(attention="none"), values=values)

    assert str(caught.value) == text


def test_read_only_memory_maps_are_viewed(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(10, dtype=np.int32).tofile(path)
    tokens = np.memmap(path, np.int32, mode="r")

    data = PackedDataset(tokens, [0, 4, 10], tokens, collator=Collator(attention="none"))

    assert data[[[1]]]["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9]]
    assert data._buffers[0].tokens.data_ptr() == tokens.ctypes.data


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            ([1.5], [0, 1]),
            TypeError,
            "tokens must be int32 or int64, but is an array of float64",
        ),
        (
            (torch.ones(2, dtype=torch.int16), [0, 1]),
            TypeError,
            "tokens must be int32 or int64, but is a tensor of torch.int16",
        ),
        (
            ([1, 2], [0, 2], [1]),
            ValueError,
            "tokens has shape (2,), but labels has (1,): give one for each token",
        ),
        (([1, 2], [0, 3]), ValueError, "offsets go from 0 to 3, but there are 2 tokens"),
        (([1, 2], [-1, 2]), ValueError, "offsets go from -1 to 2, but there are 2 tokens"),
        (([1, 2], [0, 2, 1]), ValueError, "offsets fall from 2 to 1 at sample 1"),
        (
            ([1, 2], []),
            ValueError,
            "offsets has shape (0,), but must have one dimension, with one entry more than there "
            "are samples",
        ),
        (
            ([1, 2], [0.0, 2.0]),
            TypeError,
            "offsets must hold integers, but is an array of float64",
        ),
    ],
)
def test_buffers_that_do_not_fit_are_refused(
    arguments: tuple[Any, ...], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        PackedDataset(*arguments, collator=Collator(attention="none"))

    assert str(caught.value) == text


@pytest.mark.parametrize("index", [3, -1])
def test_an_index_out_of_range_is_refused(samples: Samples, index: int) -> None:
    data = packed(samples([3, 5, 2]), Collator(attention="none"))

    with pytest.raises(IndexError) as caught:
        data[[[0, index]]]

    assert str(caught.value) == f"sample {index} is out of range: the data set has 3 samples"


def test_a_single_index_is_refused_with_the_way_out(samples: Samples) -> None:
    data = packed(samples([3, 5, 2]), Collator(attention="none"))

    with pytest.raises(TypeError) as caught:
        next(iter(DataLoader(data, batch_size=None)))

    assert str(caught.value) == (
        "a microbatch is a list of samples or of rows, not 0: give the DataLoader sampler=sampler "
        "and batch_size=None"
    )


def test_a_data_set_without_samples_has_no_lengths() -> None:
    data = PackedDataset([], [0], collator=Collator(attention="none"))

    assert len(data) == 0
    assert data.lengths.tolist() == data.label_counts()[0].tolist() == []


def test_a_data_set_survives_pickling(samples: Samples) -> None:
    data = packed(samples(LENGTHS), Collator(attention="flash"))

    assert same(data[[[3, 1]]], pickle.loads(pickle.dumps(data))[[[3, 1]]])


# ---- under a DataLoader ----


def sampler(**keys: Any) -> MultipackBatchSampler:
    return MultipackBatchSampler(LENGTHS, **{"sequence_len": 8, **keys})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_example_of_rows_works(samples: Samples, workers: int) -> None:
    dataset = samples(LENGTHS)
    collator = Collator(sequence_len=8, attention="flash")

    loader = DataLoader(
        RowDataset(dataset), batch_sampler=sampler(), collate_fn=collator, num_workers=workers
    )

    batches = list(loader)
    expected = [collator([[dataset[i] for i in row] for row in batch]) for batch in sampler()]
    assert len(loader) == len(batches) == len(expected)
    assert all(map(same, batches, expected))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "keys",
    [{}, {"multipack_real_batches": True}, {"sample_packing": False}],
    ids=repr,
)
def test_the_example_of_packed_data_works(
    samples: Samples, workers: int, keys: dict[str, Any]
) -> None:
    made = samples(LENGTHS)
    keys = {"micro_batch_size": 2, "sequence_len": 8, **keys}
    collator = Collator(attention="flash", **keys)
    data = packed(made, collator)

    loader = DataLoader(data, sampler=sampler(**keys), batch_size=None, num_workers=workers)

    batches = list(loader)
    expected = [data[batch] for batch in sampler(**keys)]
    assert len(loader) == len(batches) == len(expected) > 1
    assert all(map(same, batches, expected))
    assert type(batches[0]["max_length_q"]) is int


def test_packed_data_also_works_as_a_batch_samplers_data_set(samples: Samples) -> None:
    data = packed(samples(LENGTHS), Collator(sequence_len=8, attention="flash"))

    loader = DataLoader(data, batch_sampler=sampler(), collate_fn=lambda batch: batch)

    assert all(map(same, loader, [data[batch] for batch in sampler()]))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_make_the_same_batches(samples: Samples, method: str) -> None:
    """A parent that has planned has used its thread pool, which a forked worker must not."""
    made = samples(LENGTHS)
    collator = Collator(sequence_len=8, attention="bool")
    data = packed(made, collator)

    for dataset, keys in (
        (data, {"sampler": sampler(), "batch_size": None}),
        (RowDataset(made), {"batch_sampler": sampler(), "collate_fn": collator}),
    ):
        loader: Any = DataLoader(dataset, num_workers=1, multiprocessing_context=method, **keys)
        assert all(map(same, loader, [data[batch] for batch in sampler()]))


def test_an_epoch_of_ranks_and_workers_has_every_sample_once(samples: Samples) -> None:
    made = samples([4] * 24)
    data = packed(made, Collator(sequence_len=8, attention="none"))
    counts, starts = data.label_counts()
    seen: list[int] = []
    for rank in (0, 1):
        order = MultipackBatchSampler(
            data.lengths, counts, label_starts=starts, sequence_len=8, world_size=2, rank=rank
        )
        for batch in DataLoader(data, sampler=order, batch_size=None, num_workers=2):
            seen += batch["input_ids"].flatten().tolist()

    assert sorted(seen) == [token for sample in made for token in sample["input_ids"]]


def test_a_batch_of_many_small_samples_is_a_handful_of_shared_tensors() -> None:
    """One shared tensor for each sample runs a process out of file descriptors."""
    n = 500 * 40
    data = PackedDataset(torch.arange(n), torch.arange(n + 1), collator=Collator(attention="flash"))
    order = MultipackBatchSampler(data.lengths, sequence_len=500)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        kept = list(DataLoader(data, sampler=order, batch_size=None, num_workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert len(kept) == 40
    assert len([value for value in kept[0].values() if isinstance(value, torch.Tensor)]) == 5
