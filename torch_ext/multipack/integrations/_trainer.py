"""The Trainer of transformers, on the batches of a plan.

`PackedTrainer` replaces what a Trainer does about data and leaves the rest alone: it plans with
the batch sizes, accumulation, seed and data-parallel ranks that the trainer really has, feeds it
whole microbatches, and keeps in every checkpoint where in the plan it was. On resume that position
is checked, and the trainer skips to it by itself, as it always does.

It is a subclass, and it works in front of other trainers:

    class MyPackedTrainer(PackedTrainer, MyTrainer): ...

Cost: one pass over the lengths and labels of the data set, in its Arrow buffers where it has some,
and a plan for each epoch.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_convert

from multipack._config import Config, Split, layout
from multipack._endless import Endless
from multipack._plan import Plan
from multipack.collate import IGNORED_LABEL, Collator
from multipack.dataset import PackedDataset, RowDataset
from multipack.integrations import _checkpoint
from multipack.integrations._parallel import refuse_context_parallelism
from multipack.integrations._ranks import check_ranks
from multipack.integrations._versions import require
from multipack.sampler import MultipackBatchSampler
from multipack.streaming import StreamingMultipack

require("accelerate", "datasets", "transformers")
import datasets  # type: ignore[import-untyped] # noqa: E402
from accelerate.data_loader import (  # type: ignore[import-untyped] # noqa: E402
    prepare_data_loader,
)
from accelerate.utils import (  # type: ignore[import-untyped] # noqa: E402
    broadcast_object_list,
    gather_object,
)
from transformers import Trainer  # noqa: E402
from transformers.trainer_utils import (  # noqa: E402
    EvalLoopOutput,
    rotate_checkpoints,
    seed_worker,
)

from multipack.integrations._trainer_data import (  # noqa: E402
    Keys,
    KeysCollated,
    Microbatches,
    is_stream,
    measure,
    refuse_other_labels,
)
from multipack.integrations._trainer_refusals import (  # noqa: E402
    SCATTERED,
    refuse_arguments,
    refuse_kind,
    refuse_model,
    refuse_other_versions,
    refuse_shared_rows,
    refuse_stream,
    warn_of_uneven_weights,
)

_FLAT_COLUMNS = {"input_ids", "labels", "attention_mask"}

refuse_other_versions()


class PackedTrainer(Trainer):
    """A Trainer whose batches are packed, padded or flattened, and balanced, as a `Config` says.

        trainer = PackedTrainer(
            model=model,
            args=TrainingArguments(output_dir="out", per_device_train_batch_size=4),
            train_dataset=dataset,
            config=Config(sequence_len=4096, balance_labels=True),
        )
        trainer.train(resume_from_checkpoint=True)

    Data sets hold `input_ids` and, if not every token is supervised, `labels`. Those of Hugging
    Face are read in their Arrow buffers; other map-style data sets are read through once. With
    `max_steps`, the training data may be a stream, any iterable of samples: `StreamingMultipack`
    packs it buffer by buffer, and it is read again when it ends. Every process reads all of it, and
    a training that is resumed reads again what it had read.

    Sizes are the trainer's: `per_device_train_batch_size` (times the GPUs of a single process, less
    what `auto_find_batch_size` took off), the same for evaluation, `gradient_accumulation_steps`,
    the data-parallel ranks (peers in tensor and context parallelism get the same batches),
    `data_seed` or `seed`. Leave them out of the config; what contradicts the trainer is refused.
    What fills no round of ranks is for the config's `incomplete_batches` to decide, and
    `dataloader_drop_last` is not looked at.

    The evaluation loss is the mean over all supervised tokens, so that it does not depend on how
    the samples lie in batches; `compute_metrics` is given rows of the plan, in its order. `predict`
    pads each sample of its data set in a row of its own, in order.

    Args:
        model: A causal language model of transformers.
        args (TrainingArguments): As for the Trainer.
        config (Config): The settings.
        data_collator (Collator): How batches are made, where the choice for the model is not right;
            its settings are those of `config` all the same.
        **kwargs: Further arguments of the Trainer.

    Raises:
        TypeError: If the collator is another one, or data to evaluate on is not map-style.
        ValueError: If an argument of the trainer, or the kind of trainer or model, excludes a plan;
            the text names it.

    Warns:
        UserWarning: If a step has several microbatches whose labels are not balanced, and the model
            cannot be told how many tokens they have together, so that its loss does not weigh all
            tokens alike.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        config: Config,
        data_collator: Collator | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(config, Config):
            raise TypeError(f"config is a {type(config).__name__}, but must be a multipack.Config")
        if data_collator is not None and not isinstance(data_collator, Collator):
            raise TypeError(
                f"data_collator is a {type(data_collator).__name__}, but the batches of a plan are "
                "made by a multipack.Collator: leave it out, or give one"
            )
        refuse_kind(type(self))  # before its own errors
        self._packing = config
        self._template = data_collator
        self._train_plan: MultipackBatchSampler | None = None
        self._train_stream: Endless | None = None  # in place of a plan
        self._stream_checked = True
        self._stream_state: Mapping[str, Any] | None = None  # that it goes on from
        self._epoch_plan: Plan
        self._microbatch = 0  # of this rank and epoch: the next to be trained on
        self._eval_loaders: list[tuple[Any, Config, DataLoader[Any]]] = []
        self._token_losses: list[torch.Tensor] | None = None
        super().__init__(model, args, **kwargs)
        refuse_model(self.model)
        refuse_arguments(self, config, self._ranks)
        for dataset in _each(self.eval_dataset):
            refuse_stream(dataset)
        warn_of_uneven_weights(self, config, self._ranks)
        # What is wrong with a batch is said here, and not at the first one.
        self._collator("train")
        if self.eval_dataset is not None:
            self._collator("eval")

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training microbatches of this rank."""
        if self.train_dataset is None:
            loader: DataLoader[Any] = super().get_train_dataloader()  # has the error for it
            return loader
        self._train_plan = self._train_stream = None
        if is_stream(self.train_dataset):
            loader, self._train_stream = self._stream_loader(self.train_dataset)
            return loader
        loader, self._train_plan = self._loader(self.train_dataset, "train")
        if len(self._train_plan) == 0:
            raise ValueError(
                "the plan of the training data is empty: what is retained does not fill one round "
                f"of microbatches\n{self._train_plan.plan.stats}"
            )
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of the evaluation microbatches of this rank.

        Args:
            eval_dataset: A data set, the name of one of several, or None: the trainer's.
        """
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict):
            eval_dataset = self.eval_dataset[eval_dataset]
        if eval_dataset is None:
            loader: DataLoader[Any] = super().get_eval_dataloader()  # has the error for it
            return loader
        refuse_stream(eval_dataset)
        config = self._config()
        for known, settings, loader in self._eval_loaders:
            if known is eval_dataset and settings == config:
                return loader
        loader, _ = self._loader(eval_dataset, "eval")
        if any(known is eval_dataset for known in _each(self.eval_dataset)):
            self._eval_loaders.append((eval_dataset, config, loader))
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of samples to predict, in order, each padded in a row of its own.

        Args:
            test_dataset: A data set of samples as for training; without labels all tokens have
                one.
        """
        replaced = self.data_collator
        self.data_collator = self._new_collator(Config(sample_packing=False), "eval")
        try:
            loader: DataLoader[Any] = super().get_test_dataloader(test_dataset)
        finally:
            self.data_collator = replaced
        return loader

    def _loader(self, dataset: Any, split: Split) -> tuple[DataLoader[Any], MultipackBatchSampler]:
        """Plan a data set and return the loader of this rank's share."""
        collator = self._collator(split)
        config = collator.config
        fingerprint = getattr(dataset, "_fingerprint", None)
        data: Dataset[Any]
        collate: Any = collator
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            refuse_other_labels(dataset.column_names)
            dataset = self._remove_unused_columns(dataset, description=split)
            flat = PackedDataset.from_arrow(dataset, collator=collator)
            lengths, counts, starts = flat.lengths, None, None
            if "labels" in dataset.column_names:
                counts, starts = flat.label_counts(config)
            if _FLAT_COLUMNS.issuperset(dataset.column_names):
                data, collate = flat, default_convert  # the batches are finished
            else:
                data = RowDataset(dataset)
        else:
            lengths, counts, starts = measure(dataset, config)
            keys = self._used_keys()
            data = RowDataset(dataset if keys is None else Keys(dataset, keys))
        sampler = MultipackBatchSampler(
            lengths,
            counts,
            config,
            label_starts=starts,
            rank=self._rank,
            split=split,
            fingerprint=fingerprint,
        )
        return self._prepared(
            Microbatches(data), batch_sampler=sampler, collate_fn=collate
        ), sampler

    def _stream_loader(self, samples: Any) -> tuple[DataLoader[Any], Endless]:
        """Return the loader of this rank's share of a stream."""
        collator = self._collator("train")
        stream = Endless(
            StreamingMultipack(
                samples,
                collator.config,
                rank=self._rank,
                collator=KeysCollated(collator, self._used_keys()),
            )
        )
        return self._prepared(stream, batch_size=None), stream

    def _prepared(self, data: Dataset[Any], **options: Any) -> DataLoader[Any]:
        """Return a loader of batches that are this rank's."""
        args = self.args
        loader: DataLoader[Any] = DataLoader(
            data,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            # Older versions of transformers have no arguments for these two.
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
            in_order=getattr(args, "dataloader_in_order", True),
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            ),
            **options,
        )
        # The batches are this rank's own already: as if there were no other process.
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.accelerator.device_placement,
            rng_types=self.accelerator.rng_types.copy(),
            dispatch_batches=False,
            non_blocking=self.accelerator.non_blocking,
        )
        return prepared

    def _collator(self, split: Split) -> Collator:
        """Return what makes batches, with the settings that the trainer really has."""
        config = self._config()
        collator = self._new_collator(config, split)
        if config.multipack_real_batches is None and layout(config, split) == "one_row":
            # A dense mask of one long row takes as much as those of its rows, squared.
            masked = collator.attention in SCATTERED
            config = config.replace(multipack_real_batches=masked or self.args.n_gpu > 1)
        kind = layout(config, split)
        refuse_shared_rows(self.args.n_gpu, kind, collator)
        refuse_context_parallelism(self.get_cp_size(), kind)
        collator.config = config
        return collator

    def _new_collator(self, config: Config, split: Split) -> Collator:
        """Return a collator with some settings: like the one given, or right for the model."""
        if self._template is None:
            model: Any = self.model
            pad = getattr(self.processing_class, "pad_token_id", None)
            return Collator.for_model(model, config, pad_token_id=pad, split=split)
        collator = copy.copy(self._template)
        collator.config, collator.split = config, split
        return collator

    def _config(self) -> Config:
        """Return the settings with the sizes that the trainer has at this time."""
        args = self.args
        seeds: dict[str, Any] = {"seed": args.seed}
        if args.data_seed is not None:
            seeds["data_seed"] = args.data_seed
        return self._packing.replace(
            micro_batch_size=self._train_batch_size,
            eval_batch_size=args.eval_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            world_size=self._ranks,
            **seeds,
        )

    @property
    def _peers(self) -> int:
        """Processes that share one data-parallel rank's batches."""
        return int(self.get_tp_size() * self.get_cp_size())

    @property
    def _ranks(self) -> int:
        """Data-parallel ranks."""
        return int(self.args.world_size) // self._peers

    @property
    def _rank(self) -> int:
        """This process's data-parallel rank."""
        return int(self.args.process_index) // self._peers

    def _used_keys(self) -> frozenset[str] | None:
        """Return which keys of samples the model takes, as is done with columns; None: all."""
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        return frozenset(self._signature_columns or ())

    # Epochs, which may differ in length

    def set_initial_training_values(self, args: Any, dataloader: DataLoader[Any]) -> Any:
        """Count epochs and steps, as the Trainer does, of epochs that may differ in length."""
        values = list(super().set_initial_training_values(args, dataloader))
        if self._train_stream is not None:
            return tuple(values)  # one epoch of `max_steps`
        sampler = self._plan_of_training()
        if args.max_steps > 0:
            epochs = 1
            while sampler.total_steps(epochs) < args.max_steps:
                epochs += 1
            values[0] = epochs
        else:
            whole = int(args.num_train_epochs)
            steps = sampler.total_steps(whole)
            if (part := args.num_train_epochs - whole) > 0:
                steps += math.ceil(part * (sampler.total_steps(whole + 1) - steps))
            values[-1] = steps
        return tuple(values)

    def _run_epoch(self, **kwargs: Any) -> None:  # type: ignore[override]
        self._microbatch = 0
        if kwargs["resume_from_checkpoint"] and kwargs["epoch"] == kwargs["epochs_trained"]:
            self._microbatch = kwargs["steps_trained_in_current_epoch"]
        if self._train_stream is None:
            sampler = self._plan_of_training()
            # The wrappers around it need not pass this on: here it is done.
            sampler.set_epoch(kwargs["epoch"])
            self._epoch_plan = sampler.plan
            kwargs["steps_in_epoch"] = len(sampler)
            kwargs["num_update_steps_per_epoch"] = -(
                -len(sampler) // self.args.gradient_accumulation_steps
            )
        super()._run_epoch(**kwargs)  # type: ignore[no-untyped-call]
        if self._train_stream is not None and not self.control.should_training_stop:
            done, wanted = self.state.global_step, self.args.max_steps
            # A callback may end the epoch, and a checkpoint may be that of the last step.
            if done < wanted and not self.control.should_epoch_stop:
                step = self.args.gradient_accumulation_steps
                over = self._microbatch % step
                rest = f", and nothing is learnt from {over} of {step} microbatches of the next"
                warnings.warn(
                    "the stream gives nothing when it is read again, so the training ends after "
                    f"{done} of {wanted} steps{rest if over else ''}: give an iterable that starts "
                    "anew, as data sets do, or set max_steps to less",
                    stacklevel=2,
                )
            self.control.should_training_stop = True

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one microbatch, as the Trainer does, and count it.

        Raises:
            RuntimeError: If it is the first of a stream, and the ranks read different ones.
            ValueError: If it is the first since a checkpoint of another stream.
        """
        if self._train_stream is not None and not self._stream_checked:
            self._check_stream(self._train_stream)
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._microbatch += 1
        return loss

    def _check_stream(self, stream: Endless) -> None:
        """Compare what all ranks have read, and what was read before the checkpoint."""
        self._stream_checked = True
        if len(set(gather_object([stream.first_digest]))) > 1:
            raise RuntimeError(
                "the ranks read different streams, each of which is dealt out to all of them: give "
                "every rank the same samples in the same order (a shuffle needs a seed)"
            )
        if self._stream_state is not None:
            stream.check_samples(self._stream_state)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "non_padding":
            super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
            return
        # The Trainer would take the sum of the mask, which here has a row for each token.
        self.state.num_input_tokens_seen += self._tokens(self._microbatch - 1, inputs)

    def _tokens(self, number: int, inputs: Mapping[str, Any]) -> int:
        """Return the tokens of a number's microbatches of all ranks.

        Padding is not counted, unless they come from a stream, which does not tell it apart.
        """
        if self._train_stream is not None:
            count = torch.tensor(inputs["input_ids"].numel(), device=self.accelerator.device)
            return int(self.accelerator.gather(count).sum()) // self._peers
        sampler = self._plan_of_training()
        world = sampler.config.world_size
        rows = [row for rank in range(world) for row in self._epoch_plan[rank, number]]
        lengths = sampler._lengths[[sample for row in rows for sample in row]]
        return int(lengths.clamp(max=sampler.config.sequence_len).sum())

    def _plan_of_training(self) -> MultipackBatchSampler:
        assert self._train_plan is not None, "the trainer makes its loader first"
        return self._train_plan

    # Checkpoints

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as the Trainer does; a newest checkpoint that is not whole is passed over.

        Args:
            resume_from_checkpoint (str | bool): A checkpoint, or True: the newest in `output_dir`.
            *args: As for the Trainer.
            **kwargs: As for the Trainer.

        Raises:
            RuntimeError: If the ranks do not follow one plan.
            ValueError: If there is no whole checkpoint to resume from, or it was made with another
                order of samples; every difference is named.

        Warns:
            UserWarning: If it resumes from another checkpoint than the newest.
        """
        if resume_from_checkpoint:
            resume_from_checkpoint = self._whole_checkpoint(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _whole_checkpoint(self, asked: Any) -> str:
        """Return the checkpoint that all ranks resume from: rank 0 looks, and tells the others."""
        answer: list[Any] = [None, None]
        if self.args.process_index == 0:
            try:
                newest = asked is True
                folder = str(self.args.output_dir) if newest else asked
                answer[0] = _checkpoint.choose(folder, newest=newest)
            except ValueError as error:
                answer[1] = str(error)
        broadcast_object_list(answer)
        if answer[1] is not None:
            raise ValueError(answer[1])
        return str(answer[0])

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        # All ranks come here; a loader may be asked for by one alone.
        stream = self._train_stream
        self._stream_checked, self._stream_state = False, None
        check_ranks(
            self._plan_of_training() if stream is None else stream.stream, peers=self._peers
        )
        done: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None:
            return done
        state = _checkpoint.sampler_state(resume_from_checkpoint)
        if stream is not None:
            if state is None or self.args.ignore_data_skip:
                return done
            self._stream_state = state
            return 0, stream.position_of(state)
        state = state or {"epoch": self.state.epoch}
        if self.args.ignore_data_skip:
            epoch = state["epoch"]
            return (int(epoch) if epoch is not None else done[0]), 0
        return self._plan_of_training().position_of(state)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(self._get_output_dir(trial=trial))
        folder = run / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            _checkpoint.begin(folder)
        # Nothing is deleted, and nothing is uploaded, before this one is whole.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self._finish_checkpoint(folder)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._finish_checkpoint(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_checkpoint(self, folder: str | os.PathLike[str]) -> None:
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if self._train_stream is not None:
                state = self._train_stream.state_at(self._microbatch)
            else:
                state = self._plan_of_training().state_dict(epochs=self.state.epoch or 0.0)
            _checkpoint.finish(folder, state)

    # Evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate, as the Trainer does; the loss is the mean over tokens, not over batches."""
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        sampler = getattr(dataloader, "batch_sampler", None)
        if not isinstance(sampler, MultipackBatchSampler) or self.get_cp_size() > 1:
            return super().evaluation_loop(*arguments)
        check_ranks(sampler, peers=self._peers)
        self._token_losses = []
        try:
            output = super().evaluation_loop(*arguments)
            losses = self._token_losses
        finally:
            self._token_losses = None
        if losses and output.metrics is not None:
            sums = self.accelerator.gather(torch.stack(losses).sum(0, keepdim=True)).sum(0)
            output.metrics[f"{metric_key_prefix}_loss"] = (sums[0] / sums[1]).item()
        return output

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluate one microbatch, as the Trainer does, and keep its loss with its tokens."""
        labels = inputs.get("labels")
        result: tuple[Any, Any, Any] = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        loss = result[0]
        if self._token_losses is not None and loss is not None and labels is not None:
            tokens = (labels[..., 1:] != IGNORED_LABEL).sum().to(loss.device, torch.float32)
            # A microbatch of repeats alone has no tokens, and a loss of 0/0.
            summed = torch.where(tokens > 0, loss.float() * tokens, 0.0)
            self._token_losses.append(torch.stack([summed, tokens]))
        return result

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if self._token_losses is not None:
            return None  # so that the loss is the mean over the tokens of this microbatch alone
        return super()._get_num_items_in_batch(batch_samples, device)


def _each(datasets_: Any) -> Iterator[Any]:
    """Yield one data set, or several from a mapping, or none."""
    if isinstance(datasets_, dict):
        yield from datasets_.values()
    elif datasets_ is not None:
        yield datasets_
