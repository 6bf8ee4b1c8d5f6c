"""The trainer of trainer.cpp in Python: the same plans, batches and losses from the same seed.

    python examples/cpp/trainer.py make data.pt
    python examples/cpp/trainer.py train data.pt
    python examples/cpp/trainer.py train data.pt --attention sdpa

``make`` writes made-up samples in the format that trainer.cpp describes: questions, which are not
trained on, and answers that count on from their last token. Checkpoints are left out here;
``examples/torch_loop.py`` has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader

import multipack
from multipack import Collator, Config, MultipackBatchSampler, PackedDataset

VOCABULARY, WIDTH, HEADS, LAYERS = 100, 32, 2, 2

CONFIG = Config(
    sequence_len=64, micro_batch_size=4, balance_labels=True, gradient_accumulation_steps=2
)


def make(path: Path, samples: int = 600) -> None:
    """Write made-up samples."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.empty(samples).log_normal_(2.0, 0.7, generator=generator).clamp(1, 32).long()
    tokens, labels, offsets = [], [], [0]
    for size in sizes.tolist():
        question = torch.randint(VOCABULARY, (size,), generator=generator)
        answer = (question[-1] + torch.arange(1, 2 + size // 2)) % VOCABULARY
        tokens += [question, answer]
        labels += [torch.full_like(question, -100), answer]
        offsets.append(offsets[-1] + len(question) + len(answer))
    columns = {"tokens": torch.cat(tokens).int(), "labels": torch.cat(labels).int()}
    torch.save({**columns, "offsets": torch.tensor(offsets)}, path)


class Block(nn.Module):
    """Attention and two linear layers, with the norms before them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: dict[str, Any]) -> Tensor:
        """Return (R, L, WIDTH) for as much."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        x = x + dropout(self.out(attend(heads, batch).flatten(2)), self.dropout, self.training)
        hidden = gelu(self.up(self.norm2(x)))
        return x + dropout(self.down(hidden), self.dropout, self.training)


class Model(nn.Module):
    """A causal transformer whose positions begin anew with every sample."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONFIG.sequence_len, WIDTH)
        for layer in range(LAYERS):
            self.add_module(f"block{layer}", Block(dropout))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return logits, (R, L, VOCABULARY)."""
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for layer in range(LAYERS):
            x = self.get_submodule(f"block{layer}")(x, batch)
        return self.head(self.norm(x))


def attend(qkv: Tensor, batch: dict[str, Any]) -> Tensor:
    """Attention within the samples of a batch: (R, L, 3, H, D) to (R, L, H, D)."""
    if "attention_mask" in batch:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        return scaled_dot_product_attention(q, k, v, batch["attention_mask"]).transpose(1, 2)
    q, k, v = qkv.flatten(0, 1).unbind(1)
    out = multipack.attention(q, k, v, batch["cu_seqlens"], max_seqlen=batch["max_seqlen"])
    return out.unflatten(0, qkv.shape[:2])


def steps(
    data: Path, attention: str, epochs: int = 2
) -> Iterator[tuple[int, multipack.Plan, list[dict[str, Any]]]]:
    """Yield the epoch, its plan and the microbatches of each optimizer step."""
    columns = torch.load(data, weights_only=True)
    # The boundaries come along in both forms.
    collator = Collator(
        CONFIG,
        attention="bool" if attention == "sdpa" else "none",
        outputs=["cu_seqlens", "max_seqlen"],
    )
    packed = PackedDataset(
        columns["tokens"], columns["offsets"], columns["labels"], collator=collator
    )
    counts, starts = packed.label_counts()
    sampler = MultipackBatchSampler(packed.lengths, counts, CONFIG, label_starts=starts)
    loader = DataLoader(packed, sampler=sampler, batch_size=None, generator=torch.Generator())
    for epoch in range(epochs):
        plan = sampler.plan
        microbatches = list(loader)
        for first in range(0, len(microbatches), CONFIG.gradient_accumulation_steps):
            last = first + CONFIG.gradient_accumulation_steps
            yield epoch, plan, microbatches[first:last]


def accumulate(model: Model, microbatches: list[dict[str, Any]]) -> float:
    """Add up the gradients of a step's microbatches; return the loss for each label."""
    # The first label of a row has nothing that predicts it.
    labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in microbatches)
    total = 0.0
    for batch in microbatches:
        logits = model(batch)[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        loss = cross_entropy(logits, targets, reduction="sum") / max(labels, 1)
        loss.backward()
        total += loss.item()
    return total


def train(data: Path, attention: str = "multipack", dropout: float = 0.0) -> Iterator[float]:
    """Train, and yield the loss of each step."""
    torch.manual_seed(0)
    model = Model(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _, _, microbatches in steps(data, attention):
        loss = accumulate(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def main() -> None:
    """Read the command line, and make the data or train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["make", "train"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--attention", choices=["multipack", "sdpa"], default="multipack")
    parser.add_argument("--dropout", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.data)
        return
    for step, loss in enumerate(train(arguments.data, arguments.attention, arguments.dropout), 1):
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    main()
