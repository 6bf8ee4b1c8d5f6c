"""What a plan needs of parallelism inside a model, and what it cannot live with.

Peers in tensor and context parallelism work on one batch together, so they count as one rank.
"""

from __future__ import annotations

from multipack._config import Layout


def refuse_context_parallelism(size: int, layout: Layout) -> None:
    """Refuse rows of several samples where attention is split over processes.

    Raises:
        ValueError: If they would see one another.
    """
    if size > 1 and layout != "padded":
        raise ValueError(
            f"context parallelism (cp_size {size}) attends over whole rows, so the samples of a "
            "row would see one another: set sample_packing and batch_flattening to False"
        )


def refuse_sequence_parallelism(size: int) -> None:
    """Refuse processes that exchange batches.

    Raises:
        ValueError: If there are some.
    """
    if size > 1:
        raise ValueError(
            f"sequence parallelism (sp_size {size}) exchanges batches between its ranks, which a "
            "plan does not know of: leave it out"
        )
