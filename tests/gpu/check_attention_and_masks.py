"""Masks and attention on CUDA against the CPU in float64; run by hand on a machine with a GPU.

    python tests/gpu/check_attention_and_masks.py

It prints a line for each check and exits with 1 if one fails. Without a GPU it says so and exits
with 0. What is checked: every dtype with and without causality, window, shared key heads and
dropout; rows past the last border; the kernel that served each case, from the profiler; that
nothing waits for the device where max_seqlen is given; memory; torch.compile; block_mask.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import multipack

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 5e-3,  # tensor cores may round factors to TF32
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
LENGTHS = (0, 1, 300, 64, 0, 65, 1, 129, 16)
ROUTES = {
    "flash": "_flash_attention_forward",
    "efficient": "_efficient_attention_forward",
    "portable": "aten::logsumexp",
}

failures = 0


def report(name: str, check: Callable[[], str]) -> None:
    """Run a check, which returns what it found or raises, and print its line."""
    global failures
    try:
        print(f"ok    {name}: {check()}")
    except Exception as error:  # one failure must not hide the others
        failures += 1
        print(f"FAIL  {name}: {type(error).__name__}: {error}")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make waiting for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(dtype: torch.dtype, heads: int, kv_heads: int, size: int, rest: int) -> list[Tensor]:
    """Make q, k, v and a gradient on the CPU, in values that the dtype holds."""
    generator = torch.Generator().manual_seed(size + heads)
    tokens = sum(LENGTHS) + rest
    counts = (heads, kv_heads, kv_heads, heads)
    made = (torch.randn(tokens, n, size, generator=generator) for n in counts)
    return [x.to(dtype) for x in made]


def borders() -> Tensor:
    return torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)


def run(inputs: list[Tensor], cu: Tensor, device: str, dtype: torch.dtype, **look: Any) -> Any:
    """Return the result and the gradients of q, k and v."""
    q, k, v = (x.to(device, dtype).requires_grad_() for x in inputs[:3])
    grad_out = inputs[3].to(device, dtype)
    out = multipack.attention(q, k, v, cu.to(device), **look)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def check_case(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, rest: int, route: str, look: Any
) -> str:
    """Compare with the CPU, by norm, and look up which kernel ran."""
    inputs, cu = make(dtype, heads, kv_heads, size, rest), borders()
    expected = run(inputs, cu, "cpu", torch.float64, **look)
    with torch.profiler.profile() as profile:
        found = run(inputs, cu, "cuda", dtype, **look)
    names = {event.key for event in profile.key_averages()}
    taken = [name for name, mark in ROUTES.items() if any(mark in key for key in names)]
    assert taken == [route], f"served by {taken}, not {route}"
    differences = [
        float((one.double().cpu() - other).norm() / other.norm())
        for one, other in zip(found, expected, strict=True)
    ]
    assert max(differences) <= TOLERANCES[dtype], f"differences {differences}"
    for one in found:
        assert one.is_contiguous()
        assert not one[sum(LENGTHS) :].any(), "rows past the last border are not zero"
    again = run(inputs, cu, "cuda", dtype, max_seqlen=max(LENGTHS), **look)
    for one, other in zip(again, found, strict=True):
        assert float((one - other).norm()) <= TOLERANCES[dtype] * float(other.norm())
    return f"{route}, largest difference {max(differences):.1e}"


def check_no_waiting(dtype: torch.dtype, on_device: bool) -> str:
    """Run forward and backward where waiting is an error."""
    inputs = [x.cuda() for x in make(dtype, 4, 2, 64, 3)]
    cu = borders().cuda() if on_device else borders()
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    multipack.attention(q, k, v, cu, max_seqlen=300).backward(inputs[3])  # first use may wait
    torch.cuda.synchronize()
    with no_waiting():
        multipack.attention(q, k, v, cu, max_seqlen=300).backward(inputs[3])
    return "nothing waited"


def check_dropout(dtype: torch.dtype) -> str:
    """The share that is dropped, its repetition, and the backward by differences along a line."""
    n, size = 64, 64
    q = torch.randn(16 * n, 2, size, device="cuda", dtype=dtype)
    v = torch.eye(n, device="cuda", dtype=dtype).repeat(16, 1)[:, None].expand(-1, 2, -1)
    cu = torch.arange(17, device="cuda", dtype=torch.int32) * n

    def draw(v: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return multipack.attention(
            q, q, v, cu, max_seqlen=n, causal=False, dropout_p=0.25, scale=0.01
        )

    weights = draw(v.contiguous(), 1)
    kept = float((weights != 0).float().mean())
    assert abs(kept - 0.75) < 0.01, f"{kept} of the weights are kept"
    assert draw(v.contiguous(), 1).equal(weights), "the seed does not decide"
    assert not draw(v.contiguous(), 2).equal(weights), "the seed does not count"
    # Linear in v: the gradient of v along a direction is the result for that direction.
    values = torch.randn_like(q).requires_grad_()
    grad_out = torch.randn_like(q)
    (grad_v,) = torch.autograd.grad(draw(values, 3), values, grad_out)
    direction = torch.randn_like(q)
    by_gradient = float((grad_v.double() * direction.double()).sum())
    by_value = float((draw(direction, 3).double() * grad_out.double()).sum())
    scale = float(grad_v.double().norm() * direction.double().norm())
    assert abs(by_gradient - by_value) < TOLERANCES[dtype] * scale, (by_gradient, by_value)
    return f"{kept:.3f} kept, backward as forward"


def check_memory(dtype: torch.dtype) -> str:
    """Peak beyond what was there, for twice the tokens: twice, not four times."""
    peaks = []
    for tokens in (32768, 65536):
        q, k, v = (
            torch.randn(tokens, 8, 64, device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        cu = torch.tensor([0, tokens // 2, tokens], device="cuda", dtype=torch.int32)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        multipack.attention(q, k, v, cu, max_seqlen=tokens // 2).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0], f"peaks {peaks}"
    return f"{peaks[0] / 2**20:.0f} MiB, then {peaks[1] / 2**20:.0f} MiB"


def check_compiled(dtype: torch.dtype) -> str:
    """The default backend, for two batches."""
    torch.compiler.reset()

    def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        return multipack.attention(q * 2, k, v, cu, max_seqlen=longest).sin()

    compiled = torch.compile(layer, fullgraph=True)
    for rest in (3, 10):
        inputs = [x.cuda() for x in make(dtype, 4, 2, 64, rest)]
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        arguments = (q, k, v, borders().cuda(), 300 + rest)
        answers = []
        for function in (compiled, layer):
            out = function(*arguments)
            answers.append([out, *torch.autograd.grad(out, (q, k, v), inputs[3])])
        for one, other in zip(*answers, strict=True):
            assert float((one - other).norm()) <= TOLERANCES[dtype] * float(other.norm())
    return "as eager"


def check_mask(dtype: torch.dtype, look: Any) -> str:
    """block_mask made on the device equals that of the CPU, without waiting."""
    ids = torch.tensor([[1] * 40 + [2] * 3 + [3] * 60 + [0] * 25, [1] * 128])
    expected = multipack.block_mask(ids, dtype=dtype, **look)
    on_device = ids.cuda()
    with no_waiting():
        found = multipack.block_mask(on_device, dtype=dtype, **look)
    assert found.device.type == "cuda"
    assert found.cpu().equal(expected)
    return "equal"


def check_errors() -> str:
    """Borders that do not fit are refused where they are read on the host."""
    q, k, v, _ = (x.cuda() for x in make(torch.float16, 2, 2, 64, 0))
    wrong = [0, q.shape[0] + 1]
    for cu, look in (
        (torch.tensor(wrong, dtype=torch.int32).cuda(), {}),
        (torch.tensor(wrong, dtype=torch.int32), {"max_seqlen": 1000}),
    ):
        message = ""
        try:
            multipack.attention(q, k, v, cu, **look)
        except ValueError as error:
            message = str(error)
        assert "cu_seqlens ends at" in message, f"borders beyond the tokens: {message!r}"
    return "refused"


def main() -> None:
    """Run everything."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    flash = torch.cuda.get_device_capability() >= (8, 0)
    halves = (torch.bfloat16, torch.float16)
    looks: list[dict[str, Any]] = [
        {},
        {"causal": False},
        {"window": 1},
        {"window": 50},
        {"window": 50, "causal": False},
        {"scale": 0.3},
    ]
    for dtype, look, (heads, kv_heads), size in itertools.product(
        TOLERANCES, looks, ((4, 4), (6, 2)), (64, 128, 100)
    ):
        both_ways = "window" in look and not look.get("causal", True)
        if dtype in halves and flash and size % 8 == 0:
            route = "flash"
        elif dtype == torch.float64 or both_ways or size * dtype.itemsize % 16 != 0:
            route = "portable"
        else:
            route = "efficient"
        for rest in (0, 7):
            name = f"{dtype}, heads {heads}/{kv_heads} of {size}, {look}, {rest} tokens in none"
            arguments = (dtype, heads, kv_heads, size, rest, route, look)
            report(name, lambda a=arguments: check_case(*a))
    for dtype in (torch.bfloat16, torch.float32):
        for on_device in (True, False):
            name = f"{dtype}, borders on {'CUDA' if on_device else 'the CPU'}"
            report(name, lambda d=dtype, o=on_device: check_no_waiting(d, o))
        report(f"{dtype}, dropout", lambda d=dtype: check_dropout(d))
        report(f"{dtype}, memory", lambda d=dtype: check_memory(d))
        report(f"{dtype}, compiled", lambda d=dtype: check_compiled(d))
    report("torch.float64, dropout", lambda: check_dropout(torch.float64))
    for dtype, look in itertools.product(
        (torch.bool, torch.float32, *halves), ({}, {"causal": False, "window": 9}, {"window": 9})
    ):
        report(f"block_mask, {dtype}, {look}", lambda d=dtype, o=look: check_mask(d, o))
    report("errors", check_errors)
    print(f"{failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
