"""Plans as files: written alike everywhere, and read without trust.

A file is a NumPy archive, a zip of arrays that are stored as they are: `index`, `row_offsets` and
`batch_offsets` (int64), `header` (uint8: the settings and the report, as JSON) and a `checksum` of
the others. The checksum finds what was damaged by accident. What was made to do harm can have a
right one, so nothing is believed that can be looked at: reading takes memory in proportion to the
size of the file, whatever the file says of itself, and gives a plan whose offsets and report are of
the right shape. Whether it is the plan of some samples is for `Plan.verify` to say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, BinaryIO, NamedTuple, Union

import numpy as np
import numpy.typing as npt

from multipack._arrays import shown
from multipack._config import Config, layout
from multipack._npy import parse
from multipack._stats import Statistics, Tally
from multipack._verify import check_offsets

FORMAT = 1
TENSORS = ("index", "row_offsets", "batch_offsets")

Array = npt.NDArray[Any]


def write(path: str | PathLike[str], arrays: dict[str, Array], config: Config, report: Any) -> None:
    """Write a plan; see `Plan.save`."""
    header = {"format": FORMAT, "config": vars(config), "report": report}
    text = json.dumps(header).encode()
    # Nothing else by name: before 2.1 NumPy keeps every keyword as an array.
    named: dict[str, Any] = {
        "header": np.frombuffer(text, np.uint8),
        "checksum": np.frombuffer(checksum(text, arrays), np.uint8),
        **arrays,
    }
    with open(path, "wb") as file:
        np.savez(file, **named)


def read(path: str | PathLike[str]) -> tuple[dict[str, Array], Config, dict[str, Any]]:
    """Read a plan: its arrays, its settings and its report; see `load_plan`."""
    with open(path, "rb") as file:
        try:
            arrays = _arrays(file)
        except Exception as error:
            # zipfile and NumPy raise a dozen classes for what is no archive, and speak of pickles.
            raise ValueError(
                f"{path} is not a saved plan, or only a part of one: make it with Plan.save"
            ) from error
    text = arrays.pop("header").tobytes()
    if arrays.pop("checksum").tobytes() != checksum(text, arrays):
        raise ValueError(f"{path} is damaged: its checksum is not that of its contents; plan anew")
    try:
        config, report = _header(text)
        _check(arrays, config, report)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no plan: {error}") from error
    return arrays, config, report


def is_plan(path: str | PathLike[str]) -> bool:
    """Whether a file has the members of a saved plan, whatever is in them."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {f"{name}.npy" for name in (*TENSORS, "header")} <= set(archive.namelist())
    except Exception:  # of as many classes as in `read`
        return False


def checksum(header: bytes, arrays: Mapping[str, Array]) -> bytes:
    """Hash what a saved plan holds; a file that was cut or edited has another."""
    digest = hashlib.blake2b(header, digest_size=16)
    for name in TENSORS:
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _arrays(file: BinaryIO) -> dict[str, Array]:
    """Return the arrays of an archive, which take no more memory than the file."""
    dtypes = {**dict.fromkeys(TENSORS, "<i8"), "header": "|u1", "checksum": "|u1"}
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if sorted(member.filename for member in members) != sorted(f"{n}.npy" for n in dtypes):
            raise ValueError("other members")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("compressed, so that its size says nothing")
        if sum(member.file_size for member in members) > os.fstat(file.fileno()).st_size:
            raise ValueError("members that lie over one another")
        return {name: _array(archive.read(f"{name}.npy"), dtype) for name, dtype in dtypes.items()}


def _array(content: bytes, dtype: str) -> Array:
    """Return the array of one dimension in a .npy file, of exactly this dtype."""
    array = parse(content)
    if array.ndim != 1 or array.dtype.str != dtype:
        raise ValueError("an array of another kind")
    copied: Array = array.copy()
    return copied


def _header(text: bytes) -> tuple[Config, dict[str, Any]]:
    """Return the settings and the report of a header, which has the right keys and kinds."""
    try:
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict) or "format" not in header:
        raise ValueError("its header has no format")
    if header["format"] != FORMAT:
        raise ValueError(
            f"it has format {shown(header['format'])}, but this version reads format {FORMAT}"
        )
    _expect("header", header, _HEADER)
    return Config(**header["config"]), header["report"]


