"""The settings of a plan and of its batches, as a typed, frozen dataclass.

The rules (kinds, ranges, which settings exclude one another) live in Rust alone: making a `Config`
hands its keys over as JSON to ``torch.ops.multipack.resolve_config`` and takes the validated values
back. So Python, TorchScript and C++ accept and refuse the same settings with the same sentences.
Making one costs less than a tenth of a millisecond.

The functions at the end say what follows from the settings for one split: how samples lie in a
batch, how many there are, and how many tokens a row may hold.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

import numpy as np

from multipack import ops
from multipack._arrays import integer, shown
from multipack._yaml import read_yaml

Split = Literal["train", "eval"]
Layout = Literal["one_row", "real_rows", "padded", "flattened"]

# Layouts of rows that are filled up to a capacity; the others have a fixed number of samples.
PACKED: tuple[Layout, ...] = ("one_row", "real_rows")
# Layouts in which all samples of a microbatch lie in one row.
SINGLE_ROW: tuple[Layout, ...] = ("one_row", "flattened")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting, validated when it is made; equal settings are equal and hash alike.

    NumPy integers are taken as integers. A bool, a float or a string for an integer is refused,
    and so is a key that does not exist:

        >>> Config(sequence_len=4096, micro_batch_size=2).gradient_accumulation_steps
        1
        >>> Config(sequence_length=4096)
        Traceback (most recent call last):
        ValueError: unknown setting 'sequence_length', did you mean 'sequence_len'?

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a key is unknown, a value is out of range, or settings exclude one another.
    """

    sequence_len: int | None = None
    """Most tokens of one sample, and the unit of a row's capacity. Needed to plan."""
    micro_batch_size: int = 1
    """Rows of a microbatch, or samples in the layouts with a fixed number of them."""
    eval_batch_size: int | None = None
    """The same for evaluation; None: as `micro_batch_size`."""
    gradient_accumulation_steps: int = 1
    """Microbatches per rank and optimizer step."""
    world_size: int = 1
    """Data-parallel ranks."""
    sample_packing: bool = True
    """Pack rows up to a capacity; False: a fixed number of samples per microbatch."""
    batch_flattening: bool = False
    """Without packing: samples end to end in one row, instead of padded rows."""
    multipack_real_batches: bool | None = None
    """Packed: `micro_batch_size` rows of `sequence_len`, instead of one row of their product."""
    sample_packing_algorithm: str = "best_fit_decreasing"
    """How rows are packed: ``best_fit_decreasing``, ``tight``, ``first_fit`` or ``next_fit``."""
    sample_packing_sequentially: bool = False
    """Keep the dataset's order: next fit, no shuffling."""
    sample_packing_bin_size: int | None = None
    """Most samples in a row."""
    sample_packing_group_size: int | None = None
    """Pack so many samples at a time."""
    balance_labels: bool = False
    """Even out the supervised tokens over microbatches, optimizer steps and ranks."""
    label_balance_window_optim_steps: int = 1
    """Optimizer steps balanced together. The whole epoch is balanced at once, whatever this says: a
    window larger than 1 changes nothing."""
    balance_cost: str = "auto"
    """What ranks are evened by: ``auto``, ``tokens``, ``padded`` or ``attention``."""
    balance_cost_linear: float = 0.0
    """Weight of a token beside the sum of squared lengths, for ``attention``."""
    excess_length_strategy: str = "drop"
    """Samples longer than `sequence_len`: ``drop``, ``truncate`` or ``raise``."""
    min_sample_len: int = 1
    """Shorter samples are dropped and counted; empty ones always."""
    drop_unlabelled: bool = True
    """Drop samples without a supervised token, where label counts are given."""
    incomplete_batches: str = "drop"
    """What does not fill a round of all ranks: ``drop``, ``split`` or ``fill``."""
    pad_to_multiple_of: int = 1
    """A row's length is rounded up to a multiple of this."""
    pad_to_sequence_len: bool = False
    """Pad every row to its capacity."""
    align_samples_to: int = 1
    """Each sample's slot is rounded up to a multiple of this; must divide the capacity."""
    mask_first_label: bool = True
    """Mask the first label of every sample, so that no label crosses a border."""
    padded_tail: str = "own"
    """What the padding after a row's last sample belongs to: ``own``, ``last`` or ``none``."""
    eval_sample_packing: bool | None = None
    """`sample_packing` for evaluation; None: the same."""
    streaming_multipack_buffer_size: int = 10_000
    """Samples per buffer of a stream."""
    seed: int = 0
    """The seed of everything, unless `data_seed` is given."""
    data_seed: int | None = None
    """The seed of planning; None: `seed`."""

    def __new__(cls, /, *positional: object, **keys: object) -> Config:
        # The signature that dataclass makes would refuse an unknown key without naming the nearest.
        if positional:
            raise TypeError(
                f"settings are given by name, as in Config(sequence_len=4096), not by position: "
                f"{positional[0]!r}"
            )
        _resolve(keys)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for key, value in _resolve(vars(self)).items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> Config:
        """Read settings from a YAML file that holds nothing else.

        Args:
            path (str | os.PathLike): A file with one mapping of keys to values, or an empty one.

        Returns:
            Config: The settings of the file; every other key has its default.

        Raises:
            ValueError: If the file is not a YAML mapping, or gives a key twice, or as for `Config`.
            TypeError: As for `Config`.
        """
        keys = read_yaml(path)
        if keys is None:
            keys = {}
        if not isinstance(keys, dict):
            found = type(keys).__name__
            raise ValueError(f"{path} holds a {found}, but settings map keys to values")
        return cls(**{str(key): value for key, value in keys.items()})

    def replace(self, **keys: Any) -> Config:
        """Return a copy with some settings changed.

        Args:
            **keys: Settings by name.

        Returns:
            Config: The changed copy, validated as a whole.

        Raises:
            TypeError, ValueError: As for `Config`.
        """
        return Config(**{**vars(self), **keys})

    def to_json(self) -> str:
        """Return all settings as a JSON object: what the ops take as ``config``."""
        return json.dumps(vars(self))


