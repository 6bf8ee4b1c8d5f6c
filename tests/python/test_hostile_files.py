"""Files and states that nobody should be able to do harm with: refused in a sentence, or harmless.

Each is read like any other. What claims to be large is read in a process that has 256 MiB more than
it starts with, so that believing it would end in another error.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from limited import limited

from multipack import Collator, Config, MultipackBatchSampler, StreamingMultipack, load_plan, plan
from multipack._plan_file import checksum
from multipack.cli import sources
from multipack.cli.sources import Options, read
from multipack.integrations import axolotl
from multipack.ops import resolve_config

DEEP = "[" * 100_000

# ---- plans ----


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


# ---- states ----


def put(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with one value replaced; `...` takes it away."""
    changed = copy.deepcopy(state)
    *folders, name = path.split(".")
    place: Any = changed
    for key in folders:
        place = place[int(key) if isinstance(place, list) else key]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ("version", "1", ValueError, "the state has version '1', but this release reads version 1"),
        ("version", [1], ValueError, "the state has version [1], but this release reads version 1"),
        ("settings", 3, TypeError, "settings is 3, but must be a mapping"),
        ("epoch", 2**63, ValueError, f"epoch is {2**63}, which does not fit into 64 bits"),
        (
            "epoch",
            1 << 4096,
            ValueError,
            "epoch is an integer of 4097 bits, which does not fit into 64 bits",
        ),
        ("epoch", -1, ValueError, "epoch is -1, but must be 0 or more"),
        ("epoch", float("nan"), TypeError, "epoch is nan, but must be an integer"),
        ("epoch", "0", TypeError, "epoch is '0', but must be an integer"),
        ("position", 2**62, ValueError, f"position is {2**62}, but epoch 0 has 2 microbatches"),
        ("position", True, TypeError, "position is True, but must be an integer"),
        ("position", ..., TypeError, "position is None, but must be an integer"),
    ],
)
def test_a_sampler_refuses_a_damaged_state_and_stays_as_it_was(
    path: str, value: Any, error: type[Exception], text: str
) -> None:
    sampler = MultipackBatchSampler([3, 5, 2, 6], sequence_len=8)
    next(iter(sampler))
    state = sampler.state_dict()
    before = copy.deepcopy(state)

    with pytest.raises(error) as caught:
        sampler.load_state_dict(put(state, path, value))

    assert str(caught.value) == text
    assert sampler.state_dict() == before


@pytest.mark.parametrize("state", [None, 7, [], "state", b"", torch.zeros(2)], ids=repr)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_state_is_refused(state: Any, streaming: bool) -> None:
    config = Config(sequence_len=8)
    loaded: Any = MultipackBatchSampler([3, 5], config=config)
    if streaming:
        loaded = StreamingMultipack([], config, collator=Collator(config, attention="none"))

    with pytest.raises(TypeError, match=r"^the state is .+, but must be a mapping$"):
        loaded.load_state_dict(state)


def test_a_tensor_in_the_place_of_a_fact_differs_from_it() -> None:
    """Comparing it would have given a tensor, and no answer."""
    sampler = MultipackBatchSampler([3, 5, 2, 6], sequence_len=8)

    for path in ("settings.world_size", "lengths_digest"):
        with pytest.raises(
            ValueError, match=rf"{path.split('.')[-1]} was tensor\(\[1, 2\]\) and is now"
        ):
            sampler.load_state_dict(put(sampler.state_dict(), path, torch.tensor([1, 2])))


def test_a_long_text_in_a_state_is_not_repeated_in_the_error() -> None:
    sampler = MultipackBatchSampler([3, 5, 2, 6], sequence_len=8)

    with pytest.raises(ValueError) as caught:
        sampler.load_state_dict(put(sampler.state_dict(), "lengths_digest", "x" * 10_000_000))

    assert len(str(caught.value)) < 1000


STREAM = [{"input_ids": [i] * length} for i, length in enumerate([3, 5, 2, 6, 4, 4, 7])]


