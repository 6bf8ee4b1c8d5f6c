"""The report as one web page: tables, and plots of what packing and balancing do.

The page needs nothing beside itself: plots are SVG by matplotlib, inside the file, each small
enough to be read at the width of a phone; wider screens show two beside each other. The plots show
plans of the first epoch, made anew for them, because keeping all that were compared takes memory.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import multipack
from multipack._config import capacity, layout

from . import compare, report, rows_plot
from .sources import Lengths

_BEFORE, _AFTER, _LIMIT = "#d9741a", "#2b6ca8", "#c13b3b"
# Inches, of 96 pixels. A phone, with 330 pixels to spare, shows 9 points of it as 9 pixels.
_WIDTH, _HEIGHT = 4.4, 2.7
# So many microbatches, steps or microsteps are drawn: more would be a solid band.
_DRAWN = 150
_DRAWN_ROWS = 12
_BINS = 60

Values = npt.NDArray[Any]


class Plot(NamedTuple):
    """A picture, and what it shows in words, for those who do not see it as well."""

    title: str
    text: str
    image: str
    """A data URI."""


def write(found: report.Report, path: Path) -> None:
    """Writes the page; makes the folder if there is none.

    Raises:
        OSError: the file cannot be written.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        files("multipack.cli").joinpath("report.html").read_text("utf-8")
    )
    text = template.render(
        source=found.source,
        version=multipack.__version__,
        recommendation=found.recommendation,
        settings=report.settings_lines(found),
        data=list(report.data_lines(found)),
        plots=plots(found),
        columns=report.COLUMNS,
        lines=list(report.lines(found)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def plots(found: report.Report) -> list[Plot]:
    """All pictures, in the order of the page."""
    data, chosen = found.planned, found.recommendation
    plain = chosen.outcome.candidate.config
    before = loads(compare.make_plan(data, plain), data)
    after = None
    if isinstance(chosen.outcome.balanced, compare.Planned):
        after = loads(compare.make_plan(data, plain.replace(balance_labels=True)), data)
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "multipack", "font.size": 9, "axes.titlesize": 9}
    ):
        made = [_rows(found), _lengths(found)]
        if data.label_counts is not None:
            made += [_labels(found), _shares(found)]
        made += [_by_microbatch(before, after), _by_step(before, after, plain)]
        made.append(_by_rank(before, after, plain))
    return made


class Loads(NamedTuple):
    """What the microbatches of a plan amount to, (B,) in its order: by microstep, then rank."""

    labels: Values
    cost: Values


def loads(plan: multipack.Plan, data: Lengths) -> Loads:
    """Adds up what the planner adds up; repeats bring neither tokens nor labels."""
    config, repeated = plan.config, plan.report["repeated_samples"]
    index, rows = plan.index.numpy(), plan.row_offsets.numpy()
    batches = plan.batch_offsets.numpy()
    if layout(config, "train") == "padded":
        # Each sample has a row of its own; a plan lists all of a microbatch as one.
        rows, batches = np.arange(len(index) + 1), rows[batches]
    real = np.arange(len(index)) < len(index) - repeated
    tokens = np.where(real, np.minimum(data.lengths[index], config.sequence_len or 0), 0)
    labels = tokens - config.mask_first_label * real
    if data.label_counts is not None:
        labels = np.where(real, data.label_counts[index], 0)
    if not config.mask_first_label:
        # Nothing predicts the first token of a row.
        firsts = rows[:-1]
        if data.label_starts is not None:
            labels[firsts] -= data.label_starts[index[firsts]] & real[firsts]
        elif data.label_counts is None:
            labels[firsts] -= real[firsts]
    starts = rows[batches[:-1]]
    kind = config.balance_cost
    if kind == "attention":
        cost = np.add.reduceat(config.balance_cost_linear * tokens + tokens**2, starts)
    elif kind == "padded" or (kind == "auto" and layout(config, "train") == "padded"):
        longest = np.maximum.reduceat(np.add.reduceat(tokens, rows[:-1]), batches[:-1])
        cost = longest * np.diff(batches)
    else:
        cost = np.add.reduceat(tokens, starts)
    return Loads(np.add.reduceat(labels, starts), cost)


# Pictures.


def _figure() -> tuple[Figure, Axes]:
    made = Figure(figsize=(_WIDTH, _HEIGHT))
    made.set_layout_engine("constrained")
    axes = made.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return made, axes


def _plot(made: Figure, title: str, text: str) -> Plot:
    FigureCanvasSVG(made)
    file = io.BytesIO()
    made.savefig(file, format="svg", metadata={"Date": None})
    image = base64.b64encode(file.getvalue()).decode()
    return Plot(title, text, f"data:image/svg+xml;base64,{image}")


def _rows(found: report.Report) -> Plot:
    """The first microbatches, as padded and as recommended."""
    data, chosen = found.planned, found.recommendation
    shown = {"recommended": chosen.config}
    if isinstance(found.outcomes[0].plain, compare.Planned):
        shown = {"unpacked": found.outcomes[0].candidate.config, **shown}
    panels = [
        rows_plot.Panel(name, list(_microbatches(data, config)), capacity(config, "train"))
        for name, config in shown.items()
    ]
    return _plot(
        rows_plot.figure(panels, _WIDTH),
        "How the rows are filled",
        "The first microbatches. Supervised tokens are drawn at the end of each sample, wherever "
        "they are in it.",
    )


