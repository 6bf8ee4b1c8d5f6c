"""plan, microbatch and label_counts."""

import pytest
import torch
from by_hand import CONFIG, LENGTHS, OPS, ints, strided

from multipack import ops


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
