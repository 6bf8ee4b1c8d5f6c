"""Whether a collator lays out what was planned.

The planner decides which samples share a row by their lengths, and counts the labels that enter the
loss; the collator cuts, aligns and masks. Where their settings differ, rows overflow, or the counts
are of other labels than those that are trained on. Padding may differ: no plan depends on it.
"""

from __future__ import annotations

from typing import Any

from multipack._config import Config, Split, layout
from multipack.collate import Collator

_COLLATED_KEYS = ("excess_length_strategy", "align_samples_to", "mask_first_label")


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
    theirs = collator.config
    pairs: dict[str, tuple[Any, Any]] = {"split": (split, collator.split)}
    pairs |= {key: (getattr(config, key), getattr(theirs, key)) for key in _COLLATED_KEYS}
    pairs["layout"] = (layout(config, split), layout(theirs, split))
    if theirs.sequence_len is not None or config.excess_length_strategy == "truncate":
        pairs["sequence_len"] = (config.sequence_len, theirs.sequence_len)
    for key, (ours, other) in pairs.items():
        if ours != other:
            raise ValueError(
                f"{key} is {ours!r} for {planner}, but {other!r} for the collator: give both the "
                f"same {'split' if key == 'split' else 'config'}"
            )
