"""Runs work in several processes at once: the ranks of a process group, or any others.

Starting Python and importing torch takes seconds, so the processes are forked from one that has
done so and nothing else: a fork server. It runs no threads, so the forks are safe.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["multipack", "multipack.integrations", "datasets", "processes"])


def run_ranks(work: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Return ``work(rank, *arguments)`` of each rank of one gloo group.

    Raises:
        AssertionError: If a rank fails, or one takes too long, as when it waits for the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        return run_processes(
            [(_in_group, (store, ranks, rank, work, arguments)) for rank in range(ranks)]
        )


def run_processes(works: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return what each function returns for its arguments, run in a process of its own.

    Raises:
        AssertionError: If one fails or takes too long.
    """
    running = []
    for work, arguments in works:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_report, args=(there, work, arguments))
        process.start()
        there.close()
        running.append((process, here))
    try:
        results = []
        for number, (_, here) in enumerate(running):
            assert wait([here], SECONDS), f"process {number} of {len(works)} hangs"
            good, result = here.recv()
            assert good, f"process {number} of {len(works)} failed:\n{result}"
            results.append(result)
        for process, _ in running:
            process.join(SECONDS)
        assert [process.exitcode for process, _ in running] == [0] * len(works)
        return results
    finally:
        for process, here in running:
            process.kill()
            process.join()
            here.close()


def _report(there: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        there.send((True, work(*arguments)))
    except BaseException:
        there.send((False, traceback.format_exc()))


def _in_group(
    store: str, ranks: int, rank: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(ranks), str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        return work(rank, *arguments)
    finally:
        dist.destroy_process_group()
