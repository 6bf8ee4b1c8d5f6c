"""Collating, masks and block lists side by side with others and with what memory allows.

    python benches/python/batch_peers.py

- Collating from flat tensors stands beside a plain copy of as many bytes as it reads and writes: in
  one piece, and in four, as no collator hands out fewer large tensors.
- Collating samples that are lists or tensors stands beside transformers' collator, asked for the
  same outputs, and beside the least that any must do: a tensor from each list, joined.
- Masks of 4 rows of 4096 stand beside `torch.zeros` of the same size on the same threads, and
  beside other ways to the same mask.
- Block lists for FlexAttention stand beside torch's own `create_block_mask`.

Runs alternate, in another order each round, and the fastest of each counts, so that a busy machine
spoils one round and not one contestant. The last answer is freed before the next, and the
processor's own caches hold something else, as in training: otherwise the second to read the same
samples would find them there. So large memory is new in every run but for multipack's masks, which
keep that of the last for the next. Every answer is compared.

The others: pip install -r benches/python/requirements.txt
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from plan_peers import Contestant, lognormal
from results import Results, add_json
from torch.nn.attention.flex_attention import create_block_mask

import multipack

ROWS, ROW_LEN = 4, 4096


def compete(title: str, contestants: list[Contestant], rounds: int) -> None:
    """Time them in turn, and print the fastest run of each beside that of the first."""
    for contestant in contestants:
        contestant.time()  # the first run loads and compiles
        contestant.seconds.clear()
    elsewhere = torch.empty(16 << 20, dtype=torch.uint8)
    order = random.Random(0)
    for _ in range(rounds):
        for contestant in order.sample(contestants, len(contestants)):
            elsewhere.fill_(0)
            contestant.time()
    own = min(contestants[0].seconds)
    print(f"\n{title:52}{'ms':>10}{'of ours':>10}")
    for contestant in contestants:
        best = min(contestant.seconds)
        print(f"  {contestant.name:50}{1e3 * best:10.3f}{best / own:10.2f}")


def contestant(name: str, run: Callable[[], Any]) -> Contestant:
    """One who hands out the answer itself."""
    return Contestant(name, run, lambda answer: answer)


def check(condition: bool, name: str) -> None:
    """Stop where ours is wrong."""
    if not condition:
        raise AssertionError(f"{name} gave another answer")


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Say where two batches differ in what both have."""
    shared = sorted(ours.keys() & theirs.keys())
    for key in shared:
        mine, other = ours[key], theirs[key]
        equal = torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
        if not equal:
            return f"another `{key}`"
    return None if len(shared) >= 2 else f"has nothing to compare but {shared}"


def record(
    results: Results, title: str, contestants: list[Contestant], faults: dict[str, str | None]
) -> None:
    """Keep the results, and print what is wrong with the answers of others."""
    for contestant in contestants:
        fault = faults.get(contestant.name)
        if fault:
            print(f"  {contestant.name}: {fault}")
        results.add(title, contestant.name, contestant.seconds, fault=fault)


def exactly(tokens: int) -> np.ndarray[Any, Any]:
    """Lognormal lengths that add up to so many tokens."""
    lengths = lognormal(tokens)
    ends = np.minimum(np.cumsum(lengths), tokens)
    return np.diff(ends[: np.searchsorted(ends, tokens) + 1], prepend=0)


