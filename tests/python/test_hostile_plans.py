"""Saved plans that nobody should be able to do harm with: refused in a sentence, or harmless.

They are forged with a checksum that fits. What claims to be large is read in a process that has
256 MiB more than it starts with, so that believing it would end in another error.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from limited import DEEP, limited

from multipack import load_plan, plan
from multipack._plan_file import checksum


def saved(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Save a plan; return its header and its arrays."""
    plan([3, 5, 2, 6], [2, 1, 1, 5], sequence_len=8).save(path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in ("index", "row_offsets", "batch_offsets")}
        return json.loads(archive["header"].tobytes()), arrays


def forge(path: Path, header: bytes | Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Path:
    """Write a plan with a checksum that fits whatever it holds."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        np.savez(
            file,
            header=np.frombuffer(text, np.uint8),
            checksum=np.frombuffer(checksum(text, arrays), np.uint8),
            **arrays,  # type: ignore[arg-type]
        )
    return path


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h: without(h, "format"), "its header has no format"),
        (lambda h: h | {"format": 2}, "it has format 2, but this version reads format 1"),
        (lambda h: h | {"format": "1"}, "it has format '1', but this version reads format 1"),
        (lambda h: [h], "its header has no format"),
        (lambda h: without(h, "report"), "header lacks report"),
        (lambda h: h | {"more": 1}, "header has the unknown 'more'"),
        (lambda h: h | {"config": 7}, "header.config is 7, but must be an object"),
        (lambda h: h | {"report": [1]}, "header.report is [1], but must be an object"),
        (
            lambda h: h | {"config": {"sequence_length": 8}},
            "unknown setting 'sequence_length', did you mean 'sequence_len'?",
        ),
        (
            lambda h: h | {"config": h["config"] | {"world_size": 2**40}},
            f"world_size is {2**40}, but must be an integer from 1 to 2147483647",
        ),
        (
            lambda h: h | {"config": h["config"] | {"world_size": 2}},
            "report.world_size is 1, but settings and arrays say 2",
        ),
        (
            lambda h: h | {"config": h["config"] | {"seed": [[1]]}},
            "seed is a list, but a setting is a number, a bool or a string",
        ),
        (
            lambda h: h | {"config": h["config"] | {"cls": 1}},
            "unknown setting 'cls'",
        ),
        (
            lambda h: h | {"report": h["report"] | {"epoch": -1}},
            f"header.report.epoch is -1, but must be an integer from 0 to {2**63 - 1}",
        ),
        (
            lambda h: h | {"report": h["report"] | {"epoch": True}},
            f"header.report.epoch is True, but must be an integer from 0 to {2**63 - 1}",
        ),
        (
            lambda h: h | {"report": h["report"] | {"epoch": 2**600}},
            "header.report.epoch is an integer of 601 bits, but must be an integer from 0 to "
            f"{2**63 - 1}",
        ),
        (
            lambda h: h | {"report": h["report"] | {"split": "test"}},
            "header.report.split is 'test', but must be 'train' or 'eval'",
        ),
        (
            lambda h: h | {"report": h["report"] | {"layout": "padded"}},
            "report.layout is 'padded', but settings and arrays say one_row",
        ),
        (
            lambda h: h | {"report": h["report"] | {"microbatches_per_rank": 2**62}},
            f"report.microbatches_per_rank is {2**62}, but settings and arrays say 2.0",
        ),
        (
            lambda h: h | {"report": h["report"] | {"repeated_samples": 5}},
            "report.repeated_samples is 5, but there are 4",
        ),
        (
            lambda h: (
                h
                | {
                    "report": h["report"]
                    | {"dropped": without(h["report"]["dropped"], "unlabelled")}
                }
            ),
            "header.report.dropped lacks unlabelled",
        ),
        (
            lambda h: h | {"report": h["report"] | {"warnings": ["a", 1]}},
            "header.report.warnings is ['a', 1], but must be a list of strings",
        ),
        (
            lambda h: (
                h
                | {
                    "report": h["report"]
                    | {"truncated": {"count": 0.5, "first": None, "longest": None}}
                }
            ),
            f"header.report.truncated.count is 0.5, but must be an integer from 0 to {2**63 - 1}",
        ),
        (
            lambda h: json.dumps(h).replace('"efficiency": 1.0', '"efficiency": NaN').encode(),
            "its header holds NaN, which is no number",
        ),
        (
            lambda h: json.dumps(h).replace("{", '{"format": 1, ', 1).encode(),
            "its header has a key twice",
        ),
        (lambda h: b'{"format": ' + DEEP.encode(), "its header is nested too deeply"),
    ],
)
def test_a_plan_whose_header_is_wrong_is_refused_by_field(
    change: Callable[[Any], Any], text: str, tmp_path: Path
) -> None:
    header, arrays = saved(tmp_path / "epoch.plan")
    path = forge(tmp_path / "forged.plan", change(header), arrays)

    with pytest.raises(ValueError) as caught:
        load_plan(path)

    assert str(caught.value) == f"{path} is no plan: {text}"


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        (
            "row_offsets",
            [0, 3, 2, 4],
            "row_offsets does not rise at entry 1, but nothing may be empty",
        ),
        ("row_offsets", [0, 2, 2**62], "row_offsets must go from 0 to 4, the number of samples"),
        ("row_offsets", [], "row_offsets must go from 0 to 4, the number of samples"),
        ("batch_offsets", [0, 1, 9], "batch_offsets must go from 0 to 2, the number of rows"),
        (
            "batch_offsets",
            [0, 2],
            "report.microbatches_per_rank is 2, but settings and arrays say 1.0",
        ),
        ("index", [3, 0, -(2**63), 1], f"index[2] is {-(2**63)}, but samples count from 0"),
    ],
)
def test_a_plan_whose_offsets_are_wrong_is_refused(
    name: str, values: list[int], text: str, tmp_path: Path
) -> None:
    header, arrays = saved(tmp_path / "epoch.plan")
    path = forge(tmp_path / "forged.plan", header, {**arrays, name: np.array(values, np.int64)})

    with pytest.raises(ValueError) as caught:
        load_plan(path)

    assert str(caught.value) == f"{path} is no plan: {text}"


def no_archive(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    """Contents of files that are no plan, by what is wrong with them."""

    def archive(write: Callable[..., None] = np.savez, **changes: Any) -> bytes:
        file = io.BytesIO()
        write(
            file,
            header=np.zeros(2, np.uint8),
            checksum=np.zeros(16, np.uint8),
            **(arrays | changes),
        )
        return file.getvalue()

    twice = io.BytesIO(archive())
    with zipfile.ZipFile(twice, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("index.npy", b"")
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("header", "checksum", "index", "row_offsets", "batch_offsets"):
            with file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "<i8", "fortran_order": False, "shape": (2**25,)}
                )
                for _ in range(256):
                    member.write(bytes(1 << 20))
    whole = archive()
    return {
        "objects": archive(index=np.array([print, {}], object)),
        "another width": archive(index=np.array([0, 1], np.int32)),
        "two dimensions": archive(index=np.zeros((2, 2), np.int64)),
        "compressed": archive(np.savez_compressed),
        "a member twice": twice.getvalue(),
        "an array more": archive(more=np.zeros(1)),
        "a bomb": bomb.getvalue(),
        "a pickle": pickle.dumps(arrays),
        "cut off": whole[: len(whole) // 2],
        "nothing": b"",
        "more entries than there are": whole.replace(b"'shape': (4,)", b"'shape': (9,)"),
        "more entries than memory": whole.replace(
            b"'shape': (4,), }          ", b"'shape': (9999999999,), } "
        ),
    }


def test_what_is_no_archive_of_a_plan_is_refused_in_little_memory(tmp_path: Path) -> None:
    _, arrays = saved(tmp_path / "epoch.plan")
    paths = {}
    for number, (fault, content) in enumerate(no_archive(arrays).items()):
        paths[fault] = tmp_path / f"{number}.plan"
        paths[fault].write_bytes(content)

    said = limited(*(f"multipack.load_plan({str(path)!r})" for path in paths.values()))

    assert dict(zip(paths, said, strict=True)) == {
        fault: f"ValueError: {path} is not a saved plan, or only a part of one: make it with "
        "Plan.save"
        for fault, path in paths.items()
    }


def test_a_plan_whose_settings_ask_for_too_much_is_shown_and_verified_in_little_memory(
    tmp_path: Path,
) -> None:
    """A microbatch of its settings would take gigabytes, and a round of its ranks as well."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[3, 5, 2, 6]")
    header, arrays = saved(tmp_path / "epoch.plan")
    header["config"] |= {"sequence_len": 2**31 - 1, "pad_to_sequence_len": True}
    large = forge(tmp_path / "large.plan", header, arrays)
    ranks = 2**31 - 1
    header["config"] = header["config"] | {"world_size": ranks, "incomplete_batches": "fill"}
    header["report"] |= {"world_size": ranks, "microbatches_per_rank": 0}
    arrays = {
        "index": arrays["index"][:0],
        "row_offsets": np.zeros(1, np.int64),
        "batch_offsets": np.zeros(1, np.int64),
    }
    many = forge(tmp_path / "many.plan", header, arrays)
    options = f"{str(lengths)!r}, '--label-counts', {str(lengths)!r}"

    said = limited(
        f"main(['plan', 'show', {str(large)!r}, {str(lengths)!r}])",
        f"main(['plan', 'verify', {str(large)!r}, {options}])",
        f"main(['plan', 'verify', {str(many)!r}, {options}])",
        f"main(['plan', 'diff', {str(large)!r}, {str(many)!r}])",
    )

    assert said == ["2", "2", "2", "1"]


def test_the_readers_are_not_fooled_by_a_checksum(tmp_path: Path) -> None:
    """That of the archive itself is of no use: whoever changes it writes that as well."""
    header, arrays = saved(tmp_path / "epoch.plan")
    path = forge(tmp_path / "forged.plan", header, arrays)
    content = bytearray(path.read_bytes())
    at = content.index(arrays["index"].tobytes())
    content[at] ^= 1
    changed = bytes(content[at : at + arrays["index"].nbytes])
    start = content.rindex(b"\x93NUMPY", 0, at)
    old = zlib.crc32(path.read_bytes()[start : at + len(changed)]).to_bytes(4, "little")
    new = zlib.crc32(bytes(content[start : at + len(changed)])).to_bytes(4, "little")
    path.write_bytes(bytes(content).replace(old, new))

    with pytest.raises(ValueError, match="is damaged: its checksum is not that of its contents"):
        load_plan(path)
