"""The ops under torch.compile and torch.export, without a graph break."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multipack import ops

TOKENS = torch.arange(1, 31)
OFFSETS = torch.tensor([0, 3, 5, 9, 14, 15, 22, 30])
EMBEDDING = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(0))


def attend(index: Tensor, row_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Go from samples to attention, in one graph."""
    batch = ops.collate(TOKENS, OFFSETS, index, row_offsets, row_len=16)
    weights = ops.pack_values(TOKENS * 0.5, OFFSETS, index, row_offsets, row_len=16)
    mask = ops.block_mask(batch.segment_ids)
    hidden = EMBEDDING[batch.input_ids].transpose(1, 2)
    out = scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
    return out * weights[:, None, :, None], batch.cu_seqlens * 2


BATCHES = [
    (torch.tensor([0, 1, 2]), torch.tensor([0, 3])),
    (torch.tensor([3, 4, 5, 0]), torch.tensor([0, 2, 4])),
    (torch.tensor([6, 0, 1, 5, 2]), torch.tensor([0, 2, 5])),
]


@pytest.mark.parametrize("dynamic", [None, True])
def test_samples_to_attention_is_one_graph(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")

    for batch in BATCHES:
        for expected, found in zip(attend(*batch), compiled(*batch), strict=True):
            torch.testing.assert_close(found, expected)


def test_the_default_backend_gives_the_same():
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True)

    for expected, found in zip(attend(*BATCHES[0]), compiled(*BATCHES[0]), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("attention_mask", ["none", "bool", "additive"])
def test_collate_with_an_open_row_length_is_one_graph(attention_mask):
    torch.compiler.reset()

    def pack(index: Tensor, row_offsets: Tensor) -> tuple[Tensor, Tensor]:
        batch = ops.collate(TOKENS, OFFSETS, index, row_offsets, attention_mask=attention_mask)
        return batch.input_ids * 2, batch.attention_mask

    compiled = torch.compile(pack, fullgraph=True, backend="aot_eager")

    for batch in BATCHES:
        for expected, found in zip(pack(*batch), compiled(*batch), strict=True):
            assert found.equal(expected)


def test_the_other_ops_are_one_graph():
    torch.compiler.reset()
    config = '{"sequence_len": 16}'

    def plan_and_pack(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plan = ops.plan(lengths, None, None, config)
        index, row_offsets = ops.microbatch(*plan[:3], 1, 0, 0)
        batch = ops.collate(TOKENS, OFFSETS, index, row_offsets, row_len=16)
        listed = ops.collate_list([TOKENS[:3], TOKENS[3:]], torch.tensor([0, 2]), row_len=32)
        counts, _ = ops.label_counts(TOKENS, OFFSETS)
        return batch.labels + listed.labels[:, :16], ops.boundaries(batch.position_ids), counts

    compiled = torch.compile(plan_and_pack, fullgraph=True, backend="aot_eager")

    for expected, found in zip(
        plan_and_pack(OFFSETS.diff()), compiled(OFFSETS.diff()), strict=True
    ):
        assert found.equal(expected)


def collate_of(index: Tensor, row_offsets: Tensor) -> tuple[Tensor, ...]:
    batch = ops.collate(TOKENS, OFFSETS, index, row_offsets, row_len=16)
    values = ops.pack_values(TOKENS * 0.5, OFFSETS, index, row_offsets, row_len=16, pad=-1)
    return batch.input_ids, batch.labels, batch.cu_seqlens, values


def masks_of(index: Tensor, row_offsets: Tensor) -> tuple[Tensor, ...]:
    batch = ops.collate(
        TOKENS, OFFSETS, index, row_offsets, row_len=16, attention_mask="additive", window=3
    )
    mask = ops.block_mask(batch.segment_ids, causal=False, dtype=torch.bfloat16)
    return batch.attention_mask, mask, ops.boundaries(batch.position_ids)


def plan_of(index: Tensor, row_offsets: Tensor) -> tuple[Tensor, ...]:
    labels = torch.where(TOKENS % 2 == 0, TOKENS, -100)
    counts, starts = ops.label_counts(labels, OFFSETS)
    plan = ops.plan(OFFSETS.diff(), counts, starts, '{"sequence_len": 16}')
    index, row_offsets = ops.microbatch(*plan[:3], 1, 0, 0)
    batch = ops.collate(TOKENS, OFFSETS, index, row_offsets, row_len=16, labels=labels)
    return batch.labels, plan.index, plan.report


def collate_list_of(index: Tensor, row_offsets: Tensor) -> tuple[Tensor, ...]:
    batch = ops.collate_list([index, row_offsets], torch.tensor([0, 2]), row_len=16)
    return batch.input_ids, batch.max_seqlen


@pytest.mark.parametrize("function", [collate_of, masks_of, plan_of, collate_list_of])
def test_an_exported_program_takes_another_batch_after_loading(function, tmp_path):
    class Program(torch.nn.Module):
        def forward(self, index, row_offsets):
            return function(index, row_offsets)

    auto = {0: torch.export.Dim.AUTO}
    exported = torch.export.export(
        Program(), BATCHES[1], dynamic_shapes={"index": auto, "row_offsets": auto}
    )
    torch.export.save(exported, tmp_path / "program.pt2")

    loaded = torch.export.load(tmp_path / "program.pt2").module()

    for batch in BATCHES[1:]:
        for expected, found in zip(function(*batch), loaded(*batch), strict=True):
            assert found.equal(expected)


def test_tracing_refuses_other_devices_in_the_words_of_the_op():
    torch.compiler.reset()
    compiled = torch.compile(ops.boundaries, fullgraph=True, backend="eager")

    with pytest.raises(Exception, match="boundaries runs on the CPU, but position_ids is on meta"):
        compiled(torch.zeros(3, dtype=torch.int64, device="meta"))