def _microbatches(data: Lengths, config: multipack.Config) -> Iterator[list[rows_plot.Row]]:
    """The first microbatches of the first rank, not more than fit into a picture."""
    plan = compare.make_plan(data, config)
    left = _DRAWN_ROWS
    for k in range(len(plan)):
        rows = plan[0, k]
        if layout(config, "train") == "padded":
            rows = [[sample] for sample in rows[0]]
        if len(rows) > left and k > 0:
            break
        samples = [[_supervised(data, config, i) for i in row] for row in rows]
        width = max(sum(map(len, row)) for row in samples)
        yield [rows_plot.Row(width, row) for row in samples[:left]]
        left -= len(rows)


def _supervised(data: Lengths, config: multipack.Config, sample: int) -> Values:
    tokens = min(int(data.lengths[sample]), config.sequence_len or 0)
    labels = tokens if data.label_counts is None else int(data.label_counts[sample])
    return np.arange(tokens) >= tokens - labels


def _lengths(found: report.Report) -> Plot:
    made, axes = _figure()
    lengths, most = found.planned.lengths, found.config.sequence_len or 0
    top = max(int(lengths.max()), most)
    axes.hist(lengths, bins=_BINS, range=(0, top), color=_AFTER)
    axes.axvline(most, color=_LIMIT, linewidth=1, label=f"sequence_len {most:,}")
    axes.set(xlabel="tokens of a sample", ylabel="samples", yscale="log")
    axes.legend(frameon=False)
    text = f"Mean {found.summary.mean:,.0f} tokens, longest {found.summary.longest:,}."
    return _plot(made, "Lengths", text)


def _labels(found: report.Report) -> Plot:
    made, axes = _figure()
    counts = found.planned.label_counts
    assert counts is not None
    axes.hist(counts, bins=_BINS, color=_AFTER)
    axes.set(xlabel="supervised tokens of a sample", ylabel="samples", yscale="log")
    return _plot(made, "Labels", f"{found.summary.label_share:.1%} of all tokens are supervised.")


def _shares(found: report.Report) -> Plot:
    made, axes = _figure()
    counts, lengths = found.planned.label_counts, found.planned.lengths
    assert counts is not None
    if found.config.excess_length_strategy == "truncate":
        lengths = np.minimum(lengths, found.config.sequence_len or 0)
    axes.hist(counts / np.maximum(lengths, 1), bins=50, range=(0, 1), color=_AFTER)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel="supervised share of a sample", ylabel="samples")
    text = "The more it differs from sample to sample, the more there is to balance."
    return _plot(made, "Share of labels in a sample", text)


def _by_microbatch(before: Loads, after: Loads | None) -> Plot:
    series = [before.labels] + ([] if after is None else [after.labels])
    return _series(series, "microbatch", "Labels of each microbatch")


def _by_step(before: Loads, after: Loads | None, config: multipack.Config) -> Plot:
    size = config.world_size * config.gradient_accumulation_steps
    series = [
        found.labels[: len(found.labels) // size * size].reshape(-1, size).sum(axis=1)
        for found in (before, after)
        if found is not None
    ]
    return _series(series, "optimizer step", "Labels of each optimizer step")


def _series(series: list[Values], what: str, title: str) -> Plot:
    """Sums over time, before and after balancing."""
    made, axes = _figure()
    spreads = []
    for values, colour, name in zip(
        series, (_BEFORE, _AFTER), ("before", "balanced"), strict=False
    ):
        axes.plot(values[:_DRAWN], color=colour, linewidth=1, label=name)
        if len(values) > 1 and values.mean() > 0:
            share = compare.small_share(values.std() / values.mean())
            spreads.append(f"{share} of their mean {name}")
    axes.set(xlabel=what, ylabel="supervised tokens", ylim=(0, None))
    made.legend(frameon=False, ncols=2, loc="outside upper right")
    text = f"The first {min(_DRAWN, len(series[0])):,} of {len(series[0]):,}."
    if spreads:
        text += f" All vary by {' and '.join(spreads)}."
    return _plot(made, title, text)


def _by_rank(before: Loads, after: Loads | None, config: multipack.Config) -> Plot:
    """The heaviest and the lightest rank at each microstep, over the mean of all."""
    made, axes = _figure()
    for found, colour, name in ((before, _BEFORE, "before"), (after, _AFTER, "balanced")):
        if found is None:
            continue
        cost = found.cost.reshape(-1, config.world_size)[:_DRAWN]
        even = cost / np.maximum(cost.mean(axis=1, keepdims=True), 1)
        if config.world_size == 1:
            even = cost / max(found.cost.mean(), 1)
        axes.fill_between(
            np.arange(len(even)), even.min(axis=1), even.max(axis=1), color=colour, alpha=0.5
        )
        axes.plot(even.max(axis=1), color=colour, linewidth=1, label=f"heaviest, {name}")
    axes.set(xlabel="microbatch of each rank", ylabel="cost over the mean")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))  # lest a difference of nothing fill the picture
    axes.yaxis.set_major_formatter("{x:.2f}")
    made.legend(frameon=False, ncols=2, loc="outside upper right")
    text = (
        f"From the lightest to the heaviest of {config.world_size} ranks at the same time; ranks "
        f"wait for the heaviest. Cost is balance_cost: {config.balance_cost}."
    )
    return _plot(made, "Cost of the ranks over time", text)
