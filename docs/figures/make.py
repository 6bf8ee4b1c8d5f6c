"""Makes the figures of docs/how-it-works.md beside this file, each from what the library returns.

    python docs/figures/make.py

Equal versions of matplotlib make equal files; a test compares them with what is committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import multipack
from multipack.cli import rows_plot

HERE = Path(__file__).parent
BEFORE, AFTER, GREY = "#d9741a", "#2b6ca8", "#8a97a5"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "multipack", "font.size": 9, "axes.titlesize": 10}

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def main(folder: Path = HERE) -> None:
    """Write all figures."""
    with matplotlib.rc_context(STYLE):
        for name, made in {
            "packing": packing(),
            "masks": masks(),
            "levelling": levelling(),
            "balance": balance(),
        }.items():
            FigureCanvasSVG(made)
            made.savefig(folder / f"{name}.svg", metadata={"Date": None})


def chats(n: int) -> tuple[Numbers, Numbers]:
    """Lognormal lengths up to 4096, of which a Beta(1.2, 1.8) share is supervised."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.ceil(rng.lognormal(5.92, 1.0, n)), 1, 4096).astype(np.int64)
    labels = np.clip(np.rint(lengths * rng.beta(1.2, 1.8, n)), 1, lengths)
    return lengths, labels.astype(np.int64)


def axes_of(*columns: str, height: float = 2.6, width: float = 7.2) -> tuple[Figure, list[Axes]]:
    """Axes beside each other, with their titles."""
    made = Figure(figsize=(width, height))
    made.set_layout_engine("constrained")
    found = list(made.subplots(1, len(columns), squeeze=False)[0])
    for axes, title in zip(found, columns, strict=True):
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    return made, found


def packing() -> Figure:
    """The same samples padded, and packed by two strategies into rows of 4096."""
    lengths, labels = chats(32)
    samples = [np.arange(n) >= n - m for n, m in zip(lengths, labels, strict=True)]
    panels = []
    for name, keys in {
        "padded, 4 samples": {"sample_packing": False, "micro_batch_size": 4},
        "next_fit": {"sample_packing_algorithm": "next_fit"},
        "best_fit_decreasing": {},
    }.items():
        plan = multipack.plan(lengths, sequence_len=4096, incomplete_batches="split", **keys)
        batches = []
        for k in range(len(plan)):
            rows = plan[0, k] if "padded" not in name else [[i] for i in plan[0, k][0]]
            width = max(lengths[i] for row in rows for i in row) if "padded" in name else 4096
            batches.append([rows_plot.Row(width, [samples[i] for i in row]) for row in rows])
        panels.append(rows_plot.Panel(name, batches, 4096))
    return rows_plot.figure(panels, 7.2)


def masks() -> Figure:
    """Who attends to whom, for samples of 5, 4 and 3 tokens in a row of 16."""
    made, found = axes_of("causal", "causal, window 3", "both ways", height=2.5)
    samples = [{"input_ids": [1] * n} for n in (5, 4, 3)]
    colours = ["#f4f6f8", GREY, AFTER, BEFORE, "#36893a"]  # not allowed, the tail, three samples
    for axes, keys in zip(found, ({}, {"window": 3}, {"causal": False}), strict=True):
        collator = multipack.Collator(
            attention="bool", pad_to_multiple_of=16, outputs=["segment_ids"], **keys
        )
        batch = collator([samples])
        segments = batch["segment_ids"][0]
        shown = torch.where(batch["attention_mask"][0, 0], segments[None] + 1, 0).numpy()
        axes.imshow(shown, cmap=ListedColormap(colours), vmin=0, vmax=4)
        axes.set(xlabel="key", xticks=[0, 5, 9, 12, 15], yticks=[0, 5, 9, 12, 15])
    found[0].set_ylabel("query")
    return made


def levelling() -> Figure:
    """One length of a sweep: its samples, matched to what else is in their microbatches."""
    rng = np.random.default_rng(2)
    others, mine = np.sort(rng.integers(150, 900, 12))[::-1], rng.integers(0, 500, 12)
    made, found = axes_of("as packed", "matched", height=2.4)
    for axes, labels in zip(found, (mine, np.sort(mine)), strict=True):
        axes.bar(range(12), others, color=GREY, label="its other samples")
        axes.bar(range(12), labels, bottom=others, color=AFTER, label="its sample of this length")
        axes.axhline((others + labels).mean(), color="black", linewidth=0.8)
        axes.set(xlabel="microbatch", ylim=(0, 1400), xticks=[])
        share = (others + labels).std() / (others + labels).mean()
        axes.text(0.98, 0.93, f"std {share:.0%} of the mean", transform=axes.transAxes, ha="right")
    found[0].set_ylabel("labels")
    made.legend(*found[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for axes in found:
        axes.margins(x=0.01)
    return made


def balance() -> Figure:
    """Labels of microbatches and steps, and the cost of ranks, before and after."""
    lengths, labels = chats(40_000)
    config = multipack.Config(
        sequence_len=4096,
        micro_batch_size=4,
        world_size=8,
        gradient_accumulation_steps=2,
        balance_cost="attention",
    )
    made, found = axes_of("labels, microbatches", "labels, steps", "Σ length², ranks")
    for balanced, colour, name in ((False, BEFORE, "before"), (True, AFTER, "balanced")):
        plan = multipack.plan(lengths, labels, config, balance_labels=balanced)
        starts = plan.row_offsets[plan.batch_offsets[:-1]].numpy()
        index = plan.index.numpy()
        sums = np.add.reduceat(labels[index], starts)
        squares = np.add.reduceat(lengths[index] ** 2, starts).reshape(-1, 8)
        steps = sums[: len(sums) // 16 * 16].reshape(-1, 16).sum(axis=1)
        found[0].plot(sums[:160] / sums.mean(), color=colour, linewidth=1, label=name)
        found[1].plot(steps / steps.mean(), color=colour, linewidth=1)
        heaviest = squares.max(axis=1) / squares.mean(axis=1)
        found[2].plot(heaviest[:40], color=colour, linewidth=1)
    found[0].set(ylabel="of the mean", xlabel="microbatch", ylim=(0, 2))
    found[1].set(xlabel="optimizer step", ylim=(0.7, 1.3))
    found[2].set(xlabel="microstep", ylabel="heaviest over the mean", ylim=(0.9, None))
    for axes in found[:2]:
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    made.legend(loc="outside lower center", ncols=2)
    return made


if __name__ == "__main__":
    main()
