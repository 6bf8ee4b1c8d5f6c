"""Hugging Face data sets, read from their Arrow buffers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from multipack import Collator, MultipackBatchSampler, PackedDataset, RowDataset
from multipack._config import Config

IGNORED = -100
LENGTHS = [3, 5, 2, 0, 6, 4, 4, 1, 7, 8, 2, 6, 3]
Make = Callable[[datasets.Dataset], datasets.Dataset]


def dataset(lengths: list[int] = LENGTHS, labels: bool = True) -> datasets.Dataset:
    columns = {"input_ids": [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]}
    if labels:
        columns["labels"] = [
            [IGNORED if i % 3 == 0 else i for i in ids] for ids in columns["input_ids"]
        ]
    features = datasets.Features(
        {
            name: datasets.Sequence(datasets.Value("int32" if name == "input_ids" else "int64"))
            for name in columns
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


def collator(**keys: Any) -> Collator:
    return Collator(attention="flash", multipack_real_batches=True, **keys)


def from_arrow(data: Any, **keys: Any) -> PackedDataset:
    return PackedDataset.from_arrow(data, collator=collator(**keys))


def error_of(kind: type[Exception], data: Any) -> str:
    with pytest.raises(kind) as caught:
        from_arrow(data)
    return str(caught.value)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


def on_disk(data: datasets.Dataset, tmp_path: Path, shards: int = 1) -> datasets.Dataset:
    data.save_to_disk(str(tmp_path / "data"), num_shards=shards)
    return datasets.load_from_disk(str(tmp_path / "data"))


def large_lists(data: datasets.Dataset) -> datasets.Dataset:
    lists = {name: datasets.LargeList(value.feature) for name, value in data.features.items()}
    return data.cast(datasets.Features(lists))


VIEWS: dict[str, Make] = {
    "as it is": lambda data: data,
    "slice": lambda data: data.select(range(2, 9)),
    "selection": lambda data: data.select([7, 1, 1, 12, 4]),
    "shuffle": lambda data: data.shuffle(seed=0),
    "filter": lambda data: data.filter(lambda sample: len(sample["input_ids"]) > 2),
    "shuffle of a slice": lambda data: data.select(range(3, 11)).shuffle(seed=1),
    "two chunks": lambda data: datasets.concatenate_datasets([data, data]),
    "many slices": lambda data: datasets.concatenate_datasets(
        [data.select(range(i, i + 2)) for i in range(0, 12, 2)]
    ),
    "shuffle of chunks": lambda data: datasets.concatenate_datasets(
        [data, data.select(range(4, 9))]
    ).shuffle(seed=2),
    "large lists": large_lists,
    "large lists, slice of a shuffle": lambda data: (
        large_lists(data).shuffle(seed=3).select(range(1, 8))
    ),
    "another column": lambda data: data.add_column("score", [0.5] * len(data)),
    "labels in other chunks": lambda data: datasets.concatenate_datasets(
        [
            datasets.concatenate_datasets([data, data]).select_columns("input_ids"),
            datasets.concatenate_datasets(
                [data.select(range(5)), data.select(range(5, 13)), data]
            ).select_columns("labels"),
        ],
        axis=1,
    ),
    "numpy format": lambda data: data.with_format("numpy"),
}


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("view", VIEWS)
def test_batches_are_those_of_the_data_sets_own_samples(view: str, labels: bool) -> None:
    if not labels and view == "labels in other chunks":
        view = "as it is"
    data = VIEWS[view](dataset(labels=labels))
    columns = ["input_ids", "labels"] if labels else ["input_ids"]
    packed = from_arrow(data)
    order = np.random.default_rng(0)

    assert len(packed) == len(data)
    assert packed.lengths.tolist() == [len(ids) for ids in data["input_ids"]]
    full = [i for i, n in enumerate(packed.lengths.tolist()) if n > 0]
    for _ in range(10):
        rows = [order.choice(full, 4).tolist(), order.choice(full, 2).tolist()]
        expected = collator()(RowDataset(data.select_columns(columns)).__getitems__(rows))
        assert same(packed[rows], expected)


@pytest.mark.parametrize("view", ["as it is", "shuffle of a slice", "two chunks"])
def test_named_columns_come_along(view: str) -> None:
    lengths = dataset().with_format("numpy")["input_ids"]
    weights = [[0.5 * i] * len(ids) for i, ids in enumerate(lengths)]
    data = VIEWS[view](dataset().add_column("loss_weights", weights))
    packed = PackedDataset.from_arrow(data, collator=collator(), columns=["loss_weights"])
    rows = [[0, 3], [5, 1]]

    assert packed[rows]["loss_weights"].dtype == torch.float32
    assert same(packed[rows], collator()(RowDataset(data).__getitems__(rows)))
    assert same(pickle.loads(pickle.dumps(packed))[rows], packed[rows])


def test_named_columns_that_cannot_come_along_are_refused() -> None:
    data = dataset([2, 1]).add_column("text", [["a", "b"], ["c"]])
    data = data.add_column("kind", [[1], [2]])

    for columns, kind, text in (
        (["kinds"], ValueError, "the data set has no column 'kinds', but input_ids, labels, text"),
        (["labels"], ValueError, "'labels' is not a further key of a batch: leave it out"),
        (["text"], TypeError, "but must be of lists of integers or floats: cast it with"),
        (["kind"], ValueError, "sample 0 has 2 input_ids but 1 kind: give one for each token"),
    ):
        with pytest.raises(kind) as caught:
            PackedDataset.from_arrow(data, collator=collator(), columns=columns)
        assert text in str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_data_set_on_disk_is_read_where_it_lies(tmp_path: Path, shards: int) -> None:
    data = on_disk(dataset(), tmp_path, shards).shuffle(seed=0)
    packed = from_arrow(data)

    assert len(packed._buffers) == shards
    assert all(file["filename"].startswith(str(tmp_path)) for file in data.cache_files)
    for i in (0, 7, 12):
        assert packed[[[i, 5]]]["input_ids"].tolist() == [
            data[i]["input_ids"] + data[5]["input_ids"]
        ]


@pytest.mark.parametrize("view", ["as it is", "slice", "selection", "large lists"])
def test_nothing_of_the_data_set_is_copied(view: str) -> None:
    data = VIEWS[view](dataset())
    table = data.data.table
    values = {
        name: table.column(name).chunk(0).values.buffers()[1] for name in ("input_ids", "labels")
    }

    (buffers,) = from_arrow(data)._buffers

    for tensor, buffer in (
        (buffers.tokens, values["input_ids"]),
        (buffers.labels, values["labels"]),
    ):
        assert tensor is not None
        assert buffer.address <= tensor.data_ptr() < buffer.address + buffer.size


def test_batches_own_their_memory() -> None:
    data = dataset()
    packed = from_arrow(data)
    before = data.to_list()

    for value in packed[[[4]]].values():
        if isinstance(value, torch.Tensor):
            value.fill_(7)

    assert data.to_list() == before


def test_the_buffers_outlive_the_data_set() -> None:
    packed = PackedDataset.from_arrow(dataset(), collator=collator())
    expected = dataset()[4]["input_ids"]
    packed._arrow = None

    assert packed[[[4]]]["input_ids"].tolist() == [expected]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "config",
    [
        None,
        Config(mask_first_label=False),
        Config(sequence_len=3, excess_length_strategy="truncate"),
    ],
    ids=["default", "first label", "truncate"],
)
def test_label_counts_are_those_of_the_samples(view: str, config: Config | None) -> None:
    data = VIEWS[view](dataset())
    settings = config or Config()
    cut = settings.sequence_len

    counts, starts = from_arrow(data).label_counts(config)

    labels = [list(sample) for sample in data["labels"]]
    first = 1 if settings.mask_first_label else 0
    assert counts.tolist() == [sum(i != IGNORED for i in s[first:cut]) for s in labels]
    assert starts.tolist() == [bool(s) and s[0] != IGNORED for s in labels]


def test_without_labels_every_token_counts() -> None:
    counts, starts = from_arrow(dataset([3, 1, 0, 4], labels=False)).label_counts()

    assert counts.tolist() == [2, 0, 0, 3]
    assert starts.tolist() == [True, True, False, True]


def test_an_empty_data_set_is_empty() -> None:
    packed = from_arrow(dataset([]))

    assert len(packed) == 0
    assert packed.lengths.tolist() == packed.label_counts()[0].tolist() == []


def test_samples_that_are_all_empty_have_no_tokens() -> None:
    packed = from_arrow(dataset([0, 0]))

    assert packed.lengths.tolist() == packed.label_counts()[0].tolist() == [0, 0]


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (1, "spawn")])
def test_the_example_works(tmp_path: Path, workers: int, method: str | None) -> None:
    data = on_disk(dataset(), tmp_path, shards=2).shuffle(seed=0)
    config = Config(sequence_len=8)

    packed = PackedDataset.from_arrow(data, collator=Collator(config, attention="flash"))
    counts, starts = packed.label_counts()
    with pytest.warns(UserWarning, match="of 13 samples"):  # some of them empty or unlabelled
        sampler = MultipackBatchSampler(packed.lengths, counts, config, label_starts=starts)
    loader = DataLoader(
        packed,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,
    )

    seen = [token for batch in loader for token in batch["input_ids"].flatten().tolist()]
    retained = [i for i, count in enumerate(counts.tolist()) if count > 0]
    assert sorted(seen) == sorted(t for i in retained for t in data[i]["input_ids"])


def test_a_pickled_data_set_on_disk_names_its_file(tmp_path: Path) -> None:
    packed = from_arrow(on_disk(dataset([1000] * 100), tmp_path))
    pickled = pickle.dumps(packed)

    assert len(pickled) < 10_000  # of 1.2 MB of tokens and labels
    assert same(pickle.loads(pickled)[[[3, 99]]], packed[[[3, 99]]])


def test_a_mask_of_ones_is_passed_over() -> None:
    for value in ("int8", "int64", "bool"):
        data = dataset().add_column(
            "attention_mask",
            [[1 if value != "bool" else True] * n for n in LENGTHS],
            feature=datasets.Sequence(datasets.Value(value)),
        )

        assert same(from_arrow(data)[[[4, 5]]], from_arrow(dataset())[[[4, 5]]])


# ---- what it refuses ----


def with_column(name: str, values: list[Any], value: str = "int64") -> datasets.Dataset:
    data = dataset([3, 1, 2, 4])
    if name in data.column_names:
        data = data.remove_columns(name)
    return data.add_column(name, values, feature=datasets.Sequence(datasets.Value(value)))


FAULTS: dict[str, tuple[datasets.Dataset, int, str]] = {
    "short labels": (
        with_column("labels", [[1] * 3, [1], [1] * 2, [1] * 3]),
        3,
        "has 4 input_ids but 3 labels: give one for each token",
    ),
    "no labels": (
        with_column("labels", [[1] * 3, None, [1] * 2, [1] * 4]),
        1,
        "is null in labels",
    ),
    "no ids": (
        with_column("input_ids", [[1] * 3, [1], None, [1] * 4], "int32"),
        2,
        "is null in input_ids",
    ),
    "a null id": (
        with_column("input_ids", [[1] * 3, [1], [1, None], [1] * 4], "int32"),
        2,
        "holds a null in input_ids",
    ),
    "left padding": (
        with_column("attention_mask", [[1] * 3, [1], [0, 1], [1] * 4], "int8"),
        2,
        "has an attention_mask that is not all ones, but samples come without padding: tokenise "
        "with padding=False, or cut the padding off",
    ),
    "a short mask": (
        with_column("attention_mask", [[1] * 2, [1], [1] * 2, [1] * 4], "int8"),
        0,
        "has 3 input_ids but 2 attention_mask: give one for each token",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_cannot_be_used_is_named(fault: str) -> None:
    data, sample, text = FAULTS[fault]
    order = [3, 1, 0, 2]

    assert error_of(ValueError, data) == f"sample {sample} {text}"
    assert error_of(ValueError, data.select(order)) == f"sample {order.index(sample)} {text}"
    later = datasets.concatenate_datasets([data.select([3 if sample != 3 else 0]), data])
    assert error_of(ValueError, later) == f"sample {sample + 1} {text}"


@pytest.mark.parametrize("fault", ["a null id", "left padding", "a short mask"])
def test_a_sample_that_is_left_out_may_have_faults(fault: str) -> None:
    data, sample, _ = FAULTS[fault]
    rest = [i for i in (3, 1, 0, 2) if i != sample]

    packed = from_arrow(data.select(rest))

    ids = data["input_ids"]
    assert packed[[[0, 2]]]["input_ids"].tolist() == [ids[rest[0]] + ids[rest[2]]]


def test_a_sample_that_is_left_out_may_be_null() -> None:
    data = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], None, [3, 4]], "labels": [[5, 6], None, [7, 8]]}
    ).cast(dataset().features)

    packed = from_arrow(data.filter(lambda sample: sample["input_ids"] is not None))

    assert packed[[[1, 0]]]["labels"].tolist() == [[IGNORED, 8, IGNORED, 6]]


def test_a_sample_that_is_left_out_may_not_move_the_labels_of_others() -> None:
    data, _, _ = FAULTS["short labels"]
    rest = data.select([1, 2, 0])

    assert error_of(ValueError, rest) == (
        "row 3 of the table, which the data set leaves out, has 4 input_ids but 3 labels: give one "
        "for each token, or call flatten_indices to leave it out for good"
    )
    assert from_arrow(rest.flatten_indices())[[[2, 0]]]["labels"].tolist() == [
        [IGNORED, 1, 1, IGNORED]
    ]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("input_ids", "uint16", "list<item: uint16>"),
        ("input_ids", "float32", "list<item: float>"),
        ("labels", "int8", "list<item: int8>"),
    ],
)
def test_columns_of_other_types_are_refused(name: str, value: str, found: str) -> None:
    assert error_of(TypeError, with_column(name, [[1] * 3, [1], [1] * 2, [1] * 4], value)) == (
        f"column '{name}' is of type {found}, but must be of lists of int32 or int64: cast it with "
        "cast_column"
    )


def test_what_is_no_data_set_of_tokens_is_refused() -> None:
    data = dataset()

    assert error_of(TypeError, [{"input_ids": [1]}]) == (
        "from_arrow takes one split, a datasets.Dataset, but found a list"
    )
    assert error_of(TypeError, datasets.DatasetDict({"train": data})) == (
        "from_arrow takes one split, a datasets.Dataset, but found a DatasetDict"
    )
    assert error_of(TypeError, data.to_iterable_dataset()) == (
        "from_arrow takes one split, a datasets.Dataset, but found a IterableDataset"
    )
    assert error_of(ValueError, data.rename_column("input_ids", "ids")) == (
        "the data set has no column 'input_ids', but ids, labels"
    )
    assert error_of(TypeError, data.map(lambda _: {"labels": 1})) == (
        "column 'labels' is of type int64, but must be of lists of int32 or int64: cast it with "
        "cast_column"
    )


def test_a_data_set_that_makes_its_samples_by_a_transform_is_refused() -> None:
    data = dataset().with_transform(lambda batch: batch)

    assert error_of(ValueError, data) == (
        "the data set makes its samples by a transform, which its Arrow buffers do not show: apply "
        "it with map, or use RowDataset"
    )


def test_pyarrow_slices_and_offsets_are_absolute() -> None:
    """Or the tests above would not test that a slice is looked through."""
    chunk = dataset().select(range(2, 9)).data.table.column("input_ids").chunk(0)

    assert isinstance(chunk, pa.ListArray)
    assert chunk.offsets[0].as_py() == 8
    assert len(chunk.values) == sum(LENGTHS)
