"""Each op against a reference in plain torch, opcheck on the same samples, and every refusal.

The reference builds a batch row by row from slices and `torch.cat`, the way one would by hand; it
knows nothing of the library's way of doing it.
"""

import itertools
import math
import resource
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multipack import ops

OPS = torch.ops.multipack
FIGURE = [11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def flat(*lengths: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Return tokens 10, 11, … of so many samples, and their offsets."""
    tokens = torch.arange(10, 10 + sum(lengths), dtype=dtype)
    return tokens, torch.tensor([0, *lengths]).cumsum(0)


def one_row(*lengths: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of collate for samples of these lengths in one row."""
    return *flat(*lengths), torch.arange(len(lengths)), ints(0, len(lengths))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def reference_mask(
    segment_ids: Tensor, causal: bool, window: int | None, dtype: torch.dtype
) -> Tensor:
    query, key = segment_ids[:, None, :, None], segment_ids[:, None, None, :]
    allowed = query == key
    at = torch.arange(segment_ids.shape[1])
    distance = at[:, None] - at[None, :]
    if causal:
        allowed = allowed & (distance >= 0)
    if window is not None:
        allowed = allowed & (distance.abs() < window)
    if dtype == torch.bool:
        return allowed
    return torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)


def reference_collate(
    tokens: Tensor,
    offsets: Tensor,
    index: Tensor,
    row_offsets: Tensor,
    *,
    labels: Tensor | None = None,
    row_len: int = 0,
    max_sample_len: int = 0,
    pad_to_multiple_of: int = 1,
    align_samples_to: int = 1,
    pad_token_id: int = 0,
    position_start: int = 0,
    mask_first_label: bool = True,
    padded_tail: str = "own",
    attention_mask: str = "none",
    causal: bool = True,
    window: int | None = None,
    mask_dtype: torch.dtype | None = None,
) -> ops.Batch:
    labels = tokens if labels is None else labels
    limit = max_sample_len or 10**9

    def piece(source: Tensor, sample: int) -> Tensor:
        return source[offsets[sample] : offsets[sample + 1]][:limit].long()

    borders = row_offsets.tolist()
    rows = [index[a:b].tolist() for a, b in itertools.pairwise(borders)]
    rows = [[i for i in row if len(piece(tokens, i))] for row in rows]
    need = [sum(round_up(len(piece(tokens, i)), align_samples_to) for i in row) for row in rows]
    size = row_len or round_up(max(need, default=0), pad_to_multiple_of)
    tail_limit = max(align_samples_to, limit // align_samples_to * align_samples_to)

    batch: dict[str, list[Tensor]] = {"ids": [], "labels": [], "positions": [], "segments": []}
    true_lengths: list[int] = []
    slots: list[int] = []
    for row, used in zip(rows, need, strict=True):
        tail = size - used
        parts: dict[str, list[Tensor]] = {name: [] for name in batch}

        def add(parts, ids, row_labels, slot, number):
            padding = slot - len(ids)
            ignored = torch.full((padding,), -100)
            parts["ids"] += [ids, torch.full((padding,), pad_token_id)]
            parts["labels"] += [row_labels, ignored]
            parts["positions"].append(torch.arange(slot) + position_start)
            number = torch.full((len(ids),), number, dtype=torch.int32)
            parts["segments"] += [number, torch.zeros(padding, dtype=torch.int32)]

        for number, sample in enumerate(row, start=1):
            ids, its_labels = piece(tokens, sample), piece(labels, sample).clone()
            if mask_first_label:
                its_labels[0] = -100
            slot = round_up(len(ids), align_samples_to)
            merged = 0
            if padded_tail == "last" and number == len(row):
                merged = min(tail, max(0, tail_limit - slot))
            add(parts, ids, its_labels, slot + merged, number)
            # What is merged makes the padding inside the slot part of the segment.
            true_lengths.append(slot + merged if merged else len(ids))
            slots.append(slot + merged)
            tail -= merged
        while tail > 0:
            slot = min(tail, tail_limit)
            add(parts, ints(), ints(), slot, 0)
            if padded_tail != "none":
                true_lengths.append(min(slot, limit))
                slots.append(slot)
            tail -= slot
        for name, values in parts.items():
            dtype = torch.int32 if name == "segments" else torch.int64
            batch[name].append(torch.cat(values) if values else torch.zeros(0, dtype=dtype))

    def rectangle(name: str, dtype: torch.dtype) -> Tensor:
        return torch.stack(batch[name]) if rows else torch.zeros(0, size, dtype=dtype)

    def cumulative(values: list[int]) -> Tensor:
        return torch.tensor([0, *values]).cumsum(0).int()

    segment_ids = rectangle("segments", torch.int32)
    mask = torch.zeros(0, dtype=torch.bool)
    if attention_mask == "bool":
        mask = reference_mask(segment_ids, causal, window, torch.bool)
    elif attention_mask == "additive":
        mask = reference_mask(segment_ids, causal, window, mask_dtype or torch.float32)
    return ops.Batch(
        input_ids=rectangle("ids", torch.int64),
        labels=rectangle("labels", torch.int64),
        position_ids=rectangle("positions", torch.int64),
        segment_ids=segment_ids,
        cu_seqlens=cumulative(true_lengths),
        cu_seqlens_padded=cumulative(slots),
        max_seqlen=torch.tensor(max(true_lengths, default=0), dtype=torch.int32),
        attention_mask=mask,
    )


TWO_ROWS = (*flat(3, 2, 4, 0, 1), ints(4, 0, 2, 1, 3), ints(0, 2, 5))
COLLATE_SAMPLES = {
    "two samples": (one_row(3, 2), {}),
    "row of 8": (one_row(3, 2), {"row_len": 8}),
    "merged tail": (one_row(3, 2), {"row_len": 8, "padded_tail": "last"}),
    "no tail": (one_row(3, 2), {"row_len": 8, "padded_tail": "none"}),
    "cut tail": (one_row(3, 2), {"row_len": 16, "max_sample_len": 4}),
    "cut merged tail": (
        one_row(3, 2),
        {"row_len": 16, "max_sample_len": 4, "padded_tail": "last"},
    ),
    "two rows": (TWO_ROWS, {}),
    "two rows merged": (TWO_ROWS, {"row_len": 9, "padded_tail": "last"}),
    "truncated": (TWO_ROWS, {"max_sample_len": 2}),
    "multiple of 8": (TWO_ROWS, {"pad_to_multiple_of": 8, "pad_token_id": 7}),
    "aligned": (one_row(5, 7, 3), {"align_samples_to": 4}),
    "aligned with a tail": (
        one_row(5, 7, 3),
        {"align_samples_to": 4, "row_len": 32, "max_sample_len": 9},
    ),
    "positions from 2": (one_row(3, 2), {"position_start": 2, "row_len": 8}),
    "first labels kept": (TWO_ROWS, {"mask_first_label": False}),
    "own labels": (one_row(3, 2), {"labels": ints(-100, 5, 6, 7, -100)}),
    "bool mask": (TWO_ROWS, {"attention_mask": "bool", "row_len": 8}),
    "window": (TWO_ROWS, {"attention_mask": "bool", "window": 2}),
    "not causal": (
        TWO_ROWS,
        {"attention_mask": "additive", "causal": False, "window": 2, "row_len": 8},
    ),
    "half mask": (
        one_row(3, 2),
        {"attention_mask": "additive", "mask_dtype": torch.float16, "align_samples_to": 4},
    ),
    "brain mask": (one_row(3, 2), {"attention_mask": "additive", "mask_dtype": torch.bfloat16}),
    "only empty samples": (one_row(0, 0), {"row_len": 4}),
    "nothing": ((ints(), ints(0), ints(), ints(0)), {"row_len": 4, "attention_mask": "bool"}),
    "the same sample twice": ((*flat(3, 2), ints(1, 1), ints(0, 2)), {}),
    "the figure": (one_row(*FIGURE), {"row_len": 64}),
}


def assert_batches_equal(expected: ops.Batch, found: ops.Batch) -> None:
    for name, want, have in zip(ops.Batch._fields, expected, found, strict=True):
        torch.testing.assert_close(
            have, want, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert have.is_contiguous(), name


@pytest.mark.parametrize(("args", "options"), COLLATE_SAMPLES.values(), ids=COLLATE_SAMPLES)
def test_collate_gives_the_reference_batch(args, options):
    assert_batches_equal(reference_collate(*args, **options), ops.collate(*args, **options))


@pytest.mark.parametrize(("args", "options"), COLLATE_SAMPLES.values(), ids=COLLATE_SAMPLES)
def test_collate_passes_opcheck(args, options):
    torch.library.opcheck(OPS.collate.default, args, options)


@pytest.mark.parametrize(
    ("padded_tail", "borders", "longest"),
    [
        ("own", [0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60, 63, 64], 11),
        ("last", [0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60, 64], 11),
        ("none", [0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60, 63], 11),
    ],
)
def test_the_figure_has_the_numbers_that_are_drawn(padded_tail, borders, longest):
    batch = ops.collate(*one_row(*FIGURE), row_len=64, padded_tail=padded_tail)

    assert batch.cu_seqlens.tolist() == borders
    assert batch.max_seqlen.item() == longest
    assert batch.input_ids.shape == (1, 64)


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("label_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("index_dtype", [torch.uint8, torch.int16, torch.int32, torch.uint32])
def test_integer_dtypes_give_the_same_batch(token_dtype, label_dtype, index_dtype):
    tokens, offsets, index, row_offsets = TWO_ROWS
    labels = tokens + 1
    expected = ops.collate(*TWO_ROWS, labels=labels)

    found = ops.collate(
        tokens.to(token_dtype),
        offsets.to(index_dtype),
        index.to(index_dtype),
        row_offsets.to(index_dtype),
        labels=labels.to(label_dtype),
    )

    assert_batches_equal(expected, found)


def strided(tensor: Tensor) -> Tensor:
    """Return equal values with another in between in memory."""
    return torch.stack([tensor, torch.full_like(tensor, 99)], dim=1)[:, 0]


def unaligned(tensor: Tensor) -> Tensor:
    """Return equal values that begin at an odd address."""
    memory = bytearray(b"\0" + tensor.numpy().tobytes())
    return torch.frombuffer(memory, dtype=tensor.dtype, offset=1)


@pytest.mark.parametrize("change", [strided, unaligned])
def test_memory_that_is_not_contiguous_or_not_aligned(change):
    tokens, offsets, index, row_offsets = (change(tensor) for tensor in TWO_ROWS)
    assert not tokens.is_contiguous() or tokens.data_ptr() % 8

    found = ops.collate(tokens, offsets, index, row_offsets, labels=change(TWO_ROWS[0]))

    assert_batches_equal(ops.collate(*TWO_ROWS), found)


def test_expanded_memory():
    args = (torch.tensor([7]).expand(6), ints(0, 2, 6), torch.tensor([1]).expand(2), ints(0, 2))

    batch = ops.collate(*args)

    assert batch.input_ids.tolist() == [[7] * 8]


def test_offsets_of_a_slice_are_absolute():
    tokens, offsets, _, _ = one_row(3, 2, 4)

    batch = ops.collate(tokens, offsets[1:], ints(0, 1), ints(0, 2))

    assert batch.input_ids.tolist() == [[13, 14, 15, 16, 17, 18]]


def test_results_share_no_memory_with_the_arguments_or_each_other():
    tokens = torch.arange(8)
    batch = ops.collate(tokens, ints(0, 8), ints(0), ints(0, 1), mask_first_label=False)
    assert torch.equal(batch.input_ids[0], tokens)

    tensors = [tokens, *(tensor for tensor in batch if tensor.numel())]
    pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    batch.input_ids.fill_(-1)

    assert len(set(pointers)) == len(pointers)
    assert torch.equal(tokens, torch.arange(8))
    assert torch.equal(batch.labels[0], tokens)


def test_threads_do_not_change_the_batch():
    lengths = torch.randint(1, 400, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    args = one_row(*lengths)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.collate(*args)
        torch.set_num_threads(3)
        three = ops.collate(*args)
    finally:
        torch.set_num_threads(threads)

    assert one.input_ids.numel() > 300_000
    assert_batches_equal(one, three)


def test_threads_of_the_caller_may_call_at_once():
    args = one_row(*[500] * 300)
    expected = ops.collate(*args)

    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda _: ops.collate(*args), range(40)))

    for batch in batches:
        assert_batches_equal(expected, batch)


def test_batches_are_freed():
    args = one_row(*[1000] * 100)
    for _ in range(20):
        ops.collate(*args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(500):  # of 2.8 MB each
        ops.collate(*args)
        with pytest.raises(IndexError):
            ops.collate(args[0], args[1], ints(100), ints(0, 1))

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, f"{grown} kB more than before"


# ---- collate_list ----


def split(args: tuple[Tensor, ...]) -> list[Tensor]:
    tokens, offsets, index, _ = args
    return [tokens[offsets[i] : offsets[i + 1]] for i in index.tolist()]


LIST_SAMPLES = ["two samples", "two rows", "bool mask", "aligned", "only empty samples", "nothing"]


@pytest.mark.parametrize("name", LIST_SAMPLES)
def test_collate_list_equals_collate(name):
    args, options = COLLATE_SAMPLES[name]

    found = ops.collate_list(split(args), args[3], **options)

    assert_batches_equal(ops.collate(*args, **options), found)


def test_collate_list_with_labels_of_mixed_dtypes():
    samples = [ints(1, 2, 3), torch.tensor([4, 5], dtype=torch.int32)]
    labels = [torch.tensor([-100, 7, 8], dtype=torch.int32), ints(9, 10)]

    batch = ops.collate_list(samples, ints(0, 2), labels=labels)

    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.labels.tolist() == [[-100, 7, 8, -100, 10]]


@pytest.mark.parametrize("name", LIST_SAMPLES)
def test_collate_list_passes_opcheck(name):
    args, options = COLLATE_SAMPLES[name]
    samples = split(args)

    torch.library.opcheck(
        OPS.collate_list.default, (samples, args[3]), {"labels": samples, **options}
    )


# ---- pack_values ----

VALUE_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_pack_values_moves_any_dtype(dtype):
    _, offsets, index, row_offsets = TWO_ROWS
    numbers = torch.arange(10).remainder(2 if dtype == torch.bool else 10)
    values = numbers.to(dtype)
    expected = reference_collate(numbers, *TWO_ROWS[1:], pad_token_id=1)

    packed = ops.pack_values(values, offsets, index, row_offsets, pad=1)

    assert packed.dtype == dtype
    assert packed.to(torch.complex128).real.long().equal(expected.input_ids)


def test_pack_values_of_a_conjugate_view():
    values = torch.tensor([1 + 2j, 3 - 4j, 5j]).conj()
    assert values.is_conj()

    packed = ops.pack_values(values, ints(0, 3), ints(0), ints(0, 1), row_len=4, pad=1)

    assert packed.tolist() == [[1 - 2j, 3 + 4j, -5j, 1]]


@pytest.mark.parametrize(
    "options",
    [{}, {"row_len": 12}, {"max_sample_len": 2, "pad_to_multiple_of": 8, "pad": -1.5}],
)
def test_pack_values_passes_opcheck_and_follows_collate(options):
    args = (TWO_ROWS[0].float(), *TWO_ROWS[1:])
    pad = options.get("pad", 0)
    layout = {name: value for name, value in options.items() if name != "pad"}

    batch = ops.collate(*TWO_ROWS, **layout)
    expected = torch.where(batch.segment_ids > 0, batch.input_ids.float(), pad)

    assert ops.pack_values(*args, **options).equal(expected)
    torch.library.opcheck(OPS.pack_values.default, args, options)


@pytest.mark.parametrize(
    ("value", "pad"),
    [
        (0.5, math.inf),
        (0.5, math.nan),
        (0.5, 3 + 0j),
        (7, -3 + 0j),
        (True, 0),
        (1j, 2 - 1j),
        (1j, 4),
    ],
)
def test_pack_values_keeps_every_pad_that_the_dtype_holds(value, pad):
    values = torch.tensor([value])

    packed = ops.pack_values(values, ints(0, 1), ints(0), ints(0, 1), row_len=2, pad=pad)

    expected = torch.tensor([[value, pad.real if pad.imag == 0 else pad]], dtype=values.dtype)
    torch.testing.assert_close(packed, expected, rtol=0, atol=0, equal_nan=True)


# ---- block_mask ----

SEGMENT_IDS = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0], [1, 1, 0, 2, 0, 3, 3, 3]], dtype=torch.int32)
MASK_OPTIONS = [
    {"causal": causal, "window": window, "dtype": dtype}
    for causal in (True, False)
    for window in (None, 1, 2, 100, 2**63 - 1)
    for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("options", MASK_OPTIONS, ids=str)
def test_block_mask_gives_the_reference_mask(options):
    expected = reference_mask(SEGMENT_IDS, **options)

    found = ops.block_mask(SEGMENT_IDS, **options)

    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    seen = expected if expected.dtype == torch.bool else expected == 0
    assert seen.any(dim=-1).all(), "every query has a key"


def block_mask_elsewhere(segment_ids: Tensor, **options) -> Tensor:
    """Run the kernel for CUDA and all others, here on a CPU tensor."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return OPS.block_mask.default.redispatch(cuda, segment_ids, **options)


@pytest.mark.parametrize("options", MASK_OPTIONS, ids=str)
def test_block_mask_of_other_devices_gives_the_same(options):
    found = block_mask_elsewhere(SEGMENT_IDS, **options)

    torch.testing.assert_close(found, ops.block_mask(SEGMENT_IDS, **options), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", [ops.block_mask, block_mask_elsewhere])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint32, torch.int64, torch.uint64]
)
def test_block_mask_compares_ids_of_any_integer_dtype(kernel, dtype):
    largest = torch.iinfo(torch.int64 if dtype == torch.uint64 else dtype).max
    plain = ints(0, 1, 0, 2, 2, 1)

    mask = kernel(torch.where(plain == 2, largest, plain).to(dtype))

    assert mask.equal(reference_mask(plain[None], True, None, torch.bool))


@pytest.mark.parametrize("causal", [True, False])
def test_block_mask_of_other_devices_makes_nothing_larger_than_the_mask(causal):
    """No number of int64 per entry, as a matrix of distances would be."""
    made: list[tuple[int, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.append((out.numel(), out.element_size()))
            return out

    with Watch():
        mask = block_mask_elsewhere(SEGMENT_IDS, causal=causal, window=3)

    assert made[-1] == (mask.numel(), 1)
    assert {size for numel, size in made if numel > SEGMENT_IDS.numel()} == {1}


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_block_mask_of_other_devices_is_aligned_as_attention_there_wants_it(dtype):
    """Where rows begin elsewhere than at multiples of 16, SDPA copies the mask in every layer."""
    ids = torch.ones(2, 20, dtype=torch.int32)

    mask = block_mask_elsewhere(ids, dtype=dtype)

    assert mask.stride() == (20 * 32, 20 * 32, 32, 1)
    assert ops.block_mask(ids.to("meta"), dtype=dtype).stride() == mask.stride()
    with torch._subclasses.FakeTensorMode():
        traced = ops.block_mask(torch.empty(2, 20, dtype=torch.int32, device="cuda"), dtype=dtype)
    assert traced.stride() == mask.stride()
    assert ops.block_mask(ids, dtype=dtype).is_contiguous()


def test_block_mask_takes_one_row_without_its_dimension():
    row = SEGMENT_IDS[0]

    assert ops.block_mask(row).equal(ops.block_mask(SEGMENT_IDS[:1]))
    assert block_mask_elsewhere(row).equal(ops.block_mask(row))


def test_block_mask_lets_the_padding_of_a_row_attend_to_itself():
    """To all of it, wherever in the row it is; in both directions without causal."""
    aligned = ops.collate(*one_row(1, 1), align_samples_to=2, row_len=6, max_sample_len=1)
    padding = aligned.segment_ids[0] == 0
    assert padding.tolist() == [False, True, False, True, True, True]

    both = ops.block_mask(aligned.segment_ids, causal=False)[0, 0]
    causal = ops.block_mask(aligned.segment_ids)[0, 0]

    assert both[padding].equal(padding.expand(4, 6))
    assert causal.equal(both.tril())


def test_block_mask_of_a_size_that_comes_in_huge_pages():
    """From 32 MiB on, the system is asked for other pages; the mask is the same."""
    ids = torch.ones(6001, dtype=torch.int32)
    ids[2500:] = 2

    mask = ops.block_mask(ids)

    assert mask.numel() > 32 << 20
    assert mask.equal(reference_mask(ids[None], True, None, torch.bool))


def test_block_mask_on_the_meta_device():
    mask = ops.block_mask(SEGMENT_IDS.to("meta"), dtype=torch.bfloat16)

    assert (mask.device.type, mask.shape, mask.dtype) == ("meta", (2, 1, 8, 8), torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{}, {"window": 2, "causal": False}, {"dtype": torch.float16}], ids=str
)
def test_block_mask_passes_opcheck(options):
    torch.library.opcheck(OPS.block_mask.default, (SEGMENT_IDS,), options)
    torch.library.opcheck(OPS.block_mask.default, (SEGMENT_IDS[0].long(),), options)


# ---- boundaries ----


@pytest.mark.parametrize(
    ("positions", "borders"),
    [
        ([[0, 1, 2], [0, 0, 1]], [0, 3, 4, 6]),
        ([2, 3, 4, 2, 3], [0, 3, 5]),
        ([[0, 1, 2, 3]], [0, 4]),
        ([], [0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries(positions, borders, dtype):
    position_ids = torch.tensor(positions, dtype=dtype)

    found = ops.boundaries(position_ids)

    assert (found.tolist(), found.dtype) == (borders, torch.int32)
    torch.library.opcheck(OPS.boundaries.default, (position_ids,))


@pytest.mark.parametrize("name", ["row of 8", "two rows", "cut tail", "positions from 2"])
def test_boundaries_recover_the_cu_seqlens_of_collate(name):
    args, options = COLLATE_SAMPLES[name]
    batch = ops.collate(*args, **options)

    assert ops.boundaries(batch.position_ids).equal(batch.cu_seqlens)


# ---- label_counts ----


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "options", [{}, {"max_sample_len": 2}, {"mask_first_label": False}], ids=str
)
def test_label_counts_are_what_collate_leaves(dtype, options):
    labels = torch.tensor([-100, 1, 2, 3, -100, -100, 4, 5], dtype=dtype)
    offsets = ints(0, 3, 5, 5, 8)

    counts, starts = ops.label_counts(labels, offsets, **options)

    batch = ops.collate(labels, offsets, torch.arange(4), torch.arange(5), **options)
    assert counts.equal((batch.labels != -100).sum(dim=1))
    assert starts.tolist() == [False, True, False, False]
    torch.library.opcheck(OPS.label_counts.default, (labels, offsets), options)


# ---- plan and microbatch ----

CONFIG = '{"sequence_len": 8, "micro_batch_size": 2, "world_size": 2}'
LENGTHS = ints(6, 11, 2, 8, 4, 4, 1, 7, 3, 5, 2, 2, 8, 8, 3, 1, 8, 8, 8, 8)


def test_plan_and_microbatch_give_every_rank_its_rows():
    plan = ops.plan(LENGTHS, None, None, CONFIG)

    seen = []
    for rank in range(2):
        for k in range((len(plan.batch_offsets) - 1) // 2):
            index, row_offsets = ops.microbatch(*plan[:3], 2, rank, k)
            assert row_offsets[0] == 0
            assert row_offsets[-1] == len(index)
            assert LENGTHS[index].sum() <= 16
            seen += index.tolist()
    assert len(seen) > 0
    assert sorted(seen) == sorted(plan.index.tolist())
    assert len(set(seen)) == len(seen)
    assert 1 not in seen, "over-long"


def test_plan_and_microbatch_pass_opcheck():
    counts, starts = LENGTHS // 2, LENGTHS > 3
    torch.library.opcheck(OPS.plan.default, (LENGTHS, counts, starts, CONFIG, 3, False))
    torch.library.opcheck(OPS.plan.default, (LENGTHS, None, None, CONFIG, 0, True))

    plan = ops.plan(LENGTHS, counts, starts, CONFIG)
    torch.library.opcheck(OPS.microbatch.default, (*plan[:3], 2, 1, 0))


def test_plan_reads_strided_lengths_of_any_integer_dtype():
    expected = ops.plan(LENGTHS, None, None, CONFIG)

    for lengths in (strided(LENGTHS), LENGTHS.to(torch.uint8), strided(LENGTHS.int())):
        found = ops.plan(lengths, None, None, CONFIG)
        assert all(map(torch.equal, expected, found))


# ---- refusals: the class and the whole sentence ----

TOKENS, OFFSETS, INDEX, ROWS = one_row(3, 2)
BIG = torch.iinfo(torch.int64).max

REFUSALS = {
    "float tokens": (
        lambda: ops.collate(TOKENS.float(), OFFSETS, INDEX, ROWS),
        TypeError,
        "tokens has dtype torch.float32, but must be torch.int32 or torch.int64",
    ),
    "short tokens": (
        lambda: ops.collate(TOKENS.short(), OFFSETS, INDEX, ROWS),
        TypeError,
        "tokens has dtype torch.int16, but must be torch.int32 or torch.int64",
    ),
    "unsigned tokens": (
        lambda: ops.collate(TOKENS.to(torch.uint16), OFFSETS, INDEX, ROWS),
        TypeError,
        "tokens has dtype torch.uint16, but must be torch.int32 or torch.int64",
    ),
    "float offsets": (
        lambda: ops.collate(TOKENS, OFFSETS.double(), INDEX, ROWS),
        TypeError,
        "offsets has dtype torch.float64, but must be an integer dtype such as torch.int64",
    ),
    "bool index": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX.bool(), ROWS),
        TypeError,
        "index has dtype torch.bool, but must be an integer dtype such as torch.int64",
    ),
    "half row_offsets": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX, ROWS.half()),
        TypeError,
        "row_offsets has dtype torch.float16, but must be an integer dtype such as torch.int64",
    ),
    "float labels": (
        lambda: ops.collate(*one_row(3, 2), labels=TOKENS.float()),
        TypeError,
        "labels has dtype torch.float32, but must be torch.int32 or torch.int64",
    ),
    "two-dimensional tokens": (
        lambda: ops.collate(TOKENS[None], OFFSETS, INDEX, ROWS),
        ValueError,
        "tokens has shape [1, 5], but must be one-dimensional",
    ),
    "scalar index": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX[0], ROWS),
        ValueError,
        "index has shape [], but must be one-dimensional",
    ),
    "offsets on meta": (
        lambda: ops.collate(TOKENS, OFFSETS.to("meta"), INDEX, ROWS),
        ValueError,
        "multipack::collate runs on the CPU, but offsets is on meta: "
        "move it there with .cpu(), and the results back",
    ),
    "sparse tokens": (
        lambda: ops.collate(TOKENS.to_sparse(), OFFSETS, INDEX, ROWS),
        TypeError,
        "multipack::collate needs dense tensors, but tokens has layout Sparse: "
        "convert it with .to_dense()",
    ),
    "a sample on meta": (
        lambda: ops.collate_list([TOKENS, TOKENS.to("meta")], ROWS),
        ValueError,
        "multipack::collate_list runs on the CPU, but input_ids[1] is on meta: "
        "move it there with .cpu(), and the results back",
    ),
    "lengths on meta": (
        lambda: ops.plan(LENGTHS.to("meta"), None, None, CONFIG),
        ValueError,
        "multipack::plan runs on the CPU, but lengths is on meta: "
        "move it there with .cpu(), and the results back",
    ),
    "index too large": (
        lambda: ops.collate(TOKENS, OFFSETS, ints(0, 2), ROWS),
        IndexError,
        "index[1] is 2, but samples are numbered from 0 and there are 2",
    ),
    "negative index": (
        lambda: ops.collate(TOKENS, OFFSETS, ints(-1, 0), ROWS),
        IndexError,
        "index[0] is -1, but samples are numbered from 0 and there are 2",
    ),
    "falling offsets": (
        lambda: ops.collate(TOKENS, ints(0, 4, 3), INDEX, ROWS),
        ValueError,
        "offsets[2] is 3, less than the 4 before it: offsets may not fall",
    ),
    "offsets past the tokens": (
        lambda: ops.collate(TOKENS, ints(0, 3, 6), INDEX, ROWS),
        ValueError,
        "offsets[2] is 6, past the end of the 5 tokens",
    ),
    "negative offset": (
        lambda: ops.collate(TOKENS, ints(-1, 3, 5), INDEX, ROWS),
        ValueError,
        "offsets[0] is -1, but an offset is 0 or more",
    ),
    "no offsets": (
        lambda: ops.collate(TOKENS, ints(), INDEX, ROWS),
        ValueError,
        "offsets is empty, but has one entry more than what it delimits: [0] for nothing",
    ),
    "an enormous offset": (
        lambda: ops.collate(TOKENS, ints(0, BIG, BIG), INDEX, ROWS),
        ValueError,
        f"offsets[2] is {BIG}, past the end of the 5 tokens",
    ),
    "row_len too large": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX, ROWS, row_len=2**31),
        ValueError,
        "a batch of shape (1, 2147483648) has more tokens than the 2147483647 that int32 offsets "
        "can count; use fewer or shorter rows",
    ),
    "row_len that overflows": (
        lambda: ops.collate(TOKENS, OFFSETS, ints(0, 1), ints(0, 1, 2), row_len=BIG),
        ValueError,
        f"a batch of shape (2, {BIG}) has more tokens than the 2147483647 that int32 offsets "
        "can count; use fewer or shorter rows",
    ),
    "mask too large": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX, ROWS, row_len=131072, attention_mask="bool"),
        ValueError,
        "a mask of shape (1, 1, 131072, 131072) takes 17179869184 bytes, more than the 8589934592 "
        "that a mask may take; use attention that reads cu_seqlens, or fewer or shorter rows",
    ),
    "unknown tail": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX, ROWS, padded_tail="cut"),
        ValueError,
        'padded_tail is "cut", but must be "own", "last" or "none"',
    ),
    "unknown mask": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX, ROWS, attention_mask="dense"),
        ValueError,
        'attention_mask is "dense", but must be "none", "bool" or "additive"',
    ),
    "a bool mask of floats": (
        lambda: ops.collate(
            TOKENS, OFFSETS, INDEX, ROWS, attention_mask="bool", mask_dtype=torch.float16
        ),
        ValueError,
        'mask_dtype is torch.float16 with attention_mask "bool", but must be torch.bool for '
        '"bool", a float dtype for "additive"',
    ),
    "a mask of integers": (
        lambda: ops.collate(
            TOKENS, OFFSETS, INDEX, ROWS, attention_mask="additive", mask_dtype=torch.int32
        ),
        TypeError,
        "mask_dtype is torch.int32, but must be torch.bool, torch.float32, torch.bfloat16 or "
        "torch.float16",
    ),
    "no window": (
        lambda: ops.block_mask(SEGMENT_IDS, window=0),
        ValueError,
        "window is 0, but must be 1 or more",
    ),
    "no window for no mask": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX, ROWS, window=-1),
        ValueError,
        "window is -1, but must be 1 or more",
    ),
    "float8 mask": (
        lambda: ops.block_mask(SEGMENT_IDS, dtype=torch.float8_e5m2),
        TypeError,
        "dtype is torch.float8_e5m2, but must be torch.bool, torch.float32, torch.bfloat16 or "
        "torch.float16",
    ),
    "float segment ids": (
        lambda: ops.block_mask(SEGMENT_IDS.float()),
        TypeError,
        "segment_ids has dtype torch.float32, but must be an integer dtype such as torch.int64",
    ),
    "a segment id beyond int64": (
        lambda: ops.block_mask(torch.tensor([[1, 2], [2**63, 3]], dtype=torch.uint64)),
        ValueError,
        "segment_ids[2] is 9223372036854775808, but must be 9223372036854775807 or less",
    ),
    "sparse segment ids": (
        lambda: ops.block_mask(SEGMENT_IDS.to_sparse()),
        TypeError,
        "multipack::block_mask needs dense tensors, but segment_ids has layout Sparse: "
        "convert it with .to_dense()",
    ),
    "segment ids of three dimensions": (
        lambda: ops.block_mask(SEGMENT_IDS[None]),
        ValueError,
        "segment_ids has shape [1, 2, 8], but must be (length,) or (rows, length)",
    ),
    "block mask too large": (
        lambda: ops.block_mask(ints(1).expand(131072)),
        ValueError,
        "a mask of shape (1, 1, 131072, 131072) takes 17179869184 bytes, more than the 8589934592 "
        "that a mask may take; use attention that reads cu_seqlens, or fewer or shorter rows",
    ),
    "additive block mask too large": (
        lambda: ops.block_mask(ints(1).expand(2, 32769), dtype=torch.float32),
        ValueError,
        "a mask of shape (2, 1, 32769, 32769) takes 8590458888 bytes, more than the 8589934592 "
        "that a mask may take; use attention that reads cu_seqlens, or fewer or shorter rows",
    ),
    "three-dimensional positions": (
        lambda: ops.boundaries(torch.zeros(3, 1, 4, dtype=torch.int64)),
        ValueError,
        "position_ids has shape [3, 1, 4], but must be (length,) or (rows, length)",
    ),
    "float positions": (
        lambda: ops.boundaries(torch.zeros(3)),
        TypeError,
        "position_ids has dtype torch.float32, but must be an integer dtype such as torch.int64",
    ),
    "an empty list": (
        lambda: ops.collate_list([], ROWS),
        ValueError,
        "row_offsets ends at 2, but input_ids has 0 tensors: the last row ends there",
    ),
    # C39: of an axis for time, height and width there would be offsets beyond the tokens.
    "positions of three dimensions": (
        lambda: ops.boundaries(torch.arange(4).expand(3, 1, 4)),
        ValueError,
        "position_ids has shape [3, 1, 4], but must be (length,) or (rows, length)",
    ),
    "a sample of two dimensions": (
        lambda: ops.collate_list([TOKENS, TOKENS[None]], ROWS),
        ValueError,
        "input_ids[1] has shape [1, 5], but must be one-dimensional",
    ),
    "a sample of floats": (
        lambda: ops.collate_list([TOKENS, TOKENS.float()], ROWS),
        TypeError,
        "input_ids[1] has dtype torch.float32, but must be torch.int32 or torch.int64",
    ),
    "too few labels": (
        lambda: ops.collate_list([TOKENS, TOKENS], ROWS, labels=[TOKENS, TOKENS[:4]]),
        ValueError,
        "labels[1] has 4 entries, but input_ids[1] has 5: "
        "give one label per token, -100 where it is not supervised",
    ),
    "labels for some": (
        lambda: ops.collate_list([TOKENS, TOKENS], ROWS, labels=[TOKENS]),
        ValueError,
        "labels has 1 tensors, but input_ids has 2: give one per sample, or no labels at all",
    ),
    "a pad with a fraction": (
        lambda: ops.pack_values(TOKENS, OFFSETS, INDEX, ROWS, pad=0.5),
        ValueError,
        "pad is 0.5, which torch.int64 cannot hold",
    ),
    "a pad out of range": (
        lambda: ops.pack_values(TOKENS.to(torch.uint8), OFFSETS, INDEX, ROWS, pad=-1),
        ValueError,
        "pad is -1, which torch.uint8 cannot hold",
    ),
    "a pad that becomes infinite": (
        lambda: ops.pack_values(TOKENS.half(), OFFSETS, INDEX, ROWS, pad=1e9),
        ValueError,
        "pad is 1e+09, which torch.float16 cannot hold",
    ),
    "a complex pad for floats": (
        lambda: ops.pack_values(TOKENS.float(), OFFSETS, INDEX, ROWS, pad=1 + 2j),
        ValueError,
        "pad is (1,2), which torch.float32 cannot hold",
    ),
    "a complex pad for integers": (
        lambda: ops.pack_values(TOKENS, OFFSETS, INDEX, ROWS, pad=1 + 2j),
        ValueError,
        "pad is (1,2), which torch.int64 cannot hold",
    ),
    "values of two dimensions": (
        lambda: ops.pack_values(TOKENS[None], OFFSETS, INDEX, ROWS),
        ValueError,
        "values has shape [1, 5], but must be one-dimensional",
    ),
    "a negative length": (
        lambda: ops.plan(ints(4, -1), None, None, CONFIG),
        ValueError,
        "sample 1 has length -1, but a length is 0 or more tokens",
    ),
    "a length beyond int64": (
        lambda: ops.plan(torch.tensor([4, 2**63 + 5], dtype=torch.uint64), None, None, CONFIG),
        ValueError,
        "lengths[1] is 9223372036854775813, but must be 9223372036854775807 or less",
    ),
    "float lengths": (
        lambda: ops.plan(LENGTHS.float(), None, None, CONFIG),
        TypeError,
        "lengths has dtype torch.float32, but must be an integer dtype such as torch.int64",
    ),
    "integer starts": (
        lambda: ops.plan(LENGTHS, LENGTHS, LENGTHS, CONFIG),
        TypeError,
        "label_starts has dtype torch.int64, but must be torch.bool",
    ),
    "a negative epoch": (
        lambda: ops.plan(LENGTHS, None, None, CONFIG, -1),
        ValueError,
        "epoch is -1, but must be 0 or more",
    ),
    "an unknown setting": (
        lambda: ops.resolve_config('{"sequence_length": 8}'),
        ValueError,
        "unknown setting 'sequence_length', did you mean 'sequence_len'?",
    ),
    "an unknown setting with a NUL": (
        lambda: ops.resolve_config('{"sequence\\u0000_len\\n": 8}'),
        ValueError,
        "unknown setting 'sequence\\0_len\\n', did you mean 'sequence_len'?",
    ),
    "a setting with a NUL": (
        lambda: ops.resolve_config('{"padded_tail": "ow\\u0000n"}'),
        ValueError,
        'padded_tail is "ow\\u0000n", but must be one of own, last, none',
    ),
    "a microbatch of an empty plan": (
        lambda: ops.microbatch(ints(), ints(0), ints(0), 2, 1, 0),
        IndexError,
        "k is 0, but the plan is empty: it has no microbatches",
    ),
    "a rank that does not exist": (
        lambda: ops.microbatch(INDEX, ints(0, 1, 2), ints(0, 1, 2), 2, 2, 0),
        IndexError,
        "rank is 2, but must be from 0 to 1",
    ),
}


@pytest.mark.parametrize(("call", "error", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_have_the_right_class_and_sentence(call, error, sentence):
    with pytest.raises(error) as caught:
        call()

    assert type(caught.value) is error
    assert str(caught.value) == sentence
    assert ops.collate(TOKENS, OFFSETS, INDEX, ROWS).input_ids.equal(TOKENS[None]), "goes on"


@pytest.mark.parametrize(
    "name",
    [
        "no window",
        "float8 mask",
        "float segment ids",
        "sparse segment ids",
        "segment ids of three dimensions",
        "block mask too large",
        "additive block mask too large",
    ],
)
def test_block_mask_of_other_devices_refuses_the_same(name, monkeypatch):
    call, error, sentence = REFUSALS[name]
    elsewhere = SimpleNamespace(block_mask=SimpleNamespace(default=block_mask_elsewhere))
    monkeypatch.setattr(ops, "_ops", elsewhere)

    with pytest.raises(error) as caught:
        call()

    assert str(caught.value) == sentence
