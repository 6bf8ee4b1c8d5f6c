"""Lightning's Trainer with the callback: whole epochs, all ranks, stopped and continued."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import run
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from multipack import Collator, MultipackBatchSampler, PackedDataset, RowDataset
from multipack.integrations.lightning import MultipackCallback, trainer_settings
from multipack.integrations.torchdata import stateful_loader

LENGTHS = np.random.default_rng(0).integers(1, 9, 60).tolist()
SAMPLES = [{"input_ids": [number] * length} for number, length in enumerate(LENGTHS)]
COLLATOR = Collator(attention="none")

pytestmark = [
    # Python warns of forks while there are threads, as torch has them.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    # What Lightning says to everybody, and that it does not know the sampler's position.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|treespec|TreeSpec)"),
    pytest.mark.filterwarnings("ignore:.*set_vital. is deprecated"),
]


class Model(LightningModule):
    """Predicts the next token, and remembers what it has seen."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(100, 8)
        self.head = torch.nn.Linear(8, 100)
        self.seen: list[tuple[int, list[Any]]] = []
        self.stop_at = stop_at

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.stop_at:
            raise InterruptedError
        self.seen.append((self.current_epoch, batch["input_ids"].tolist()))
        logits = self.head(self.embedding(batch["input_ids"]))
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data(LightningDataModule):
    def __init__(self, kind: str, workers: int) -> None:
        super().__init__()
        self.kind, self.workers = kind, workers

    def setup(self, stage: str) -> None:
        self.sampler = MultipackBatchSampler(
            LENGTHS, sequence_len=16, **trainer_settings(self.trainer)
        )

    def train_dataloader(self) -> Any:
        if self.kind == "rows":
            return DataLoader(
                RowDataset(SAMPLES),
                batch_sampler=self.sampler,
                collate_fn=COLLATOR,
                num_workers=self.workers,
            )
        tokens = np.concatenate([sample["input_ids"] for sample in SAMPLES])
        packed = PackedDataset(tokens, np.cumsum([0, *LENGTHS]), collator=COLLATOR)
        return DataLoader(packed, sampler=self.sampler, batch_size=None, num_workers=self.workers)


