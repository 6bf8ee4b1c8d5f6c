"""How much the tables of others unpack to, found out before anything is unpacked.

A file of some hundred bytes may stand for gigabytes: Parquet counts equal values, and buffers of
Arrow may be compressed. What a file says of that in its summary need not be true, so this looks at
what Arrow itself goes by, and as it does: the header of each page of Parquet, in Thrift's compact
protocol (https://parquet.apache.org/docs/file-format/data-pages), and the first eight bytes of each
compressed buffer of Arrow, whose place a FlatBuffer tells
(https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc).

It takes some 20 µs for each page and each record batch, and no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ._errors import CliError

# Of all that is unpacked at once, unless it is packed in not much less: a hundred million numbers.
MOST = 800_000_000

_DAMAGED = (AttributeError, IndexError, KeyError, RecursionError, TypeError, struct.error)


def is_bomb(unpacked: int, packed: int) -> bool:
    """Whether so many bytes out of so few are more than data can be meant to have."""
    return unpacked > max(MOST, 100 * packed)


class RowGroup(NamedTuple):
    """What the footer of a Parquet file says of a row group."""

    rows: int
    """How many it has."""
    columns: list[Any]
    """Its columns, for `pages_of`."""


class Pages(NamedTuple):
    """What the pages of a column hold."""

    values: int
    """Values, nulls included."""
    packed: int
    """Bytes of all pages as they are."""
    unpacked: int
    """Bytes of all pages, unpacked."""
    largest: int
    """Bytes of the largest page, unpacked."""


def row_groups_of(file: memoryview) -> list[RowGroup]:
    """The row groups of a Parquet file; asked for them, pyarrow 26 aborts where they are damaged.

    Raises:
        CliError: If there is no footer that says what is in them.
    """
    try:
        start = len(file) - 8 - struct.unpack_from("<I", file, len(file) - 8)[0]
        footer, _ = _thrift(file, start, _STRUCT)
        return [
            RowGroup(group[3, _INT64], [column[3, _STRUCT] for column in group[1, _LIST]])
            for group in footer[4, _LIST]
        ]
    except _DAMAGED as error:
        raise CliError("no footer that says where the columns are") from error


def pages_of(file: memoryview, column: Any) -> Pages:
    """Look through the pages of a column of a row group.

    Raises:
        CliError: If what is there are no pages.
    """
    values, unpacked, largest, at = 0, 0, 0, 0
    try:
        packed, start = column[7, _INT64], column[9, _INT64]
        start = at = min(start, column.get((11, _INT64)) or start)
        # Arrow reads a little further, because of files that are wrong by so much.
        while at < start + packed + 100 and values < column[5, _INT64]:
            header, at = _thrift(file, at, _STRUCT)
            size, length = header[2, _INT32], header[3, _INT32]
            counts = [data[1, _INT32] for data in map(header.get, _DATA) if data is not None]
            if min(start, size, length, *counts) < 0:
                raise IndexError
            at += length
            values += sum(counts)
            unpacked += size
            largest = max(largest, size)
    except _DAMAGED as error:
        raise CliError(f"no page of a column at byte {at}") from error
    return Pages(values, packed, unpacked, largest)


_INT32, _INT64, _LIST, _STRUCT = 5, 6, 9, 12
# What is said of the values, in one version of pages and in the other.
_DATA = ((5, _STRUCT), (8, _STRUCT))


def _thrift(data: memoryview, at: int, kind: int) -> tuple[Any, int]:
    """The number, list or struct of this kind at byte `at`, and where the next value is.

    Of a struct these are its fields, by number and kind: readers pass over one of another kind.
    """
    if kind in (1, 2):  # true and false, which in lists take a byte
        return None, at
    if kind == 3:
        return None, at + 1
    if kind == 7:
        return None, at + 8
    if kind in (4, _INT32, _INT64):
        number, at = _varint(data, at)
        number &= (1 << (64 if kind == _INT64 else 32)) - 1  # as Thrift does
        return (number >> 1) ^ -(number & 1), at
    if kind == 8:
        length, at = _varint(data, at)
        return None, at + length
    if kind in (_LIST, 10):
        head, at = data[at], at + 1
        length, of = head >> 4, head & 15
        if length == 15:
            length, at = _varint(data, at)
        if length > len(data) - at:  # of values that take a byte or more
            raise IndexError
        values = []
        for _ in range(length):
            value, at = _thrift(data, at, 3 if of in (1, 2) else of)
            values.append(value)
        return values, at
    if kind != _STRUCT:
        raise KeyError(kind)
    fields, number = {}, 0
    while (head := data[at]) & 15:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _thrift(data, at, _INT32)
        fields[number, kind], at = _thrift(data, at, kind)
    return fields, at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte, at = data[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise IndexError


def check_batch(messages: Iterable[Any], number: int) -> bool:
    """Check the next record batch, and what comes before it.

    Args:
        messages: The messages of an Arrow stream or file, from the batch before on.
        number: Which batch it is, from 0.

    Returns:
        bool: Whether there is one.

    Raises:
        CliError: If it unpacks to far more than there is of it.
    """
    for message in messages:
        if message.type not in ("record batch", "dictionary"):
            continue
        try:
            unpacked = _unpacked(message)
        except _DAMAGED as error:
            raise CliError(f"record batch {number} is damaged") from error
        packed = message.body.size
        if is_bomb(unpacked, packed):
            raise CliError(
                f"record batch {number} unpacks to {unpacked:,} bytes from {packed:,}: write it in "
                "smaller ones, or uncompressed"
            )
        if message.type == "record batch":
            return True
    return False


def _unpacked(message: Any) -> int:
    """Bytes of the buffers of a record batch or a dictionary, as far as they are compressed."""
    data, body = memoryview(message.metadata), memoryview(message.body)
    root = _target(data, 0)
    batch = _target(data, _field(data, root, 2))
    if message.type == "dictionary":
        batch = _target(data, _field(data, batch, 1))
    # Arrow 0.17 told of it elsewhere, where there are remarks, and is still understood.
    before = message.metadata_version.name == "V4" and _field(data, root, 4)
    if not _field(data, batch, 3) and not before:
        return 0
    buffers = _target(data, _field(data, batch, 2))
    total = 0
    for number in range(struct.unpack_from("<I", data, buffers)[0]):
        start, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
        if length > 0:
            total += max(0, struct.unpack_from("<q", body, start)[0])
    return total


def messages_of(file: Any) -> Iterator[Any]:
    """The messages that the footer of an Arrow file names: dictionaries, and then record batches.

    Args:
        file: The file, as a buffer of Arrow.

    Raises:
        CliError: If the footer names what is none.
    """
    import pyarrow as pa  # type: ignore[import-untyped]

    try:
        data = memoryview(file)
        footer = _target(data, len(data) - 10 - struct.unpack_from("<I", data, len(data) - 10)[0])
        for kind in (2, 3):
            place = _field(data, footer, kind)
            blocks = _target(data, place) if place else 0
            for number in range(struct.unpack_from("<I", data, blocks)[0] if blocks else 0):
                start, head, body = struct.unpack_from("<qi4xq", data, blocks + 4 + 24 * number)
                if min(start, head, body) < 0:
                    raise IndexError
                yield pa.ipc.read_message(file[start : start + head + body])
    except (*_DAMAGED, pa.ArrowException, OSError, EOFError) as error:
        raise CliError("no footer that says where the record batches are") from error


def _target(data: memoryview, at: int) -> int:
    """Where what a FlatBuffer refers to at byte `at` is."""
    return int(at + struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table of a FlatBuffer is; 0 if there is none."""
    places = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, places)[0]:
        return 0
    place = struct.unpack_from("<H", data, places + 4 + 2 * number)[0]
    return int(table + place) if place else 0
