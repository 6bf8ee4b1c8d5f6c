"""The ops in forked processes, after the parent has used its pool of threads.

A child inherits the memory of a pool but not its threads: whoever hands work to them waits for
ever. Data loaders fork by default on Linux, `datasets` does so in `map(num_proc=…)`.
"""

import os
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from multipack import ops

LENGTHS = torch.full((400,), 500)
TOKENS = torch.arange(int(LENGTHS.sum()))
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
ALL = (TOKENS, OFFSETS, torch.arange(400), torch.tensor([0, 400]))
SECONDS = 60


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ops.collate(*ALL)  # large enough to be shared out, so that the pool is built
    yield
    torch.set_num_threads(before)


def run_in_child(work) -> int:
    """Fork, run `work` in the child, return its exit status; kill it when it takes too long."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def collate_all() -> None:
    batch = ops.collate(*ALL)
    # Compared by numpy: after a fork torch's own threads hang, as ours would.
    assert np.array_equal(batch.input_ids.numpy()[0], TOKENS.numpy())


# Python warns of forks while there are threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.mark.usefixtures("two_threads")
def test_a_forked_child_uses_threads_of_its_own():
    def child() -> None:
        assert torch.get_num_threads() == 2
        collate_all()
        ops.label_counts(TOKENS, OFFSETS)

    for _ in range(5):
        assert run_in_child(child) == 0


@pytest.mark.usefixtures("two_threads")
def test_a_grandchild_does_too():
    def child() -> None:
        collate_all()
        assert run_in_child(collate_all) == 0
        collate_all()

    assert run_in_child(child) == 0


@pytest.mark.usefixtures("two_threads")
def test_a_child_leaves_the_memory_that_its_parent_keeps_for_masks():
    ids = torch.zeros(6001, dtype=torch.int32)
    left = ops.block_mask(ids).data_ptr()

    def child() -> None:
        mask = ops.block_mask(ids, causal=False)
        assert mask.numpy().sum() == 6001**2

    assert run_in_child(child) == 0
    assert ops.block_mask(ids).data_ptr() == left


class Batches(Dataset):
    """One batch per item, packed in the worker."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> torch.Tensor:
        collate_all()
        index = torch.arange(i, i + 10)
        return ops.collate(TOKENS, OFFSETS, index, torch.tensor([0, 10])).input_ids


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers_finish(start):
    loader = DataLoader(
        Batches(),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=start,
        timeout=SECONDS,
    )

    for _ in range(3 if start == "fork" else 1):
        for i, ids in enumerate(loader):
            assert ids.flatten().equal(TOKENS[OFFSETS[i] : OFFSETS[i + 10]])
