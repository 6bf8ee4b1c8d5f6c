"""Views of a Hugging Face data set's Arrow buffers.

A column of lists is, in each chunk, one flat buffer of values and the offsets of its lists. The
buffers are viewed as NumPy arrays, whatever slices lie on them; the offsets of all chunks are
joined into one array that counts through the chunks. What a selection leaves out may have any fault
that does not move the samples after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The tokens of a data set, its labels if it has some, and what else was asked for."""

    chunks: list[dict[str, npt.NDArray[Any]]]
    """`input_ids`, perhaps `labels`, and further columns of each chunk, as views; at least one."""
    offsets: Int64s
    """(N+1,): where each sample begins, counted through the chunks from 0."""
    first_samples: Int64s
    """(C,): the first sample of each chunk."""
    mapping: Int64s | None
    """The sample behind each index of the data set; None: the sample of that number."""


def read(dataset: Any, further: Sequence[str] = ()) -> Columns:
    """View the columns of a data set; `PackedDataset.from_arrow` says what is refused."""
    table = getattr(getattr(dataset, "data", None), "table", None)
    if not isinstance(table, pa.Table):
        raise TypeError(
            f"from_arrow takes one split, a datasets.Dataset, but found a {type(dataset).__name__}"
        )
    if dataset.format["type"] == "custom":
        raise ValueError(
            "the data set makes its samples by a transform, which its Arrow buffers do not show: "
            "apply it with map, or use RowDataset"
        )
    for name in ("input_ids", *further):
        if name not in table.column_names:
            raise ValueError(
                f"the data set has no column {name!r}, but {', '.join(table.column_names)}"
            )
    known = ("input_ids", "labels", "attention_mask")
    names = [*(name for name in known if name in table.column_names), *further]
    for name in names:
        _check_type(name, table.schema.field(name).type)

    indices = dataset._indices
    mapping = None
    if indices is not None:
        mapping = indices.column(0).to_numpy().astype(np.int64)

    chunks: list[dict[str, npt.NDArray[Any]]] = []
    borders, first_samples, faults = [np.zeros(1, np.int64)], [], []
    samples = 0
    for batch in table.select(names).to_batches():
        if batch.num_rows == 0:
            continue
        try:
            # Arrow takes offsets out of a file as they are, and would follow them anywhere.
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise ValueError(f"the data set's table is damaged: {error}") from error
        lists = {name: _Lists(name, batch.column(name)) for name in names}
        faults += [
            dataclasses.replace(fault, samples=fault.samples + samples) for fault in _faults(lists)
        ]
        tokens = lists["input_ids"]
        # A mask may be of bools, which Arrow keeps in bits.
        chunks.append({name: lists[name].view() for name in names if name != "attention_mask"})
        borders.append(borders[-1][-1] + tokens.offsets[1:] - tokens.offsets[0])
        first_samples.append(samples)
        samples += batch.num_rows
    _refuse(faults, mapping)
    if not chunks:
        empty = np.zeros(0, np.int64)
        chunks, first_samples = [dict.fromkeys(names, empty)], [0]
    return Columns(chunks, np.concatenate(borders), np.array(first_samples), mapping)


class _Lists:
    """One chunk of a column of lists."""

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.array = array
        # Absolute in the values, which know nothing of the slice.
        self.offsets: Int64s = array.offsets.to_numpy().astype(np.int64)
        self.lengths: Int64s = np.diff(self.offsets)
        self.values = array.values.slice(self.offsets[0], self.offsets[-1] - self.offsets[0])

    def view(self) -> npt.NDArray[Any]:
        """The values of all lists, end to end, where Arrow keeps them."""
        dtype = np.dtype(self.values.type.to_pandas_dtype())
        buffer = self.values.buffers()[1]
        if buffer is None:
            return np.zeros(0, dtype)
        start = self.values.offset
        return np.frombuffer(buffer, dtype)[start : start + len(self.values)]

    def rows_of(self, flags: Any) -> Int64s:
        """The lists that hold a flagged value."""
        places = np.flatnonzero(flags.to_numpy(zero_copy_only=False)) + self.offsets[0]
        return np.unique(np.searchsorted(self.offsets, places, side="right") - 1)


@dataclasses.dataclass(frozen=True)
class _Fault:
    """Samples that cannot be used, and what is wrong with them."""

    samples: Int64s
    """Rising."""
    text: str
    """What follows "sample 17": a template for the numbers of that sample."""
    numbers: tuple[Int64s, ...] = ()
    """Each as long as `samples`."""
    shifts: bool = False
    """Whether the fault moves the samples after it, so that it counts though it be left out."""

    def describe(self, sample: int) -> str:
        at = np.searchsorted(self.samples, sample)
        return self.text.format(*(column[at] for column in self.numbers))


def _faults(lists: dict[str, _Lists]) -> Iterator[_Fault]:
    """Find what is wrong with a chunk; single values are looked at only where something is."""
    tokens = lists["input_ids"]
    for name, column in lists.items():
        if column.array.null_count > 0:
            flags = column.array.is_null().to_numpy(zero_copy_only=False)
            yield _Fault(np.flatnonzero(flags), f"is null in {name}")
        if column.values.null_count > 0:
            yield _Fault(column.rows_of(column.values.is_null()), f"holds a null in {name}")
        differing = np.flatnonzero(column.lengths != tokens.lengths)
        if differing.size > 0:
            yield _Fault(
                differing,
                f"has {{}} input_ids but {{}} {name}: give one for each token",
                (tokens.lengths[differing], column.lengths[differing]),
                shifts=name != "attention_mask",
            )
    mask = lists.get("attention_mask")
    if mask is not None and len(mask.values) > 0:
        flags = pyarrow.compute.not_equal(mask.values, pa.scalar(1).cast(mask.values.type))
        if pyarrow.compute.any(flags).as_py():
            yield _Fault(
                mask.rows_of(flags.fill_null(False)),
                "has an attention_mask that is not all ones, but samples come without padding: "
                "tokenise with padding=False, or cut the padding off",
            )


def _refuse(faults: list[_Fault], mapping: Int64s | None) -> None:
    """Raise for the first sample of the data set that has a fault."""
    first: tuple[int, str] | None = None
    for fault in faults:
        places = fault.samples
        if mapping is not None:
            places = np.flatnonzero(np.isin(mapping, fault.samples))
        if places.size > 0 and (first is None or places[0] < first[0]):
            place = int(places[0])
            first = (place, fault.describe(place if mapping is None else int(mapping[place])))
    if first is not None:
        raise ValueError(f"sample {first[0]} {first[1]}")
    for fault in faults:
        if fault.shifts:
            row = int(fault.samples[0])
            raise ValueError(
                f"row {row} of the table, which the data set leaves out, {fault.describe(row)}, or "
                "call flatten_indices to leave it out for good"
            )


def _check_type(name: str, found: Any) -> None:
    """Refuse a column that is not of lists of the numbers that the ops take."""
    is_of_lists = pa.types.is_list(found) or pa.types.is_large_list(found)
    value = found.value_type if is_of_lists else pa.null()
    if name in ("input_ids", "labels"):
        allowed, right = "int32 or int64", value in (pa.int32(), pa.int64())
    elif name == "attention_mask":
        allowed = "integers or bools"
        right = pa.types.is_integer(value) or pa.types.is_boolean(value)
    else:
        allowed = "integers or floats"
        right = pa.types.is_integer(value) or pa.types.is_floating(value)
    if not right:
        raise TypeError(
            f"column '{name}' is of type {found}, but must be of lists of {allowed}: "
            "cast it with cast_column"
        )
