"""Lightning's Trainer on packed, balanced batches, with exact resume.

    python examples/lightning_fit.py runs/one
    torchrun --nproc-per-node 2 examples/lightning_fit.py runs/two

Three things are special. The sampler is made in `setup`, where the trainer is known, and takes
ranks and accumulation from it; the callback keeps the position in the checkpoints; and Lightning is
told not to wrap the sampler. Run again with the same folder, it goes on from the last checkpoint.

Lightning takes the mean over the microbatches of a step, each a mean of its own. The labels are
balanced, so that all of a step weigh much the same nevertheless.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import made_up
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from multipack import Collator, Config, MultipackBatchSampler, PackedDataset
from multipack.integrations.lightning import MultipackCallback, trainer_settings

CONFIG = Config(
    sequence_len=64, micro_batch_size=4, multipack_real_batches=True, balance_labels=True
)


class Data(LightningDataModule):
    """Made-up samples, packed for the ranks that the trainer has."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.packed = PackedDataset(
            *made_up.samples(samples), collator=Collator(CONFIG, attention="bool")
        )

    def setup(self, stage: str) -> None:
        """Make the sampler, which the callback looks for under this name."""
        counts, starts = self.packed.label_counts()
        settings = trainer_settings(self.trainer)
        self.sampler = MultipackBatchSampler(
            self.packed.lengths, counts, CONFIG, label_starts=starts, **settings
        )

    def train_dataloader(self) -> Any:
        """Return the loader of this rank's microbatches."""
        return DataLoader(self.packed, sampler=self.sampler, batch_size=None, num_workers=1)


class Model(LightningModule):
    """A small Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = made_up.llama()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean loss of a microbatch's labels."""
        loss: torch.Tensor = self.llama(**batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(folder: Path, *, epochs: int = 2, samples: int = 600) -> torch.nn.Module:
    """Train, from the last checkpoint in `folder` if there is one."""
    data, model = Data(samples), Model()
    trainer = Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        callbacks=[
            MultipackCallback(data),
            ModelCheckpoint(folder, every_n_train_steps=5, save_last=True),
        ],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",  # leave both out for GPUs
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    last = folder / "last.ckpt"
    trainer.fit(model, data, ckpt_path=last if last.exists() else None)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where checkpoints are")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    train(arguments.folder, epochs=arguments.epochs)