def make_config(config: Config | None, keys: Mapping[str, Any]) -> Config:
    """Return `config`, or the defaults, with `keys` laid over it.

    Raises:
        TypeError: If `config` is not a `Config`, or as for `Config`.
        ValueError: As for `Config`.
    """
    if config is None:
        return Config(**keys)
    if not isinstance(config, Config):
        raise TypeError(
            f"config must be a multipack.Config or None, but is a {type(config).__name__}; "
            "write Config(...), or give the settings as keywords"
        )
    return config.replace(**keys) if keys else config


def refuse_config(label_counts: object) -> None:
    """Refuse settings in the place of the label counts.

    Raises:
        TypeError: If `label_counts` is a `Config`.
    """
    if isinstance(label_counts, Config):
        raise TypeError("label_counts is a Config: write config=... for it")


def checked_split(split: str) -> Split:
    """Return the name of a split.

    Raises:
        ValueError: If there is no such split.
    """
    if split == "train":
        return "train"
    if split == "eval":
        return "eval"
    raise ValueError(f"split is {split!r}, but must be 'train' or 'eval'")


def checked_rank(rank: object, world_size: int, *, or_all: bool = False) -> int:
    """Return a rank as a plain int; without one it is 0, which must be the only one.

    Args:
        rank: This rank's number, or None.
        world_size (int): How many there are.
        or_all (bool): Whether errors offer ``"all"``, which the caller takes.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is needed and missing, or out of range.
    """
    if rank is None:
        if world_size > 1:
            alternative = ", or 'all' for every rank's microbatches in global order"
            raise ValueError(
                f"rank is needed when world_size is {world_size}: this rank's number"
                f"{alternative if or_all else ''}"
            )
        return 0
    number = integer("rank", rank)
    if not 0 <= number < world_size:
        raise ValueError(
            f"rank is {number}, but must be from 0 to {world_size - 1}"
            + (", or 'all'" if or_all else "")
        )
    return number


def layout(config: Config, split: Split) -> Layout:
    """Return how the samples of a microbatch lie in its tensors."""
    packed = config.sample_packing
    if split == "eval" and config.eval_sample_packing is not None:
        packed = config.eval_sample_packing
    if packed:
        return "real_rows" if config.multipack_real_batches else "one_row"
    return "flattened" if config.batch_flattening else "padded"


def batch_size(config: Config, split: Split) -> int:
    """Return the rows of a microbatch, or its samples in the layouts with a fixed number."""
    if split == "eval" and config.eval_batch_size is not None:
        return config.eval_batch_size
    return config.micro_batch_size


def capacity(config: Config, split: Split) -> int:
    """Return the most tokens of a row, or 0 where no `sequence_len` is set."""
    rows = batch_size(config, split) if layout(config, split) in SINGLE_ROW else 1
    return rows * (config.sequence_len or 0)


def _resolve(keys: Mapping[str, object]) -> dict[str, Any]:
    """Validate `keys` and return all settings."""
    plain = {key: _plain(key, value) for key, value in keys.items()}
    resolved: dict[str, Any] = json.loads(ops.resolve_config(json.dumps(plain)))
    return resolved


def _plain(key: str, value: object) -> object:
    """Return `value` as JSON knows it; what is right for the key is for Rust to say."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} is {value}, but must be a finite number")
    if isinstance(value, int) and value.bit_length() > 256:
        raise ValueError(f"{key} is {shown(value)}, which does not fit into 64 bits")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | dict):
        # For Rust to refuse as it stands; what is nested could stand for more than memory holds.
        inner = list(value.values()) if isinstance(value, dict) else value
        if len(inner) <= 8 and not any(isinstance(part, list | dict) for part in inner):
            return value
    if isinstance(value, np.bool_ | np.floating):
        return value.item()
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        raise TypeError(
            f"{key} is a {kind}, but a setting is a number, a bool or a string"
        ) from None
