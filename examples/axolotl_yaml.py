"""Batches as an Axolotl YAML asks for them, in a loop of your own.

    python examples/axolotl_yaml.py examples/axolotl.yml

Sampler and collator follow the file, with Axolotl's defaults for what it leaves out. What they do
not look at (the model, its data, the optimizer) is printed and left to the loop; what they cannot
do is refused by name.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import made_up
import torch
from torch.utils.data import DataLoader

from multipack import PackedDataset
from multipack.integrations.axolotl import from_yaml


def train(file: Path, *, samples: int = 600) -> list[float]:
    """Train for one epoch; return the loss of each step, the mean over its labels."""
    settings = from_yaml(file)
    print("followed:", ", ".join(settings.used))
    print("left to the loop:", ", ".join(settings.ignored))
    data = PackedDataset(*made_up.samples(samples), collator=settings.collator())
    counts, starts = data.label_counts()
    sampler = settings.sampler(data.lengths, counts, label_starts=starts)
    print(sampler.plan.stats)

    model = made_up.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = iter(DataLoader(data, sampler=sampler, batch_size=None))
    losses = []
    while step := list(itertools.islice(batches, settings.config.gradient_accumulation_steps)):
        labels = sum((batch["labels"][:, 1:] != -100).sum() for batch in step)
        loss = sum(
            model(**batch, use_cache=False, num_items_in_batch=labels).loss for batch in step
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the YAML file")
    train(parser.parse_args().file)