def trainer(folder: Any, *callbacks: Any, **keys: Any) -> Trainer:
    keys = {"max_epochs": 3, "accumulate_grad_batches": 2, **keys}
    return Trainer(
        accelerator="cpu",
        use_distributed_sampler=False,
        callbacks=[*callbacks, ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **keys,
    )


def fit(
    folder: Path, kind: str, workers: int, *, stop_at: int | None = None, resume: bool = False
) -> Model:
    data, model = Data(kind, workers), Model(stop_at)
    checkpoint = str(folder / "last.ckpt") if resume else None
    try:
        trainer(folder, MultipackCallback(data)).fit(model, data, ckpt_path=checkpoint)
    except InterruptedError:
        assert len(model.seen) == stop_at
    return model


def weights(model: Model) -> dict[str, bytes]:
    return {key: value.numpy().tobytes() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(("kind", "workers"), [("rows", 0), ("rows", 2), ("packed", 2)])
def test_a_fit_that_was_stopped_goes_on_exactly(kind: str, workers: int, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", kind, workers)
    size = len(whole.seen) // 3
    sampler = MultipackBatchSampler(LENGTHS, sequence_len=16)
    assert size == len(sampler)
    assert [ids for _, ids in whole.seen] == [
        COLLATOR(RowDataset(SAMPLES)[batch])["input_ids"].tolist()
        for _ in range(3)
        for batch in sampler
    ]

    # After a step, in the middle of one, at the end of an epoch and at the start of one.
    for stop in (4, size + 5, 2 * size, 2 * size + 1):
        folder = tmp_path / str(stop)
        stopped = fit(folder, kind, workers, stop_at=stop)
        resumed = fit(folder, kind, workers, resume=True)

        done = len(whole.seen) - len(resumed.seen)
        assert stop - 2 < done <= stop
        assert stopped.seen[:done] + resumed.seen == whole.seen
        assert weights(resumed) == weights(whole)


def test_epochs_that_are_ended_early_have_each_their_own_order(tmp_path: Path) -> None:
    data, model = Data("rows", 0), Model()
    trainer(tmp_path, MultipackCallback(data), limit_train_batches=3).fit(model, data)

    sampler = MultipackBatchSampler(LENGTHS, sequence_len=16)
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)[:3]
        expected += [
            COLLATOR(RowDataset(SAMPLES)[batch])["input_ids"].tolist() for batch in batches
        ]
    assert [ids for _, ids in model.seen] == expected


def test_a_second_fit_starts_with_the_first_epoch(tmp_path: Path) -> None:
    seen = []
    sampler = MultipackBatchSampler(LENGTHS, sequence_len=16)
    loader = DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=COLLATOR)
    for _ in range(2):
        model = Model()
        trainer(tmp_path, MultipackCallback(sampler), max_epochs=1, accumulate_grad_batches=1).fit(
            model, loader
        )
        seen.append(model.seen)

    assert seen[0] == seen[1]


def test_what_does_not_fit_the_trainer_is_refused(tmp_path: Path) -> None:
    sampler = MultipackBatchSampler(LENGTHS, sequence_len=16)
    other = MultipackBatchSampler(LENGTHS, sequence_len=16)
    loader = DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=COLLATOR)

    with pytest.raises(ValueError) as caught:
        trainer(tmp_path, MultipackCallback(sampler)).fit(Model(), loader)
    assert str(caught.value) == (
        "gradient_accumulation_steps is 1 for the sampler, but 2 for the trainer: give the sampler "
        "**trainer_settings(trainer)"
    )
    with pytest.raises(ValueError, match="no loader of the training draws from this sampler: L"):
        trainer(tmp_path, MultipackCallback(other), accumulate_grad_batches=1).fit(Model(), loader)
    stateful = stateful_loader(SAMPLES, sampler, collate_fn=COLLATOR)
    with pytest.raises(
        ValueError, match="the loader has a state, which Lightning would restore to"
    ):
        trainer(tmp_path, MultipackCallback(sampler), accumulate_grad_batches=1).fit(
            Model(), stateful
        )
    with pytest.raises(TypeError, match="source is a list, but must be a MultipackBatchSampler, o"):
        MultipackCallback([])
    with pytest.raises(RuntimeError, match="the data module has no MultipackBatchSampler as its "):
        MultipackCallback(LightningDataModule()).state_dict()


def fit_on(rank: int, folder: str, wrapped: bool) -> Any:
    """Train one epoch on one of two ranks, as torchrun starts them."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    data, model = Data("packed", 0), Model()
    fitting = trainer(folder, MultipackCallback(data), max_epochs=1, strategy="ddp", devices=2)
    if wrapped:
        fitting._accelerator_connector.use_distributed_sampler = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitting.fit(model, data)
        except ValueError as error:
            return str(error)
    return [ids for _, ids in model.seen], weights(model)


def test_two_ranks_have_every_sample_once_and_the_same_weights(tmp_path: Path) -> None:
    (first, ours), (second, theirs) = run(fit_on, 2, str(tmp_path), False)

    sampler = MultipackBatchSampler(
        LENGTHS, sequence_len=16, world_size=2, rank="all", gradient_accumulation_steps=2
    )
    expected = [COLLATOR(RowDataset(SAMPLES)[batch])["input_ids"].tolist() for batch in sampler]
    assert (first, second) == (expected[0::2], expected[1::2])
    assert ours == theirs


def test_a_sampler_that_lightning_has_wrapped_is_refused(tmp_path: Path) -> None:
    """C78: it deals the batches of this rank out to the ranks once more, and nothing fails."""
    assert run(fit_on, 2, str(tmp_path), True) == 2 * [
        "no loader of the training draws from this sampler: Lightning may have wrapped it to deal "
        "its batches out once more; give the trainer use_distributed_sampler=False"
    ]
