"""The report as a page; tests/browser looks at it in a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import write_lengths, write_lines

import multipack
from multipack.cli import compare, main, page
from multipack.cli.sources import Lengths


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
    said = " ".join(shown.split())
    told = re.findall(r"<b>Recommended:</b> (.*)\.</p>|<li>(.*)</li>", text)
    assert len(told) > 1
    for recommended, note in told:
        assert (recommended or note) in said
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
