"""The report: its settings, what it compares and what it recommends."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import write_lengths, write_lines

import multipack
from multipack.cli import compare, main, page
from multipack.cli.sources import Lengths
from multipack.integrations import axolotl

# Settings.


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


def test_what_an_axolotl_yaml_may_mean_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lengths(tmp_path / "data.npz")
    config = tmp_path / "config.yml"
    config.write_text("sequence_len: 64\nsample_packing: true\nflash_atention: true\n")

    assert main(["report", str(path), "--axolotl", str(config)]) == 0

    assert (
        f"note: {config}: flash_atention is ignored; did you mean flash_attention?\n"
        in capsys.readouterr().err
    )


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
        (
            ["--config", "wrong.yml"],
            "wrong.yml: unknown setting 'sequnce_len', did you mean 'sequence_len'?",
        ),
        (
            ["--config", "axolotl.yml"],
            "axolotl.yml: unknown setting 'base_model' (an Axolotl YAML is for --axolotl)",
        ),
        (["--config", "list.yml"], "list.yml holds a list, but settings map keys to values"),
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
    Path("axolotl.yml").write_text("base_model: Qwen/Qwen3-0.6B\nsequence_len: 8\n")
    Path("list.yml").write_text("- sequence_len\n")

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
