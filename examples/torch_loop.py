"""A plain PyTorch training loop over packed batches: DDP, accumulation, checkpoints, exact resume.

    python examples/torch_loop.py runs/one
    torchrun --nproc-per-node 2 examples/torch_loop.py runs/two

Run again with the same folder, it goes on from the last checkpoint; killed at any moment, even
while it writes one, it ends with the very weights that it would have had. Three things matter:

- The loss of a step is the sum over all its tokens, divided by their number on all ranks. The mean
  of the microbatches' means would weigh a token by the company it happens to be in.
- The sampler is told what was trained on, because the workers of the loader run ahead.
- Each rank draws its random numbers from one state, which is in the checkpoint. The loader has a
  generator of its own: it draws a seed whenever it starts, a resumed run once more than another.

The samples are made up here: numbers, and an answer that counts on from the last one. Only answers
are trained on. This runs on CPUs; for GPUs move the model and the batches there, name ``nccl``
instead of ``gloo``, and keep ``torch.cuda.get_rng_state()`` as well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from multipack import Collator, Config, MultipackBatchSampler, PackedDataset
from multipack.integrations import check_ranks

VOCABULARY = 100


def train(
    config: Config,
    folder: Path,
    *,
    epochs: int = 2,
    workers: int = 0,
    save_every: int = 10,
    samples: int = 600,
) -> torch.nn.Module:
    """Train on this rank, from the last checkpoint in `folder` if there is one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = config.replace(world_size=ranks)

    data = PackedDataset(*made_up_samples(samples), collator=Collator(config, attention="bool"))
    counts, starts = data.label_counts()
    sampler = MultipackBatchSampler(data.lengths, counts, config, label_starts=starts, rank=rank)
    loader = DataLoader(
        data,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator(),
    )

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
    ).train()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = sampler.total_steps(epochs)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    torch.manual_seed(rank)

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"][rank])
    check_ranks(sampler)

    while sampler.epoch < epochs:
        for microbatches in grouped(loader, config.gradient_accumulation_steps):
            loss = train_step(wrapped, microbatches, ranks)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            sampler.consumed(len(microbatches))
            done = schedule.last_epoch
            if rank == 0 and done % 10 == 0:
                print(f"step {done} of {steps}: loss {loss:.3f}", flush=True)
            if done % save_every == 0 or done == steps:
                states = {name: part.state_dict() for name, part in parts.items()}
                save(checkpoint, {**states, "random": of_all_ranks(torch.get_rng_state())})
    return model


def train_step(
    model: torch.nn.Module, microbatches: list[dict[str, torch.Tensor]], ranks: int
) -> float:
    """Add up the gradients of a step; return the mean loss of this rank's part, per token."""
    # The first label of a row predicts nothing.
    tokens = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in microbatches]).sum()
    mine = int(tokens)
    if ranks > 1:
        dist.all_reduce(tokens)
    total = 0.0
    for number, batch in enumerate(microbatches, 1):
        # Gradients travel once a step.
        apart = ranks > 1 and number < len(microbatches)
        with model.no_sync() if apart else contextlib.nullcontext():
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            loss = cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            # DDP divides by the number of ranks.
            (loss * ranks / tokens.clamp(min=1)).backward()
            total += loss.item()
    return total / max(1, mine)


def grouped(loader: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield the microbatches of each step; the last step of an epoch may have fewer."""
    batches = iter(loader)
    while group := list(itertools.islice(batches, size)):
        yield group


def of_all_ranks(value: Any) -> list[Any]:
    """Return the value that each rank has."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def save(path: Path, states: dict[str, Any]) -> None:
    """Write a checkpoint on the first rank: whole under another name, then renamed."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def made_up_samples(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens of questions and answers, where each sample begins, and the labels."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.empty(count).log_normal_(2.0, 0.7, generator=generator).clamp(1, 32).long()
    tokens, labels, offsets = [], [], [0]
    for size in sizes.tolist():
        question = torch.randint(VOCABULARY, (size,), generator=generator)
        answer = (question[-1] + torch.arange(1, 2 + size // 2)) % VOCABULARY
        tokens += [question, answer]
        labels += [torch.full_like(question, -100), answer]
        offsets.append(offsets[-1] + len(question) + len(answer))
    return torch.cat(tokens), torch.tensor(offsets), torch.cat(labels)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or will be")
    parser.add_argument("--config", type=Path, help="a YAML file of multipack settings")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=10, help="optimizer steps")
    arguments = parser.parse_args()

    config = Config(sequence_len=64, micro_batch_size=4, gradient_accumulation_steps=2)
    if arguments.config is not None:
        config = Config.from_yaml(arguments.config)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(
        config,
        arguments.folder,
        epochs=arguments.epochs,
        workers=arguments.workers,
        save_every=arguments.save_every,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
