"""Accelerate: loaders of a plan, whose microbatches are dealt out whole.

    accelerator = Accelerator()
    config = Config(sequence_len=4096, world_size=accelerator.num_processes)
    sampler = MultipackBatchSampler(lengths, config=config, rank="all")
    loader = DataLoader(
        RowDataset(dataset), batch_sampler=sampler, collate_fn=Collator(config, attention="flash")
    )
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    for epoch in range(3):
        set_epoch(loader, epoch)
        for batch in loader: ...

Accelerate gives every n-th batch of a sampler to each of n processes, and the plan's order is made
for that: first all ranks' microbatches of the first microstep, then those of the second. What is
left to guard against are settings that would cut batches up, and epochs, which its wrappers
(`BatchSamplerShard`, the loaders of `skip_first_batches`) do not pass on to the sampler.

For a `PackedDataset`, whose batches are finished, give
``collate_fn=torch.utils.data.default_convert``. The loader of a `StreamingMultipack` is used as it
is: it has this rank's batches alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from multipack._config import PACKED, layout
from multipack.integrations._parallel import (
    refuse_context_parallelism,
    refuse_pipeline_parallelism,
    refuse_sequence_parallelism,
)
from multipack.integrations._ranks import check_ranks
from multipack.integrations._versions import require
from multipack.sampler import MultipackBatchSampler
from multipack.streaming import StreamingMultipack

require("accelerate")


def prepare(accelerator: Any, *objects: Any, **keys: Any) -> Any:
    """Prepare as `Accelerator.prepare` does, after checking that batches stay whole.

    Args:
        accelerator (Accelerator): All its processes must call this.
        *objects: What `Accelerator.prepare` takes; at least one loader of a plan among them.
        **keys: As for `Accelerator.prepare`.

    Returns:
        What `Accelerator.prepare` returns.

    Raises:
        RuntimeError: If the ranks do not follow one plan.
        TypeError: If a `MultipackBatchSampler` is the loader's sampler and not its batch sampler.
        ValueError: If no object is such a loader, one is of a `StreamingMultipack`, or a setting
            excludes it; the text names it.
    """
    loaders = [item for item in objects if isinstance(item, DataLoader)]
    if any(isinstance(loader.dataset, StreamingMultipack) for loader in loaders):
        raise ValueError(
            "a DataLoader has a StreamingMultipack, whose batches are this rank's already, and the "
            "Accelerator would share them out again: leave the loader out, and move its batches to "
            "the device"
        )
    samplers = [_sampler_of(loader) for loader in loaders]
    found = [sampler for sampler in samplers if sampler is not None]
    if not found:
        raise ValueError(
            "none of the objects is a DataLoader with a MultipackBatchSampler as its batch_sampler"
        )
    for item in objects:
        refuse_pipeline_parallelism(item)
    peers = _peers(accelerator)
    for sampler in found:
        _refuse(accelerator, sampler, accelerator.num_processes // peers)
    prepared = accelerator.prepare(*objects, **keys)
    for item in prepared if isinstance(prepared, tuple) else (prepared,):
        inner = _sampler_of(item) if isinstance(item, DataLoader) else None
        if inner is not None:
            check_ranks(inner, peers=peers)
            # Nothing was repeated to fill the last batch up, so nothing is to be cut off.
            setattr(item.dataset, "total_dataset_length", 0)  # noqa: B010
            _tell(item, inner)
    return prepared


def set_epoch(loader: Any, epoch: int) -> None:
    """Go to the start of an epoch, through all wrappers; the current one keeps its position.

    Args:
        loader: What `prepare` returned, or ``accelerate.skip_first_batches`` of it.
        epoch (int): From 0.

    Raises:
        TypeError: If it is not the loader of a plan, or as for `MultipackBatchSampler.set_epoch`.
        ValueError: As for `MultipackBatchSampler.set_epoch`.
    """
    sampler = _sampler_or_raise(loader)
    sampler.set_epoch(epoch)
    _tell(loader, sampler)


def load_state_dict(
    loader: Any, state: Mapping[str, Any], *, ignore_data_skip: bool = False
) -> None:
    """Go to a saved position: the next iteration over the loader goes on from there.

    It takes the place of ``skip_first_batches``, which would skip the same batches again. The state
    is the sampler's; call ``sampler.consumed()`` for each batch that was trained on.

    Args:
        loader: What `prepare` returned.
        state (Mapping): As for `MultipackBatchSampler.load_state_dict`.
        ignore_data_skip (bool): As there.

    Raises:
        TypeError: If it is not the loader of a plan, or as there.
        ValueError: As there.
    """
    sampler = _sampler_or_raise(loader)
    sampler.load_state_dict(state, ignore_data_skip=ignore_data_skip)
    _tell(loader, sampler)


def _sampler_of(loader: Any) -> MultipackBatchSampler | None:
    """Return the sampler of a plan inside a loader's wrappers."""
    if isinstance(getattr(loader, "sampler", None), MultipackBatchSampler):
        raise TypeError(
            "the DataLoader has a MultipackBatchSampler as sampler, which accelerate cannot share "
            "out: give it as batch_sampler, and for a PackedDataset "
            "collate_fn=torch.utils.data.default_convert"
        )
    inner = getattr(loader, "batch_sampler", None)
    while inner is not None and not isinstance(inner, MultipackBatchSampler):
        inner = getattr(inner, "batch_sampler", None)
    return inner


