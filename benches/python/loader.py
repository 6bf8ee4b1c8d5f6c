"""How fast batches come out of a DataLoader, and how soon the first one.

    python benches/python/loader.py --folder somewhere

Two data sets of Hugging Face, int32 with labels, lognormal lengths, are written to the folder,
unless they are there, and read back memory-mapped, in chunks of 1000 samples as they are written:
200,000 samples of 600 tokens in the mean, and a million of 150; a gigabyte each. Two figures:

- *tokens a second and worker*: workers collate batches of four rows of 4096 tokens and send them
  over; the main process copies the tensors into others, as a trainer copies them to its device.
  Every tenth batch is compared with its samples. A loader prefetches two batches for each worker
  unless told otherwise; with four a worker seldom waits. The main process has the last core for
  itself, and the workers share the others: left to itself, Linux keeps processes that wake one
  another on one core where cores share no cache, as in virtual machines. Beside the clock there is
  processor time, of the workers and of the main process: what either could do if the other took
  none.
- *start to first batch*: label counts of the million read, two ranks balanced and planned, the
  first batch in hand, all in this process; the file was opened before.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader

import multipack

SEED = 20261130
PART = 100_000
# Samples, the mean of the logarithm of their lengths, and the longest.
LONG = (200_000, 5.923548, 4096)
SHORT = (1_000_000, 4.537, 1024)
CONFIG = multipack.Config(sequence_len=4096, micro_batch_size=4)
CORES = os.sched_getaffinity(0)


def opened(folder: Path, samples: int, mean: float, longest: int) -> datasets.Dataset:
    """Return samples of which the second half is supervised, from the disk."""
    if (folder / "state.json").exists():
        return datasets.load_from_disk(folder)
    rng = np.random.default_rng(SEED)

    def part(samples: int) -> datasets.Dataset:
        lengths = np.ceil(rng.lognormal(mean, 1.0, samples)).clip(1, longest).astype(np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        tokens = rng.integers(0, 1 << 17, int(offsets[-1]), dtype=np.int32)
        within = np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)
        labels = np.where(within < np.repeat(lengths // 2, lengths), -100, tokens).astype(np.int32)
        columns = {"input_ids": tokens, "labels": labels}
        lists = {
            name: pa.LargeListArray.from_arrays(offsets, column) for name, column in columns.items()
        }
        return datasets.Dataset(pa.table(lists))

    parts = [part(min(PART, samples - first)) for first in range(0, samples, PART)]
    datasets.concatenate_datasets(parts).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def expected(dataset: datasets.Dataset, batch: list[list[int]]) -> torch.Tensor:
    """Return the tokens of a microbatch, read sample by sample."""
    samples = dataset.with_format("numpy")[[sample for row in batch for sample in row]]
    return torch.from_numpy(np.concatenate(list(samples["input_ids"])).astype(np.int64))


def tokens_per_second(
    dataset: datasets.Dataset, workers: int, prefetched: int, batches: int
) -> dict[str, float]:
    """Take so many batches from workers; return the tokens a second by the clock and by processors.

    The time of the workers has their start in it.
    """
    collator = multipack.Collator(CONFIG, attention="flash")
    packed = multipack.PackedDataset.from_arrow(dataset, collator=collator)
    sampler = multipack.MultipackBatchSampler(packed.lengths, config=CONFIG)
    order = [sampler.plan[0, k] for k in range(batches)]
    loader = iter(
        DataLoader(
            packed,
            sampler=order,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetched,
            worker_init_fn=keep_to_a_core,
        )
    )
    kept = {0: next(loader)["input_ids"]}
    row = torch.empty(1, CONFIG.micro_batch_size * CONFIG.sequence_len, dtype=torch.int64)
    taken = {key: row.clone() for key in ("input_ids", "labels", "position_ids")}
    tokens, of_workers = 0, cpu_of_children()
    start, of_main = time.perf_counter(), time.process_time()
    for number, batch in enumerate(loader, 1):
        for key, tensor in taken.items():
            tensor[:, : batch[key].shape[1]].copy_(batch[key])
        tokens += batch["input_ids"].numel()
        if number % 10 == 0:
            kept[number] = batch["input_ids"]
    seconds, of_main = time.perf_counter() - start, time.process_time() - of_main
    del loader
    of_workers = cpu_of_children() - of_workers
    for number, ids in kept.items():
        assert ids.flatten().equal(expected(dataset, order[number])), number
    return {
        "by the clock and worker": tokens / seconds / workers,
        "by the workers' processor time": tokens / of_workers,
        "by the main process's": tokens / of_main,
    }


def keep_to_a_core(worker: int) -> None:
    """Leave the last core, which worker -1 is kept to, to the main process."""
    cores = sorted(CORES)
    os.sched_setaffinity(0, {cores[-1] if worker < 0 else cores[worker % max(len(cores) - 1, 1)]})


def cpu_of_children() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_batch(dataset: datasets.Dataset) -> dict[str, float]:
    """Return the seconds until each stage of a start is done, from the opened data set on."""
    config = CONFIG.replace(world_size=2, balance_labels=True, gradient_accumulation_steps=4)
    collator = multipack.Collator(config, attention="flash")
    stages: dict[str, float] = {}
    start = time.perf_counter()

    def done(stage: str) -> None:
        stages[stage] = time.perf_counter() - start

    packed = multipack.PackedDataset.from_arrow(dataset, collator=collator)
    done("opened")
    counts, starts = packed.label_counts()
    done("labels counted")
    sampler = multipack.MultipackBatchSampler(
        packed.lengths, counts, config, label_starts=starts, rank=1
    )
    done("planned")
    batch = next(iter(DataLoader(packed, sampler=sampler, batch_size=None)))
    done("first batch")
    assert batch["input_ids"].flatten().equal(expected(dataset, sampler.plan[1, 0]))
    return stages


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keeps the data sets for the next time")
    parser.add_argument("--batches", type=int, default=4_000, help="of each measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[2, 4], help="for each worker")
    arguments = parser.parse_args()

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for stage, seconds in first_batch(opened(folder / "short", *SHORT)).items():
            print(f"{stage:<16} {seconds:6.2f} s")
        dataset = opened(folder / "long", *LONG)
        keep_to_a_core(-1)
        for workers in arguments.workers:
            for prefetched in arguments.prefetch:
                rates = tokens_per_second(dataset, workers, prefetched, arguments.batches)
                text = ", ".join(f"{rate / 1e6:.1f} {name}" for name, rate in rates.items())
                print(f"{workers} workers, {prefetched} prefetched: million tokens/s: {text}")


if __name__ == "__main__":
    main()
