"""A training loop of your own under Hugging Face's Accelerate, over packed batches.

    python examples/accelerate_loop.py runs/one
    accelerate launch --num-processes 2 examples/accelerate_loop.py runs/two

The sampler is made with ``rank="all"``, because Accelerate shares its microbatches out. The loss of
a step is the sum over its tokens, divided by their number on all ranks; DDP divides gradients by
the number of ranks, so it is multiplied by that. Run again with the same folder, it goes on where
the last checkpoint was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from pathlib import Path
from typing import Any

import made_up
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_convert

from multipack import Collator, Config, MultipackBatchSampler, PackedDataset
from multipack.integrations.accelerate import load_state_dict, prepare


def train(
    folder: Path, *, epochs: int = 2, samples: int = 600, steps: int | None = None
) -> torch.nn.Module:
    """Train for some epochs, or `steps` more, from the checkpoint in `folder` if there is one."""
    accelerator = Accelerator(cpu=True)  # leave cpu=True out for GPUs
    config = Config(
        sequence_len=64,
        micro_batch_size=4,
        multipack_real_batches=True,
        gradient_accumulation_steps=2,
        world_size=accelerator.num_processes,
        balance_labels=True,
    )
    data = PackedDataset(*made_up.samples(samples), collator=Collator(config, attention="bool"))
    counts, starts = data.label_counts()
    sampler = MultipackBatchSampler(data.lengths, counts, config, label_starts=starts, rank="all")
    model = made_up.llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = DataLoader(data, batch_sampler=sampler, collate_fn=default_convert)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

    if (folder / "sampler.pt").exists():
        accelerator.load_state(str(folder))
        load_state_dict(loader, torch.load(folder / "sampler.pt"))
    while sampler.epoch < epochs and steps != 0:
        batches = iter(loader)
        while group := list(itertools.islice(batches, config.gradient_accumulation_steps)):
            step(accelerator, model, group)
            optimizer.step()
            optimizer.zero_grad()
            sampler.consumed(len(group))
            if steps is not None and (steps := steps - 1) == 0:
                break
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        torch.save(sampler.state_dict(), folder / "sampler.pt")
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model)


def step(accelerator: Accelerator, model: torch.nn.Module, group: list[dict[str, Any]]) -> None:
    """Add the gradients of the microbatches of one step, each token with the same weight."""
    tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
    everywhere = accelerator.gather(tokens).sum()
    for number, batch in enumerate(group):
        last = number == len(group) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            loss = cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
            )
            accelerator.backward(loss * accelerator.num_processes / everywhere)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint is")
    train(parser.parse_args().folder)
