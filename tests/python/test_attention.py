"""multipack.attention against plain torch, segment by segment, in float64.

Two references, both obvious: `alone` runs scaled_dot_product_attention on one segment after another
with a small mask of its own, and the portable route of the op, from torch's operations, which
serves devices without a kernel. Every comparison covers the result and the three gradients.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import multipack
from multipack.ops import attention

# Empty segments at the start, inside and at the end, and single tokens.
BORDERS = torch.tensor([0, 0, 1, 4, 4, 12, 13, 30, 37, 37], dtype=torch.int32)
TOKENS = 37

LOOKS = [
    pytest.param({}, id="causal"),
    pytest.param({"causal": False}, id="both-ways"),
    pytest.param({"window": 1}, id="window-1"),
    pytest.param({"window": 5}, id="window-5"),
    pytest.param({"window": 5, "causal": False}, id="window-both-ways"),
    pytest.param({"window": 1000}, id="window-beyond"),
    pytest.param({"scale": 0.3}, id="scale"),
]
HEADS = [
    pytest.param(2, 2, id="heads-2-2"),
    pytest.param(6, 2, id="heads-6-2"),
    pytest.param(3, 1, id="heads-3-1"),
]


def make(
    tokens: int = TOKENS,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Tensor]:
    """Make q, k, v and a gradient for the result."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, size)] + [(tokens, kv_heads, size)] * 2 + [(tokens, heads, size)]
    made = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]
    return [tensor.requires_grad_(i < 3) for i, tensor in enumerate(made)]


def alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """One segment after another, in float64; zero after the last."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for start, end in itertools.pairwise(borders.tolist()):
        if start == end:
            continue
        place = torch.arange(end - start)
        distance = place[:, None] - place
        allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            allowed &= distance.abs() < window
        by_head = [x[start:end].double().transpose(0, 1) for x in (q, k, v)]
        keys, values = (x.repeat_interleave(group, dim=0) for x in by_head[1:])
        seen = scaled_dot_product_attention(
            by_head[0], keys, values, attn_mask=allowed, scale=scale
        )
        out[start:end] = seen.transpose(0, 1)
    return out


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradients of q, k and v."""
    q, k, v, grad_out = inputs
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out.to(out.dtype))]


def run(inputs: list[Tensor], borders: Tensor, **look: Any) -> list[Tensor]:
    return with_gradients(attention(*inputs[:3], borders, **look), inputs)


def run_alone(inputs: list[Tensor], borders: Tensor, **look: Any) -> list[Tensor]:
    return with_gradients(alone(*inputs[:3], borders, **look), inputs)


def portable(
    inputs: list[Tensor],
    borders: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> list[Tensor]:
    """Run the route of devices without a kernel on the CPU."""
    q, k, v, grad_out = (x.detach() for x in inputs)
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    options = (None, causal, window, scale, dropout_p)
    ops = torch.ops.multipack
    out, *saved = ops._attention_forward.default._op_dk(key, q, k, v, borders, *options)
    gradients = ops._attention_backward.default._op_dk(
        key, grad_out, q, k, v, out, *saved, borders, *options
    )
    return [out, *gradients]


def compare(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    """Compare by norm, relative to the largest: under a window of 1, gradients of q vanish."""
    scale = max(float(tensor.double().norm()) for tensor in expected)
    for name, one, other in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one.double() - other.double()).norm()) <= tolerance * scale, name


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("look", LOOKS)
def test_equals_each_segment_alone(look, heads, kv_heads):
    inputs = make(heads=heads, kv_heads=kv_heads)

    compare(run(inputs, BORDERS, **look), run_alone(inputs, BORDERS, **look))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("look", LOOKS)
def test_the_portable_route_equals_each_segment_alone(look, heads, kv_heads):
    inputs = make(heads=heads, kv_heads=kv_heads)

    compare(portable(inputs, BORDERS, **look), run_alone(inputs, BORDERS, **look))


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_segments_of_several_blocks(look, dtype, tolerance):
    """Longer than a block of queries, a tile of keys and a task, and by one more or less."""
    lengths = torch.tensor([700, 63, 64, 65, 257, 1, 256])
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    inputs = make(int(borders[-1]), heads=2, kv_heads=1, size=16, dtype=dtype)
    look = {**look, "window": look["window"] * 50} if look.get("window") == 5 else look

    compare(run(inputs, borders, **look), run_alone(inputs, borders, **look), tolerance)


