"""Planning side by side with other packers, on the same lengths, in one process.

    python benches/python/plan_peers.py --n 10000000

Lognormal lengths (mean about 600 after clipping at 4096) and capacity 4096, unless `--lengths` says
otherwise. multipack's figure is its Python API, tensors in and plan out: the seeded shuffle, the
statistics and the digests included. Where there is Cargo, what the others do, packing alone, is
timed beside it, by the Rust bench and on lengths of the same kind. The others are timed on their
fastest interface. Runs alternate, and the fastest of each counts, so that a busy machine spoils one
round and not one contestant. Every answer is checked: each sample once, no row over the capacity.

The others: pip install -r benches/python/requirements.txt
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import operator
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import Results, add_json

import multipack

CAPACITY = 4096
SEED = 20261130
ROOT = Path(__file__).parents[2]

Lengths = np.ndarray[Any, np.dtype[np.int64]]


def lognormal(n: int) -> Lengths:
    """A long tail, as of chats and documents."""
    lengths = np.ceil(np.random.default_rng(SEED).lognormal(5.923548, 1.0, n))
    return np.clip(lengths, 1, CAPACITY).astype(np.int64)


def uniform(n: int) -> Lengths:
    """From 0.2 to 0.6 of the capacity: nothing small to fill gaps."""
    low, high = int(0.2 * CAPACITY), int(0.6 * CAPACITY)
    return np.random.default_rng(SEED).integers(low, high, n)


def triplets(n: int) -> Lengths:
    """Three by three they fill rows exactly: n / 3 rows are possible."""
    rng = np.random.default_rng(SEED)
    quarter, half = CAPACITY // 4, CAPACITY // 2
    first, second = rng.integers(quarter + 1, half, (2, 2 * n))
    third = CAPACITY - first - second
    right = (third > quarter) & (third < half)
    rows = np.stack([first, second, third], axis=1)[right][: n // 3]
    return rng.permutation(rows.reshape(-1))


LENGTHS = {"lognormal": lognormal, "uniform": uniform, "triplets": triplets}


class Contestant:
    """A packer with its data made ready."""

    def __init__(self, name: str, run: Callable[[], Any], rows: Callable[[Any], Any]) -> None:
        self.name = name
        self.run = run
        self.rows = rows
        self.seconds: list[float] = []
        self.answer: Any = None

    def time(self) -> None:
        """Run once."""
        self.answer = None  # freed before the clock starts
        start = time.perf_counter()
        self.answer = self.run()
        self.seconds.append(time.perf_counter() - start)


def ours(lengths: Lengths, algorithm: str) -> Contestant:
    """Plan by the Python API."""
    tensor = torch.from_numpy(lengths)
    config = multipack.Config(sequence_len=CAPACITY, sample_packing_algorithm=algorithm)

    def rows(plan: multipack.Plan) -> tuple[np.ndarray, np.ndarray]:
        return plan.index.numpy(), plan.row_offsets.numpy()

    return Contestant(f"multipack {algorithm}", lambda: multipack.plan(tensor, config=config), rows)


def seqpacker(lengths: Lengths) -> Contestant:
    """Optimised best fit decreasing in Rust, arrays in and out."""
    from seqpacker import Packer

    packer = Packer(capacity=CAPACITY, strategy="obfd", seed=0)

    def rows(answer: Any) -> tuple[np.ndarray, np.ndarray]:
        items, splits = answer
        return items, np.concatenate([[0], splits, [len(items)]])

    return Contestant("seqpacker obfd", lambda: packer.pack_flat(lengths), rows)


def lightbinpack(lengths: Lengths) -> Contestant:
    """Optimised best fit decreasing in C++, lists in and out."""
    import lightbinpack as peer

    numbers = lengths.tolist()
    return Contestant("lightbinpack obfd", lambda: peer.obfd(numbers, CAPACITY, -1), from_lists)


def axolotl(lengths: Lengths) -> Contestant:
    """First fit in groups of 100,000, compiled by numba, one process."""
    from axolotl.utils.samplers.multipack import pack_parallel

    numbers = lengths.astype(np.int32)
    pack_parallel(numbers[:2000], CAPACITY, 100_000, 200, 1)  # compiles
    return Contestant(
        "axolotl pack_parallel",
        lambda: pack_parallel(numbers, CAPACITY, 100_000, 200, 1),
        from_lists,
    )


def trl(lengths: Lengths) -> Contestant:
    """Best fit decreasing over a table of tokens, which it lays out as well."""
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    tokens = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(lengths.sum(), np.int8)))
    table = pa.table({"input_ids": tokens})

    def rows(packed: Any) -> tuple[np.ndarray, np.ndarray]:
        # It does not say which sample is where: the lengths tell, up to samples of one length.
        column = packed["seq_lengths"].combine_chunks()
        items = np.empty(len(lengths), np.int64)
        items[np.argsort(column.flatten().to_numpy(), kind="stable")] = np.argsort(
            lengths, kind="stable"
        )
        return items, column.offsets.to_numpy().astype(np.int64)

    return Contestant("trl bfd", lambda: _pack_bfd(table, CAPACITY), rows)


def from_lists(answer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows as lists of items, flattened."""
    sizes = np.fromiter((len(row) for row in answer), np.int64, len(answer))
    items = np.fromiter((item for row in answer for item in row), np.int64, int(sizes.sum()))
    return items, np.concatenate([[0], np.cumsum(sizes)])


