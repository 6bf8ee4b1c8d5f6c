"""Runs work in several processes at once: the ranks of a process group, or one that may be killed.

Starting Python and importing torch takes seconds, so the processes are forked from one that has
done so and nothing else, a fork server. It runs no threads, so the forks are safe.
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

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["multipack.integrations", "torch._dynamo", "transformers.models.llama.modeling_llama"]
)


class Running:
    """Processes that each run ``work(rank, *arguments)``; several form a gloo group.

    As a context it leaves no process behind.
    """

    def __init__(self, work: Callable[..., Any], count: int, *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = None if count == 1 else Path(self._folder.name, "store").as_uri()
        self._processes = []
        for rank in range(count):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_report, args=(there, store, rank, count, work, arguments)
            )
            process.start()
            there.close()
            self._processes.append((process, here))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for _, here in self._processes:
            here.close()
        self._folder.cleanup()

    def kill(self) -> None:
        """Send SIGKILL to all of them."""
        for process, _ in self._processes:
            process.kill()
        for process, _ in self._processes:
            process.join()

    def alive(self) -> bool:
        """Whether all of them are running."""
        return all(process.is_alive() for process, _ in self._processes)

    def results(self) -> list[Any]:
        """Wait for the end; return what each returned.

        Raises:
            AssertionError: If one fails, or takes too long, as when it waits for the others.
        """
        left = {here: rank for rank, (_, here) in enumerate(self._processes)}
        results = [None] * len(left)
        while left:
            ready = wait(left, SECONDS)
            assert ready, f"ranks {sorted(left.values())} of {len(results)} hang"
            for here in ready:
                rank = left.pop(here)
                good, results[rank] = here.recv()
                assert good, f"rank {rank} of {len(results)} failed:\n{results[rank]}"
        for process, _ in self._processes:
            process.join(SECONDS)
            assert process.exitcode == 0
        return results


def run(work: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Return ``work(rank, *arguments)`` of each of `count` processes, as `Running` starts them."""
    with Running(work, count, *arguments) as running:
        return running.results()


def _report(
    there: Connection,
    store: str | None,
    rank: int,
    count: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # What a program on Linux has, and a process of the fork server has not.
    multiprocessing.set_start_method("fork", force=True)
    if store is not None:
        os.environ["WORLD_SIZE"], os.environ["RANK"] = str(count), str(rank)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    try:
        there.send((True, work(rank, *arguments)))
    except BaseException:
        there.send((False, traceback.format_exc()))
    if store is not None:
        dist.destroy_process_group()
