"""A small Llama and the loop that trains it, the same for padded and for packed batches.

The loop stops after an exact number of supervised tokens, so that two runs have learned from
equally many whatever their layout. The loss of a step is its sum over all supervised tokens
divided by their number, never a mean of means, in which a microbatch with few labels would count as
much as one with many. The learning rate falls with the supervised tokens seen, not with the steps.

Logits are computed only where a label is: the vocabulary costs about as much as this small
transformer, and padding shall not pay for it. A loop that computes all logits, as most do, loses
more by padding than is seen here.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import multipack
from multipack.collate import IGNORED_LABEL

from .data import PADDING, Tokens

PEAK_LEARNING_RATE = 2e-3

Batch = dict[str, Any]


class Loader(NamedTuple):
    """A sampler, and the data set that makes tensors of what it yields."""

    samples: multipack.PackedDataset
    sampler: multipack.MultipackBatchSampler

    def epoch(self) -> Iterator[Batch]:
        """The microbatches of the next epoch; the sampler moves on by itself."""
        return iter(DataLoader(self.samples, sampler=self.sampler, batch_size=None))


def make_loader(
    data: Tokens, config: multipack.Config, split: Literal["train", "eval"] = "train"
) -> Loader:
    """Plans the data, and lays them out with the 4-D bool mask that isolates samples under SDPA."""
    collator = multipack.Collator(config, attention="bool", pad_token_id=PADDING)
    samples = multipack.PackedDataset(data.tokens, data.offsets, data.labels, collator=collator)
    counts, starts = samples.label_counts()
    sampler = multipack.MultipackBatchSampler(
        samples.lengths, counts, config, label_starts=starts, split=split
    )
    return Loader(samples, sampler)


def make_model(vocabulary: int, sequence_len: int, seed: int) -> LlamaForCausalLM:
    """A Llama of six layers, 128 wide, with tied embeddings; equal seeds give equal weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=sequence_len,
        tie_word_embeddings=True,
        pad_token_id=PADDING,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return LlamaForCausalLM(config)


def use_idle_cores() -> int:
    """Leaves alone as many cores as other programs keep busy; returns the threads that torch uses.

    Its OpenMP threads spin while they wait for one another. With two of them on two cores that were
    busy otherwise, the demo took 320 s, with one of them about 120 s.
    """
    idle = (os.cpu_count() or 1) - round(os.getloadavg()[0])
    torch.set_num_threads(max(1, min(torch.get_num_threads(), idle)))
    return torch.get_num_threads()


class Step(NamedTuple):
    """One optimizer step: counts of tokens, and the loss summed over the supervised, in nats."""

    microbatches: int
    computed_tokens: int
    real_tokens: int
    supervised_tokens: int
    loss_sum: float


@dataclass(frozen=True)
class Run:
    """What a training run did."""

    history: list[Step]
    seconds: float

    def total(self, field: str) -> int:
        """The sum of a count of `Step` over the run."""
        return sum(getattr(step, field) for step in self.history)

    @property
    def padding_share(self) -> float:
        """Padding among all tokens that went through the model, 0 to 1."""
        return 1 - self.total("real_tokens") / self.total("computed_tokens")

    @property
    def final_loss(self) -> float:
        """Loss per supervised token over the steps that saw the last tenth of them."""
        least = self.total("supervised_tokens") / 10
        loss, count = 0.0, 0
        for step in reversed(self.history):
            if count >= least:
                break
            loss += step.loss_sum
            count += step.supervised_tokens
        return loss / count


def supervised_tokens(batch: Batch) -> int:
    """Labels that enter the loss; the collator has masked the first one of each sample."""
    return int((batch["labels"] != IGNORED_LABEL).sum())


def trim(batches: list[Batch], most: int) -> None:
    """Unlabels, in place, all but the first `most` supervised tokens of a step."""
    for batch in batches:
        labels = batch["labels"]
        supervised = labels != IGNORED_LABEL
        number = supervised.flatten().cumsum(0).view_as(labels)
        labels.masked_fill_(supervised & (number > most), IGNORED_LABEL)
        most -= supervised_tokens(batch)


def loss_sum(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The loss summed over the supervised tokens of a microbatch, 0-d."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    targets = batch["labels"][:, 1:]
    supervised = targets != IGNORED_LABEL
    logits = model.lm_head(hidden[:, :-1][supervised])
    return functional.cross_entropy(logits, targets[supervised], reduction="sum")


def train(name: str, model: LlamaForCausalLM, loader: Loader, supervised: int) -> Run:
    """Trains on exactly `supervised` supervised tokens, for several epochs if one has fewer.

    Args:
        name: stands before the progress bar.
        model: changed in place.
        loader: the samples in the layout to train in; a step takes as many microbatches as its
            config accumulates.
        supervised: supervised tokens to learn from.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE)
    accumulation = loader.sampler.config.gradient_accumulation_steps
    source = itertools.chain.from_iterable(loader.epoch() for _ in itertools.count())
    history: list[Step] = []
    seen = 0
    started = time.perf_counter()
    with tqdm(total=supervised, desc=name, unit=" supervised tokens", mininterval=0.5) as bar:
        while seen < supervised:
            batches = list(itertools.islice(source, accumulation))
            trim(batches, supervised - seen)
            count = sum(supervised_tokens(batch) for batch in batches)
            total = 0.0
            for batch in batches:
                loss = loss_sum(model, batch)
                torch.autograd.backward(loss / count)
                total += float(loss.detach())
            optimizer.param_groups[0]["lr"] = PEAK_LEARNING_RATE * (1 - seen / supervised)
            optimizer.step()
            optimizer.zero_grad()
            history.append(
                Step(
                    microbatches=len(batches),
                    computed_tokens=sum(batch["input_ids"].numel() for batch in batches),
                    real_tokens=sum(int((b["input_ids"] != PADDING).sum()) for b in batches),
                    supervised_tokens=count,
                    loss_sum=total,
                )
            )
            seen += count
            bar.set_postfix(loss=f"{total / count:.3f}", refresh=False)
            bar.update(count)
    return Run(history, time.perf_counter() - started)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, loader: Loader) -> float:
    """Loss per supervised token over an epoch."""
    total, count = 0.0, 0
    for batch in loader.epoch():
        total += float(loss_sum(model, batch))
        count += supervised_tokens(batch)
    return total / count
