"""Whether a plan is what it claims to be: checked without trusting the planner or the file.

First the samples must be those of the plan. Then everything that a plan promises is checked against
the lengths, by the plainest means: each retained sample once, no row over its capacity, as many
microbatches on every rank, nothing repeated but what is marked. Last it is compared with a fresh
plan, entry by entry. Costs about what planning costs, and a few arrays of the size of the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from multipack._config import PACKED, Config, Split, batch_size, capacity, layout

if TYPE_CHECKING:
    import torch

    from multipack._plan import Plan

_Array = npt.NDArray[np.int64]


def check_promises(plan: Plan, lengths: _Array, label_counts: _Array | None) -> None:
    """Check a plan against the samples that it is said to be of.

    Raises:
        ValueError: At the first promise that the plan breaks.
    """
    index, rows, batches = (
        tensor.numpy() for tensor in (plan.index, plan.row_offsets, plan.batch_offsets)
    )
    check_offsets("row_offsets", rows, len(index), "samples")
    check_offsets("batch_offsets", batches, len(rows) - 1, "rows")
    world_size = plan.config.world_size
    if len(batches) - 1 != len(plan) * world_size:
        raise ValueError(
            f"the plan has {len(batches) - 1} microbatches, but {world_size} ranks with "
            f"{len(plan)} each have {len(plan) * world_size}"
        )
    _check_samples(plan, index, lengths, label_counts)
    _check_rows(plan.config, plan.report["split"], index, rows, batches, lengths)


def check_what_is_given(
    plan: Plan, label_counts: torch.Tensor | None, label_starts: torch.Tensor | None
) -> None:
    """Check that labels are given if and only if the plan was made with some.

    Raises:
        ValueError: If they are missing, or are too many.
    """
    had = plan.report["inputs"]["labels"] is not None
    given = label_counts is not None or label_starts is not None
    if had and not given:
        raise ValueError("the plan was made with label counts: give them, to check it")
    if given and not had:
        raise ValueError("the plan was made without label counts: leave them out, to check it")


def check_inputs(plan: Plan, fresh: Plan) -> None:
    """Check that a plan was made from the same samples as one that was made anew.

    Raises:
        ValueError: If it was not; the text says in what they differ.
    """
    for what in ("lengths", "labels"):
        was, found = plan.report["inputs"][what], fresh.report["inputs"][what]
        if was != found:
            raise ValueError(
                f"the {what} are not those that the plan was made from: their digest is {found}, "
                f"and that in the plan is {was}"
            )


def check_equality(plan: Plan, fresh: Plan) -> None:
    """Compare a plan with one that was made anew, with the same settings.

    Raises:
        ValueError: If they differ; the text says in what.
    """
    for name in ("index", "row_offsets", "batch_offsets"):
        kept, made = getattr(plan, name), getattr(fresh, name)
        if not kept.equal(made):
            at = _first_difference(kept.numpy(), made.numpy())
            raise ValueError(
                f"{name} differs from a fresh plan from entry {at} on: it was changed, or made by "
                f"another version of the planner (it says {plan.report['version']}, and this is "
                f"{fresh.report['version']})"
            )
    if plan.report != fresh.report:
        facts = sorted(key for key, value in fresh.report.items() if plan.report.get(key) != value)
        raise ValueError(f"the report differs from that of a fresh plan in {', '.join(facts)}")


def check_offsets(name: str, offsets: _Array, end: int, what: str) -> None:
    """Check that offsets rise from 0 to the end of what they point into."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end:
        raise ValueError(f"{name} must go from 0 to {end}, the number of {what}")
    flat = np.flatnonzero(np.diff(offsets) <= 0)
    if len(flat) > 0:
        raise ValueError(f"{name} does not rise at entry {flat[0]}, but nothing may be empty")


def _check_samples(plan: Plan, index: _Array, lengths: _Array, label_counts: _Array | None) -> None:
    """Check that each retained sample is there once, beside marked repeats."""
    outside = np.flatnonzero((index < 0) | (index >= len(lengths)))
    if len(outside) > 0:
        raise ValueError(
            f"entry {outside[0]} of index is sample {index[outside[0]]}, but there are "
            f"{len(lengths)} samples"
        )
    border = len(index) - plan.report["repeated_samples"]
    times = np.bincount(index[:border], minlength=len(lengths))
    retained = _retained(plan.config, lengths, label_counts)
    for wrong, text in (
        (times > 1, "is planned more than once, and is not marked as a repeat"),
        ((times > 0) & ~retained, "is planned, but the settings leave it out"),
    ):
        if wrong.any():
            raise ValueError(f"sample {np.argmax(wrong)} {text}")
    strange = np.flatnonzero(times[index[border:]] == 0)
    if len(strange) > 0:
        raise ValueError(
            f"sample {index[border + strange[0]]} is marked as a repeat, but is planned nowhere "
            "else"
        )
    missing = retained & (times == 0)
    may_leave_out = plan.report["split"] == "train" and plan.config.incomplete_batches == "drop"
    if missing.sum() != (plan.report["unused_samples"] if may_leave_out else 0):
        raise ValueError(
            f"{missing.sum()} retained samples are not planned (first: {np.argmax(missing)}), but "
            f"the report says {plan.report['unused_samples']}"
        )


def _retained(
    config: Config, lengths: _Array, label_counts: _Array | None
) -> npt.NDArray[np.bool_]:
    """Say which samples the settings keep."""
    kept: npt.NDArray[np.bool_] = lengths >= config.min_sample_len
    if config.excess_length_strategy != "truncate":
        kept &= lengths <= (config.sequence_len or 0)
    if label_counts is not None and config.drop_unlabelled:
        kept &= label_counts > 0
    return kept


def _check_rows(
    config: Config, split: Split, index: _Array, rows: _Array, batches: _Array, lengths: _Array
) -> None:
    """Check that no row or microbatch holds more than it may."""
    kind, size = layout(config, split), batch_size(config, split)
    align = config.align_samples_to
    slots = -(-np.minimum(lengths[index], config.sequence_len or 0) // align) * align
    ends = np.concatenate([[0], np.cumsum(slots)])
    limits: list[tuple[str, Any, int | None]] = [("rows", np.diff(batches), 1)]
    if kind in PACKED:
        limits = [
            ("rows", np.diff(batches), size if kind == "real_rows" else 1),
            ("tokens", np.diff(ends[rows]), capacity(config, split)),
            ("samples", np.diff(rows), config.sample_packing_bin_size),
        ]
    else:
        limits.append(("samples", np.diff(rows), size))
    for what, found, bound in limits:
        if bound is not None and (found > bound).any():
            at = int(np.argmax(found > bound))
            place = "microbatch" if what == "rows" else "row"
            raise ValueError(f"{place} {at} holds {found[at]} {what}, more than {bound}")


def _first_difference(one: _Array, other: _Array) -> int:
    """The first entry that two unequal arrays do not share."""
    shared = min(len(one), len(other))
    different = np.flatnonzero(one[:shared] != other[:shared])
    return int(different[0]) if len(different) > 0 else shared
