"""What packing and balancing would do to some lengths: every layout and strategy, side by side.

The figures are those of real plans (`multipack.plan`), not estimates. So many plans of 50 million
samples would take minutes, and say what those of a million of them do: standard deviations, shares
and ratios hardly depend on the number of samples. Hence the comparison may be of a sample of the
samples; about 10 s for a million.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import multipack
from multipack._config import Layout, layout

from .sources import Lengths

ALGORITHMS = ("best_fit_decreasing", "tight", "first_fit", "next_fit")

# A share of rows that the slower packer must save to be recommended.
_WORTH_TIGHT = 0.005
# What packing must save, of steps or of tokens computed, to be recommended.
_WORTH_PACKING = 0.05
# The share of its unevenness that balancing must get below, to be recommended.
_WORTH_BALANCING = 0.8
# How much the labels of a microbatch or step must vary, over their mean, for balancing.
_UNEVEN_MICROBATCHES = 0.05
_UNEVEN_STEPS = 0.01
# How much more than the mean the heaviest rank must cost.
_UNEVEN_RANKS = 0.05
# The share of over-long samples from which on one is told what to do about it.
_MANY_OVER_LONG = 0.01


class Summary(NamedTuple):
    """The data themselves, before any setting leaves something out."""

    samples: int
    tokens: int
    shortest: int
    mean: float
    quantiles: dict[str, int]
    """Lengths that a half, 90 %, 99 % of the samples do not exceed."""
    longest: int
    empty: int
    over_long: int
    over_long_tokens: int
    label_tokens: int | None
    """Supervised tokens; None: no labels are given, so all are."""
    label_share: float | None
    """Their share of all tokens, or of those that truncation leaves."""
    unlabelled: int | None
    """Samples that are not empty and have no supervised token."""


def summarise(data: Lengths, config: multipack.Config) -> Summary:
    """Looks at the data: O(N), and a copy of the lengths."""
    lengths, counts = data.lengths, data.label_counts
    n = len(lengths)
    ranks = {f"{share:.0%}": min(n - 1, int(share * n)) for share in (0.5, 0.9, 0.99)}
    ordered = np.partition(lengths, sorted(set(ranks.values())))
    over = lengths > (config.sequence_len or 0)
    over_long = int(np.count_nonzero(over))
    tokens = int(lengths.sum(dtype=np.int64))
    over_long_tokens = int(lengths.sum(where=over, dtype=np.int64))
    label_tokens = share = unlabelled = None
    if counts is not None:
        left = tokens
        if config.excess_length_strategy == "truncate":
            left += over_long * (config.sequence_len or 0) - over_long_tokens
        label_tokens = int(counts.sum(dtype=np.int64))
        share = label_tokens / max(1, left)
        unlabelled = int(np.count_nonzero(lengths) - np.count_nonzero(counts))
    return Summary(
        samples=n,
        tokens=tokens,
        shortest=int(lengths.min()),
        mean=tokens / n,
        quantiles={name: int(ordered[rank]) for name, rank in ranks.items()},
        longest=int(lengths.max()),
        empty=n - int(np.count_nonzero(lengths)),
        over_long=over_long,
        over_long_tokens=over_long_tokens,
        label_tokens=label_tokens,
        label_share=share,
        unlabelled=unlabelled,
    )


def thin(data: Lengths, most: int) -> Lengths:
    """At most so many of the samples, drawn at random, in their order; 0: all.

    As int64, which every plan would make of them anew.
    """
    n = len(data.lengths)
    chosen: Any = slice(None)
    if 0 < most < n:
        chosen = np.sort(np.random.default_rng(0).choice(n, most, replace=False, shuffle=False))
    counts, starts = data.label_counts, data.label_starts
    return Lengths(
        data.lengths[chosen].astype(np.int64, copy=False),
        None if counts is None else counts[chosen].astype(np.int64, copy=False),
        None if starts is None else starts[chosen],
    )


class Planned(NamedTuple):
    """One plan in numbers."""

    stats: multipack.Statistics
    unused_samples: int
    microbatches: int
    """Per rank."""
    steps: int
    """Optimizer steps, an incomplete last one included."""
    mean_samples: float
    """Samples of a step."""
    seconds: float

    computed_tokens: int
    """Positions that go through the model in an epoch, padding included."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout and a strategy."""

    layout: Layout
    algorithm: str | None
    """None: nothing is packed."""
    config: multipack.Config
    """Without balancing."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A candidate as planned; a sentence instead of a plan says why there is none."""

    candidate: Candidate
    plain: Planned | str
    balanced: Planned | str