def stream_of(**keys: Any) -> StreamingMultipack:
    config = Config(sequence_len=8, world_size=2, streaming_multipack_buffer_size=4)
    return StreamingMultipack(STREAM, config, rank=0, collator=Collator(config, attention="none"))


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ("buffer", ..., ValueError, "the state has no 'buffer'"),
        ("buffer", None, TypeError, "buffer is None, but must be a mapping"),
        ("buffer.seed", 2**64, ValueError, f"seed is {2**64}, but must be from 0 to {2**64 - 1}"),
        ("buffer.seed", "1", TypeError, "seed is '1', but must be an integer"),
        ("buffer.batches", -5, ValueError, "batches is -5, but must be 0 or more"),
        ("buffer.labelled", 1, TypeError, "labelled is 1, but must be a bool or None"),
        ("buffer.carried", 8, TypeError, "carried is 8, but must be a list or a tuple"),
        (
            "buffer.carried",
            [8],
            TypeError,
            "an entry of carried is 8, but must be a list or a tuple",
        ),
        (
            "buffer.carried",
            [[1, 2, 3]],
            ValueError,
            "an entry of carried has 3 parts: a number and a sample",
        ),
        (
            "buffer.carried",
            [[1, 2]],
            TypeError,
            "sample 1 of the stream is a int, but a sample is a mapping with 'input_ids'",
        ),
        ("buffer.counts", [], TypeError, "counts is [], but must be a mapping"),
        ("buffer.counts.read", 0.5, TypeError, "read is 0.5, but must be an integer"),
        (
            "buffer.counts.read",
            2**63,
            ValueError,
            f"read is {2**63}, which does not fit into 64 bits",
        ),
        (
            "buffer.counts.truncated.count",
            -1,
            ValueError,
            "count of truncated is -1, but must be 0 or more",
        ),
        ("buffer.counts.dropped", {"x": 1}, TypeError, "x is 1, but must be a mapping"),
        ("shares", [0, 0, 0], ValueError, "shares is of worker 0, but there are 0"),
        ("shares", [0, 1], ValueError, "shares has 2 entries, but must have 3"),
        ("shares", "012", TypeError, "shares is '012', but must be a list or a tuple or None"),
        ("position", None, TypeError, "position is None, but must be an integer"),
    ],
)
def test_a_stream_refuses_a_damaged_state_and_stays_as_it_was(
    path: str, value: Any, error: type[Exception], text: str
) -> None:
    stream = stream_of()
    next(iter(stream))
    state = stream.state_dict()
    before = copy.deepcopy(state)

    with pytest.raises(error) as caught:
        stream.load_state_dict(put(state, path, value))

    assert str(caught.value) == text
    assert stream.state_dict() == before


def test_a_stream_that_was_read_further_than_it_goes_is_refused() -> None:
    stream = stream_of()
    next(iter(stream))
    stream.load_state_dict(put(stream.state_dict(), "buffer.counts.read", 2**62))

    with pytest.raises(ValueError, match=f"the stream ends after 7 samples, but {2**62} were read"):
        list(stream)


# ---- settings ----


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ('{"seed": 1, "seed": 2}', ValueError, "setting 'seed' is given twice: leave one out"),
        (
            '{"seed": 1, "x": "' + "y" * (1 << 20) + '"}',
            ValueError,
            "the settings are not a JSON object: 1048596 bytes, more than 1048576",
        ),
        (
            '{"seed": "' + "y" * 500 + '"}',
            TypeError,
            f'seed is "{"y" * 99}… (502 characters), but must be an integer from 0 to {2**64 - 1}',
        ),
        (
            '{"' + "y" * 500 + '": 1}',
            ValueError,
            f"unknown setting '{'y' * 100}… (500 characters)'",
        ),
        (
            '{"seed": ' + DEEP,
            ValueError,
            "the settings are not a JSON object: recursion limit exceeded at line 1 column 136",
        ),
        (
            "[1]",
            ValueError,
            "the settings are not a JSON object: invalid type: sequence, expected a map at line 1 "
            "column 0",
        ),
    ],
    ids=["twice", "long", "long value", "long key", "deep", "list"],
)
def test_settings_in_json_that_are_none_are_refused(
    text: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        resolve_config(text)

    assert str(caught.value) == said


def test_a_number_comes_through_json_as_it_is() -> None:
    """One in ten was another one by a bit, and a digest of the settings with it."""
    for weight in (0.1, 135364.40322091896, 1.8802308925025002, 777.1234567890123, 1e-300):
        assert Config(balance_cost_linear=weight).balance_cost_linear == weight


def test_settings_that_no_json_holds_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        Config(seed=1 << 100_000)
    assert str(caught.value) == "seed is an integer of 100001 bits, which does not fit into 64 bits"
    with pytest.raises(TypeError) as caught_type:
        Config(seed=[[]])  # type: ignore[arg-type]
    assert str(caught_type.value) == "seed is a list, but a setting is a number, a bool or a string"


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(i + 1)}: &{chr(i + 1)} [{', '.join(['*' + chr(i)] * 8)}]\n" for i in range(97, 115)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{chr(i + 1)}: &{chr(i + 1)} {{<<: [*{chr(i)}, *{chr(i)}, *{chr(i)}, *{chr(i)}]}}\n"
    for i in range(97, 118)
)
YAML = {
    "a bomb": (BOMB + "seed: *s\n", "stands for more than 1,000,000 values, which no settings do"),
    "a bomb of merges": (MERGES, "stands for more than 1,000,000 values, which no settings do"),
    "an alias of itself": ("seed: &a [*a]\n", "has an alias inside of what it stands for"),
    "a key twice": (
        "seed: 1\nsequence_len: 8\nseed: 2\n",
        "has the key 'seed' twice, in line 1 and in line 3: leave one out",
    ),
    "deep": (DEEP, "is nested too deeply for settings"),
    "no date": (
        "seed: 2001-99-99\n",
        "holds a value that YAML cannot read: month must be in 1..12",
    ),
    "a list": ("- seed\n", "holds a list, but settings map keys to values"),
}