def test_random_settings(seeded):
    lengths = torch.from_numpy(seeded.integers(0, 90, 6))
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    kv_heads, group, size = (int(n) for n in seeded.integers(1, 5, 3))
    inputs = make(int(borders[-1]) + 3, kv_heads * group, kv_heads, size, seed=int(lengths[0]))
    look = {"causal": bool(seeded.integers(2))}
    if seeded.integers(2):
        look["window"] = int(seeded.integers(1, 100))

    found = run(inputs, borders, **look)

    compare(found, run_alone(inputs, borders, **look))
    compare(portable(inputs, borders, **look), found)


def test_tokens_after_the_last_border_are_in_no_segment():
    """As cu_seqlens says under padded_tail="none": the outputs there are defined."""
    inputs = make(TOKENS)
    for tensor in inputs:
        tensor.data[30:] = float("nan")

    out, *gradients = run(inputs, torch.tensor([0, 12, 30], dtype=torch.int32))

    for tensor in (out, *gradients):
        assert tensor[30:].eq(0).all()
        assert tensor.isfinite().all()
    for ours, other in zip(
        (out, *gradients), portable(inputs, torch.tensor([0, 12, 30])), strict=True
    ):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("borders", [[0], [0, 0], [0, 0, 0]])
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_segment_at_all(borders, tokens):
    inputs = make(tokens)

    for found in (run(inputs, torch.tensor(borders)), portable(inputs, torch.tensor(borders))):
        assert [tensor.shape for tensor in found] == [inputs[i].shape for i in (0, 0, 1, 2)]
        assert not any(tensor.any() for tensor in found)


@pytest.mark.parametrize("change", [1.0, float("nan")])
def test_a_segment_cannot_move_another(change):
    """Not even with what a mask would let through: 0 times NaN."""
    q, k, v, _ = make()
    before = attention(q, k, v, BORDERS)
    for start, end in itertools.pairwise(BORDERS.tolist()):
        changed = [x.detach().clone() for x in (q, k, v)]
        for tensor in changed:
            tensor[start:end] += change
        after = attention(*changed, BORDERS)
        same = (after == before).flatten(1).all(1)
        assert same[:start].all()
        assert same[end:].all()
        assert not same[start:end].any()


def test_is_what_sdpa_gives_with_the_mask_of_block_mask():
    q, k, v, _ = make(heads=2, kv_heads=2)
    segments = torch.arange(len(BORDERS) - 1).repeat_interleave(BORDERS.diff())
    mask = multipack.block_mask(segments, window=7)[0]

    masked = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask)

    torch.testing.assert_close(attention(q, k, v, BORDERS, window=7), masked.transpose(0, 1))


def test_a_view_is_read_where_it_lies():
    """One projection for q, k and v; heads before tokens; a stride of 0; columns before rows."""
    fused = torch.randn(TOKENS, 3, 2, 8, dtype=torch.float64)
    by_head = torch.randn(2, TOKENS, 8, dtype=torch.float64).transpose(0, 1)
    expanded = torch.randn(1, 2, 8, dtype=torch.float64).expand(TOKENS, 2, 8)
    backwards = torch.randn(8, 2, TOKENS, dtype=torch.float64).permute(2, 1, 0)
    for views in (fused.unbind(1), (by_head, expanded, backwards)):
        inputs = [*(x.detach().requires_grad_() for x in views), backwards]
        plain = [*(x.detach().contiguous().requires_grad_() for x in views), backwards]
        compare(run(inputs, BORDERS), run(plain, BORDERS), 0)


def test_borders_of_either_integer_dtype_and_stride():
    inputs = make()
    wide = torch.stack([BORDERS.long(), BORDERS.long()], dim=1)[:, 0]

    compare(run(inputs, wide), run(inputs, BORDERS), 0)