def judge(contestant: Contestant, lengths: Lengths) -> tuple[int, str | None]:
    """Count the rows of an answer, and say what is wrong with it.

    Raises:
        AssertionError: If it is ours that is wrong.
    """
    items, offsets = contestant.rows(contestant.answer)
    totals = np.add.reduceat(lengths[items], offsets[:-1])
    fault = None
    if np.any(np.bincount(items, minlength=len(lengths)) != 1):
        fault = "a sample is lost or repeated"
    elif totals.max() > CAPACITY:
        fault = f"a row has {totals.max()} tokens"
    if fault and contestant.name.startswith("multipack"):
        raise AssertionError(f"{contestant.name}: {fault}")
    return len(totals), fault


def packing_alone(algorithm: str, n: int) -> float | None:
    """Seconds for packing without the rest of a plan, the fastest of some runs of the Rust bench.

    It knows 100,000, 1 million and 10 million lognormal lengths.
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        return None
    name = f"pack/{algorithm.removesuffix('_decreasing')}/{n}"
    arguments = ["bench", "--quiet", "--bench", "plan", "--", f"^{name}$", "--noplot"]
    subprocess.run([cargo, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    samples = target / "criterion" / name / "new" / "sample.json"
    if not samples.exists():
        return None
    runs = json.loads(samples.read_text())
    return min(map(operator.truediv, runs["times"], runs["iters"])) / 1e9


def main() -> None:
    """Time them all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--lengths", choices=LENGTHS, default="lognormal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithms", default="best_fit_decreasing,first_fit")
    parser.add_argument("--peers", default="seqpacker,lightbinpack,axolotl")
    add_json(parser)
    args = parser.parse_args()
    results = Results(args.json)
    lengths = LENGTHS[args.lengths](args.n)
    peers = {"seqpacker": seqpacker, "lightbinpack": lightbinpack, "axolotl": axolotl, "trl": trl}
    algorithms = [name for name in args.algorithms.split(",") if name]
    contestants = [ours(lengths, name) for name in algorithms]
    for name in filter(None, args.peers.split(",")):
        try:
            contestants.append(peers[name](lengths))
        except ImportError as error:
            print(f"{name} is not installed ({error}): see benches/python/requirements.txt")
    for _ in range(args.rounds):
        for contestant in contestants:
            contestant.time()

    bound = -(-int(lengths.sum()) // CAPACITY)
    print(f"{args.n:,} {args.lengths} lengths, capacity {CAPACITY}, {bound:,} rows at least")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in peers:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    print(f"{'':34}{'seconds':>10}{'rows':>12}{'over':>9}{'of ours':>9}")
    own = min(contestants[0].seconds)
    for contestant in contestants:
        (rows, fault), best = judge(contestant, lengths), min(contestant.seconds)
        over = f"{rows / bound - 1:9.3%}"
        print(f"{contestant.name:34}{best:10.4f}{rows:12,}{over}{best / own:9.1f}  {fault or ''}")
        figures = {"rows": f"{rows:,}", "over the bound": over.strip()}
        setting = f"{args.n:,} {args.lengths} lengths, capacity {CAPACITY:,}"
        results.add(setting, contestant.name, contestant.seconds, figures, fault)
    for algorithm in algorithms if args.lengths == "lognormal" else []:
        if alone := packing_alone(algorithm, args.n):
            print(f"{f'packing alone, {algorithm}':34}{alone:10.4f}{'':21}{alone / own:9.1f}")


if __name__ == "__main__":
    main()