def test_hostile_yaml_is_refused_in_little_memory(tmp_path: Path) -> None:
    """Aliases are free until somebody walks through what they stand for, or prints it."""
    paths = {}
    for number, (fault, (content, _)) in enumerate(YAML.items()):
        paths[fault] = tmp_path / f"{number}.yml"
        paths[fault].write_text(content)

    for read_file in ("multipack.Config.from_yaml", "axolotl.from_yaml"):
        said = limited(*(f"{read_file}({str(path)!r})" for path in paths.values()))

        assert dict(zip(paths, said, strict=True)) == {
            fault: f"ValueError: {paths[fault]} {text}" for fault, (_, text) in YAML.items()
        }


def test_an_integer_without_end_inside_of_a_list_is_refused_by_its_size(tmp_path: Path) -> None:
    """Python writes integers of up to 4300 digits, and reads longer hexadecimal ones."""
    path = tmp_path / "settings.yml"
    path.write_text(f"accelerator_config: [1, 0x{'f' * 5000}]")

    with pytest.raises(ValueError, match=r"\[1, an integer of 20000 bits\] is no mapping"):
        axolotl.from_yaml(path)


def test_yaml_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.yml"
    path.write_bytes(b"seed: \xff\xfe")

    for read_file in (Config.from_yaml, axolotl.from_yaml):
        with pytest.raises(ValueError, match=r"settings\.yml is not YAML: unacceptable character"):
            read_file(path)


def test_anchors_and_merges_may_still_be_used(tmp_path: Path) -> None:
    path = tmp_path / "settings.yml"
    path.write_text("base: &base {seed: 1, data_seed: 2}\nuse:\n  <<: *base\n  seed: 3\n")

    with pytest.raises(ValueError, match="unknown setting 'base'"):
        Config.from_yaml(path)


# ---- the readers of `multipack report` ----


def packed_zeros(path: Path, mebibytes: int) -> Path:
    """Write a .npz whose `lengths` unpack to so many zeros."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (mebibytes << 20,)}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("lengths.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(member, header)
        for _ in range(mebibytes):
            member.write(bytes(1 << 20))
    return path


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", DEEP, ":1: JSON that is nested too deeply"),
        ("a.jsonl", "9" * 5000, ":1: not JSON that can be read: Exceeds the limit"),
        (
            "a.jsonl",
            f'{{"length": {2**63}}}',
            f":1: expected at most {2**63 - 1} in `length`, found {2**63}",
        ),
        (
            "a.jsonl",
            f'{{"input_ids": [1, {2**63}]}}',
            ":1: an integer in `input_ids` does not fit into 64 bits",
        ),
        (
            "a.jsonl",
            '{"input_ids": [1, true]}',
            ":1: expected integers in `input_ids`, found a boolean",
        ),
        (
            "a.jsonl",
            '{"length": 1, "count": 1e999}',
            ":1: expected an integer in `count`, found inf",
        ),
        (
            "a.jsonl",
            f'{{"length": 1, "count": {2**62}}}',
            "the histogram has 4,611,686,018,427,387,904 samples",
        ),
        ("a.json", DEEP, ": JSON that is nested too deeply"),
        (
            "a.json",
            f'{{"{"9" * 5000}": 1}}',
            ": record 0: expected an integer in `length`, found a string",
        ),
    ],
)
def test_records_that_are_hostile_are_refused_in_a_sentence(
    name: str, content: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)

    with pytest.raises(Exception, match=r".") as caught:
        read([path], Options(Config(sequence_len=8)))

    assert type(caught.value).__name__ == "CliError"
    assert text in str(caught.value)


def test_texts_among_the_tokens_take_no_memory_of_their_own(tmp_path: Path) -> None:
    """As a NumPy array each of them would be as wide as the widest."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": ["x" * 1_000_000, *[""] * 100_000]}))

    said = limited(f"main(['report', {str(path)!r}, '--sequence-len', '8'])")

    assert said == ["2"]


def test_arrays_that_unpack_to_more_than_they_should_are_refused_in_little_memory(
    tmp_path: Path,
) -> None:
    bomb = packed_zeros(tmp_path / "bomb.npz", 1024)
    lying = tmp_path / "lying.npy"
    np.save(lying, np.zeros(4, np.int64))
    lying.write_bytes(
        lying.read_bytes().replace(b"'shape': (4,), }          ", b"'shape': (9999999999,), } ")
    )
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([print], object), allow_pickle=True)

    said = limited(
        *(
            f"main(['report', {str(path)!r}, '--sequence-len', '8'])"
            for path in (bomb, lying, objects)
        ),
        *(f"main(['plan', 'make', {str(path)!r}, 'out.plan'])" for path in (lying, objects)),
    )

    assert said == ["2"] * 5