@pytest.mark.parametrize("size", [16, 20, 80])
def test_the_same_inputs_give_the_same_bits(size):
    """Whoever takes which block, wherever the tensors begin, and beside whatever else runs."""
    inputs = make(1500, heads=4, kv_heads=2, size=size, dtype=torch.float32)
    borders = torch.tensor([0, 700, 720, 1400, 1500])
    expected = run(inputs, borders)
    before = torch.get_num_threads()
    busy = [sys.executable, "-c", "for _ in range(10**9): pass"]  # ends by itself at the worst
    beside = [subprocess.Popen(busy) for _ in range(3)]
    try:
        for attempt in range(12):
            torch.set_num_threads(1 + attempt % 4)
            moved = []
            for i, tensor in enumerate(inputs):
                room = torch.empty(attempt + tensor.numel())
                moved.append(room[attempt:].view_as(tensor).copy_(tensor.detach()))
                moved[i].requires_grad_(i < 3)
            for one, other in zip(run(moved, borders), expected, strict=True):
                assert torch.equal(one, other), attempt
    finally:
        torch.set_num_threads(before)
        for process in beside:
            process.kill()
            process.wait()


_WITH_VECTORS = """
import sys, torch, multipack
print(torch.backends.cpu.get_cpu_capability())
results = []
for q, k, v, grad_out, borders, look in torch.load(sys.argv[1]):
    out = multipack.attention(q, k, v, borders, **look)
    results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)])
torch.save(results, sys.argv[2])
"""


# The older ones of what this machine has; the newest is what all other tests use.
OLDER = ["default", *["avx2"] * (torch.backends.cpu.get_cpu_capability() == "AVX512")]


@pytest.mark.parametrize("vectors", OLDER)
def test_every_generation_of_vector_units(vectors, tmp_path):
    lengths = torch.tensor([130, 1, 64, 3, 77])
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    cases = [
        ([*make(280, 4, 2, size, dtype), borders, look], tolerance)
        for size in (1, 16, 20, 72)
        for dtype, tolerance in [(torch.float64, 1e-12), (torch.float32, 1e-6)]
        for look in ({}, {"causal": False}, {"window": 70})
    ]
    torch.save([case for case, _ in cases], tmp_path / "cases")

    code = [sys.executable, "-c", _WITH_VECTORS, tmp_path / "cases", tmp_path / "results"]
    done = subprocess.run(
        code, env=os.environ | {"ATEN_CPU_CAPABILITY": vectors}, capture_output=True, text=True
    )

    assert done.stdout == f"{vectors.upper()}\n", done.stderr
    found = torch.load(tmp_path / "results")
    for ((*inputs, _, look), tolerance), result in zip(cases, found, strict=True):
        compare(result, run_alone(inputs, borders, **look), tolerance)


def test_scores_that_are_far_apart():
    """Softmax at its limits: nothing overflows, and what is tiny is no more than tiny."""
    inputs = make(size=4, dtype=torch.float32)
    with torch.no_grad():
        inputs[0].mul_(200)

    compare(run(inputs, BORDERS), run_alone(inputs, BORDERS), 1e-5)


def test_keys_that_weigh_nothing():
    """Scores of -inf give a weight of 0, in tiles that have no other as well."""
    q, k, v, _ = (x.detach() for x in make(150, 1, 1, dtype=torch.float32))
    q[..., 0] = 1
    k[:70, 0, 0] = -torch.inf
    borders = torch.tensor([0, 150])

    found = attention(q, k, v, borders, causal=False)

    rest = [x[70:] for x in (k, v)]
    expected = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, *rest)))
    torch.testing.assert_close(found, expected.transpose(0, 1))


@pytest.mark.parametrize("look", LOOKS)
def test_gradcheck(look):
    q, k, v, _ = make(tokens=14, heads=2, kv_heads=1, size=3)
    borders = torch.tensor([0, 1, 1, 9, 12])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, borders, **look)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_a_second_derivative_is_refused():
    q, k, v, _ = make()
    (gradient,) = torch.autograd.grad(attention(q, k, v, BORDERS).sum(), q, create_graph=True)

    with pytest.raises(NotImplementedError) as raised:
        gradient.sum().backward()

    assert str(raised.value) == (
        "multipack::attention has no second derivative: where one is needed, use "
        "scaled_dot_product_attention with the mask of multipack::block_mask"
    )