def candidates(config: multipack.Config) -> Iterator[Candidate]:
    """Every layout and strategy that these settings allow, each once.

    Where a microbatch has one row, all packed layouts are the same, and so are all unpacked ones.
    """
    single = config.micro_batch_size == 1
    unpacked = {"sample_packing": False, "multipack_real_batches": None}
    for flat in (False,) if single else (False, True):
        yield _candidate(config, None, **unpacked, batch_flattening=flat)
    # Sequential packing is next fit, and nothing else keeps the order.
    algorithms = ALGORITHMS[-1:] if config.sample_packing_sequentially else ALGORITHMS
    for real in (False,) if single else (False, True):
        for algorithm in algorithms:
            keys = {"sample_packing_algorithm": algorithm, "multipack_real_batches": real}
            yield _candidate(config, algorithm, sample_packing=True, batch_flattening=False, **keys)


def _candidate(config: multipack.Config, algorithm: str | None, **keys: Any) -> Candidate:
    made = config.replace(balance_labels=False, **keys)
    return Candidate(layout(made, "train"), algorithm, made)


def compare(data: Lengths, config: multipack.Config, told: Callable[[str], None]) -> list[Outcome]:
    """Plans every candidate, balanced and not; `told` is called with the name of each."""
    outcomes = []
    for candidate in candidates(config):
        found = []
        for balance in (False, True):
            told(name_of(candidate) + (", balanced" if balance else ""))
            found.append(_try(data, candidate.config, balance))
        outcomes.append(Outcome(candidate, *found))
    return outcomes


def layout_of(config: multipack.Config) -> tuple[Layout, str | None]:
    """The layout and strategy of settings, as a candidate has them."""
    kind = layout(config, "train")
    single = config.micro_batch_size == 1
    if kind == "padded" or kind == "flattened":
        return "padded" if single else kind, None
    if single:
        kind = "one_row"
    sequential = config.sample_packing_sequentially
    return kind, "next_fit" if sequential else config.sample_packing_algorithm


def count_plans(config: multipack.Config) -> int:
    """How many plans `compare` makes."""
    return 2 * sum(1 for _ in candidates(config))


