"""The command `multipack plan`: plans as files, shown and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multipack
from multipack.cli import main

LENGTHS = [3, 5, 2, 6, 9, 4, 1, 8]

SETTINGS = ["--set", "sequence_len=8", "world_size=2", "incomplete_batches=fill"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """Write the lengths to a file."""
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS))
    return path


def made(lengths: Path, *options: str) -> multipack.Plan:
    path = lengths.with_name("epoch.plan")
    assert main(["plan", "make", str(lengths), str(path), *options]) == 0
    return multipack.load_plan(path)


@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
def test_make_plans_what_the_library_plans(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = made(lengths, *SETTINGS, "--epoch", "3")

    expected = multipack.plan(
        LENGTHS, sequence_len=8, world_size=2, incomplete_batches="fill", epoch=3
    )
    assert expected.report == plan.report
    assert capsys.readouterr().out == (
        f"{plan.digest}  one_row, train, epoch 3\n"
        f"2 microbatches on each of 2 ranks\n"
        f"{plan.stats}\n"
        "note: of 8 samples 1 dropped as longer than sequence_len 8 (first: 4, longest: 9 tokens)\n"
    )


@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
def test_show_prints_what_make_has_printed(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = made(lengths, *SETTINGS)
    printed = capsys.readouterr().out

    assert main(["plan", "show", str(lengths.with_name("epoch.plan"))]) == 0

    shown = capsys.readouterr().out
    assert printed.startswith(shown)
    assert str(plan.stats) in shown


def test_verify_takes_the_plan_of_these_samples_and_no_other(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = lengths.with_name("counts.json")
    counts.write_text(json.dumps([1] * 8))
    plan = made(lengths, *SETTINGS, "--label-counts", str(counts))
    path = lengths.with_name("epoch.plan")
    capsys.readouterr()

    verify = ["plan", "verify", str(path), str(lengths)]
    assert main([*verify, "--label-counts", str(counts)]) == 0
    assert capsys.readouterr().out == (
        f"{path} is the plan of these samples: digest {plan.digest}\n"
    )
    assert main(verify) == 2
    assert capsys.readouterr().err.startswith(
        "multipack: the labels are not those that the plan was made from: their digest is None"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lengths.txt", "3\n5\n 2\n6\n9\n4\n1\n8\n"),
        ("lengths.jsonl", "3\n5\n2\n6\n9\n4\n1\n8"),
        ("lengths.json", "[3, 5, 2, 6, 9, 4, 1, 8]"),
    ],
)
def test_lengths_are_read_from_text_as_from_arrays(lengths: Path, name: str, content: str) -> None:
    text = lengths.with_name(name)
    text.write_text(content)

    assert made(lengths, *SETTINGS).digest == made(text, *SETTINGS).digest


def test_settings_come_from_a_file_and_are_overridden(lengths: Path) -> None:
    config = lengths.with_name("settings.yaml")
    config.write_text("sequence_len: 16\nsample_packing: false\nmicro_batch_size: 2\n")

    plan = made(
        lengths,
        "--config",
        str(config),
        "--set",
        "sequence_len=8",
        "--split=eval",
        "--set",
        "data_seed=null",
    )

    assert plan.config == multipack.Config(sequence_len=8, sample_packing=False, micro_batch_size=2)
    assert plan.report["split"] == "eval"


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        ("3\nx\n", SETTINGS, "line 2 of {path} is 'x', but must be an integer"),
        ("3\n\n5\n", SETTINGS, "line 2 of {path} is '', but must be an integer"),
        (
            "3\n",
            ["--set", "sequence_len"],
            "'sequence_len' is no setting: write KEY=VALUE, as in sequence_len=4096",
        ),
        (
            "3\n",
            ["--set", "sequnce_len=8"],
            "unknown setting 'sequnce_len', did you mean 'sequence_len'?",
        ),
        (
            "3\n",
            ["--set", "sequence_len=long"],
            'sequence_len is "long", but must be an integer from 1 to 2147483647',
        ),
        (
            "-3\n",
            ["--set", "sequence_len=8"],
            "sample 0 has length -3, but a length is 0 or more tokens",
        ),
        ("3\n", ["--set", "sequence_len=8", "--epoch=-1"], "epoch is -1, but must be 0 or more"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    content: str, options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)

    assert main(["plan", "make", str(path), str(tmp_path / "plan"), *options]) == 2

    assert capsys.readouterr().err == f"multipack: {text.format(path=path)}\n"
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("lengths.npy", b"hello", "is not a NumPy array of numbers: "),
        ("lengths.json", b"{", "is not JSON: "),
        ("lengths.json", b"{}", "lengths must hold integers, but is an array of object"),
    ],
)
def test_files_that_are_not_what_their_name_says_are_one_sentence(
    name: str, content: bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    assert main(["plan", "make", str(path), str(tmp_path / "plan"), *SETTINGS]) == 2

    errors = capsys.readouterr().err
    assert text in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("action", [["show", "{none}"], ["verify", "{none}", "{none}"]], ids=repr)
def test_a_missing_file_is_one_sentence(
    action: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = str(tmp_path / "none")

    assert main(["plan", *(part.format(none=none) for part in action)]) == 2

    assert capsys.readouterr().err == f"multipack: [Errno 2] No such file or directory: '{none}'\n"
