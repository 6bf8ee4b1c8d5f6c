"""Hugging Face transformers: attention over packed rows, and the Trainer on packed batches."""

from multipack.integrations._attention import register_attention
from multipack.integrations._trainer import PackedTrainer

__all__ = ["PackedTrainer", "register_attention"]
