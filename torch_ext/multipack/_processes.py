"""How many processes train together, as far as this one can tell without asking the others."""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist

from multipack._config import Config, Split


def process_count() -> int:
    """Return the processes of the process group or, without one, those that torchrun started."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else 1


def warn_if_alone(config: Config, split: Split) -> None:
    """Warn that every process would train on all samples.

    It is a warning because the processes may share every batch, as tensor-parallel ones do; an
    evaluation on one of the processes is nothing special.

    Warns:
        UserWarning: If there are several processes and one data-parallel rank.
    """
    count = process_count()
    if split == "train" and config.world_size == 1 and count > 1:
        warnings.warn(
            f"world_size is 1, but there are {count} processes: each will train on all samples; "
            f"give world_size={count} and rank, unless the processes share every batch, as "
            "tensor-parallel ones do",
            stacklevel=3,
        )
