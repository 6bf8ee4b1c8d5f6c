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

from typing import Any

from trl.trainer.sft_trainer import SFTTrainer

from multipack._config import Config
from multipack.integrations._trainer import PackedTrainer


class PackedSFTTrainer(PackedTrainer, SFTTrainer):
    """An SFTTrainer whose batches are packed, padded or flattened, and balanced, by a `Config`.

    The SFTTrainer cuts samples to its `max_length` before they are planned. It may not be less than
    the config's `sequence_len`; with None, `excess_length_strategy` decides about longer ones.

    Args:
        model: As for the SFTTrainer.
        args (SFTConfig): As for the SFTTrainer, without `packing` and `padding_free`.
        config (Config): The settings; see `PackedTrainer`.
        **kwargs: As for the SFTTrainer and `PackedTrainer`.

    Raises:
        TypeError: As for `PackedTrainer`.
        ValueError: As for `PackedTrainer`; if `packing`, `eval_packing` or `padding_free` is set,
            or `max_length` is less than `sequence_len`.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *, config: Config, **kwargs: Any
    ) -> None:
        for name in ("packing", "eval_packing", "padding_free"):
            if getattr(args, name, None):
                raise ValueError(
                    f"{name} is set, but multipack packs in the SFTTrainer's place: leave it out"
                )
        # The default of a SFTConfig that is not given.
        longest = getattr(args, "max_length", 1024)
        needed = config.sequence_len
        if longest is not None and needed is not None and longest < needed:
            raise ValueError(
                f"max_length is {longest}, to which samples would be cut before they are packed "
                f"up to sequence_len {needed}: set max_length to {needed}, or to None to let "
                "excess_length_strategy decide"
            )
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
            self._total_train_tokens = before + self._tokens(self._microbatch)
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return result
