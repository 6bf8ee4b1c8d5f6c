"""The TorchScript module that test_script.py runs in Python, and test_cpp.py in C++."""

import torch
from torch import Tensor


class Planner(torch.nn.Module):
    """From flat samples to a batch: counts labels, plans, takes one microbatch, collates it."""

    def forward(
        self, tokens: Tensor, labels: Tensor, offsets: Tensor, config: str, k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, labels, boundaries and mask of microbatch `k`."""
        counts, starts = torch.ops.multipack.label_counts(labels, offsets)
        index, row_offsets, batch_offsets, _ = torch.ops.multipack.plan(
            offsets.diff(), counts, starts, config
        )
        index, row_offsets = torch.ops.multipack.microbatch(
            index, row_offsets, batch_offsets, 1, 0, k
        )
        made = torch.ops.multipack.collate(
            tokens, offsets, index, row_offsets, labels=labels, attention_mask="bool"
        )
        return made[0], made[1], made[4], made[7]