def test_a_small_archive_may_still_be_compressed(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", lengths=np.full(100_000, 7), other=np.zeros(3))

    found, _ = read([tmp_path / "a.npz"], Options(Config(sequence_len=8)))

    assert found.lengths.sum() == 700_000


def say_more_values(path: Path) -> None:
    """Have the footer of a Parquet file of 2^20 values say that it has 2^27 - 1."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    old, new = (b"\x80\x80\x80\x01", b"\xfe\xff\xff\x7f")  # twice the number, 7 bits a byte
    assert old in content[start:]
    path.write_bytes(content[:start] + content[start:].replace(old, new))


def test_parquet_that_unpacks_to_more_than_it_should_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    """A row of 2^28 equal tokens is a file of 650 bytes."""
    path = tmp_path / "a.parquet"
    tokens = pa.ListArray.from_arrays([0, 1 << 20], pa.array(np.zeros(1 << 20, np.int8)))
    pa.parquet.write_table(pa.table({"input_ids": tokens}), path, write_statistics=False)
    say_more_values(path)
    packed = pa.parquet.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size

    with pytest.raises(Exception, match=r".") as caught:
        read([path], Options(Config(sequence_len=8)))

    assert type(caught.value).__name__ == "CliError"
    assert str(caught.value) == (
        f"{path}: row group 0 unpacks to 1,073,741,816 bytes from {packed}: write it with smaller "
        "row groups"
    )


def test_long_rows_of_parquet_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """A thousand of them at once would take gigabytes."""
    path = tmp_path / "a.parquet"
    tokens = pa.array(np.zeros(6 << 20, np.int8))
    rows = pa.ListArray.from_arrays(np.arange(0, 7 << 20, 1 << 20, np.int32), tokens)
    pa.parquet.write_table(pa.table({"input_ids": rows}), path)

    batches = sources._read_table(path, Options(Config(sequence_len=8)))

    assert [batch.num_rows for batch in batches] == [4, 2]


def broken_lists(offsets: list[int]) -> pa.Table:
    """A table whose lists begin where no values are."""
    held = np.array([0, 1, 3], np.int32)
    lists = pa.ListArray.from_buffers(
        pa.list_(pa.int64()), 2, [None, pa.py_buffer(held)], children=[pa.array([1, 2, 3])]
    )
    table = pa.table({"input_ids": lists})
    held[:] = offsets  # only now, for pyarrow looks at them when it makes a table
    return table


@pytest.mark.parametrize(
    "offsets", [[0, 2, 2**30], [0, -5, 3], [3, 1, 3], [-(2**31), 1, 3]], ids=repr
)
def test_arrow_offsets_that_point_elsewhere_are_refused(offsets: list[int], tmp_path: Path) -> None:
    """Arrow follows them wherever they lead: into other memory, or to the end of the process."""
    import datasets

    from multipack import PackedDataset

    table = broken_lists(offsets)
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)

    with pytest.raises(Exception, match=r"a\.arrow: ") as caught:
        read([path], Options(Config(sequence_len=8)))
    assert type(caught.value).__name__ == "CliError"
    with pytest.raises(ValueError, match=r"^the data set's table is damaged: "):
        PackedDataset.from_arrow(
            # By itself it would read the table, to make a fingerprint.
            datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="damaged"),
            collator=Collator(sequence_len=8, attention="none"),
        )


def test_a_damaged_folder_is_refused_before_anything_is_gathered(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": [[1], [2, 3]]}).save_to_disk(str(tmp_path))
    (data,) = tmp_path.glob("*.arrow")
    offsets = np.array([0, 1, 3], np.int32).tobytes()
    damaged = np.array([0, 1, 2**30], np.int32).tobytes()
    assert offsets in data.read_bytes()
    data.write_bytes(data.read_bytes().replace(offsets, damaged))

    with pytest.raises(Exception, match=r" is damaged: ") as caught:
        read([tmp_path], Options(Config(sequence_len=8)))
    assert type(caught.value).__name__ == "CliError"


def test_a_batch_of_many_rows_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in slices, and looking at one of them takes as long as the whole batch."""
    table = pa.table({"input_ids": [[1, 2]] * 5000})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    looked_at = []
    real = sources._sound
    monkeypatch.setattr(sources, "_sound", lambda batch: looked_at.append(1) or real(batch))

    found, _ = read([path], Options(Config(sequence_len=8)))

    assert len(found.lengths) == 5000
    assert looked_at == [1]


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
