"""A picture of how rows are filled: samples as bars, supervised tokens darker, padding hatched.

One panel per layout, one line per row, microbatches set apart by a gap. Costs about a second; meant
for some dozens of rows in all, beyond which a line is too thin to read.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Light and dark of one hue: a sample and its supervised tokens. Grey is left to padding.
_SHADES = [
    ("#aecbe8", "#2b6ca8"),
    ("#fbd0a2", "#d9741a"),
    ("#b5dfb5", "#36893a"),
    ("#d9c6e6", "#7d4fa0"),
    ("#f5bcbc", "#c13b3b"),
    ("#b3e0e0", "#1f8a8f"),
]
_PADDING: dict[str, Any] = {
    "facecolor": "#eeeeee",
    "edgecolor": "#b5b5b5",
    "hatch": "////",
    "linewidth": 0.0,
}

_BAR = 0.84
_GAP = 0.9


class Row(NamedTuple):
    """One row of a microbatch."""

    width: int
    """Tokens of the row with its padding."""
    samples: list[npt.NDArray[np.bool_]]
    """Of each sample in the row, in order: whether its tokens are supervised."""

    @property
    def real_tokens(self) -> int:
        """Tokens of samples."""
        return sum(len(sample) for sample in self.samples)

    @property
    def supervised_tokens(self) -> int:
        """Tokens of samples that are supervised."""
        return sum(int(sample.sum()) for sample in self.samples)


class Panel(NamedTuple):
    """One layout: its name and some of its microbatches."""

    name: str
    microbatches: list[list[Row]]
    capacity: int
    """Tokens that a row may hold: the end of the scale."""


def draw(title: str, panels: list[Panel], path: Path) -> None:
    """Writes the picture as a PNG; makes the folder if there is none.

    Raises:
        OSError: the file cannot be written.
    """
    picture = figure(panels, width=12)
    picture.suptitle(title, fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, format="png", dpi=130)


def figure(panels: list[Panel], width: float) -> Figure:
    """The picture, as high as its rows want it.

    Args:
        panels: one below the other.
        width: in inches; below 8 there is no room for what each microbatch holds, in numbers.
    """
    is_wide = width >= 8
    heights = [_height(panel) for panel in panels]
    made = Figure(figsize=(width, 1.6 + 0.13 * sum(heights) + 0.6 * len(panels)))
    FigureCanvasAgg(made)
    made.set_layout_engine("constrained", h_pad=0.08, w_pad=0.12 if is_wide else 0.04)
    all_axes = made.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, panel in zip(all_axes[:, 0], panels, strict=True):
        _draw_panel(axes, panel, is_wide)
    all_axes[-1, 0].set_xlabel("position in the row, in tokens")
    light, dark = _SHADES[0]
    made.legend(
        handles=[
            Patch(facecolor=light, label="a sample (each its own bar)"),
            Patch(facecolor=dark, label="its supervised tokens"),
            Patch(**_PADDING, label="padding"),
        ],
        loc="outside lower center",
        ncols=3 if is_wide else 1,
        frameon=False,
    )
    return made


def _height(panel: Panel) -> float:
    rows = sum(len(rows) for rows in panel.microbatches)
    return rows + _GAP * (len(panel.microbatches) - 1)


def _draw_panel(axes: Axes, panel: Panel, is_wide: bool) -> None:
    top = 0.0
    middles = []
    for rows in panel.microbatches:
        shades = cycle(_SHADES)
        for i, row in enumerate(rows):
            start = 0
            for sample in row.samples:
                light, dark = next(shades)
                y = (top + i + (1 - _BAR) / 2, _BAR)
                axes.broken_barh([(start, len(sample))], y, facecolor=light)
                axes.broken_barh(spans(sample, start), y, facecolor=dark)
                # A thin white line parts neighbours of any colour.
                border = 0.8 if is_wide else 0.3
                axes.vlines(start, y[0], y[0] + _BAR, color="white", linewidth=border)
                start += len(sample)
            axes.broken_barh([(start, row.width - start)], y, **_PADDING)
        middles.append(top + len(rows) / 2)
        if is_wide:
            right = panel.capacity * 1.01
            axes.text(right, middles[-1], _counts(rows), va="center", fontsize=8, clip_on=False)
        top += len(rows) + _GAP
    axes.set_ylim(_height(panel), 0)
    axes.set_xlim(0, panel.capacity)
    numbers = range(1, len(middles) + 1)
    axes.set_yticks(middles, [f"microbatch {k}" if is_wide else f"{k}" for k in numbers])
    if not is_wide:
        axes.set_ylabel("microbatch")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    everything = [row for rows in panel.microbatches for row in rows]
    title = f"{panel.name}: {_summary(everything)}"
    axes.set_title(title if is_wide else title.replace("; ", "\n"), loc="left", fontsize=10)


def spans(supervised: npt.NDArray[np.bool_], start: int) -> list[tuple[int, int]]:
    """Place in the row and length of each run of supervised tokens of a sample at `start`."""
    edges = np.flatnonzero(np.diff(supervised, prepend=False, append=False))
    return [(start + int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def _totals(rows: list[Row]) -> tuple[int, int, int]:
    """Samples, their tokens, and all tokens with the padding."""
    return (
        sum(len(row.samples) for row in rows),
        sum(row.real_tokens for row in rows),
        sum(row.width for row in rows),
    )


def _counts(rows: list[Row]) -> str:
    samples, real, computed = _totals(rows)
    supervised = sum(row.supervised_tokens for row in rows)
    return (
        f"{samples} samples\n{real:,} of {computed:,} tokens\nare real ({real / computed:.1%}),\n"
        f"{supervised:,} supervised"
    )


def _summary(rows: list[Row]) -> str:
    samples, real, computed = _totals(rows)
    return (
        f"{len(rows)} rows hold {samples} samples; "
        f"{1 - real / computed:.1%} of {computed:,} tokens are padding"
    )