def _check(arrays: Mapping[str, Array], config: Config, report: Mapping[str, Any]) -> None:
    """Check that offsets rise, and that settings, report and arrays speak of the same plan."""
    index, rows, batches = (arrays[name] for name in TENSORS)
    check_offsets("row_offsets", rows, len(index), "samples")
    check_offsets("batch_offsets", batches, len(rows) - 1, "rows")
    if len(index) > 0 and index.min() < 0:
        raise ValueError(f"index[{index.argmin()}] is {index.min()}, but samples count from 0")
    facts = {
        "world_size": config.world_size,
        "layout": layout(config, report["split"]),
        "microbatches_per_rank": (len(batches) - 1) / config.world_size,
    }
    for name, value in facts.items():
        if report[name] != value:
            raise ValueError(
                f"report.{name} is {shown(report[name])}, but settings and arrays say {value}"
            )
    if report["repeated_samples"] > len(index):
        raise ValueError(
            f"report.repeated_samples is {report['repeated_samples']}, but there are {len(index)}"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a key twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"its header holds {name}, which is no number")


class _Kind(NamedTuple):
    """What a value must be."""

    text: str
    passes: Callable[[Any], bool]

    def or_none(self) -> _Kind:
        """The same, or nothing."""
        return _Kind(f"{self.text}, or null", lambda value: value is None or self.passes(value))


_COUNT = _Kind(
    f"an integer from 0 to {2**63 - 1}", lambda value: type(value) is int and 0 <= value < 2**63
)
_NUMBER = _Kind("a number", lambda value: type(value) in (int, float))
_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_TEXTS = _Kind(
    "a list of strings",
    lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
)
_SPLIT = _Kind("'train' or 'eval'", lambda value: value in ("train", "eval"))
_MAPPING = _Kind("an object", lambda value: isinstance(value, dict))

# A kind, or the keys of an object, each with what its value must be.
_Shape = Union[_Kind, "dict[str, _Shape]"]


def _of(cls: Any) -> dict[str, _Shape]:
    """What a dataclass of numbers is written as."""
    kinds = {"int": _COUNT, "int | None": _COUNT.or_none(), "float | None": _NUMBER.or_none()}
    return {field.name: kinds[str(field.type)] for field in dataclasses.fields(cls)}


_REPORT: dict[str, _Shape] = {
    "version": _COUNT,
    "digest": _TEXT,
    "inputs": {"settings": _TEXT, "lengths": _TEXT, "labels": _TEXT.or_none()},
    "split": _SPLIT,
    "epoch": _COUNT,
    "layout": _TEXT,
    "capacity": _COUNT,
    "world_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "microbatches_per_rank": _COUNT,
    "repeated_rows": _COUNT,
    "repeated_samples": _COUNT,
    "unused_rows": _COUNT,
    "unused_samples": _COUNT,
    "retained": _COUNT,
    "dropped": dict.fromkeys(("too_short", "over_long", "unlabelled"), _of(Tally)),
    "truncated": _of(Tally),
    "warnings": _TEXTS,
    "before": _of(Statistics),
    "after": _of(Statistics),
}
_HEADER: dict[str, _Shape] = {"format": _COUNT, "config": _MAPPING, "report": _REPORT}


def _expect(name: str, value: Any, shape: _Shape) -> None:
    """Check that a value of a header is of a shape.

    Raises:
        ValueError: If not; the text names the first place that is wrong.
    """
    if isinstance(shape, _Kind):
        if not shape.passes(value):
            raise ValueError(f"{name} is {shown(value)}, but must be {shape.text}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}, but must be an object")
    for key in shape.keys() ^ value.keys():
        has, what = ("lacks", key) if key in shape else ("has", f"the unknown {shown(key)}")
        raise ValueError(f"{name} {has} {what}")
    for key, inner in shape.items():
        _expect(f"{name}.{key}", value[key], inner)
