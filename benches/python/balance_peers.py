"""Balancing supervised tokens side by side with Axolotl, on the same samples, in one process.

    python benches/python/balance_peers.py --n 100000

Four ranks, four microbatches for each in an optimizer step. Packed: lognormal lengths (mean about
600) of which a Beta(1.2, 1.8) share is supervised. A fixed number of four samples: a mixture of
chats with short and long answers and texts that are supervised throughout. Every figure is computed
here from the schedules, by the same lines. Checked: each sample at most once and none lost but in
rows left over, no row over the capacity, no padding added, rows and mean labels unchanged.

The time is that of a whole plan: for multipack with packing, statistics and digests (the median of
five), for Axolotl what its sampler takes to make its batches. What balancing takes of it is shown
too: the whole less the same plan without balancing. So for multipack that includes a packing that
mixes lengths. Axolotl is the only other one that balances labels. It needs its files and numba
alone: see benches/python/requirements.txt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
from typing import Any

import numpy as np
import torch
from results import Results, add_json

import multipack

SEED = 20261130
SEQUENCE_LEN = 4096
RANKS, ACCUMULATION = 4, 4
STEP = RANKS * ACCUMULATION
SAMPLES = 4  # of a microbatch, in the layouts with a fixed number of them
PAD_TO = 64

Integers = np.ndarray[Any, np.dtype[np.int64]]


def shares_of_answers(n: int) -> tuple[Integers, Integers]:
    """Lengths and label counts; labels are a random share of each sample, 40 % on average."""
    lengths = np.ceil(np.random.default_rng(SEED).lognormal(5.923548087481045, 1.0, n))
    lengths = np.clip(lengths, 1, SEQUENCE_LEN).astype(np.int64)
    shares = np.random.default_rng(SEED + 1).beta(1.2, 1.8, n)
    return lengths, np.clip(np.rint(shares * lengths), 1, lengths).astype(np.int64)


def chats(n: int) -> tuple[Integers, Integers]:
    """Lengths and label counts of 60 % short answers, 25 % long ones, 15 % nothing but answer."""
    of_length, of_kind, of_short, of_long = (
        np.random.default_rng(seed) for seed in np.random.SeedSequence(SEED).spawn(4)
    )
    lengths = np.rint(of_length.lognormal(5.923548087481045, 1.0, n))
    lengths = np.clip(lengths, 16, SEQUENCE_LEN).astype(np.int64)
    kind = of_kind.random(n)
    short, long = of_short.beta(2.0, 5.0, n), of_long.beta(5.0, 1.0, n)
    shares = np.where(kind < 0.6, short, np.where(kind < 0.85, long, 1.0))
    labels = np.clip(np.rint(shares * lengths), 1, lengths).astype(np.int64)
    # The first token of a sample is predicted by nothing.
    return lengths, labels - (labels == lengths)


class Schedule:
    """Microbatches as flat arrays: items, and where rows and microbatches begin."""

    def __init__(self, items: Integers, rows: Integers, batches: Integers) -> None:
        self.items, self.rows, self.batches = items, rows, batches

    @classmethod
    def of_plan(cls, plan: multipack.Plan) -> Schedule:
        """Ours."""
        arrays = (plan.index, plan.row_offsets, plan.batch_offsets)
        return cls(*(array.numpy() for array in arrays))

    @classmethod
    def of_lists(cls, batches: list[list[list[int]]]) -> Schedule:
        """Microbatches as lists of rows, which are lists of items."""
        rows = [row for batch in batches for row in batch]
        return cls(
            np.concatenate([np.asarray(row, np.int64) for row in rows]),
            np.cumsum([0, *map(len, rows)]),
            np.cumsum([0, *map(len, batches)]),
        )

    def of_rows(self, values: Integers) -> Integers:
        """What the samples of each row sum up to."""
        return np.add.reduceat(values[self.items], self.rows[:-1])

    def of_batches(self, values: Integers) -> Integers:
        """The same for each microbatch."""
        return np.add.reduceat(self.of_rows(values), self.batches[:-1])

    def sizes(self, lengths: Integers, padded: bool) -> Integers:
        """Positions of each microbatch; padded, each sample is a row."""
        if not padded:
            return self.of_batches(lengths)
        starts = self.rows[self.batches[:-1]]
        longest = np.maximum.reduceat(lengths[self.items], starts)
        count = np.diff(self.rows[self.batches])
        return count * (-(-longest // PAD_TO) * PAD_TO)


def figures(
    schedule: Schedule, lengths: Integers, labels: Integers, padded: bool = False
) -> dict[str, float]:
    """How even a schedule is; an incomplete last step does not count for steps."""
    mine, tokens = schedule.of_batches(labels), schedule.of_batches(lengths)
    squares = schedule.of_batches(lengths**2)
    sizes = schedule.sizes(lengths, padded)
    whole = len(mine) // STEP * STEP
    microsteps = sizes[:whole].reshape(-1, RANKS)
    attention = squares[:whole].reshape(-1, RANKS)
    steps = mine[:whole].reshape(-1, STEP).sum(axis=1)
    return {
        "rows": len(schedule.rows) - 1,
        "mean": mine.mean(),
        "labels": mine.std(),
        "step labels": steps.std(),
        "tokens": tokens.std(),
        "step tokens": tokens[:whole].reshape(-1, STEP).sum(axis=1).std(),
        "padding": float(sizes.sum() - tokens.sum()),
        "wait": (microsteps.max(axis=1) - microsteps.mean(axis=1)).mean(),
        "jump": np.abs(np.diff(microsteps, axis=0)).mean(),
        "attention": (attention.max(axis=1) / attention.mean(axis=1)).mean(),
    }


def fault_of(schedule: Schedule, lengths: Integers, capacity: int | None, n: int) -> str | None:
    """What is wrong: samples that are repeated, too many left out, a row over its capacity."""
    if np.bincount(schedule.items, minlength=n).max() > 1:
        return "a sample is repeated"
    rows = schedule.of_rows(lengths)
    room = capacity * RANKS * SAMPLES if capacity else SAMPLES * RANKS * SEQUENCE_LEN
    if lengths.sum() - lengths[schedule.items].sum() > room:
        return "more samples are left out than rows left over can hold"
    if capacity and rows.max() > capacity:
        return f"a row has {rows.max()} tokens"
    return None


def check(schedule: Schedule, lengths: Integers, capacity: int | None, n: int) -> None:
    """Stop if something is wrong with ours."""
    if fault := fault_of(schedule, lengths, capacity, n):
        raise AssertionError(fault)


def ours(data: tuple[Integers, Integers], balance: bool, **keys: Any) -> tuple[Any, float]:
    """Plan, and say how long that takes."""
    lengths, labels = (torch.from_numpy(array) for array in data)
    config = multipack.Config(
        sequence_len=keys.pop("capacity", SEQUENCE_LEN),
        world_size=RANKS,
        gradient_accumulation_steps=ACCUMULATION,
        balance_labels=balance,
        **keys,
    )
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        plan = multipack.plan(lengths, labels, config)
        seconds.append(time.perf_counter() - start)
    return plan, statistics.median(seconds)


def axolotl_packed(
    data: tuple[Integers, Integers], balance: bool, capacity: int, rows: int
) -> tuple[list[list[list[int]]], float]:
    """Its sampler for packed rows."""
    from axolotl.utils.samplers.multipack import MultipackBatchSampler
    from torch.utils.data import RandomSampler

    lengths, labels = data
    torch.manual_seed(0)
    sampler = MultipackBatchSampler(
        RandomSampler(range(len(lengths))),
        batch_size=rows,
        batch_max_len=capacity,
        lengths=lengths,
        bin_size=200,
        drop_last=True,
        label_counts=labels if balance else None,
        label_start_counts=np.zeros_like(labels) if balance else None,
        seed=42,
        batches_per_optimizer_step=STEP,
        dp_count=RANKS,
        num_processes=1,
    )
    start = time.perf_counter()
    batches = sampler.generate_batches()
    return batches, time.perf_counter() - start


def axolotl_fixed(
    data: tuple[Integers, Integers], mode: str
) -> tuple[list[list[list[int]]], float]:
    """Its sampler for a fixed number of samples; mode is ``padded`` or ``flattened``."""
    from axolotl.utils.samplers.label_balanced import LabelBalancedRandomSampler

    lengths, labels = data
    sampler = LabelBalancedRandomSampler(
        lengths,
        labels,
        SAMPLES,
        seed=42,
        batches_per_optimizer_step=STEP,
        length_mode=mode,
        padding_multiple=PAD_TO if mode == "padded" else 1,
        dp_count=RANKS,
    )
    start = time.perf_counter()
    order = list(sampler)
    seconds = time.perf_counter() - start
    whole = len(order) // SAMPLES * SAMPLES
    return [[order[at : at + SAMPLES]] for at in range(0, whole, SAMPLES)], seconds


def show(
    name: str, found: dict[str, float], seconds: float, plain: float, floor: float | None
) -> None:
    """Print a line: shares of the mean, which is that of a step for steps."""
    mean = found["mean"]
    least = "" if floor is None else f"{floor / mean:10.2%}"
    print(
        f"{name:48}{found['rows']:>9,.0f}{found['labels'] / mean:10.3%}{least:>10}"
        f"{found['step labels'] / mean / STEP:11.4%}{found['attention']:10.4f}"
        f"{seconds:9.3f} s{seconds - plain:10.3f} s"
    )


def shares(found: dict[str, float]) -> dict[str, str]:
    """The figures of packed rows for a table."""
    mean = found["mean"]
    return {
        "labels of a microbatch, std/mean": f"{found['labels'] / mean:.2%}",
        "of a step": f"{found['step labels'] / mean / STEP:.3%}",
        "Σ length², heaviest rank/mean": f"{found['attention']:.4f}",
    }


def packed(n: int, peer: bool, results: Results) -> None:
    """Compare packed rows."""
    data = shares_of_answers(n)
    lengths, labels = data
    print(f"\npacked, {n:,} samples: labels of a microbatch and of a step, std/mean")
    columns = f"{'rows':>9}{'microbatch':>10}{'floor':>10}{'step':>11}{'sum len^2':>10}"
    print(f"{'':48}{columns}{'time':>11}{'balancing':>12}")
    for layout, capacity, rows in (
        ("one row of 4096", 4096, 1),
        ("one row of 16384", 16384, 1),
        ("four rows of 4096", 4096, 4),
    ):
        setting = f"{n:,} samples packed into {layout}, {RANKS} ranks, accumulation {ACCUMULATION}"
        keys: dict[str, Any] = {"micro_batch_size": max(capacity // SEQUENCE_LEN, rows)}
        if rows > 1:
            keys["multipack_real_batches"] = True
        plain = 0.0
        for balance, cost in ((False, "auto"), (True, "auto"), (True, "attention")):
            plan, seconds = ours(data, balance, balance_cost=cost, **keys)
            plain = plain if balance else seconds
            schedule = Schedule.of_plan(plan)
            check(schedule, lengths, capacity, n)
            before, after = plan.stats.before, plan.stats.after
            if (before.rows, before.mean_labels) != (after.rows, after.mean_labels):
                raise AssertionError("balancing changed what is planned")
            name = "balanced" if balance else "not balanced"
            name += ", attention" if cost == "attention" else ""
            floor = after.label_std_floor if balance else None
            found = figures(schedule, lengths, labels)
            show(f"{layout}: multipack {name}", found, seconds, plain, floor)
            results.add(setting, f"multipack {name}", [seconds], shares(found))
        if peer:
            for balance in (False, True):
                batches, seconds = axolotl_packed(data, balance, capacity, rows)
                plain = plain if balance else seconds
                schedule = Schedule.of_lists(batches)
                name = "balanced" if balance else "not balanced"
                found = figures(schedule, lengths, labels)
                show(f"{layout}: axolotl {name}", found, seconds, plain, None)
                fault = fault_of(schedule, lengths, capacity, n)
                results.add(setting, f"axolotl {name}", [seconds], shares(found), fault)


def fixed(n: int, peer: bool, results: Results) -> None:
    """Compare the layouts with a fixed number of samples."""
    data = chats(n)
    lengths, labels = data
    columns = ("labels", "step labels", "tokens", "step tokens", "padding", "wait", "jump")
    print(f"\n{SAMPLES} samples a microbatch, {n:,} samples: std, padding and waits in tokens")
    print(f"{'':36}{'floor':>8}{''.join(f'{name:>13}' for name in columns)}{'time':>11}")
    for mode in ("flattened", "padded"):
        keys: dict[str, Any] = {"micro_batch_size": SAMPLES, "sample_packing": False}
        if mode == "flattened":
            keys["batch_flattening"] = True
        else:
            keys["pad_to_multiple_of"] = PAD_TO
        lines: list[tuple[str, Schedule, float, str]] = []
        for balance in (False, True):
            plan, seconds = ours(data, balance, **keys)
            name = f"{mode}: multipack {'balanced' if balance else 'not balanced'}"
            floor = plan.stats.after.label_std_floor if balance else None
            least = "" if floor is None else f"{floor:.0f}"
            lines.append((name, Schedule.of_plan(plan), seconds, least))
        if peer:
            batches, seconds = axolotl_fixed(data, mode)
            lines.append((f"{mode}: axolotl balanced", Schedule.of_lists(batches), seconds, ""))
        paddings = []
        for name, schedule, seconds, least in lines:
            fault = fault_of(schedule, lengths, None, n)
            if fault and "multipack" in name:
                raise AssertionError(f"{name}: {fault}")
            found = figures(schedule, lengths, labels, padded=mode == "padded")
            paddings.append(found["padding"])
            values = "".join(f"{found[column]:13,.0f}" for column in columns)
            print(f"{name:36}{least:>8}{values}{seconds:9.3f} s  {fault or ''}")
            shown = {f"{column}, std": f"{found[column]:,.0f}" for column in columns[:4]}
            shown |= {column: f"{found[column]:,.0f}" for column in columns[4:]}
            setting = f"{n:,} samples, {SAMPLES} to a microbatch, {mode}"
            results.add(setting, name.removeprefix(f"{mode}: "), [seconds], shown, fault)
        if paddings[1] > paddings[0]:
            raise AssertionError("balancing added padding")


def main() -> None:
    """Compare, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=100_000, help="samples of the packed layouts")
    parser.add_argument("--fixed", type=int, default=200_000, help="samples of the other layouts")
    add_json(parser)
    args = parser.parse_args()
    results = Results(args.json)
    try:
        axolotl_packed(shares_of_answers(2000), True, SEQUENCE_LEN, 1)  # compiles
        peer = True
        print(f"axolotl {importlib.metadata.version('axolotl')}")
    except ImportError as error:
        peer = False
        print(f"axolotl is not installed ({error}): see benches/python/requirements.txt")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if args.n:
        packed(args.n, peer, results)
    if args.fixed:
        fixed(args.fixed, peer, results)


if __name__ == "__main__":
    main()
