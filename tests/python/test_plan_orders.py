"""The order of a plan: another in each epoch, well mixed, and the same everywhere.

That is in every process, thread and child, with any number of threads, interrupted or not.
"""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from plans import ALGORITHMS, rows_of

from multipack import Plan, plan


@pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
def test_an_epoch_is_a_permutation_of_equal_samples(form: Any) -> None:
    """Shuffling a tensor in place by swapping views once duplicated some entries."""
    for seed in range(50):
        made = plan(form([4] * 64), sequence_len=4, seed=seed)

        assert list(range(64)) == sorted(made.index.tolist())
        assert made.digest == plan([4] * 64, sequence_len=4, seed=seed).digest


def test_what_is_left_out_differs_by_epoch() -> None:
    used: set[int] = set()
    for epoch in range(20):
        index = plan([4] * 10, sequence_len=4, world_size=4, epoch=epoch).index.tolist()
        assert len(set(index)) == 8
        used.update(index)

    assert set(range(10)) == used


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    lengths = list(range(1, 40))

    def digest(**keys: Any) -> str:
        return plan(lengths, sequence_len=64, **keys).digest

    assert digest() == digest()
    assert digest(epoch=1) != digest(epoch=0)
    assert digest(seed=1) != digest(seed=0)
    # Were the two added, epoch 1 of seed 0 would be epoch 0 of seed 1.
    first = plan(lengths, sequence_len=64, seed=0, epoch=1).index
    assert first.tolist() != plan(lengths, sequence_len=64, seed=1, epoch=0).index.tolist()


def lognormal(seeded: np.random.Generator, n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths with a long tail, as those of chats are."""
    return np.clip(seeded.lognormal(5, 1, n), 1, 2048).astype(np.int64)


def pairs(plan: Plan) -> set[tuple[int, int]]:
    """All pairs of samples that share a row."""
    return {pair for row in rows_of(plan) for pair in itertools.combinations(sorted(row), 2)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_shares_a_row_differs_by_epoch(seed: int, algorithm: str) -> None:
    """A packer that sorts would put the same samples together in every epoch.

    Samples of equal length take turns: here each length has a hundred.
    """
    lengths = np.random.default_rng(seed).permutation(np.repeat(np.arange(100, 500, 20), 100))
    first, second = (
        pairs(plan(lengths, sequence_len=2048, sample_packing_algorithm=algorithm, epoch=epoch))
        for epoch in (0, 1)
    )

    assert len(first & second) < 0.15 * len(first)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_neighbouring_microbatches_are_not_alike(
    seeded: np.random.Generator, algorithm: str
) -> None:
    """Sorted by length they would be, and the loss would go up and down with them."""
    made = plan(lognormal(seeded, 5000), sequence_len=2048, sample_packing_algorithm=algorithm)

    correlation = made.stats.after.length_correlation
    assert correlation is not None
    assert abs(correlation) <= 3 / len(made) ** 0.5


def test_data_seed_stands_in_for_seed() -> None:
    lengths = list(range(1, 40))

    alone = plan(lengths, sequence_len=64, seed=5).index.tolist()

    assert alone == plan(lengths, sequence_len=64, seed=1, data_seed=5).index.tolist()


def test_other_processes_and_thread_counts_make_the_same_plan() -> None:
    """Ranks must agree without talking: no hash order, no thread order."""
    code = (
        "import multipack, numpy; "
        "lengths = numpy.random.default_rng(0).integers(1, 2048, 20_000); "
        "print(multipack.plan(lengths, sequence_len=4096, world_size=3).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "MULTIPACK_NUM_THREADS": threads, "OMP_NUM_THREADS": "8"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("0", "1"), ("1", "2"), ("2", "8"))
    }

    assert len(digests) == 1


def digest_of_many() -> str:
    return plan(np.random.default_rng(0).integers(1, 2048, 200_000), sequence_len=4096).digest


def test_a_forked_child_makes_the_same_plan() -> None:
    """After the parent has used its threads, which the child does not have."""
    here = digest_of_many()

    with multiprocessing.get_context("fork").Pool(1) as child:
        assert here == child.apply_async(digest_of_many).get(timeout=60)


@pytest.mark.parametrize(("delay", "patience"), [(0.0, 0.0), (0.0, 0.05), (0.1, 0.0)])
def test_planning_can_be_interrupted(delay: float, patience: float) -> None:
    """A real Ctrl-C: the planner was still at work, or about to begin, when Python heard it.

    Python waits for it at its end, which it does for threads that are alive.
    """
    code = (
        "import os, signal, threading, time\n"
        "import numpy, multipack\n"
        # A shell that runs the tests in the background has it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "lengths = numpy.random.default_rng(0).integers(1, 4096, 1_000_000)\n"
        "begin = threading.Thread._bootstrap_inner\n"
        "def begin_later(thread):\n"
        f"    time.sleep({delay} if thread.name == 'multipack plan' else 0)\n"
        "    begin(thread)\n"
        "threading.Thread._bootstrap_inner = begin_later\n"
        "def planners():\n"
        "    return [t for t in threading.enumerate() if t.name == 'multipack plan']\n"
        "def interrupt():\n"
        "    while not planners():\n"
        "        time.sleep(0.001)\n"
        f"    time.sleep({patience})\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "try:\n"
        "    multipack.plan(lengths, sequence_len=4096, sample_packing_algorithm='tight')\n"
        "except KeyboardInterrupt:\n"
        "    print([thread.is_alive() for thread in planners()])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[True]\n"


def test_a_long_plan_is_the_same_in_any_thread_and_its_errors_are_too() -> None:
    lengths = np.random.default_rng(0).integers(1, 4096, 1_000_000)
    with ThreadPoolExecutor() as pool:
        elsewhere = pool.submit(plan, lengths, sequence_len=4096).result()

    assert elsewhere.digest == plan(lengths, sequence_len=4096).digest
    lengths[-1] = -1
    with pytest.raises(ValueError, match="sample 999999 has length -1"):
        plan(lengths, sequence_len=4096)
