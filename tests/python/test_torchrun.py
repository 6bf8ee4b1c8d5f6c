"""Several ranks, each a process with a loader of its own that talks to no other."""

from __future__ import annotations

import itertools
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainer_runs
from processes import run
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from multipack import Collator, Config, MultipackBatchSampler, RowDataset, StreamingMultipack
from multipack.integrations import check_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_loop.py"
LENGTHS = np.random.default_rng(0).integers(1, 33, 203).tolist()
SAMPLES = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one row": {"micro_batch_size": 2},
    "real rows": {"micro_batch_size": 2, "multipack_real_batches": True},
    "padded": {"micro_batch_size": 4, "sample_packing": False},
    "flattened": {"micro_batch_size": 4, "sample_packing": False, "batch_flattening": True},
}


def supervised(batches: Any) -> list[set[int]]:
    """Return the samples of each batch that have labels."""
    return [set(batch["labels"].unique().tolist()) - {-100} for batch in batches]


def epochs_of(rank: int, ranks: int) -> dict[str, Any]:
    """Return the samples of each batch of two epochs and of an evaluation, and the lengths told."""
    seen = {}
    for name, keys in LAYOUTS.items():
        for policy in ("drop", "split", "fill"):
            config = Config(
                sequence_len=32,
                world_size=ranks,
                incomplete_batches=policy,
                mask_first_label=False,
                gradient_accumulation_steps=2,
                **keys,
            )
            found: list[Any] = []
            for split in ("train", "train", "eval"):
                sampler = MultipackBatchSampler(LENGTHS, config=config, rank=rank, split=split)
                collator = Collator(config, attention="none", split=split)
                loader = DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=collator)
                sampler.set_epoch(len(found))
                check_ranks(sampler)
                told = len(loader)
                found.append((told, supervised(loader)))
                # A rank that had more batches would wait here for ever.
                for _ in range(told):
                    dist.all_reduce(torch.ones(()))
            seen[f"{name}, {policy}"] = found
    return seen


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_comes_once_over_all_ranks_and_all_have_as_many_batches(ranks: int) -> None:
    seen = run(epochs_of, ranks, ranks)

    for case in seen[0]:
        for epoch, of_ranks in enumerate(zip(*(rank[case] for rank in seen), strict=True)):
            assert len({told for told, _ in of_ranks}) == 1
            assert all(told == len(batches) for told, batches in of_ranks)
            counts = Counter(
                sample for _, batches in of_ranks for batch in batches for sample in batch
            )
            assert set(counts.values()) == {1}, case
            if epoch == 2 or "drop" not in case:
                assert len(counts) == len(SAMPLES), case


def length_alone(rank: int) -> int | None:
    sampler = MultipackBatchSampler(LENGTHS, sequence_len=32, world_size=2, rank=rank)
    loader = DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=list)
    told = None
    if rank == 0:
        told = len(loader), sampler.total_steps(3), len(list(loader)), sampler.state_dict()["epoch"]
    dist.barrier()
    return told


def test_a_rank_that_asks_for_the_length_alone_waits_for_nobody() -> None:
    """C67: the other rank waits at the barrier meanwhile."""
    told, nothing = run(length_alone, 2)

    assert told[0] == told[2] > 0
    assert told[3] == 1
    assert nothing is None


def stream_of(source: str, rank: int, ranks: int) -> StreamingMultipack:
    samples: Any = SAMPLES
    if source == "hugging face":
        samples = datasets.Dataset.from_list(SAMPLES).to_iterable_dataset(num_shards=4)
        samples = samples.shuffle(seed=0, buffer_size=50)
    config = Config(
        sequence_len=32,
        world_size=ranks,
        streaming_multipack_buffer_size=50,
        incomplete_batches="fill",
        mask_first_label=False,
    )
    collator = Collator(config, attention="none")
    return StreamingMultipack(samples, config, rank=rank, collator=collator)


def streamed(rank: int, ranks: int, source: str) -> Any:
    """Return this rank's batches: by two workers, and in one process, stopped and continued."""
    loader = DataLoader(stream_of(source, rank, ranks), batch_size=None, num_workers=2)
    by_workers = supervised(loader)

    running = stream_of(source, rank, ranks)
    batches = supervised(itertools.islice(running, 7))
    check_ranks(running)
    again = stream_of(source, rank, ranks)
    again.load_state_dict(running.state_dict())
    check_ranks(again)
    return by_workers, batches + supervised(again)


@pytest.mark.parametrize("source", ["list", "hugging face"])
def test_a_stream_is_shared_out_over_ranks_and_workers(source: str) -> None:
    seen = run(streamed, 2, 2, source)

    assert all(by_workers == continued for by_workers, continued in seen)
    assert len(seen[0][0]) == len(seen[1][0])
    counts = Counter(sample for by_workers, _ in seen for batch in by_workers for sample in batch)
    assert counts == dict.fromkeys(range(1, len(SAMPLES) + 1), 1)


def steps_of_the_loop(rank: int, ranks: int) -> dict[str, Any]:
    """Return the gradients of one step of the example's loop in every layout."""
    train_step = runpy.run_path(str(EXAMPLE))["train_step"]
    samples = trainer_runs.chats(24)
    lengths = [len(sample["input_ids"]) for sample in samples]
    found = {}
    for name, keys in LAYOUTS.items():
        config = Config(
            sequence_len=32,
            world_size=ranks,
            gradient_accumulation_steps=12 // ranks,
            balance_labels=True,
            incomplete_batches="fill",
            **keys,
        )
        counts = [sum(label != -100 for label in sample["labels"]) for sample in samples]
        sampler = MultipackBatchSampler(lengths, counts, config, rank=rank)
        collator = Collator(config, attention="bool")
        step = list(DataLoader(RowDataset(samples), batch_sampler=sampler, collate_fn=collator))
        assert 1 < len(step) <= config.gradient_accumulation_steps
        model = trainer_runs.tiny_llama()
        train_step(DistributedDataParallel(model) if ranks > 1 else model, step, ranks)
        found[name] = {key: value.grad.numpy() for key, value in model.named_parameters()}
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_of_the_loop_has_the_gradients_of_its_samples_each_alone(ranks: int) -> None:
    for found in run(steps_of_the_loop, ranks, ranks):
        for layout in LAYOUTS:
            trainer_runs.check_gradients(found[layout], trainer_runs.chats(24))


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), str(tmp_path), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 10 of 16: loss ")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["sampler"]
    assert (state["epoch"], state["position"]) == (2, 0)
