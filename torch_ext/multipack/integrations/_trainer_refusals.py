"""What `PackedTrainer` cannot work with, refused by name before anything is trained.

Rewards, preferences and diffusion are trained by subclasses of the same Trainer, and many of its
arguments say how batches are made. Most of them would take packed batches without an error, and
learn something else.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers import Trainer, __version__

from multipack._config import SINGLE_ROW, Config, Layout
from multipack.collate import Collator
from multipack.integrations._parallel import (
    refuse_pipeline_parallelism,
    refuse_sequence_parallelism,
)
from multipack.integrations._trainer_data import is_stream

if TYPE_CHECKING:
    from multipack.integrations._trainer import PackedTrainer

# Attention whose tensors have a part for each row.
SCATTERED = ("bool", "additive", "none")

# Names of trainers that do not train on single causal texts, as parts of class names.
_OTHER_TRAINERS = {
    "reward models": ("Reward", "PRM"),
    "preferences": ("DPO", "KTO", "ORPO", "CPO", "BCO", "TPO"),
    "reinforcement learning": ("PPO", "GRPO", "RLOO", "GMPO", "A2PO", "OnlineDPO", "NashMD", "XPO"),
    "distillation": ("Distillation", "GKD", "GOLD", "SDFT", "SDPO", "IWOPD"),
    "diffusion": ("Diffusion", "DDPO"),
}

# What models learn instead of the next token, as transformers names their losses.
_OTHER_LOSSES = {
    "ForMaskedLM": "masked tokens",
    "ForQuestionAnswering": "spans of answers",
    "ForSequenceClassification": "one label for each sample, as reward models do",
    "ForTokenClassification": "classes of tokens",
}

# Methods of the Trainer that are replaced here and are no part of its documented interface.
_PRIVATE = (
    "_get_num_items_in_batch",
    "_init_training_state",
    "_push_from_checkpoint",
    "_run_epoch",
    "_save_checkpoint",
    "_track_num_input_tokens",
    "get_cp_size",
    "get_sp_size",
    "get_tp_size",
    "set_initial_training_values",
)


def refuse_other_versions() -> None:
    """Refuse a Trainer that would not call what is replaced: epochs or resuming would be wrong.

    Raises:
        ImportError: If it has no such method.
    """
    if missing := [name for name in _PRIVATE if not hasattr(Trainer, name)]:
        raise ImportError(
            f"the Trainer of transformers {__version__} has no {missing[0]}, which PackedTrainer "
            "replaces: install transformers 5.24"
        )


def refuse_kind(kind: type[Trainer]) -> None:
    """Refuse trainers that do not learn single causal texts.

    Raises:
        ValueError: If it is one of them.
    """
    for base in kind.__mro__:
        for what, parts in _OTHER_TRAINERS.items():
            name = base.__name__
            if name.endswith("Trainer") and any(part in name for part in parts):
                raise ValueError(
                    f"{name} is a trainer for {what}, but multipack packs and balances "
                    "the samples of causal language-model training: use it with Trainer or "
                    "SFTTrainer"
                )


def refuse_model(model: Any) -> None:
    """Refuse models that do not learn the next token.

    Raises:
        ValueError: If it is one of them.
    """
    config, name = getattr(model, "config", None), type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder with a decoder, but multipack packs the samples of causal "
            "language models"
        )
    if "diffusion" in getattr(config, "model_type", ""):
        raise ValueError(
            f"{name} is a diffusion model, but multipack packs and balances the samples of causal "
            "language models"
        )
    learnt = _OTHER_LOSSES.get(getattr(model, "loss_type", None) or "")
    if learnt is not None:
        raise ValueError(
            f"{name} learns {learnt}, but multipack packs and balances the samples of causal "
            "language models"
        )


def refuse_arguments(trainer: PackedTrainer, config: Config, ranks: int) -> None:
    """Refuse arguments of the trainer that a plan excludes, and settings that contradict them.

    Raises:
        ValueError: If there is such an argument.
    """
    args = trainer.args
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        raise ValueError(
            f"train_sampling_strategy is {strategy!r}, but the plan says which samples go together "
            "and when: leave it out (for the order of the data set, set "
            "sample_packing_sequentially in the config)"
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config has {name}, which would cut microbatches up: leave it out"
            )
    if getattr(trainer.processing_class, "padding_side", "right") != "right":
        raise ValueError(
            "the tokenizer pads on the left, but batches are padded on the right: set its "
            "padding_side to 'right'"
        )
    refuse_sequence_parallelism(trainer.get_sp_size())
    refuse_pipeline_parallelism(trainer.model)
    if args.include_num_input_tokens_seen == "non_padding" and is_stream(trainer.train_dataset):
        raise ValueError(
            "include_num_input_tokens_seen is 'non_padding', but the batches of a stream do not "
            "tell what is padding: set it to 'all'"
        )
    decided = {
        "micro_batch_size": ("per_device_train_batch_size", args.per_device_train_batch_size),
        "eval_batch_size": ("per_device_eval_batch_size", args.per_device_eval_batch_size),
        "gradient_accumulation_steps": (
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps,
        ),
        "world_size": ("number of data-parallel ranks", ranks),
        "seed": ("seed", args.seed),
        "data_seed": ("data_seed", args.data_seed),
    }
    defaults = Config()
    for key, (name, value) in decided.items():
        here = getattr(config, key)
        if value is not None and here not in (getattr(defaults, key), value):
            raise ValueError(
                f"the config has {key} {here}, but the trainer's {name} is {value}: leave it out "
                "of the config"
            )


def refuse_shared_rows(gpus: int, kind: Layout, collator: Collator) -> None:
    """Refuse batches that the GPUs of one process cannot share by their rows.

    Raises:
        ValueError: If there are several, and a batch has one row, or borders that run through all.
    """
    if gpus < 2:
        return
    if kind in SINGLE_ROW:
        fault = "one row"
    elif collator.attention not in SCATTERED:
        fault = f"attention={collator.attention!r}, whose borders run through all rows"
    else:
        return
    raise ValueError(
        f"{gpus} GPUs in one process share a batch by its rows, but this one has {fault}: start a "
        "process for each GPU with torchrun, or set multipack_real_batches and an attention with "
        "masks"
    )


def refuse_stream(dataset: Any) -> None:
    """Refuse data to evaluate on that has no indices.

    Raises:
        TypeError: If it has none.
    """
    if is_stream(dataset):
        raise TypeError(
            "the data set is a stream, but an evaluation needs indices: give a map-style data set"
        )


def warn_of_uneven_weights(trainer: PackedTrainer, config: Config, ranks: int) -> None:
    """Warn of a model whose loss stays the mean of a microbatch, whatever the step has.

    Warns:
        UserWarning: If it is one, and a step has several microbatches, whose labels are not
            balanced.
    """
    args = trainer.args
    microbatches = args.gradient_accumulation_steps * ranks
    told = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    even = told or config.balance_labels
    if trainer.train_dataset is not None and microbatches > 1 and not even:
        warnings.warn(
            f"{type(trainer.model).__name__} takes no num_items_in_batch, so the loss of a step is "
            f"the mean of its {microbatches} microbatches' means, and tokens in a microbatch with "
            "few labels weigh more than others: give the model's forward a **kwargs that reaches "
            "its loss, give compute_loss_func, or balance_labels, with which they differ little",
            stacklevel=3,
        )
