"""torchdata's StatefulDataLoader, which saves and restores the middle of an epoch.

It asks the sampler for its position whenever it hands out a batch, and keeps the answer until that
batch comes back from the workers. So `loader.state_dict()` is exact with any number of workers, and
`sampler.consumed` is not needed. The position in a stream is kept by the workers themselves. States
are for as many workers as they were saved with.

    loader = stateful_loader(packed, sampler, num_workers=2)
    for batch in loader:
        ...
        state = loader.state_dict()

    loader.load_state_dict(state)  # in another process; the next batch is the one that followed
"""

from __future__ import annotations

from typing import Any

from multipack._agreement import check_agreement
from multipack.dataset import PackedDataset, RowDataset
from multipack.integrations._versions import require
from multipack.sampler import MultipackBatchSampler
from multipack.streaming import StreamingMultipack

require("torchdata")
from torchdata.stateful_dataloader import (  # type: ignore[import-untyped] # noqa: E402
    StatefulDataLoader,
)

_DECIDED = ("sampler", "batch_sampler", "batch_size", "shuffle", "drop_last")


def stateful_loader(
    data: Any, sampler: MultipackBatchSampler | None = None, **options: Any
) -> StatefulDataLoader:
    """Make a StatefulDataLoader of packed batches.

    Args:
        data: A `PackedDataset`; a `StreamingMultipack`, which takes no sampler; or any map-style
            data set of samples, which needs a `collate_fn` beside.
        sampler (MultipackBatchSampler): The microbatches of this rank.
        **options: As for `StatefulDataLoader`: `num_workers`, `collate_fn`, `pin_memory`, …

    Returns:
        StatefulDataLoader: Yields what the collator makes. Continued from the state after the last
        batch of an epoch, its first pass has no batch.

    Raises:
        TypeError: If the sampler is missing, or given with a stream; if the collator is.
        ValueError: If an option is given that the sampler decides, or batches may come in another
            order than they were handed out, which no position can name; if the collator's settings
            are not those of the plan.
    """
    if taken := [name for name in _DECIDED if name in options]:
        raise ValueError(f"{taken[0]} is decided by the sampler or the stream: leave it out")
    if not options.get("in_order", True):
        raise ValueError("in_order=False gives batches that no position can name: leave it out")
    if isinstance(data, StreamingMultipack):
        if sampler is not None:
            raise TypeError("a stream plans by itself: leave the sampler out")
        return StatefulDataLoader(data, batch_size=None, **options)
    if not isinstance(sampler, MultipackBatchSampler):
        raise TypeError(
            f"sampler is a {type(sampler).__name__}, but must be a MultipackBatchSampler"
        )
    collator = data.collator if isinstance(data, PackedDataset) else options.get("collate_fn")
    check_agreement("the sampler", sampler.config, sampler.split, collator)
    if isinstance(data, PackedDataset):
        return StatefulDataLoader(data, sampler=sampler, batch_size=None, **options)
    if collator is None:
        raise TypeError(
            "collate_fn is needed to make batches of samples: a multipack.Collator, or wrap the "
            "samples in a PackedDataset"
        )
    return StatefulDataLoader(RowDataset(data), batch_sampler=sampler, **options)
