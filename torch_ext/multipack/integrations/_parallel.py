"""What a plan needs of parallelism inside a model, and what it cannot live with.

Peers in tensor and context parallelism work on one batch together, so they count as one rank. So
would the stages of a pipeline, but neither transformers' Trainer nor Accelerate trains any.
"""

from __future__ import annotations

from typing import Any

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


def refuse_pipeline_parallelism(model: Any) -> None:
    """Refuse a model that transformers has loaded in stages.

    Raises:
        ValueError: If it is one.
    """
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if (stages := getattr(distributed, "pp_size", None) or 1) > 1:
        raise ValueError(
            f"pipeline parallelism (pp_size {stages}) has stages, which the Trainer and "
            "Accelerate take for data-parallel ranks with the whole model: leave it out"
        )
