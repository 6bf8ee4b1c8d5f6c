"""A training loop over torchdata's StatefulDataLoader, resumed in the middle of an epoch.

    python examples/torchdata_loop.py runs/one

The loader's own state says where the next microbatch is, however far its workers had fetched
ahead, so the loop need not count. Run again with the same folder, it goes on from the last
checkpoint, and ends with the same weights as if it had never stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import made_up
import torch

from multipack import Collator, Config, MultipackBatchSampler, PackedDataset
from multipack.integrations.torchdata import stateful_loader


def train(
    folder: Path, *, epochs: int = 2, samples: int = 600, steps: int | None = None
) -> torch.nn.Module:
    """Train for some epochs, or `steps` more, from the checkpoint in `folder` if there is one."""
    config = Config(sequence_len=64, micro_batch_size=4, multipack_real_batches=True)
    data = PackedDataset(*made_up.samples(samples), collator=Collator(config, attention="bool"))
    counts, starts = data.label_counts()
    sampler = MultipackBatchSampler(data.lengths, counts, config, label_starts=starts)
    loader = stateful_loader(data, sampler, num_workers=2)
    model = made_up.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}

    begun, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        begun = saved.pop("epoch")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    folder.mkdir(parents=True, exist_ok=True)
    for epoch in range(begun, epochs):
        for batch in loader:
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch}, checkpoint)
            if steps is not None and (steps := steps - 1) == 0:
                return model
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint is")
    train(parser.parse_args().folder)
