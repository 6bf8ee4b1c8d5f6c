"""What the ops refuse: the class of each error, and the whole sentence."""

from types import SimpleNamespace

import pytest
import torch
from by_hand import CONFIG, LENGTHS, SEGMENT_IDS, block_mask_elsewhere, ints, one_row

from multipack import ops

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
    "an unknown option": (
        lambda: ops.collate(TOKENS, OFFSETS, INDEX, ROWS, row_length=8),
        TypeError,
        "there is no option 'row_length', but labels, row_len, max_sample_len, pad_to_multiple_of, "
        "align_samples_to, pad_token_id, position_start, mask_first_label, padded_tail, "
        "attention_mask, causal, window, mask_dtype",
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
