"""What a plan does to the data: how full its rows are, how even its work, and what it left out.

The numbers come from the planner's report; nothing is computed here. ``str(stats)`` is a table for
people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The schedule in numbers; None where one has no meaning, as without a complete step.

    They describe the generated schedule, not measured memory or throughput.
    """

    rows: int
    """Rows in the epoch, over all ranks."""
    lower_bound: int
    """Rows that no packing of the retained samples can do without."""
    efficiency: float | None
    """Real tokens as a share of the space: of rows times capacity if packed, else of the padded
    batches."""
    mean_unpadded_length: float | None
    """Real tokens of a microbatch, on average."""
    padding_tokens: int
    """Positions of the batches that hold no real token, over the epoch."""
    mean_labels: float | None
    """Supervised tokens of a microbatch, on average."""
    microbatch_label_std: float | None
    """Standard deviation of the supervised tokens of a microbatch."""
    label_std_floor: float | None
    """What `microbatch_label_std` could be at best, however these samples were packed into as many
    microbatches; None without label counts."""
    step_label_std: float | None
    """Standard deviation of the supervised tokens of a complete optimizer step."""
    step_token_std: float | None
    """Standard deviation of the real tokens of a complete optimizer step."""
    rank_cost_imbalance: float | None
    """Cost of a microstep's heaviest rank over the mean of all ranks, on average: 1 is even."""
    rank_size_jump: float | None
    """Change in size from one microbatch of a rank to its next, in tokens, on average."""
    length_correlation: float | None
    """Correlation of the mean sample lengths of neighbouring microbatches: near 0 is well mixed."""


@dataclasses.dataclass(frozen=True)
class Tally:
    """Samples with the same fate."""

    count: int
    """How many."""
    first: int | None
    """The index of the first; None if there is none."""
    longest: int | None
    """The length of the longest, in tokens; None if there is none."""

    def __str__(self) -> str:
        if self.count == 0:
            return "0"
        return f"{self.count} (first: sample {self.first}, longest: {self.longest} tokens)"

    def plus(self, later: Tally) -> Tally:
        """Count samples together with later ones of the same fate."""
        if self.first is None or self.longest is None or later.longest is None:
            return self if self.count else later
        return Tally(self.count + later.count, self.first, max(self.longest, later.longest))


NO_SAMPLES = Tally(0, None, None)


@dataclasses.dataclass(frozen=True)
class Stats:
    """A plan's statistics: `before` as packed, `after` balancing and arranging.

    Without balancing the two agree but for the order of microbatches.
    """

    before: Statistics
    after: Statistics
    retained: int
    """Samples that the settings keep, whether or not this epoch has room for them all."""
    dropped: dict[str, Tally]
    """Samples left out, by reason: ``over_long``, ``too_short``, ``unlabelled``."""
    truncated: Tally
    """Samples cut to `sequence_len`."""
    unused_samples: int
    """Retained samples that this epoch leaves out, because they fill no round of ranks."""
    repeated_samples: int
    """Samples repeated to fill a round of ranks; their labels are all -100."""

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Stats:
        """Read the statistics out of a planner's report."""
        return cls(
            before=Statistics(**report["before"]),
            after=Statistics(**report["after"]),
            retained=report["retained"],
            dropped={reason: Tally(**tally) for reason, tally in report["dropped"].items()},
            truncated=Tally(**report["truncated"]),
            unused_samples=report["unused_samples"],
            repeated_samples=report["repeated_samples"],
        )

    def __str__(self) -> str:
        lines = [f"{'retained samples':<24}{self.retained:>16,}"]
        lines += [
            f"{'dropped: ' + reason:<24}{tally!s:>16}"
            for reason, tally in self.dropped.items()
            if tally.count
        ]
        if self.truncated.count:
            lines.append(f"{'truncated':<24}{self.truncated!s:>16}")
        for name in ("unused_samples", "repeated_samples"):
            if count := getattr(self, name):
                lines.append(f"{name.replace('_', ' '):<24}{count:>16,}")
        lines.append(f"{'':<24}{'before':>16}{'after':>16}")
        for field in dataclasses.fields(Statistics):
            before, after = getattr(self.before, field.name), getattr(self.after, field.name)
            name = field.name.replace("_", " ")
            lines.append(f"{name:<24}{_number(before):>16}{_number(after):>16}")
        return "\n".join(lines)


def _number(value: float | int | None) -> str:
    """Write a number in at most 16 characters."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}"
