"""What the short examples train on, and what they train: made up, so that nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, offsets and labels, as `multipack.PackedDataset` takes them.

    A sample is some numbers below 100, and an answer that counts on from the last one. Only the
    answer is trained on.
    """
    rng = torch.Generator().manual_seed(0)
    tokens, labels, offsets = [], [], [0]
    for _ in range(count):
        asked, told = (int(torch.randint(2, 33, (), generator=rng)) for _ in range(2))
        prompt = torch.randint(0, 100, (asked,), generator=rng)
        answer = (prompt[-1] + torch.arange(1, told)) % 100
        tokens += [prompt, answer]
        labels += [torch.full_like(prompt, -100), answer]
        offsets.append(offsets[-1] + len(prompt) + len(answer))
    return torch.cat(tokens), torch.tensor(offsets), torch.cat(labels)


def llama() -> Any:
    """Return a small model, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
