"""block_mask and boundaries against plain torch, on the CPU and on other devices."""

import resource

import pytest
import torch
from by_hand import (
    COLLATE_SAMPLES,
    OPS,
    SEGMENT_IDS,
    block_mask_elsewhere,
    ints,
    one_row,
    reference_mask,
)
from torch.utils._python_dispatch import TorchDispatchMode

from multipack import ops

# ---- block_mask ----

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


@pytest.mark.parametrize(
    ("dtype", "row_len"),
    [(torch.bool, 6001), (torch.bfloat16, 4100), (torch.float16, 4100), (torch.float32, 2900)],
)
def test_block_mask_of_a_size_that_comes_in_huge_pages(dtype, row_len):
    """From 32 MiB on, it lies in memory that the last such mask left; the mask is the same."""
    ids = torch.ones(row_len, dtype=torch.int32)
    ids[2500:] = 2
    expected = reference_mask(ids[None], True, 1000, dtype)

    for _ in range(2):
        mask = ops.block_mask(ids, window=1000, dtype=dtype)

        assert mask.nbytes > 32 << 20
        assert mask.equal(expected)
        mask.fill_(1)  # and leave that behind
        del mask


def test_block_masks_in_huge_pages_share_no_memory():
    ids = torch.zeros(6001, dtype=torch.int32)
    others = [ops.block_mask(ids) for _ in range(3)]

    others.pop().zero_()
    ops.block_mask(ids).zero_()

    assert all(mask.equal(reference_mask(ids[None], True, None, torch.bool)) for mask in others)


def test_block_mask_in_huge_pages_is_a_tensor_like_others():
    mask = ops.block_mask(torch.zeros(6001, dtype=torch.int32))

    assert mask.is_contiguous()
    assert mask.logical_not_().sum() == 6001 * 3000
    assert mask.resize_(6001 * 6002).numel() == 6001 * 6002
    assert mask[: 6001 * 6001].sum() == 6001 * 3000


def test_block_mask_in_huge_pages_gives_its_memory_back():
    ids = torch.zeros(6001, dtype=torch.int32)
    ops.block_mask(ids)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):  # of 36 MB each
        ops.block_mask(ids)

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, f"{grown} kB more than before"


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