def flat(tokens: int, rounds: int, results: Results) -> None:
    """The op, from flat int64 tokens and labels to one row."""
    lengths = exactly(tokens)
    ids = torch.arange(tokens) % 50_021
    labels = torch.where(ids % 10 < 7, -100, ids)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    index = torch.from_numpy(np.random.default_rng(0).permutation(len(lengths)))
    row_offsets = torch.tensor([0, len(lengths)])
    # 16 bytes read for each token and 28 written, as a copy of 22 reads and writes.
    bytes_copied = torch.ones(22 * tokens, dtype=torch.uint8)
    quarters = bytes_copied.chunk(4)
    ours = contestant(
        "multipack.ops.collate",
        lambda: multipack.ops.collate(ids, offsets, index, row_offsets, labels=labels),
    )
    title = f"{tokens:,} tokens of {len(lengths):,} samples, flat int64"
    op = torch.ops.multipack.collate.default
    contestants = [
        ours,
        # Without the function that has types and defaults.
        contestant(
            "multipack, the op alone",
            lambda: op(ids, offsets, index, row_offsets, labels=labels),
        ),
        contestant("torch: a copy of as many bytes", bytes_copied.clone),
        contestant("torch: the same in four tensors", lambda: [part.clone() for part in quarters]),
    ]
    compete(title, contestants, rounds)
    order = [torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in index]
    check(torch.equal(ours.answer.input_ids[0], ids[torch.cat(order)]), ours.name)
    record(results, title, contestants, {})


