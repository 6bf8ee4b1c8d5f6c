"""What differs between two plans, and why.

A plan is a function of settings, lengths, label counts, epoch, split and the planner's version, all
of which it records: so whatever differs there is why two plans differ, and if nothing does, a file
was changed. Rows are compared as sets of samples, and microbatches as sets of rows, by sums of
64-bit hashes: a few passes over the samples, and a sort of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import multipack

Hashes = npt.NDArray[Any]

# What people ask for first; `plan show` prints all statistics.
_STATISTICS = (
    "efficiency",
    "padding_tokens",
    "microbatch_label_std",
    "step_label_std",
    "rank_cost_imbalance",
)


def reasons(a: multipack.Plan, b: multipack.Plan) -> Iterator[str]:
    """What the two were made from, where that differs; a line each."""
    before, after = vars(a.config), vars(b.config)
    for key, value in before.items():
        if value != after[key]:
            unused = key == "seed" and a.config.data_seed == b.config.data_seed is not None
            note = ", which planning does not use, as data_seed is set" if unused else ""
            yield f"{key}: {_plain(value)} in A, {_plain(after[key])} in B{note}"
    for key in ("split", "epoch"):
        if a.report[key] != b.report[key]:
            yield f"{key}: {a.report[key]} in A, {b.report[key]} in B"
    for what in ("lengths", "labels"):
        digests = [plan.report["inputs"][what] for plan in (a, b)]
        if None in digests and digests != [None, None]:
            has, lacks = "BA" if digests[0] is None else "AB"
            yield f"{what}: counted in {has}, not given in {lacks}"
        elif digests[0] != digests[1]:
            yield f"{what}: not the same (digest {digests[0]} in A, {digests[1]} in B)"
    if a.report["version"] != b.report["version"]:
        yield f"planner: version {a.report['version']} in A, {b.report['version']} in B"


def changes(a: multipack.Plan, b: multipack.Plan) -> Iterator[str]:
    """What became of it: samples, rows, microbatches and statistics that differ; a line each."""
    for name, key in (("retained samples", "retained"), ("unused samples", "unused_samples")):
        if a.report[key] != b.report[key]:
            yield f"{name}: {a.report[key]:,} in A, {b.report[key]:,} in B"
    if len(a) != len(b):
        yield f"microbatches of each rank: {len(a):,} in A, {len(b):,} in B"
    (samples_a, rows_a, batches_a), (samples_b, rows_b, batches_b) = map(_hashes, (a, b))
    for name, one, other in (("samples", samples_a, samples_b), ("rows", rows_a, rows_b)):
        only_a = int(np.count_nonzero(~np.isin(one, other)))
        only_b = int(np.count_nonzero(~np.isin(other, one)))
        if only_a or only_b:
            shared = len(one) - only_a
            yield f"{name}: {shared:,} in both, {only_a:,} only in A, {only_b:,} only in B"
    if a.config.world_size == b.config.world_size:
        shared = min(len(batches_a), len(batches_b))
        places = np.flatnonzero(batches_a[:shared] != batches_b[:shared])
        if len(places):
            k, rank = divmod(int(places[0]), a.config.world_size)
            yield (
                f"microbatches with other rows at the same place: {len(places):,} of {shared:,}, "
                f"the first is microbatch {k} of rank {rank}"
            )
        elif len(batches_a) == len(batches_b) and not a.index.equal(b.index):
            yield "order: microbatches have the same rows, but not in the same order within"
    for name in _STATISTICS:
        before, after = (_plain(getattr(plan.stats.after, name)) for plan in (a, b))
        if before != after:
            yield f"{name.replace('_', ' ')}: {before} in A, {after} in B"


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:,.4f}" if isinstance(value, float) else str(value)


def _hashes(plan: multipack.Plan) -> tuple[Hashes, Hashes, Hashes]:
    """A number for each sample, row and microbatch, equal where their contents are."""
    samples = _mix(plan.index.numpy().astype(np.uint64))
    if len(samples) == 0:
        return samples, samples, samples
    rows = _mix(np.add.reduceat(samples, plan.row_offsets.numpy()[:-1]))
    return samples, rows, np.add.reduceat(rows, plan.batch_offsets.numpy()[:-1])


def _mix(values: Hashes) -> Hashes:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that scatters bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scattered: Hashes = mixed ^ (mixed >> np.uint64(31))
    return scattered
