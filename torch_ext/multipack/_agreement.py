"""Whether a collator lays out what is planned, asked before the first batch."""

from __future__ import annotations

from typing import Any

from multipack._config import Config, Split
from multipack._microbatch import Terms
from multipack.collate import Collator


def check_agreement(planner: str, config: Config, split: Split, collator: Any) -> None:
    """Refuse a collator that would make other batches than are planned.

    Args:
        planner (str): What plans, as errors call it.
        config (Config): Its settings.
        split (str): Its split.
        collator: Anything that makes a batch; only a `Collator` has settings to compare.

    Raises:
        ValueError: If the split, or a setting that the plan depends on, is another.
    """
    if not isinstance(collator, Collator):
        return
    if split != collator.split:
        raise ValueError(
            f"split is {split!r} for {planner}, but {collator.split!r} for the collator: give both "
            "the same split"
        )
    Terms.of(config, split).check(planner, Terms.of(collator.config, split))
