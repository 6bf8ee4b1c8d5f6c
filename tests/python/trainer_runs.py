"""Small trainings with the real libraries, in processes of their own.

Importing torch and transformers takes seconds, so it is done once, in a server that forks a child
for each process of a training. Children are killed as the tests wish, and leave files behind.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 64

# The server finds modules of the environment only, not those of this folder.
_PRELOADED = [
    "multipack.integrations.hf",
    "transformers.models.llama.modeling_llama",
]

_LIMIT = 120.0  # seconds that a training may take before it counts as hanging


def run(target: Callable[..., Any], processes: int, *args: Any, killed: bool = False) -> list[Any]:
    """Call a function of this folder in processes of one group, and return what each returned.

    Args:
        target: A function of a module; it is called with `args`.
        processes (int): How many. As torchrun does, the environment says who is who.
        *args: Plain data.
        killed (bool): Whether one of them is expected to kill itself; the others are killed then.

    Returns:
        list: What the function returned in each process; empty if they were killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, children = [], []
    for rank in range(processes):
        here, there = context.Pipe(duplex=False)
        child = context.Process(
            target=_child, args=(there, target, rank, processes, port, list(sys.path), args)
        )
        child.start()
        there.close()
        pipes.append(here)
        children.append(child)
    deadline = time.monotonic() + _LIMIT
    results, failure = [], None
    try:
        if killed:
            while all(child.is_alive() for child in children):
                assert time.monotonic() < deadline, "nobody was killed"
                time.sleep(0.01)
            return []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
            done, value = pickle.loads(pipe.recv_bytes())
            if not done:
                failure = failure or value
            results.append(value)
        assert failure is None, failure
        return results
    finally:
        for child in children:
            if killed or failure is not None:
                child.kill()
            child.join(10)
            child.kill()


def _child(pipe: Any, target: Any, rank: int, processes: int, port: int, path: Any, args: Any):
    sys.path[:] = path
    multiprocessing.set_start_method("fork", force=True)  # of a DataLoader's workers
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["CI"] = "1"  # TRL then tells nobody that it runs
    if processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # trainers collect garbage, for most of a second with what the server imported
    try:
        answer = (True, target(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group is not waited for


def tiny_llama(attention: str = "sdpa", dropout: float = 0.0) -> Any:
    """Return a Llama of 4000 weights, the same each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,  # so that what attends to what shows in the loss
            attention_dropout=dropout,
            attn_implementation=attention,
        )
    )


def chats(n: int, seed: int = 0, longest: int = 24) -> list[dict[str, list[int]]]:
    """Return samples of which the first part, at times nearly all, is not supervised."""
    import numpy as np

    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(n):
        tokens = rng.integers(1, VOCABULARY, rng.integers(3, longest + 1)).tolist()
        prompt = int(rng.integers(1, len(tokens)))
        samples.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return samples


def arguments(folder: str | Path, **keys: Any) -> Any:
    """Return arguments of a Trainer that is quiet and on the CPU."""
    from transformers import TrainingArguments

    defaults = {
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 11,
    }
    return TrainingArguments(output_dir=str(folder), **(defaults | keys))


def packed(
    folder: Path,
    samples: Any = None,
    *,
    evaluation: Any = None,
    kind: Any = None,
    model: Any = None,
    config: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    **keys: Any,
) -> Any:
    """Return a PackedTrainer, or one of another `kind`, on 24 chats or other samples.

    `config` are keys of the plan's, `given` further arguments of the trainer, and `keys` those of
    its `TrainingArguments`.
    """
    import datasets

    from multipack import Config
    from multipack.integrations.hf import PackedTrainer

    if samples is None:
        samples = chats(24)
    if isinstance(samples, list):
        samples = datasets.Dataset.from_list(samples)
    return (kind or PackedTrainer)(
        model=tiny_llama() if model is None else model,
        args=arguments(folder, **keys),
        train_dataset=samples,
        eval_dataset=evaluation,
        config=Config(**({"sequence_len": 24} | (config or {}))),
        **(given or {}),
    )


def weights(model: Any) -> dict[str, Any]:
    """Return the weights as arrays, by name."""
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


def each_alone(samples: list[dict[str, list[int]]]) -> tuple[float, dict[str, Any]]:
    """Return the loss and the gradients of all samples, each alone, as a mean over all tokens."""
    import torch

    model = tiny_llama()
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        labels = torch.tensor(sample["labels"])[1:]
        logits = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        tokens += int((labels != -100).sum())
    loss = total / tokens
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def check_gradients(found: dict[str, Any], samples: list[dict[str, list[int]]]) -> None:
    """Compare gradients with those of all samples, each alone."""
    import numpy as np

    for name, value in each_alone(samples)[1].items():
        largest = np.abs(value).max()
        assert largest > 1e-3
        np.testing.assert_allclose(found[name], value, atol=1e-4 * largest, err_msg=name)
