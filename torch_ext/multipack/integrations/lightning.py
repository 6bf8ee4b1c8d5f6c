"""Lightning: the sampler's settings from the trainer, and its position in every checkpoint.

Lightning would wrap the sampler to deal its batches out to ranks, which the sampler does itself, so
it is told not to: ``use_distributed_sampler=False``. The rest is a callback.

    class Data(LightningDataModule):
        def setup(self, stage):
            self.sampler = MultipackBatchSampler(
                packed.lengths, sequence_len=4096, **trainer_settings(self.trainer)
            )

        def train_dataloader(self):
            return DataLoader(packed, sampler=self.sampler, batch_size=None)

    data = Data()
    trainer = Trainer(use_distributed_sampler=False, callbacks=[MultipackCallback(data)])
    trainer.fit(model, data)

Lightning adds up the losses of microbatches as they come, each a mean of its own: give balanced
labels, or scale the loss by the labels of the step.
"""

from __future__ import annotations

from typing import Any

from multipack._agreement import check_agreement
from multipack.integrations._ranks import check_ranks
from multipack.integrations._versions import require
from multipack.sampler import MultipackBatchSampler

require("lightning")
from lightning.pytorch import (  # noqa: E402
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
)
from lightning.pytorch.utilities.combined_loader import CombinedLoader  # noqa: E402


def trainer_settings(trainer: Trainer) -> dict[str, int]:
    """Return what the trainer knows of a sampler's arguments.

    Args:
        trainer (Trainer): One whose strategy is set up, as in `LightningDataModule.setup`.

    Returns:
        dict[str, int]: `world_size` and `rank` of data parallelism, which tensor-parallel processes
            share, and `gradient_accumulation_steps`.
    """
    replicas = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return {
        "world_size": replicas["num_replicas"],
        "rank": replicas["rank"],
        "gradient_accumulation_steps": trainer.accumulate_grad_batches,
    }


class MultipackCallback(Callback):
    """Keeps a sampler in step with the trainer, and its position in the trainer's checkpoints.

    At the start it compares the sampler with the trainer and with the other ranks. A fit that goes
    on from a checkpoint goes on with the next microbatch, whatever workers had fetched. In the
    middle of an epoch Lightning warns that the loader is not resumable: it asks the loader alone.

    Args:
        source (MultipackBatchSampler | LightningDataModule): The sampler of the training, or a data
            module that makes one as its attribute `sampler` in `setup`.

    Raises:
        TypeError: If it is neither.
    """

    def __init__(self, source: MultipackBatchSampler | LightningDataModule) -> None:
        if not isinstance(source, MultipackBatchSampler | LightningDataModule):
            raise TypeError(
                f"source is a {type(source).__name__}, but must be a MultipackBatchSampler, or a "
                "LightningDataModule that makes one as its attribute `sampler`"
            )
        self._source = source

    @property
    def sampler(self) -> MultipackBatchSampler:
        """The sampler.

        Raises:
            RuntimeError: If the data module has made none.
        """
        if isinstance(self._source, MultipackBatchSampler):
            return self._source
        sampler = getattr(self._source, "sampler", None)
        if not isinstance(sampler, MultipackBatchSampler):
            raise RuntimeError(
                "the data module has no MultipackBatchSampler as its attribute `sampler`: make it "
                "in setup, which runs before a checkpoint is read"
            )
        return sampler

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Go to the trainer's epoch, before a checkpoint is read and the loader iterated."""
        if stage == "fit":
            self.sampler.set_epoch(trainer.current_epoch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the sampler with the trainer, and with the other ranks.

        Raises:
            ValueError: If a setting of the sampler is not the trainer's or the collator's, or no
                loader draws from it; the text says what to do.
            RuntimeError: If the ranks do not agree; see `check_ranks`.
        """
        expected = trainer_settings(trainer)
        given = {**vars(self.sampler.config), "rank": self.sampler.rank}
        for key, value in expected.items():
            if given[key] != value:
                raise ValueError(
                    f"{key} is {given[key]!r} for the sampler, but {value} for the trainer: give "
                    "the sampler **trainer_settings(trainer)"
                )
        drawing = [
            loader
            for loader in CombinedLoader(trainer.train_dataloader).flattened
            for name in ("sampler", "batch_sampler")
            if getattr(loader, name, None) is self.sampler
        ]
        if not drawing:
            raise ValueError(
                "no loader of the training draws from this sampler: Lightning may have wrapped it "
                "to deal its batches out once more; give the trainer use_distributed_sampler=False"
            )
        if hasattr(drawing[0], "state_dict"):
            raise ValueError(
                "the loader has a state, which Lightning would restore too, and after the last "
                "batch of an epoch to an empty epoch: give the trainer a torch.utils.data."
                "DataLoader, and leave the position to this callback"
            )
        collator = getattr(drawing[0].dataset, "collator", drawing[0].collate_fn)
        check_agreement("the sampler", self.sampler.config, self.sampler.split, collator)
        check_ranks(self.sampler, peers=trainer.world_size // expected["world_size"])

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to the trainer's epoch, which `limit_train_batches` ends early."""
        self.sampler.set_epoch(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the microbatch."""
        self.sampler.consumed()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, for the checkpoint."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position in a checkpoint.

        Raises:
            ValueError: If it was saved in another order of samples; see the sampler.
        """
        self.sampler.load_state_dict(state_dict)
