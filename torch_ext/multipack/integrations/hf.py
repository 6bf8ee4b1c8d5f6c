"""Hugging Face transformers: attention over packed rows."""

from multipack.integrations._attention import register_attention

__all__ = ["register_attention"]
