"""Attention over packed rows beside the other ways to keep samples apart, in one process.

    python benches/python/attention_peers.py            # the op: seconds and ratios
    python benches/python/attention_peers.py --step     # a training step of a small Llama

The op, forward and backward in float32, 8 heads of 64: `multipack.attention` on the packed tokens,
scaled_dot_product_attention with the block-diagonal bool mask, and scaled_dot_product_attention on
each sample alone, causal and without a mask, its tensors already laid out for it. The mask is made
beforehand.

The step: forward, loss and backward of a Llama on the same samples (lognormal lengths up to 2048),
laid out four ways; real tokens, without padding, for each second. Making the batch counts.

Runs alternate and the fastest of each counts. Every answer is checked against that of the samples
alone, or of the padded batch.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from results import Results, add_json
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import multipack
from multipack.integrations.hf import register_attention

HEADS, SIZE = 8, 64
SETTINGS = [(4096, 8), (4096, 64), (16384, 28)]
SEED = 20261130

Result = list[Tensor]


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", action="store_true", help="a training step instead of the op")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the fastest counts")
    parser.add_argument("--tokens", type=int, help="only the settings with so many tokens")
    add_json(parser)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    torch.manual_seed(SEED)
    if arguments.step:
        compare_steps(arguments.runs, results)
        return
    for tokens, samples in SETTINGS:
        if arguments.tokens in (None, tokens):
            compare_ops(tokens, samples, arguments.runs, results)


def timed(
    runs: int, ways: dict[str, Callable[[], Result]]
) -> dict[str, tuple[list[float], Result]]:
    """Run each way in turn, `runs` times, and return its seconds and its answer.

    A run before them is not counted: it finds memory and kernels.
    """
    found: dict[str, tuple[list[float], Result]] = {}
    for run_number in range(runs + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            answer = run()
            seconds = time.perf_counter() - start
            before = found[name][0] if run_number > 1 else []
            found[name] = ([*before, seconds], answer)
    return found


def check(found: dict[str, tuple[list[float], Result]], reference: str) -> None:
    """Compare every answer with that of one way, relative to its norm."""
    for name, (_, answer) in found.items():
        for one, other in zip(answer, found[reference][1], strict=True):
            difference = float((one - other).norm() / other.norm())
            assert difference < 1e-5, f"{name} differs from {reference} by {difference}"


def compare_ops(tokens: int, samples: int, runs: int, results: Results) -> None:
    """Forward and backward of the op alone."""
    q, k, v = (torch.randn(tokens, HEADS, SIZE, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(tokens, HEADS, SIZE)
    borders = torch.linspace(0, tokens, samples + 1).int()
    lengths = borders.diff()
    longest = int(lengths.max())
    mask = multipack.block_mask(torch.arange(samples).repeat_interleave(lengths))

    def by_head(x: Tensor) -> Tensor:
        return x.detach().transpose(0, 1).contiguous().requires_grad_()

    def packed() -> Result:
        out = multipack.attention(q, k, v, borders, max_seqlen=longest)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]

    # Of four dimensions: for fewer, torch leaves out its fused kernel.
    batch = [by_head(x)[None].detach().requires_grad_() for x in (q, k, v)]

    def masked() -> Result:
        out = scaled_dot_product_attention(*batch, attn_mask=mask)
        gradients = torch.autograd.grad(out, batch, grad_out.transpose(0, 1)[None])
        return [x.detach()[0].transpose(0, 1) for x in (out, *gradients)]

    each = [
        [by_head(x[start:end])[None].detach().requires_grad_() for x in (q, k, v, grad_out)]
        for start, end in itertools.pairwise(borders.tolist())
    ]

    def alone() -> Result:
        parts = []
        for *inputs, grad in each:
            out = scaled_dot_product_attention(*inputs, is_causal=True)
            parts.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
        columns = zip(*parts, strict=True)
        return [torch.cat([x[0] for x in column], dim=1).transpose(0, 1) for column in columns]

    found = timed(runs, {"multipack": packed, "alone": alone, "mask": masked})
    check(found, "alone")
    ours, mask, single = (min(found[name][0]) for name in ("multipack", "mask", "alone"))
    print(
        f"{tokens} tokens, {samples} samples: multipack {ours:.4f} s, "
        f"4D bool mask {mask:.4f} s ({mask / ours:.1f} times), "
        f"samples alone {single:.4f} s ({single / ours:.2f} times)"
    )
    setting = f"{tokens:,} tokens in {samples} samples, {HEADS} heads of {SIZE}, with gradients"
    results.add(setting, "multipack.attention", found["multipack"][0])
    results.add(setting, "torch: SDPA with the 4D bool mask", found["mask"][0])
    results.add(setting, "torch: SDPA on the samples one by one", found["alone"][0])


def compare_steps(runs: int, results: Results) -> None:
    """One training step of a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register_attention()
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    row = 16384
    rng = np.random.default_rng(SEED)
    lengths = np.clip(np.ceil(rng.lognormal(5.92, 1.0, 1000)), 1, 2048).astype(int)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), row, side="right")]
    samples = [{"input_ids": rng.integers(1, 4096, n)} for n in lengths]
    supervised = int((lengths - 1).sum())
    plan = multipack.plan(lengths, sequence_len=2048, incomplete_batches="split")
    short_rows = [[samples[i] for i in plan[0, k][0]] for k in range(len(plan))]
    print(
        f"{len(samples)} samples, {lengths.sum()} tokens, longest {lengths.max()}; "
        f"{sum(p.numel() for p in LlamaForCausalLM(config).parameters()) / 1e6:.1f} M parameters"
    )

    def way(
        implementation: str, attention: str, rows: list[list[dict[str, object]]], **keys: object
    ):
        torch.manual_seed(SEED)
        # A configuration of its own: the implementation is written into it.
        own = copy.deepcopy(config)
        model = LlamaForCausalLM._from_config(own, attn_implementation=implementation)
        collator = multipack.Collator(attention=attention, **keys)

        def step() -> Result:
            model.zero_grad()
            batch = collator(rows)
            loss = model(**batch, use_cache=False, num_items_in_batch=supervised).loss
            loss.backward()
            return [loss.detach(), model.model.layers[0].self_attn.k_proj.weight.grad]

        return step

    single = {"pad_to_multiple_of": row}
    ways = {
        "packed, multipack": way("multipack", "multipack", [samples], **single),
        "padded": way("sdpa", "none", [[sample] for sample in samples]),
        "rows of 2048, 4D mask": way("sdpa", "bool", short_rows),
    }
    ways["packed, 4D mask"] = way("sdpa", "bool", [samples], **single)
    found = timed(runs, ways)
    check(found, "padded")
    best = min(found["packed, multipack"][0])
    setting = (
        f"a training step of a small Llama, {lengths.sum():,} tokens in {len(lengths)} samples"
    )
    for name, (seconds, _) in found.items():
        fewest = min(seconds)
        rate = f"{lengths.sum() / fewest:,.0f}"
        print(
            f"{name}: {fewest:.2f} s, {rate} real tokens a second, "
            f"{fewest / best:.2f} times the seconds of multipack"
        )
        kind = "multipack" if "multipack" in name else "torch: SDPA"
        results.add(setting, f"{kind}, {name}", seconds, {"real tokens a second": rate})


if __name__ == "__main__":
    main()