def test_only_what_needs_a_gradient_gets_one():
    q, k, v, grad_out = make()
    attention(q, k.detach(), v.detach(), BORDERS).backward(grad_out)

    torch.testing.assert_close(q.grad, run([q, k, v, grad_out], BORDERS)[1])
    assert k.grad is None
    assert v.grad is None


def test_inference_mode():
    inputs = make()
    with torch.inference_mode():
        assert attention(*inputs[:3], BORDERS).equal(attention(*inputs[:3], BORDERS))


def test_autocast_runs_in_the_lower_precision():
    """Under it, rotary embeddings leave q and k in float32 beside a v in bfloat16."""
    q, k, v, grad_out = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v.bfloat16(), BORDERS)
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]

    found = with_gradients(out, [q, k, v, grad_out])

    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    compare(found, run([*low, grad_out.bfloat16()], BORDERS), 0)


# Dropout.


def dropped(out_of: Tensor, **look: Any) -> Tensor:
    """The weights (S, H, n, n) that are used: with v the identity, they are the result."""
    segments, heads, n, size = out_of.shape
    q = out_of.transpose(1, 2).flatten(0, 1)
    v = torch.eye(n, size, dtype=q.dtype).repeat(segments, 1)[:, None].expand(-1, heads, -1)
    borders = torch.arange(segments + 1) * n
    out = attention(q, q, v.contiguous(), borders, **look)
    return out.view(segments, n, heads, size).transpose(1, 2)


def test_dropout_drops_its_share_and_keeps_the_mean():
    q = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    plain = dropped(q, causal=False)
    torch.manual_seed(3)
    weights = dropped(q, causal=False, dropout_p=0.25)

    kept = weights != 0
    torch.testing.assert_close(weights[kept], plain[kept] / 0.75)
    assert abs(kept.double().mean() - 0.75) < 0.01  # 49152 draws: standard deviation 0.002
    # Neither rows, heads nor segments share their draws.
    rows = {tuple(row) for row in kept.flatten(0, 2).tolist()}
    assert len(rows) == 4 * 3 * 64


