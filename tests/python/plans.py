"""What the tests of plans share."""

from __future__ import annotations

from multipack import Plan

ALGORITHMS = ("best_fit_decreasing", "tight", "first_fit", "next_fit")


def rows_of(plan: Plan) -> list[list[int]]:
    """All rows of a plan, microbatch after microbatch."""
    return [
        row
        for k in range(len(plan))
        for rank in range(plan.config.world_size)
        for row in plan[rank, k]
    ]
