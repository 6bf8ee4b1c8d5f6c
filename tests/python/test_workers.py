"""Workers of a DataLoader: of any kind, after threads were used, over thousands of batches.

What one batch needs in a worker (its memory, its file descriptors, its pickling) is tested beside
the data sets, and the ops in forked processes by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from processes import Running
from torch.utils.data import DataLoader, Dataset

from multipack import Collator, Config, MultipackBatchSampler, PackedDataset, label_counts, plan

CONFIG = Config(sequence_len=64, micro_batch_size=2)
LENGTHS = np.random.default_rng(0).integers(1, 65, 500)
SECONDS = 60

pytestmark = [
    # Python warns of forks while there are threads, which is what is tested here.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator"),
]


def data() -> PackedDataset:
    tokens = torch.arange(int(LENGTHS.sum()))
    return PackedDataset(
        tokens, np.cumsum([0, *LENGTHS]), collator=Collator(CONFIG, attention="flash")
    )


def sampler() -> MultipackBatchSampler:
    return MultipackBatchSampler(LENGTHS, config=CONFIG)


def use_threads() -> None:
    """Let this process start all the pools that there are: torch's, and the planner's."""
    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    plan(np.full(400_000, 7), sequence_len=64)
    labels = torch.arange(2_000_000)
    label_counts(labels, torch.arange(0, 2_000_001, 5))


@pytest.fixture
def _threads_in_use() -> Any:
    before = torch.get_num_threads()
    use_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_in_use")
@pytest.mark.parametrize(
    "options",
    [
        {"multiprocessing_context": "fork", "num_workers": 2},
        {"multiprocessing_context": "fork", "num_workers": 2, "persistent_workers": True},
        {"multiprocessing_context": "fork", "num_workers": 3, "prefetch_factor": 8},
        {"multiprocessing_context": "fork", "num_workers": 2, "pin_memory": True},
        {"multiprocessing_context": "spawn", "num_workers": 1, "persistent_workers": True},
        {"multiprocessing_context": "forkserver", "num_workers": 1, "persistent_workers": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
def test_two_epochs_are_those_of_a_single_process(options: dict[str, Any]) -> None:
    expected, order, made = [], sampler(), data()
    for _ in range(2):
        expected.append([made[batch]["input_ids"] for batch in order])
    loader = DataLoader(data(), sampler=sampler(), batch_size=None, timeout=SECONDS, **options)

    for epoch in expected:
        batches = [batch["input_ids"] for batch in loader]
        assert len(batches) == len(epoch)
        assert all(map(torch.equal, batches, epoch))


def test_an_iteration_that_is_given_up_leaves_no_worker_behind() -> None:
    before = threading.active_count()
    for _ in range(3):
        iterator = iter(DataLoader(data(), sampler=sampler(), batch_size=None, num_workers=2))
        next(iterator)
        del iterator

    # The threads that feed the queues of indices are told to end, and not waited for; nor are
    # workers that take more than five seconds.
    deadline = time.monotonic() + SECONDS
    while (
        multiprocessing.active_children() or threading.active_count() > before
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert multiprocessing.active_children() == []
    assert threading.active_count() <= before


class Watched(Dataset[Any]):
    """Says with each batch what the worker uses."""

    def __init__(self, inner: PackedDataset) -> None:
        self.inner = inner

    def __getitem__(self, batch: Any) -> Any:
        made = self.inner[batch]
        made["used"] = in_use()
        return made


def in_use() -> tuple[int, int, int]:
    """Return this process's threads, open files, and resident memory in pages of 4 KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages


@pytest.mark.usefixtures("_threads_in_use")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_nothing_grows_over_ten_thousand_batches(method: str) -> None:
    """Neither threads nor files nor memory, in a worker or in the main process."""
    loader = DataLoader(
        Watched(data()),
        sampler=sampler(),
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=method,
        timeout=SECONDS,
    )
    seen, early, tokens = 0, None, 0
    while seen < 10_000:
        for batch in loader:
            seen, tokens = seen + 1, tokens + batch["input_ids"].numel()
            if seen == 2_000:
                early = [in_use(), batch["used"]]
    late = [in_use(), batch["used"]]

    assert tokens > 100 * seen
    assert early is not None
    for (threads, files, pages), (threads_after, files_after, pages_after) in zip(
        early, late, strict=True
    ):
        assert threads_after <= threads
        # A worker has a file for each batch that waits, of which there are two at most.
        assert files_after <= files + 1
        assert pages_after - pages < 8 << 20 >> 12


def test_workers_do_not_copy_what_they_share() -> None:
    """Reference counts of Python ints make every worker copy them all, as the control shows."""
    code = """
import torch, multipack
from torch.utils.data import DataLoader, Dataset

def private_kib():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))

class Watched(Dataset):
    def __init__(self, read):
        self.read, self.count = read, 0
    def __getitem__(self, batch):
        self.read(batch)
        self.count += 1
        return private_kib() if self.count % 300 == 0 else 0

n = 5_000_000
offsets = torch.arange(0, 4 * n + 1, 4)
data = multipack.PackedDataset(
    torch.arange(4 * n, dtype=torch.int32), offsets, collator=multipack.Collator(
        attention="flash", sequence_len=4096))
counts, starts = data.label_counts()
sampler = multipack.MultipackBatchSampler(
    data.lengths, counts, label_starts=starts, sequence_len=4096)
ints = list(range(n))
for read in (data.__getitem__, lambda batch: sum(ints[i] for i in batch[0])):
    print(max(DataLoader(Watched(read), sampler=sampler, batch_size=None, num_workers=4)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    packed, control = map(int, done.stdout.split())

    assert packed < 50_000  # of the 200,000 that the data and the plan take
    assert control > 100_000


def mapped(rank: int) -> Any:
    """Pack inside `map`, in processes that datasets forks from one that has used its threads."""
    use_threads()
    collator = Collator(CONFIG, attention="flash")

    def pack(batch: dict[str, Any]) -> dict[str, Any]:
        lengths = [len(ids) for ids in batch["input_ids"]]
        made = plan(lengths, config=CONFIG, incomplete_batches="fill")
        rows = [
            collator([{"input_ids": batch["input_ids"][i]} for i in made[0, k][0]])["input_ids"][0]
            for k in range(len(made))
        ]
        return {"input_ids": [row.tolist() for row in rows]}

    ids = [[number] * length for number, length in enumerate(LENGTHS[:200].tolist(), 1)]
    source = datasets.Dataset.from_dict({"input_ids": ids})
    packed = source.map(pack, batched=True, batch_size=50, num_proc=2)
    return sum(len(row) for row in packed["input_ids"])


def test_packing_inside_map_finishes() -> None:
    """In a process of its own, which is killed if it hangs."""
    with Running(mapped, 1) as running:
        assert running.results() == [int(LENGTHS[:200].sum())]