def _sampler_or_raise(loader: Any) -> MultipackBatchSampler:
    sampler = _sampler_of(loader)
    if sampler is None:
        raise TypeError(
            f"the {type(loader).__name__} has no MultipackBatchSampler as its batch_sampler"
        )
    return sampler


def _tell(loader: Any, sampler: MultipackBatchSampler) -> None:
    """Set the loader's own count of epochs, which it sends its batch sampler to at each pass."""
    loader.iteration = sampler.epoch


def _peers(accelerator: Any) -> int:
    """Return how many processes share one data-parallel rank's batches."""
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is None:
        return 1
    refuse_sequence_parallelism(parallel.sp_size)
    return int(parallel.tp_size * parallel.cp_size)


def _refuse(accelerator: Any, sampler: MultipackBatchSampler, ranks: int) -> None:
    """Refuse what would cut batches up or share them out twice.

    Raises:
        ValueError: If there is such a setting.
    """
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name):
            raise ValueError(
                f"the Accelerator has {name}, which would cut microbatches up: leave it out"
            )
    config = sampler.config
    accumulation = accelerator.gradient_accumulation_steps
    # At 1, a loop may accumulate by itself.
    if sampler.split == "train" and accumulation not in (1, config.gradient_accumulation_steps):
        raise ValueError(
            f"the plan has gradient_accumulation_steps {config.gradient_accumulation_steps}, but "
            f"the Accelerator has {accumulation}: plan for as many"
        )
    if config.world_size != ranks:
        raise ValueError(
            f"the plan has world_size {config.world_size}, but the Accelerator has {ranks} "
            "data-parallel ranks: plan for as many"
        )
    if ranks > 1 and sampler.rank != "all":
        raise ValueError(
            f"the sampler yields the microbatches of rank {sampler.rank} alone, and the "
            "Accelerator would share them out again: make it with rank='all'"
        )
    kind = layout(config, sampler.split)
    parallel = getattr(accelerator, "parallelism_config", None)
    refuse_context_parallelism(1 if parallel is None else parallel.cp_size, kind)
    if ranks > 1 and config.incomplete_batches == "split" and kind not in PACKED:
        raise ValueError(
            "incomplete_batches is 'split', which leaves microbatches of fewer samples, but the "
            "Accelerator shares out full ones only: set it to 'drop' or 'fill'"
        )