def test_the_seed_decides_what_dropout_drops():
    inputs = make()

    def draw(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return run(inputs, BORDERS, dropout_p=0.5)

    compare(draw(1), draw(1), 0)
    assert not draw(1)[0].equal(draw(2)[0])


@pytest.mark.parametrize("look", LOOKS)
def test_the_backward_drops_what_the_forward_dropped(look):
    """Long enough for several blocks; the same seed makes the same function for gradcheck."""
    borders = torch.tensor([0, 2, 70])
    q, k, v, _ = make(tokens=70, heads=2, kv_heads=1, size=2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(q, k, v, borders, dropout_p=0.4, **look)

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


def test_the_portable_route_drops_the_same_forward_and_backward():
    q, k, v, grad_out = make(tokens=20, heads=2, kv_heads=1, size=4)
    borders = torch.tensor([0, 3, 20])

    def run_seeded(q: Tensor) -> list[Tensor]:
        torch.manual_seed(5)
        return portable([q, k, v, grad_out], borders, dropout_p=0.4)

    # The derivative along one direction, by differences.
    direction = torch.randn_like(q)
    _, grad_q, _, _ = run_seeded(q)
    ahead, back = (run_seeded(q.detach() + step * direction)[0] for step in (1e-6, -1e-6))
    by_differences = ((ahead - back) / 2e-6 * grad_out).sum()
    torch.testing.assert_close((grad_q * direction).sum(), by_differences, rtol=1e-6, atol=1e-6)


def test_checkpointing_draws_the_same_again():
    q, k, v, grad_out = make()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, BORDERS, dropout_p=0.5)

    torch.manual_seed(1)
    plain = with_gradients(attend(q, k, v), [q, k, v, grad_out])
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    compare(with_gradients(out, [q, k, v, grad_out]), plain, 0)


# Errors.


def refused(error: type[Exception], *arguments: Any, **look: Any) -> str:
    with pytest.raises(error) as raised:
        attention(*arguments, **look)
    return str(raised.value)


@pytest.mark.parametrize(
    ("borders", "look", "text"),
    [
        ([1, 3], {}, "cu_seqlens[0] is 1, but the first segment begins at 0"),
        ([0, 5, 3, 9], {}, "cu_seqlens falls from 5 to 3 at entry 2"),
        ([0, 38], {}, "cu_seqlens ends at 38, but q has 37 tokens"),
        ([0, 5, 9], {"max_seqlen": 4}, "segment 0 has 5 tokens, more than max_seqlen 4"),
        ([0, 5], {"max_seqlen": -1}, "max_seqlen is -1, but must not be negative"),
        ([0, 5], {"window": 0}, "window is 0, but must be at least 1"),
        ([0, 5], {"dropout_p": 1.0}, "dropout_p is 1, but must be at least 0 and less than 1"),
        ([0, 5], {"dropout_p": -0.5}, "dropout_p is -0.5, but must be at least 0 and less than 1"),
        ([[0, 5]], {}, "cu_seqlens has shape [1, 2], but must be (segments + 1,)"),
        ([], {}, "cu_seqlens has shape [0], but must be (segments + 1,)"),
    ],
)
def test_wrong_values_are_refused(borders, look, text):
    q, k, v, _ = make()

    borders = torch.tensor(borders, dtype=torch.int64)
    assert refused(ValueError, q, k, v, borders, **look) == text


@pytest.mark.parametrize(
    ("q", "k", "v", "text"),
    [
        (
            (5, 2),
            (5, 1, 8),
            (5, 1, 8),
            "q has shape [5, 2], but must be (tokens, heads, head size)",
        ),
        (
            (5, 2, 8),
            (4, 1, 8),
            (5, 1, 8),
            "k has shape [4, 1, 8], but q has [5, 2, 8]: tokens and head size must be the same",
        ),
        (
            (5, 2, 8),
            (5, 2, 8),
            (5, 2, 6),
            "v has shape [5, 2, 6], but q has [5, 2, 8]: tokens and head size must be the same",
        ),
        ((5, 2, 8), (5, 2, 8), (5, 1, 8), "k has 2 heads, but v has 1"),
        (
            (5, 3, 8),
            (5, 2, 8),
            (5, 2, 8),
            "q has 3 heads, which must be a multiple of the 2 heads of k and v",
        ),
        ((5, 2, 0), (5, 2, 0), (5, 2, 0), "q has shape [5, 2, 0]: the head size must not be 0"),
    ],
)
def test_wrong_shapes_are_refused(q, k, v, text):
    tensors = [torch.zeros(shape) for shape in (q, k, v)]

    assert refused(ValueError, *tensors, torch.tensor([0, 4])) == text


def test_a_backward_of_another_forward_is_refused():
    """Kernels would read past the end."""
    q, k, v, grad_out = make()
    options = (BORDERS, None, True, None, None, 0.0)
    out, logsumexp, random = torch.ops.multipack._attention_forward(q, k, v, *options)
    saved = [grad_out, q, k, v, out, logsumexp, random]
    for place in (0, 4, 5):
        cut = [x[:1] if i == place else x for i, x in enumerate(saved)]
        with pytest.raises(ValueError, match="are not those of a forward with this q"):
            torch.ops.multipack._attention_backward(*cut, *options)


def test_wrong_dtypes_are_refused():
    q, k, v, _ = make(dtype=torch.float32)

    assert refused(TypeError, q, k.half(), v, BORDERS) == (
        "k has dtype torch.float16, but q has torch.float32"
    )
    assert refused(TypeError, q.int(), k, v, BORDERS) == (
        "q has dtype torch.int32, but must be float32, bfloat16, float16 or float64"
    )
    assert refused(TypeError, q, k, v, BORDERS.short()) == (
        "cu_seqlens has dtype torch.int16, but must be int32 or int64"
    )
    assert refused(TypeError, q, k, v.detach().to_sparse(), BORDERS) == (
        "multipack::attention needs dense tensors, but v has layout Sparse: convert it with "
        ".to_dense()"
    )


# Memory, programs.

_PEAK = """
import resource, sys, torch, multipack
tokens, segments = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
q, k, v = (torch.ones(tokens, 2, 32, requires_grad=True) for _ in range(3))
borders = (torch.arange(segments + 1) * (tokens // segments)).int()
multipack.attention(q[:64], k[:64], v[:64], borders[:1]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
multipack.attention(q, k, v, borders).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("segments", [1, 32])
def test_memory_grows_with_the_tokens_and_not_with_their_square(segments):
    """A mask of 8192 tokens takes 64 MiB and the scores 512; gradients a segment, 192 MiB."""

    def peak(tokens: int) -> float:
        code = [sys.executable, "-c", _PEAK, str(tokens), str(segments)]
        return int(subprocess.run(code, check=True, capture_output=True).stdout) / 1024

    # Result, gradients and the gradients' way to the leaves: 2 MiB a tensor, and a few tiles.
    assert peak(8192) < 24


@pytest.mark.parametrize(
    ("dtype", "size", "look"),
    [
        (torch.bfloat16, 64, (True, None, None, 0.0)),
        (torch.float16, 256, (False, 5, 0.5, 0.1)),
        (torch.float32, 64, (True, 5, None, 0.0)),
        (torch.bfloat16, 264, (False, None, None, 0.1)),
    ],
)
def test_the_cuda_routes_fit_together_in_shapes(dtype, size, look):
    """On tensors that have a device and no memory.

    The first two take torch's flash kernel, the others the efficient one, whose backward torch 2.13
    cannot trace.
    """
    key, ops = torch._C.DispatchKey.CUDA, torch.ops.multipack
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(TOKENS, 6, size, dtype=dtype, device="cuda")
        k = torch.empty(TOKENS, 2, size, dtype=dtype, device="cuda")
        borders = torch.empty(5, dtype=torch.int32, device="cuda")
        options = (17, *look)
        found = ops._attention_forward.default._op_dk(key, q, k, k, borders, *options)
        for one, other in zip(
            found, ops._attention_forward(q, k, k, borders, *options), strict=True
        ):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )
        if size <= 256 and dtype != torch.float32:
            gradients = ops._attention_backward.default._op_dk(
                key, torch.empty_like(q), q, k, k, *found, borders, *options
            )
            assert [tensor.shape for tensor in gradients] == [q.shape, k.shape, k.shape]


# Said by torch's own check from 2.14 on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck():
    for inputs, look in (
        (make(dtype=torch.float32), {}),
        (make(), {"causal": False, "window": 3, "max_seqlen": 30, "scale": 0.5}),
    ):
        torch.library.opcheck(torch.ops.multipack.attention.default, (*inputs[:3], BORDERS), look)


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_forward_and_backward_for_all_batches(dynamic):
    torch.compiler.reset()

    def layer(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int) -> Tensor:
        return attention(q * 2, k, v, borders, max_seqlen=longest).sin()

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (20, 25, 31, 37):
        inputs = make(tokens)
        borders = torch.tensor([0, 3, tokens - 2, tokens], dtype=torch.int32)
        arguments = (*inputs[:3], borders, tokens - 5)
        expected = with_gradients(layer(*arguments), inputs)
        compare(with_gradients(compiled(*arguments), inputs), expected, 1e-15)


def test_the_default_backend_gives_the_same():
    torch.compiler.reset()
    inputs = make(dtype=torch.float32)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, BORDERS, window=4).sin()

    compiled = torch.compile(layer, fullgraph=True)

    found = with_gradients(compiled(*inputs[:3]), inputs)
    compare(found, with_gradients(layer(*inputs[:3]), inputs), 1e-6)


class Layer(torch.nn.Module):
    """Attention as a module of a saved program."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, borders: Tensor) -> Tensor:
        """Attend in a window."""
        return torch.ops.multipack.attention(q, k, v, borders, window=5)


def test_torchscript_saved_and_loaded(tmp_path):
    torch.jit.script(Layer()).save(tmp_path / "layer.pt")
    inputs = make()

    out = torch.jit.load(tmp_path / "layer.pt")(*inputs[:3], BORDERS)

    compare(with_gradients(out, inputs), run(inputs, BORDERS, window=5), 0)


def test_an_exported_program_attends_in_another_batch_after_loading(tmp_path):
    auto = torch.export.Dim.AUTO
    shapes = [{0: auto}] * 4
    first, other = make(TOKENS), make(20)
    program = torch.export.export(Layer(), (*first[:3], BORDERS), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    borders = torch.tensor([0, 11, 20], dtype=torch.int32)

    out = loaded(*other[:3], borders)

    compare(with_gradients(out, other), run(other, borders, window=5), 1e-15)