def samples(form: str, rounds: int, results: Results) -> None:
    """The collator, from samples that are lists or tensors."""
    rng = np.random.default_rng(0)
    make = {"lists": lambda a: a.tolist(), "tensors": torch.from_numpy}[form]
    made = []
    for length in exactly(8 * ROW_LEN):
        ids = rng.integers(5, 32_000, int(length))
        labels = np.where(np.arange(length) < length // 2, -100, ids)
        made.append({"input_ids": make(ids), "labels": make(labels)})

    def least() -> dict[str, torch.Tensor]:
        return {
            key: torch.cat([torch.as_tensor(sample[key]) for sample in made])[None]
            for key in ("input_ids", "labels")
        }

    collator = multipack.Collator(attention="flash", outputs=["seq_idx"])
    ours = contestant("multipack.Collator", lambda: collator(made))
    contestants = [ours, contestant("torch: as_tensor and cat, no more", least)]
    if form == "tensors":
        tokens, labels = ([sample[key] for sample in made] for key in ("input_ids", "labels"))
        row = torch.tensor([0, len(made)])
        contestants.append(
            contestant(
                "multipack.ops.collate_list, the op alone",
                lambda: multipack.ops.collate_list(tokens, row, labels=labels)._asdict(),
            )
        )
    try:
        from transformers import DataCollatorWithFlattening

        theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        contestants.append(contestant("transformers flattening", lambda: theirs(made)))
    except ImportError as error:
        print(f"transformers is not installed ({error})")
    title = f"{8 * ROW_LEN:,} tokens of {len(made)} samples, {form}"
    compete(title, contestants, rounds)
    faults = {c.name: difference(ours.answer, dict(c.answer)) for c in contestants[2:]}
    record(results, title, contestants, faults)


def masks(dtype: torch.dtype, rounds: int, results: Results) -> None:
    """Dense masks, and the ways of others to the bool one."""
    batch = packed_rows()
    ids, positions, lengths = batch["segment_ids"], batch["position_ids"], batch["lengths"]
    shape = (ROWS, 1, ROW_LEN, ROW_LEN)
    ours = contestant("multipack.block_mask", lambda: multipack.block_mask(ids, dtype=dtype))
    contestants = [
        ours,
        contestant("torch: zeros, no more", lambda: torch.zeros(shape, dtype=dtype)),
    ]
    if dtype == torch.bool:
        contestants.append(contestant("torch: all compared with all, tril", lambda: compared(ids)))
        for make in (torchtune_mask, transformers_mask):
            try:
                contestants.append(make(lengths, positions))
            except (ImportError, importlib.metadata.PackageNotFoundError) as error:
                print(f"{make.__name__.removesuffix('_mask')} is not installed ({error})")
    title = f"mask of {ROWS} rows of {ROW_LEN:,}, {str(dtype).removeprefix('torch.')}"
    compete(title, contestants, rounds)
    expected = compared(ids)
    allowed = ours.answer if dtype == torch.bool else ours.answer == 0
    check(torch.equal(allowed, expected), ours.name)
    faults = {
        other.name: None if torch.equal(other.answer.view(shape), expected) else "another mask"
        for other in contestants[2:]
    }
    record(results, title, contestants, faults)


def packed_rows() -> dict[str, Any]:
    """Four full rows."""
    lengths = [exactly(ROW_LEN + row)[:-1] for row in range(ROWS)]
    lengths = [np.append(row, ROW_LEN - row.sum()) for row in lengths]
    rows = [[{"input_ids": np.ones(length, np.int64)} for length in row] for row in lengths]
    collator = multipack.Collator(
        attention="none", multipack_real_batches=True, outputs=["segment_ids", "cu_seqlens"]
    )
    return {**collator(rows), "lengths": [torch.from_numpy(row) for row in lengths]}


def compared(ids: torch.Tensor) -> torch.Tensor:
    """The dull way."""
    same_segment = ids[:, None, :, None] == ids[:, None, None, :]
    return same_segment & torch.ones(ROW_LEN, ROW_LEN, dtype=torch.bool).tril()


def torchtune_mask(lengths: list[torch.Tensor], positions: torch.Tensor) -> Contestant:
    """A block for each sample, put together. Only the one file is loaded, and not torchao."""
    root = importlib.metadata.distribution("torchtune").locate_file("torchtune")
    for name in ("torchtune", "torchtune.modules", "torchtune.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    utils = importlib.import_module("torchtune.modules.attention_utils")
    return contestant(
        "torchtune create_block_causal_mask", lambda: utils.create_block_causal_mask(lengths)
    )


def transformers_mask(lengths: list[torch.Tensor], positions: torch.Tensor) -> Contestant:
    """What a Llama makes of positions that restart."""
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(hidden_size=64, num_attention_heads=2, attn_implementation="sdpa")
    embedded = torch.zeros(ROWS, ROW_LEN, 64)
    return contestant(
        "transformers create_causal_mask",
        lambda: create_causal_mask(config, embedded, None, None, position_ids=positions),
    )


def block_lists(rounds: int, results: Results) -> None:
    """Block lists for FlexAttention."""
    batch = packed_rows()
    ids, borders = batch["segment_ids"], batch["cu_seqlens"]

    def may_attend(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (ids[b, q] == ids[b, k]) & (q >= k)

    ours = contestant(
        "multipack.flex_block_mask", lambda: multipack.flex_block_mask(borders, rows=ROWS)
    )
    theirs = contestant(
        "torch: create_block_mask",
        lambda: create_block_mask(may_attend, ROWS, None, ROW_LEN, ROW_LEN, device="cpu"),
    )
    title = f"block lists of {ROWS} rows of {ROW_LEN:,}, for FlexAttention"
    compete(title, [ours, theirs], rounds)
    for side in ("kv", "q", "full_kv", "full_q"):
        for part in ("num_blocks", "indices"):
            lists = (getattr(c.answer, f"{side}_{part}") for c in (ours, theirs))
            check(torch.equal(*lists), f"{ours.name} ({side}_{part})")
    record(results, title, [ours, theirs], {})


def main() -> None:
    """Time them all and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parts", default="flat,samples,masks,blocks")
    add_json(parser)
    args = parser.parse_args()
    results = Results(args.json)
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # of the others
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in ("transformers", "torchtune"):
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if "flat" in args.parts:
        for tokens in (1 << 15, 1 << 20):
            flat(tokens, 5 * args.rounds, results)
    if "samples" in args.parts:
        for form in ("lists", "tensors"):
            samples(form, args.rounds, results)
    if "masks" in args.parts:
        for dtype in (torch.bool, torch.bfloat16):
            masks(dtype, args.rounds, results)
    if "blocks" in args.parts:
        block_lists(min(args.rounds, 3), results)


if __name__ == "__main__":
    main()
