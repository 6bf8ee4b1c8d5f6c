"""collate, collate_list and pack_values against batches made by hand, and opcheck on the same."""

import math
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from by_hand import (
    COLLATE_SAMPLES,
    FIGURE,
    OPS,
    TWO_ROWS,
    assert_batches_equal,
    ints,
    one_row,
    reference_collate,
    strided,
)
from torch import Tensor

from multipack import ops


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


def test_pack_values_of_complex_numbers_aligned_to_their_parts():
    memory = bytearray(torch.arange(10, dtype=torch.float64).numpy().tobytes())
    values = torch.frombuffer(memory, dtype=torch.complex128, offset=8, count=4)
    assert values.data_ptr() % 16 == 8

    packed = ops.pack_values(values, ints(0, 4), ints(0), ints(0, 1), row_len=4, pad=1)

    assert packed.tolist() == [[1 + 2j, 3 + 4j, 5 + 6j, 7 + 8j]]


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