def _try(data: Lengths, config: multipack.Config, balance: bool) -> Planned | str:
    try:
        if balance:
            config = config.replace(balance_labels=True)
        started = time.perf_counter()
        made = make_plan(data, config)
        seconds = time.perf_counter() - started
    except ValueError as error:
        return str(error)
    if len(made) == 0:
        return str(made.report["warnings"][-1])
    stats = made.stats
    real = (stats.after.mean_unpadded_length or 0.0) * len(made) * config.world_size
    steps = -(-len(made) // config.gradient_accumulation_steps)
    return Planned(
        stats=stats.after,
        unused_samples=stats.unused_samples,
        microbatches=len(made),
        steps=steps,
        mean_samples=len(made.index) / steps,
        seconds=seconds,
        computed_tokens=round(real) + stats.after.padding_tokens,
    )


def make_plan(data: Lengths, config: multipack.Config) -> multipack.Plan:
    """The plan of the first epoch; what was left out is told by the report, not by warnings.

    Raises:
        ValueError: as for `multipack.plan`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return multipack.plan(
            data.lengths, data.label_counts, config, label_starts=data.label_starts
        )


def name_of(candidate: Candidate) -> str:
    """What a person calls it: its layout, with the sizes, and its strategy."""
    kind = layout_name(candidate.config)
    return kind if candidate.algorithm is None else f"{kind} by {candidate.algorithm}"


def layout_name(config: multipack.Config) -> str:
    """How the samples of a microbatch lie, with the sizes."""
    tokens, rows = config.sequence_len or 0, config.micro_batch_size
    kind, _ = layout_of(config)
    if kind == "padded":
        return "one sample" if rows == 1 else f"padded, {rows} samples"
    if kind == "flattened":
        return f"flattened, {rows} samples"
    return f"one row of {rows * tokens:,}" if kind == "one_row" else f"{rows} rows of {tokens:,}"


def count_name(count: int) -> str:
    """A number as people say it, with three or more digits that count."""
    return f"{count / 1e6:,.1f} million" if count >= 10_000_000 else f"{count:,}"


def spread(std: float | None, mean: float | None, microbatches: int = 1) -> float | None:
    """A standard deviation of sums over so many microbatches, as a share of their mean."""
    if std is None or not mean:
        return None
    return std / (mean * microbatches)


def step_spread(planned: Planned, config: multipack.Config) -> float | None:
    """How much the labels of an optimizer step vary, as a share of their mean."""
    microbatches = config.world_size * config.gradient_accumulation_steps
    return spread(planned.stats.step_label_std, planned.stats.mean_labels, microbatches)


def microbatch_spread(planned: Planned) -> float | None:
    """How much the labels of a microbatch vary, as a share of their mean."""
    return spread(planned.stats.microbatch_label_std, planned.stats.mean_labels)


def padding_share(planned: Planned) -> float:
    """Padding among the positions that go through the model."""
    return planned.stats.padding_tokens / max(1, planned.computed_tokens)


class Recommendation(NamedTuple):
    """What to do."""

    outcome: Outcome
    balanced: bool
    settings: dict[str, Any]
    """The settings that make it so."""
    text: str
    """One sentence, with its reason."""
    notes: list[str]
    """What else is worth knowing, a sentence each."""

    @property
    def config(self) -> multipack.Config:
        """All settings."""
        return self.outcome.candidate.config.replace(balance_labels=self.balanced)


def recommend(
    outcomes: list[Outcome], config: multipack.Config, summary: Summary
) -> Recommendation:
    """Chooses a layout, a strategy and whether to balance, by the thresholds at the top.

    Packing is chosen if it saves steps or computed tokens; the layout of its rows is the user's,
    because it depends on the attention that there is; balancing if it evens what was uneven.

    Raises:
        ValueError: if nothing could be planned.
    """
    usable = [outcome for outcome in outcomes if isinstance(outcome.plain, Planned)]
    if not usable:
        raise ValueError(str(outcomes[0].plain))
    unpacked = [outcome for outcome in usable if outcome.candidate.algorithm is None]
    real_rows = bool(config.multipack_real_batches) and config.micro_batch_size > 1
    packed = [
        outcome
        for outcome in usable
        if outcome.candidate.layout == ("real_rows" if real_rows else "one_row")
    ]
    best, action, reasons = _choose(unpacked, packed)
    plain = plan_of(best.plain)
    balanced = isinstance(best.balanced, Planned)
    if balanced:
        found = list(_reasons_to_balance(plain, plan_of(best.balanced), config))
        balanced = bool(found)
        action += " and balance the labels" if balanced else ""
        reasons += found or ["balancing would even out little that is uneven"]
    return Recommendation(
        best,
        balanced,
        _settings(best.candidate, balanced),
        f"{action}: {', and '.join(reasons)}",
        list(_notes(best, balanced, config, summary, usable)),
    )


def plan_of(planned: Planned | str) -> Planned:
    """A plan that is known to have been made."""
    assert isinstance(planned, Planned)
    return planned


def _choose(unpacked: list[Outcome], packed: list[Outcome]) -> tuple[Outcome, str, list[str]]:
    """The better of the unpacked and packed plans, what to do for it, and why."""
    if not packed:
        return unpacked[0], "leave the samples unpacked", ["no packed plan can be made of them"]
    best = packed[0]
    for other in packed[1:]:
        ratio = plan_of(other.plain).stats.rows / max(1, plan_of(best.plain).stats.rows)
        if other.candidate.algorithm == "tight" and ratio < 1 - _WORTH_TIGHT:
            best = other
    new = plan_of(best.plain)
    action = f"pack into {name_of(best.candidate)}"
    if not unpacked:
        return best, action, [f"its rows are {new.stats.efficiency or 0:.1%} full"]
    old = plan_of(unpacked[0].plain)
    saved_steps = 1 - new.steps / max(1, old.steps)
    saved_tokens = 1 - new.computed_tokens / max(1, old.computed_tokens)
    if max(saved_steps, saved_tokens) < _WORTH_PACKING:
        return (
            unpacked[0],
            "leave the samples unpacked",
            [
                f"packing would save {saved_steps:.1%} of the steps and {saved_tokens:.1%} of the "
                "tokens computed"
            ],
        )
    reasons = [f"an epoch takes {new.steps:,} optimizer steps instead of {old.steps:,}"]
    if saved_tokens >= _WORTH_PACKING:
        reasons.append(
            f"computes {count_name(new.computed_tokens)} tokens instead of "
            f"{count_name(old.computed_tokens)}, of which {padding_share(old):.0%} are padding"
        )
    return best, action, reasons


def _reasons_to_balance(
    plain: Planned, balanced: Planned, config: multipack.Config
) -> Iterator[str]:
    """What balancing evens, where it is uneven."""
    steps = step_spread(plain, config), step_spread(balanced, config)
    microbatches = microbatch_spread(plain), microbatch_spread(balanced)
    if _is_evened(*steps, _UNEVEN_STEPS):
        yield (
            f"the labels of an optimizer step vary by {small_share(steps[1])} of their mean "
            f"instead of {steps[0]:.1%}"
        )
    elif _is_evened(*microbatches, _UNEVEN_MICROBATCHES):
        yield (
            f"the labels of a microbatch vary by {small_share(microbatches[1])} of their mean "
            f"instead of {microbatches[0]:.1%}"
        )
    costs = [planned.stats.rank_cost_imbalance or 1.0 for planned in (plain, balanced)]
    if _is_evened(costs[0] - 1, costs[1] - 1, _UNEVEN_RANKS):
        yield f"the heaviest rank costs {costs[1]:.2f} times the mean instead of {costs[0]:.2f}"


def small_share(share: float | None) -> str:
    """A share that may be next to nothing, but is not nothing for that."""
    return "less than 0.01%" if share is not None and 0 < share < 1e-4 else f"{share or 0:.2%}"


def _is_evened(before: float | None, after: float | None, uneven: float) -> bool:
    if before is None or after is None:
        return False
    return before > uneven and after < _WORTH_BALANCING * before


def _settings(candidate: Candidate, balanced: bool) -> dict[str, Any]:
    """The settings that choose this layout and strategy, as a YAML file would have them."""
    if candidate.algorithm is None:
        return {
            "sample_packing": False,
            "batch_flattening": candidate.config.batch_flattening,
            "balance_labels": balanced,
        }
    return {
        "sample_packing": True,
        "multipack_real_batches": candidate.layout == "real_rows",
        "sample_packing_algorithm": candidate.algorithm,
        "balance_labels": balanced,
    }


def _notes(
    best: Outcome,
    balanced: bool,
    config: multipack.Config,
    summary: Summary,
    usable: list[Outcome],
) -> Iterator[str]:
    """What else there is to know, most important first."""
    chosen = plan_of(best.balanced if balanced else best.plain)
    if summary.over_long > _MANY_OVER_LONG * summary.samples:
        fate = "cut" if config.excess_length_strategy == "truncate" else "left out"
        yield (
            f"{summary.over_long:,} samples ({summary.over_long / summary.samples:.1%}) are longer "
            f"than sequence_len {config.sequence_len:,} and {fate}: 99 % of the samples have at "
            f"most {summary.quantiles['99%']:,} tokens"
        )
    if chosen.unused_samples > _MANY_OVER_LONG * summary.samples:
        yield (
            f"{chosen.unused_samples:,} samples fill no round of all ranks and are left out, "
            "others in each epoch: incomplete_batches split or fill keeps them"
        )
    old = next((o for o in usable if o.candidate.algorithm is None), best)
    growth = chosen.mean_samples / max(1.0, plan_of(old.plain).mean_samples)
    if growth > 1.5:
        yield (
            f"a step then holds {chosen.mean_samples:,.0f} samples on average instead of "
            f"{plan_of(old.plain).mean_samples:,.0f}: fewer microbatches in a step, or another "
            "learning rate, make up for it"
        )
    if best.candidate.layout == "one_row" and config.micro_batch_size > 1:
        rows = next((o for o in usable if o.candidate.layout == "real_rows"), None)
        full = "" if rows is None else f", {plan_of(rows.plain).stats.efficiency or 0:.1%} full"
        yield (
            "one row wants attention that takes the borders of its samples, such as flash "
            f"attention; with masks set multipack_real_batches: true, for "
            f"{config.micro_batch_size} rows{full}"
        )
    floor = spread(chosen.stats.label_std_floor, chosen.stats.mean_labels)
    reached = microbatch_spread(chosen)
    if balanced and floor and reached and floor > _UNEVEN_MICROBATCHES and floor > reached / 2:
        yield (
            f"whole samples cannot make the labels of a microbatch vary by less than {floor:.1%}; "
            "larger microbatches can"
        )
