"""Settings from an Axolotl YAML, with Axolotl's names and defaults.

For data that is tokenised already, to be trained on elsewhere in the way that the file describes:

    settings = from_yaml("config.yml", world_size=8)
    sampler = settings.sampler(lengths, counts, label_starts=starts, rank=rank)
    loader = DataLoader(
        RowDataset(samples), batch_sampler=sampler, collate_fn=settings.collator(pad_token_id=0)
    )

What the file asks for and cannot be done is refused by name, with the reason. What concerns neither
the order of samples nor the shape of batches is left alone, and listed.

Two things differ from Axolotl on purpose. The first label of every sample is masked, so that no
token is predicted across a border; `mask_first_label=False` brings it back. Rows are packed the
same way on all ranks whatever the state of torch's random numbers, so the order is another one.

Axolotl's keys, defaults and rules are those of version 0.21: https://docs.axolotl.ai
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

from multipack._arrays import Bools, Integers, shown
from multipack._config import Config, Split, layout
from multipack._yaml import read_yaml
from multipack.collate import Collator
from multipack.sampler import MultipackBatchSampler
from multipack.streaming import StreamingMultipack

_DEFAULTS: dict[str, Any] = {
    "sequence_len": 512,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "sample_packing_bin_size": 200,
    "sample_packing_group_size": 100_000,
    "streaming_multipack_buffer_size": 10_000,
    "excess_length_strategy": "drop",
    "min_sample_len": 2,
    "label_balance_window_optim_steps": 1,
    "seed": 42,
}

# What keeps the samples of a row apart, by the values of `attn_implementation`.
_ATTENTION = {
    "eager": "additive",
    "sdpa": "bool",
    "flex_attention": "flex",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
}
# The older keys for the same, which are true or false.
_ATTENTION_FLAGS = {
    "eager_attention": "eager",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
}
_PATCHED_ATTENTION = ("xformers_attention", "sage_attention", "s2_attention")
_VARLEN = ("flash", "flex")

# What must be true or false, and what a number to calculate with.
_FLAGS = (
    *_ATTENTION_FLAGS,
    *_PATCHED_ATTENTION,
    "balance_labels",
    "batch_flattening",
    "curriculum_sampling",
    "dataloader_drop_last",
    "do_causal_lm_eval",
    "eval_sample_packing",
    "group_by_length",
    "multipack_real_batches",
    "pad_to_sequence_len",
    "pretrain_multipack_attn",
    "sample_packing",
    "sample_packing_sequentially",
    "streaming",
)
_NUMBERS = (
    "batch_size",
    "context_parallel_size",
    "dp_replicate_size",
    "dp_shard_size",
    "gradient_accumulation_steps",
    "micro_batch_size",
    "pad_to_multiple_of",
    "sequence_len",
    "tensor_parallel_size",
)

# Old names that Axolotl still takes.
_RENAMED = {
    "pretrain_multipack_buffer_size": "streaming_multipack_buffer_size",
    "sequence_parallel_degree": "context_parallel_size",
}

_PAIRS = "it trains on pairs or prompts, and packed batches are for causal language modelling"
# Never possible: the key, and why.
_REFUSED = {
    "rl": _PAIRS,
    "reward_model": _PAIRS,
    "process_reward_model": _PAIRS,
    "diffusion": "its attention is not causal, and its labels are not known after tokenisation",
}
_USED = {
    *_DEFAULTS,
    *_FLAGS,
    *_NUMBERS,
    *_REFUSED,
    *_RENAMED,
    "accelerator_config",
    "attn_implementation",
    "data_seed",
    "eval_batch_size",
    "eval_sequence_len",
    "eval_table_size",
    "padding_side",
    "pretraining_dataset",
}


@dataclasses.dataclass(frozen=True)
class AxolotlSettings:
    """What an Axolotl YAML says about batches; see `from_yaml`."""

    config: Config
    """The settings."""
    eval_config: Config
    """The same for evaluation, which may have another `eval_sequence_len`."""
    attention: str
    """How the samples of a row are kept apart: as for `Collator`."""
    peers: int
    """How many processes share one rank's batches, for `check_ranks`: the file's tensor-parallel
    times its context-parallel size."""
    is_streaming: bool
    """Whether the data is a stream: `stream` instead of `sampler`."""
    used: Mapping[str, Any]
    """The keys of the file that were followed, with their values."""
    ignored: tuple[str, ...]
    """The keys of the file that do not concern batches."""

    def sampler(
        self,
        lengths: Integers,
        label_counts: Integers | None = None,
        *,
        rank: Any = None,
        label_starts: Bools | None = None,
        split: Split = "train",
        fingerprint: str | None = None,
    ) -> MultipackBatchSampler:
        """Make the sampler of a split; the arguments are those of `MultipackBatchSampler`.

        Raises:
            TypeError, ValueError: As for `MultipackBatchSampler`; if the training data is a stream.
        """
        if self.is_streaming and split == "train":
            raise ValueError("the file describes a stream, whose lengths are not known: use stream")
        return MultipackBatchSampler(
            lengths,
            label_counts,
            self._config_of(split),
            rank=rank,
            label_starts=label_starts,
            split=split,
            fingerprint=fingerprint,
        )

    def collator(
        self, *, pad_token_id: int = 0, split: Split = "train", **options: Any
    ) -> Collator:
        """Make the collator of a split.

        Args:
            pad_token_id (int): The tokenizer's.
            split (str): ``train`` or ``eval``.
            **options: Further arguments of `Collator`.

        Raises:
            TypeError, ValueError: As for `Collator`.
        """
        config = self._config_of(split)
        # A row of one sample needs nothing to keep samples apart.
        attention = "none" if layout(config, split) == "padded" else self.attention
        options = {"attention": attention, "pad_token_id": pad_token_id, **options}
        return Collator(config, split=split, **options)

    def stream(
        self,
        iterable: Iterable[Mapping[str, Any]],
        *,
        collator: Callable[[Any], dict[str, Any]],
        rank: int | None = None,
    ) -> StreamingMultipack:
        """Pack a stream of samples; the arguments are those of `StreamingMultipack`.

        Raises:
            TypeError, ValueError: As for `StreamingMultipack`; if the file describes no stream.
        """
        if not self.is_streaming:
            raise ValueError("the file describes no stream: set streaming: true, or use sampler")
        return StreamingMultipack(iterable, self.config, rank=rank, collator=collator)

    def _config_of(self, split: Split) -> Config:
        return self.eval_config if split == "eval" else self.config


def from_yaml(
    path: str | PathLike[str], *, world_size: int | None = None, **keys: Any
) -> AxolotlSettings:
    """Read an Axolotl YAML.

    For ``{sequence_len: 2048, micro_batch_size: 2, sample_packing: true, flash_attention: true}``
    the settings pack rows of 4096 tokens by first fit, at most 200 samples in a row, padded to
    multiples of 2048, for ``attention="flash"``. Without the last key they are two rows of 2048
    for a mask.

    Args:
        path (str | os.PathLike): The file.
        world_size (int): Data-parallel ranks: a multiple of the file's `dp_shard_size` times its
            `dp_replicate_size`. None: as many as that.
        **keys: Settings of `Config` that override what the file says, such as
            ``sample_packing_algorithm="best_fit_decreasing"``.

    Returns:
        AxolotlSettings: The settings, and what they were taken from.

    Raises:
        ValueError: If the file is not a YAML mapping, gives a key twice, or asks for something that
            is not possible; the text names each such key with the reason. Also if `world_size` is
            not a multiple of what the file says, and as for `Config`.
        TypeError: As for `Config`.

    Warns:
        UserWarning: If a key is unknown here and nearly the name of one that is followed.
    """
    given = _read(path)
    read = _Reader(given)
    # The rules rely on the kinds.
    faults = list(read.mistyped()) or list(read.refused())
    if refused := [f"{key}: {reason}" for key, reason in faults]:
        raise ValueError(f"{path} asks for what is not possible: {'; '.join(refused)}")
    ignored = tuple(key for key in given if key not in _USED)
    for key in ignored:
        if near := difflib.get_close_matches(key, _USED, n=1, cutoff=0.85):
            warnings.warn(f"{path}: {key} is ignored; did you mean {near[0]}?", stacklevel=2)
    ranks = read.product("dp_shard_size", "dp_replicate_size")
    config = Config(
        **{**read.settings(), "world_size": ranks if world_size is None else world_size, **keys}
    )
    if config.world_size % ranks:
        raise ValueError(
            f"world_size is {config.world_size}, but must be a multiple of {ranks}, which is "
            f"dp_shard_size times dp_replicate_size in {path}"
        )
    length = given.get("eval_sequence_len")
    return AxolotlSettings(
        config=config,
        eval_config=config if length is None else config.replace(sequence_len=length),
        attention=_ATTENTION[read.attention],
        peers=read.product("tensor_parallel_size", "context_parallel_size"),
        is_streaming=read.streaming,
        used={key: value for key, value in given.items() if key in _USED},
        ignored=ignored,
    )


class _Reader:
    """The meaning of a file's keys."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.named = given
        self.given = given = {_RENAMED.get(key, key): value for key, value in given.items()}
        self.packs = bool(given.get("sample_packing"))
        packs_eval = given.get("eval_sample_packing")
        if packs_eval is None:
            packs_eval = self.packs and not given.get("eval_table_size")
        self.packs_eval = bool(packs_eval)
        self.streaming = bool(given.get("streaming") or given.get("pretraining_dataset"))
        flags = [name for key, name in _ATTENTION_FLAGS.items() if given.get(key) is True]
        self.attention = str(given.get("attn_implementation") or [*flags, "sdpa"][0])
        if "/" in self.attention and "flash" in self.attention:
            self.attention = "flash_attention_2"  # a kernel of the hub
        self.varlen = _ATTENTION.get(self.attention) in _VARLEN
        self.flattens = given.get("batch_flattening")
        if self.flattens == "auto":
            self.flattens = self.varlen and not self.packs and self.get("micro_batch_size") != 1

    def get(self, key: str) -> Any:
        """Return a value, or its default where the file has none or null."""
        value = self.given.get(key)
        return _DEFAULTS.get(key) if value is None else value

    def product(self, *sizes: str) -> int:
        """Return the product of sizes of parallelism, which are 1 where the file has none."""
        return math.prod(self.given.get(size) or 1 for size in sizes)

    def settings(self) -> dict[str, Any]:
        """Return the settings of `Config`."""
        packs_any = self.packs or self.packs_eval
        settings = {key: self.get(key) for key in _DEFAULTS}
        for key in ("eval_batch_size", "data_seed"):
            settings[key] = self.get(key)
        settings["excess_length_strategy"] = str(settings["excess_length_strategy"]).lower()
        if self.given.get("batch_size"):
            settings["gradient_accumulation_steps"] = (
                self.given["batch_size"] // settings["micro_batch_size"]
            )
        settings |= {
            "sample_packing": self.packs,
            "eval_sample_packing": self.packs_eval,
            "batch_flattening": bool(self.flattens),
            "balance_labels": bool(self.given.get("balance_labels")),
            "pad_to_multiple_of": self._multiple(),
            # Without packing the last batch of an epoch is used, filled up where it is short.
            "incomplete_batches": (
                "drop" if self.packs or self.given.get("dataloader_drop_last") else "fill"
            ),
            "drop_unlabelled": self.packs,
        }
        if packs_any and not self.streaming:
            real = self.given.get("multipack_real_batches")
            settings["multipack_real_batches"] = not self.varlen if real is None else real
        if self.given.get("curriculum_sampling"):
            settings["sample_packing_sequentially"] = True
        elif self.given.get("sample_packing_sequentially"):
            # The order is kept, but it is a shuffled one.
            settings["sample_packing_algorithm"] = "next_fit"
        elif packs_any:
            settings["sample_packing_algorithm"] = "first_fit"
        if self.given.get("sample_packing_sequentially"):
            settings |= {"sample_packing_bin_size": None, "sample_packing_group_size": None}
        return settings

    def _multiple(self) -> int:
        """Return what the length of a row is rounded up to a multiple of."""
        pads, multiple = self.given.get("pad_to_sequence_len"), self.given.get("pad_to_multiple_of")
        if pads is None and self.packs:
            pads = True
        if self.flattens or pads is False:
            return 1
        multiple = 64 if multiple is None else multiple
        return -(-self.get("sequence_len") // multiple) * multiple if pads else multiple

    def mistyped(self) -> Iterable[tuple[str, str]]:
        """Yield each key whose value is of the wrong kind, as far as `Config` does not see it."""
        for key in _FLAGS:
            value = self.given.get(key)
            if not isinstance(value, bool | None) and (key, value) != ("batch_flattening", "auto"):
                yield key, f"{shown(value)} is neither true nor false"
        for key in _NUMBERS:
            value = self.given.get(key, 1)
            if value is not None and (type(value) is not int or value < 1):
                yield key, f"{shown(value)} is no integer of 1 or more"
        parallel = self.given.get("accelerator_config")
        if not isinstance(parallel, dict | None):
            yield "accelerator_config", f"{shown(parallel)} is no mapping"

    def refused(self) -> Iterable[tuple[str, str]]:
        """Yield each key that cannot be followed, and why."""
        given, balances = self.given, bool(self.given.get("balance_labels"))
        for key, reason in _REFUSED.items():
            # An empty block switches diffusion on.
            if given.get(key) or (key in given and key == "diffusion" and given[key] is not False):
                yield key, reason
        if self.attention not in _ATTENTION:
            yield (
                "attn_implementation",
                f"{shown(self.attention)} is none of {', '.join(_ATTENTION)}",
            )
        for key in _PATCHED_ATTENTION:
            if given.get(key):
                yield key, "it is a patch of Axolotl's own, which is not here"
        yield from self._refused_orders(balances)
        if given.get("padding_side") == "left":
            yield "padding_side", "rows are padded on the right"
        parallel = given.get("accelerator_config") or {}
        if parallel.get("split_batches") or parallel.get("dispatch_batches"):
            yield (
                "accelerator_config",
                "whole batches are dealt out to ranks: leave split_batches and dispatch_batches "
                "false",
            )
        window = given.get("label_balance_window_optim_steps")
        if window not in (None, 1) and not balances:
            yield "label_balance_window_optim_steps", "it needs balance_labels: true"
        elif window not in (None, 1) and self.streaming:
            yield (
                "label_balance_window_optim_steps",
                "the buffers of a stream do not say where optimizer steps begin",
            )
        if self.packs_eval and given.get("eval_table_size"):
            yield "eval_table_size", "it needs eval_sample_packing: false"
        if self.packs_eval and given.get("do_causal_lm_eval"):
            yield "do_causal_lm_eval", "it needs eval_sample_packing: false"
        if given.get("batch_size") and given.get("gradient_accumulation_steps"):
            yield "batch_size", "it is set beside gradient_accumulation_steps: give either"
        elif (given.get("batch_size") or 0) % self.get("micro_batch_size"):
            yield "batch_size", "it is no multiple of micro_batch_size"
        for old, new in _RENAMED.items():
            if {old, new} <= self.named.keys():
                yield old, f"it is the old name of {new}: give either"
        split = self.product("context_parallel_size") > 1
        if split and self.packs and self.get("micro_batch_size") > 1:
            yield "context_parallel_size", "with sample_packing it needs micro_batch_size: 1"
        yield from self._refused_flattening()
        yield from self._refused_streams(balances)

    def _refused_orders(self, balances: bool) -> Iterable[tuple[str, str]]:
        """Yield the orders of samples that cannot be followed."""
        given = self.given
        for key in ("curriculum_sampling", "sample_packing_sequentially"):
            if given.get(key) and balances:
                yield key, "balance_labels moves samples between batches, so it keeps no order"
        keeps = not self.packs or given.get("sample_packing_sequentially")
        if given.get("curriculum_sampling") and not keeps:
            yield (
                "curriculum_sampling",
                "packing keeps the order with sample_packing_sequentially: true only",
            )
        if given.get("group_by_length") and not self.packs:
            yield "group_by_length", "samples are shuffled, or balanced, and never sorted by length"

    def _refused_flattening(self) -> Iterable[tuple[str, str]]:
        if self.flattens and self.packs:
            yield "batch_flattening", "it needs sample_packing: false"
        elif self.flattens and not self.varlen:
            yield "batch_flattening", "it needs flash_attention or flex_attention"

    def _refused_streams(self, balances: bool) -> Iterable[tuple[str, str]]:
        given = self.given
        if not self.streaming:
            return
        if balances and not self.packs:
            yield "balance_labels", "without sample_packing it needs the lengths of all samples"
        sources = given.get("pretraining_dataset")
        if self.packs and isinstance(sources, list) and len(sources) > 1:
            yield "pretraining_dataset", "with sample_packing it can be one data set only"
        if given.get("pretrain_multipack_attn") is False:
            yield "pretrain_multipack_attn", "false would let samples attend to one another"


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ValueError: If there is none.
    """
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise ValueError(f"{path} holds a {type(given).__name__}, but settings map keys to values")
    return given
