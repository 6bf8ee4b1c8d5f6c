"""The settings under which a killed training must go on exactly: every pair of choices, or all.

In continuous integration each two choices of different kinds meet in at least one case, which
finds what goes wrong between two of them at a fraction of the cost. `make test-resume` runs every
combination.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

CHOICES: dict[str, list[Any]] = {
    "layout": ["one_row", "real_rows", "padded", "flattened"],
    "balanced": [False, True],
    "processes": [1, 2],
    "accumulation": [1, 4],
    "workers": [0, 2],
}

LAYOUTS: dict[str, dict[str, bool]] = {
    "one_row": {"sample_packing": True},
    "real_rows": {"sample_packing": True, "multipack_real_batches": True},
    "padded": {"sample_packing": False},
    "flattened": {"sample_packing": False, "batch_flattening": True},
}


def cases() -> list[dict[str, Any]]:
    """Return the cases to run: all if the environment has ``MULTIPACK_RESUME=all``."""
    return every_case() if os.environ.get("MULTIPACK_RESUME") == "all" else pairwise()


def every_case() -> list[dict[str, Any]]:
    """Return every combination of choices."""
    return [
        dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
    ]


def pairwise() -> list[dict[str, Any]]:
    """Return cases in which each two choices meet, by taking again and again the one with most."""

    def pairs(case: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(case.items(), 2))

    left = set().union(*map(pairs, every_case()))
    chosen = []
    while left:
        chosen.append(max(every_case(), key=lambda case: len(pairs(case) & left)))
        left -= pairs(chosen[-1])
    return chosen


def name(case: dict[str, Any]) -> str:
    """Return the name of a case's test."""
    return (
        f"{case['layout']}-{'balanced' if case['balanced'] else 'plain'}-{case['processes']}proc-"
        f"accum{case['accumulation']}-{case['workers']}workers"
    )


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a case, for `multipack.Config`."""
    return {
        **LAYOUTS[case["layout"]],
        "balance_labels": case["balanced"],
        "world_size": case["processes"],
        "gradient_accumulation_steps": case["accumulation"],
    }
