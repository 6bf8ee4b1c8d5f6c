"""TRL: its SFTTrainer on packed batches.

`PackedSFTTrainer` leaves tokenizing, chat templates and the masking of prompts to the SFTTrainer,
with `completion_only_loss` and `assistant_only_loss` as they are, and replaces its packing:

    trainer = PackedSFTTrainer(
        model="Qwen/Qwen3-0.6B",
        args=SFTConfig(output_dir="out", max_length=4096),
        train_dataset=dataset,
        config=Config(sequence_len=4096, balance_labels=True),
    )

Its batches, evaluation and checkpoints are those of `multipack.integrations.hf.PackedTrainer`.
"""

from __future__ import annotations

import copy
from typing import Any

from multipack._config import Config
from multipack.integrations._trainer import PackedTrainer
from multipack.integrations._versions import require

require("trl")
from trl.trainer.sft_config import SFTConfig  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402


class PackedSFTTrainer(PackedTrainer, SFTTrainer):
    """An SFTTrainer whose batches are packed, padded or flattened, and balanced, by a `Config`.

    What becomes of samples longer than the config's `sequence_len` is for its
    `excess_length_strategy` to say: they are dropped and counted, and with ``"truncate"`` cut as
    the SFTTrainer would. It itself cuts nothing, so its `max_length` may not be less. The
    `num_tokens` that it logs are counted without padding, those of a stream with it.

    Args:
        model: As for the SFTTrainer.
        args (SFTConfig): As for the SFTTrainer, without `packing` and `padding_free`.
        config (Config): The settings; see `PackedTrainer`.
        **kwargs: As for the SFTTrainer and `PackedTrainer`.

    Raises:
        TypeError: As for `PackedTrainer`; if `args` is no SFTConfig.
        ValueError: As for `PackedTrainer`; if `packing`, `eval_packing` or `padding_free` is set,
            `max_length` is less than `sequence_len`, or samples are to be cut at their beginning.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *, config: Config, **kwargs: Any
    ) -> None:
        if not isinstance(args, SFTConfig):
            raise TypeError(f"args is a {type(args).__name__}, but must be a trl.SFTConfig")
        for name in ("packing", "eval_packing", "padding_free"):
            if getattr(args, name, None):
                raise ValueError(
                    f"{name} is set, but multipack packs in the SFTTrainer's place: leave it out"
                )
        longest, needed = args.max_length, config.sequence_len
        if longest is not None and needed is not None and longest < needed:
            raise ValueError(
                f"max_length is {longest}, less than sequence_len {needed}: set sequence_len to "
                f"{longest}, or max_length to {needed} or None"
            )
        cut = getattr(args, "truncation_mode", "keep_start")
        if cut != "keep_start" and config.excess_length_strategy == "truncate":
            raise ValueError(
                f"truncation_mode is {cut!r}, but excess_length_strategy "
                "'truncate' keeps the beginning of a sample: leave it out"
            )
        args = copy.copy(args)
        args.max_length = None
        super().__init__(model, args, config=config, **kwargs)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss, as the SFTTrainer does, and count tokens for its `num_tokens`."""
        before = self._total_train_tokens
        result = super().compute_loss(  # type: ignore[no-untyped-call]
            model, inputs, return_outputs, num_items_in_batch
        )
        if model.training:
            # The SFTTrainer would take the sum of the mask, which here has a row for each token.
            self._total_train_tokens = before + self._tokens(self._microbatch, inputs)
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return result
