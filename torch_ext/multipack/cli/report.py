"""Shows what packing and balancing would do to your data, every layout and strategy side by side.

  multipack report chats.jsonl --sequence-len 4096 --micro-batch-size 4 --world-size 8
  multipack report train.parquet --axolotl config.yml --html report.html
  multipack report lengths.npy --label-counts labels.npy --sequence-len 4096 --json

DATA are JSON lines, JSON, Parquet, Arrow, CSV, a folder that save_to_disk of Hugging Face's
datasets wrote, or NumPy files of lengths. A record has input_ids and labels; or length, label_count
and count (a histogram); or messages, prompt and completion, or text, which are tokenised here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import multipack

from . import reading, settings
from ._errors import CliError, require

if TYPE_CHECKING:
    from . import compare, sources

HELP = "what packing and balancing would do to your data"

_COLUMNS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `multipack report`."""
    parser.usage = "%(prog)s DATA [DATA ...] [options] [settings]"
    option = parser.add_argument
    option("data", nargs="+", type=Path, metavar="DATA", help="files of one kind, or a folder")
    option("--skip-bad", action="store_true", help="count bad records and pass over them")
    option(
        "--sample",
        type=int,
        default=1_000_000,
        metavar="N",
        help="plan so many of the samples, drawn at random; 0: all (default: %(default)s)",
    )
    option("--json", action="store_true", help="print JSON instead of tables")
    option("--html", type=Path, metavar="FILE", help="write a page with plots as well")
    reading.add_reading(parser)
    settings.add_settings(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the report; it goes to stdout, the progress bars to stderr.

    Raises:
        CliError: a package is absent, the data cannot be read, or the settings cannot be planned
            with.
    """
    if args.html is not None:
        require("multipack report --html", ("jinja2", "matplotlib"))
    config = settings.read_settings(args)
    if args.sample < 0:
        raise CliError(f"--sample is {args.sample}, but must be 0 or more")
    data, notes = reading.read_data(args.data, args, config, skip_bad=args.skip_bad)
    report = make_report(args.data, data, notes, config, args.sample)
    if args.html is not None:
        from . import page

        try:
            page.write(report, args.html)
        except OSError as error:
            raise CliError(f"cannot write {args.html}: {error.strerror or error}") from error
    print(json.dumps(as_json(report), indent=2) if args.json else "\n".join(as_text(report)))
    if args.html is not None and not args.json:
        print(f"page with plots: {args.html}")


@dataclasses.dataclass(frozen=True)
class Report:
    """All that is told, in whatever form."""

    source: str
    config: multipack.Config
    summary: compare.Summary
    notes: list[str]
    """Of the reading."""
    planned: sources.Lengths
    """The samples that the plans are of."""
    outcomes: list[compare.Outcome]
    recommendation: compare.Recommendation

    def is_yours(self, outcome: compare.Outcome, balanced: bool) -> bool:
        """Whether this is the plan of the settings as given."""
        from .compare import layout_of

        candidate = outcome.candidate
        same_layout = layout_of(self.config) == (candidate.layout, candidate.algorithm)
        return same_layout and balanced == self.config.balance_labels

    def is_recommended(self, outcome: compare.Outcome, balanced: bool) -> bool:
        """Whether this is the plan that is recommended."""
        chosen = self.recommendation
        return outcome is chosen.outcome and balanced == chosen.balanced

    @property
    def is_sampled(self) -> bool:
        """Whether the plans are of some of the samples."""
        return len(self.planned.lengths) < self.summary.samples


def make_report(
    paths: list[Path],
    data: sources.Lengths,
    notes: list[str],
    config: multipack.Config,
    most: int,
) -> Report:
    """Plans and compares; shows progress.

    Raises:
        CliError: nothing can be planned.
    """
    from tqdm import tqdm

    from . import compare

    summary = compare.summarise(data, config)
    planned = compare.thin(data, most)
    try:
        if summary.over_long and config.excess_length_strategy == "raise":
            compare.make_plan(data, config)  # which raises for the first of them
        with tqdm(total=compare.count_plans(config), unit=" plans", delay=1.0) as bar:

            def told(name: str) -> None:
                bar.set_description(f"planning {name}", refresh=False)
                bar.update()

            outcomes = compare.compare(planned, config, told)
        recommendation = compare.recommend(outcomes, config, summary)
    except ValueError as error:
        raise CliError(f"{', '.join(map(str, paths))}: {error}") from error
    source = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    return Report(source, config, summary, notes, planned, outcomes, recommendation)


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data; shares and spreads are of 1."""
    plans = []
    for outcome in report.outcomes:
        for balanced in (False, True):
            planned = outcome.balanced if balanced else outcome.plain
            entry: dict[str, Any] = {
                "layout": outcome.candidate.layout,
                "strategy": outcome.candidate.algorithm,
                "balanced": balanced,
                "yours": report.is_yours(outcome, balanced),
                "recommended": report.is_recommended(outcome, balanced),
            }
            if isinstance(planned, str):
                entry["refused"] = planned
            else:
                entry.update(figures(planned, report.config))
            plans.append(entry)
    return {
        "source": report.source,
        "data": report.summary._asdict(),
        "notes": report.notes,
        "settings": vars(report.config),
        "planned_samples": len(report.planned.lengths),
        "plans": plans,
        "recommendation": {
            "text": report.recommendation.text,
            "settings": report.recommendation.settings,
            "notes": report.recommendation.notes,
        },
    }


def figures(planned: compare.Planned, config: multipack.Config) -> dict[str, Any]:
    """A plan in numbers, by name."""
    from .compare import microbatch_spread, padding_share, step_spread

    return {
        **dataclasses.asdict(planned.stats),
        "padding_share": padding_share(planned),
        "microbatch_label_spread": microbatch_spread(planned),
        "step_label_spread": step_spread(planned, config),
        "microbatches_per_rank": planned.microbatches,
        "steps": planned.steps,
        "unused_samples": planned.unused_samples,
        "seconds": planned.seconds,
    }


def data_lines(report: Report) -> Iterator[tuple[str, str]]:
    """What is told of the data: names and sentences."""
    found, config = report.summary, report.config
    yield "samples", f"{found.samples:,} with {found.tokens:,} tokens"
    most = ", ".join(f"{name} up to {value:,}" for name, value in found.quantiles.items())
    yield "lengths", f"{found.shortest:,} to {found.longest:,}, mean {found.mean:,.1f}; {most}"
    fate = {"drop": "dropped", "truncate": "cut", "raise": "refused"}
    yield (
        "over-long",
        f"{found.over_long:,} longer than sequence_len {config.sequence_len:,}"
        + (
            f", with {found.over_long_tokens / found.tokens:.1%} of the tokens: "
            f"{fate[config.excess_length_strategy]}"
            if found.over_long
            else ""
        ),
    )
    yield "empty", f"{found.empty:,}" + (": dropped" if found.empty else "")
    if found.label_tokens is None:
        yield "supervised", "all tokens, as no labels are given"
    else:
        yield "supervised", f"{found.label_tokens:,} tokens, {found.label_share:.1%}"
        unlabelled = ": dropped" if found.unlabelled and config.drop_unlabelled else ""
        yield "unlabelled", f"{found.unlabelled:,} without a supervised token{unlabelled}"
    for note in report.notes:
        yield "note", note
    if report.is_sampled:
        planned = len(report.planned.lengths)
        yield (
            "planned",
            f"{planned:,} of the samples, drawn at random: an epoch has "
            f"{found.samples / planned:,.1f} times the rows and steps below (--sample 0 plans all)",
        )


COLUMNS = {
    "rows": "in an epoch, over all ranks",
    "over bound": "rows beyond the fewest that any packing needs",
    "full": "real tokens in the space of the rows",
    "padding": "among the tokens that the model computes",
    "steps": "optimizer steps in an epoch",
    "labels, batch": "supervised tokens of a microbatch: standard deviation over the mean",
    "labels, step": "supervised tokens of an optimizer step, likewise",
    "rank cost": "of the heaviest rank over the mean of all, at the same time, on average",
    "seconds": "to plan",
}
"""The figures of a plan, and what they mean."""


def cells(planned: compare.Planned, config: multipack.Config, packed: bool) -> tuple[str, ...]:
    """The figures of a plan under `COLUMNS`."""
    from .compare import microbatch_spread, padding_share, step_spread

    stats = planned.stats
    bound = stats.rows / stats.lower_bound - 1 if stats.lower_bound and packed else None
    imbalance = stats.rank_cost_imbalance
    return (
        f"{stats.rows:,}",
        _percent(bound, 2),
        _percent(stats.efficiency, 1),
        _percent(padding_share(planned), 1),
        f"{planned.steps:,}",
        _percent(microbatch_spread(planned), 2),
        _percent(step_spread(planned, config), 3),
        "-" if imbalance is None else f"{imbalance:.3f}",
        f"{planned.seconds:.2f}",
    )


def _percent(share: float | None, digits: int) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


class Line(NamedTuple):
    """A line of the comparison: a layout and strategy, balanced or not."""

    layout: str
    strategy: str
    mark: str
    """``*`` the recommended one, ``>`` that of the settings as given."""
    cells: tuple[str, ...]
    refusal: str | None
    """Why there is no plan, instead of cells."""


def lines(report: Report) -> Iterator[Line]:
    """The comparison, in the words of people."""
    from .compare import layout_name

    for outcome in report.outcomes:
        layout = layout_name(outcome.candidate.config)
        strategy = outcome.candidate.algorithm or "as drawn"
        packed = outcome.candidate.algorithm is not None
        for balanced, planned in ((False, outcome.plain), (True, outcome.balanced)):
            name = f"{strategy}, balanced" if balanced else strategy
            mark = ">" if report.is_yours(outcome, balanced) else " "
            if report.is_recommended(outcome, balanced):
                mark = "*"
            if isinstance(planned, str):
                yield Line(layout, name, mark, (), planned)
            else:
                yield Line(layout, name, mark, cells(planned, report.config, packed), None)


def as_text(report: Report) -> Iterator[str]:
    """The report for a terminal of 120 columns, which tables may exceed, line by line."""
    yield report.source
    for name, text in data_lines(report):
        yield f"  {name:12}{text}"
    yield ""
    widths = [max(len(name), 6) + 2 for name in COLUMNS]
    yield f"{'':32}" + "".join(f"{name:>{w}}" for name, w in zip(COLUMNS, widths, strict=True))
    layout = None
    for line in lines(report):
        if line.layout != layout:
            layout = line.layout
            yield layout
        found = "".join(f"{cell:>{w}}" for cell, w in zip(line.cells, widths, strict=False))
        yield f"{line.mark} {line.strategy:30}" + (found or f"  no plan: {line.refusal}")
    yield "* recommended, > your settings"
    for name, meaning in COLUMNS.items():
        yield f"  {name + ':':15}{meaning}"
    yield ""
    chosen = report.recommendation
    wrap = textwrap.TextWrapper(_COLUMNS, subsequent_indent="  ", break_on_hyphens=False).wrap
    yield from wrap(f"recommended: {chosen.text}")
    yield "  " + ", ".join(settings_lines(report))
    for note in chosen.notes:
        yield from wrap(f"note: {note}")


def settings_lines(report: Report) -> list[str]:
    """The recommended settings as lines of YAML."""
    found = report.recommendation.settings.items()
    return [f"{k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in found]
