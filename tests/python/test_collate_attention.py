"""What the collator gives each kind of attention, and which combinations it refuses."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from collating import Samples, collate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader

from multipack import Collator, flex_block_mask

NAMES = {
    "flash": ["cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k"],
    "multipack": ["cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k"],
    "varlen": ["cu_seq_q", "max_q", "cu_seq_k", "max_k"],
}

BLOCKS = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [0, 0, 0, 1, 1, 0],
    [0, 0, 0, 0, 0, 1],
]


def test_a_bool_mask_allows_each_sample_its_own_past(samples: Samples) -> None:
    batch = collate(samples([3, 2]), "bool", pad_to_multiple_of=6)

    assert batch["attention_mask"].dtype == torch.bool
    assert batch["attention_mask"].int().tolist() == [[BLOCKS]]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_an_additive_mask_is_0_or_the_minimum(samples: Samples, dtype: torch.dtype | None) -> None:
    batch = collate(samples([3, 2]), "additive", pad_to_multiple_of=6, dtype=dtype)

    mask = batch["attention_mask"]
    assert mask.dtype == (dtype or torch.float32)
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(mask.dtype).min}
    assert (mask == 0).int().tolist() == [[BLOCKS]]


@pytest.mark.parametrize("attention", ["bool", "additive"])
def test_masked_attention_is_that_of_each_sample_alone(samples: Samples, attention: str) -> None:
    """In the second row too, and whatever the padded tail holds."""
    a, b, c, d = samples([3, 2, 4, 2])
    rows = [[a, b], [c, d]]
    mask = collate(rows, attention, multipack_real_batches=True, pad_to_multiple_of=8)[
        "attention_mask"
    ]
    query, key, value = torch.randn(3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(0))

    packed = scaled_dot_product_attention(query, key, value, attn_mask=mask)

    assert torch.isfinite(packed).all()
    for row, borders in enumerate(([0, 3, 5], [0, 4, 6])):
        for start, end in itertools.pairwise(borders):
            alone = scaled_dot_product_attention(
                *(x[row : row + 1, :, start:end] for x in (query, key, value)), is_causal=True
            )
            torch.testing.assert_close(packed[row : row + 1, :, start:end], alone)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_attention_over_padding_is_finite_forward_and_backward(
    samples: Samples, dtype: torch.dtype, backend: SDPBackend
) -> None:
    """A query without any key is NaN in some kernels, and spreads in the next layer."""
    kind = "bool" if dtype == torch.bool else "additive"
    mask = collate(
        samples([3]), kind, dtype=None if dtype == torch.bool else dtype, pad_to_multiple_of=5
    )["attention_mask"]
    allowed = mask if dtype == torch.bool else mask == 0
    assert allowed.any(-1).all()
    x = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    x = x.to(torch.float32 if dtype == torch.bool else dtype).requires_grad_()

    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(x, x, x, attn_mask=mask)
    out.float().sum().backward()

    assert torch.isfinite(out).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_sample_numbers_are_never_called_a_mask(samples: Samples) -> None:
    """Cast to bool by an attention function, samples 1 and 2 would be one."""
    for attention in ("none", *NAMES):
        batch = collate(samples([3, 2]), attention, pad_to_multiple_of=6, outputs=["segment_ids"])
        assert "attention_mask" not in batch
        assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0]]


@pytest.mark.parametrize("attention", ["bool", "additive"])
def test_a_mask_has_the_rows_and_the_width_of_its_batch(samples: Samples, attention: str) -> None:
    """C60: never that of the sum of the samples where rows are given, nor the reverse."""
    a, b, c, d = samples([3, 2, 4, 2])

    one = collate([a, b], attention)
    two = collate([[a, b], [c, d]], attention, multipack_real_batches=True)

    assert (one["input_ids"].shape, one["attention_mask"].shape) == ((1, 5), (1, 1, 5, 5))
    assert (two["input_ids"].shape, two["attention_mask"].shape) == ((2, 6), (2, 1, 6, 6))


def test_a_window_limits_the_mask(samples: Samples) -> None:
    batch = collate(samples([3]), "bool", window=2)

    assert batch["attention_mask"].int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]]


def test_an_all_ones_mask_never_comes_out(samples: Samples) -> None:
    """It is taken for "no padding" by models, which then attend across samples."""
    marked = [
        {**sample, "attention_mask": [1] * len(sample["input_ids"])} for sample in samples([3, 2])
    ]

    assert "attention_mask" not in collate(marked)
    assert "attention_mask" not in collate(marked, "flash")
    assert collate(marked, "bool")["attention_mask"].dim() == 4


@pytest.mark.parametrize("attention", NAMES)
def test_attention_by_borders_gets_them_and_plain_ints(samples: Samples, attention: str) -> None:
    batch = collate(samples([3, 2]), attention)

    assert list(batch) == ["input_ids", "labels", "position_ids", *NAMES[attention]]
    for borders, longest in (NAMES[attention][:2], NAMES[attention][2:]):
        offsets = batch[borders]
        assert (offsets.dtype, offsets.tolist()) == (torch.int32, [0, 3, 5])
        assert offsets.is_contiguous()
        assert type(batch[longest]) is int
        assert batch[longest] == 3


def test_varlen_names_are_those_of_torch() -> None:
    assert set(NAMES["varlen"]) <= set(inspect.signature(varlen_attn).parameters)


@pytest.mark.parametrize(
    ("keys", "borders"),
    [
        ({}, [0, 3, 5, 8, 12, 14, 16]),
        ({"align_samples_to": 4}, [0, 4, 8, 12, 16]),
        ({"padded_tail": "last"}, [0, 3, 8, 12, 16]),
    ],
)
def test_flex_attention_gets_the_blocks_of_the_same_segments(
    samples: Samples, keys: dict[str, Any], borders: list[int]
) -> None:
    a, b, c, d = samples([3, 2, 4, 2])
    batch = collate(
        [[a, b], [c, d]], "flex", multipack_real_batches=True, pad_to_multiple_of=8, **keys
    )

    mask = batch["attention_mask"]
    assert isinstance(mask, BlockMask)
    assert mask.shape == (2, 1, 8, 8)
    expected = flex_block_mask(torch.tensor(borders), rows=2)
    dense = [create_mask(made.mask_mod, 2, 1, 8, 8, "cpu") for made in (mask, expected)]
    assert torch.equal(*dense)


def test_flex_attention_covers_a_tail_that_borders_leave_out(samples: Samples) -> None:
    batch = collate(samples([3, 2]), "flex", pad_to_multiple_of=8, padded_tail="none")

    mask = create_mask(batch["attention_mask"].mask_mod, 1, 1, 8, 8, "cpu")
    expected = collate(samples([3, 2]), "bool", pad_to_multiple_of=8)["attention_mask"]
    assert torch.equal(mask, expected)


def test_workers_hand_block_masks_over(samples: Samples) -> None:
    """A mask function that is defined inside another cannot leave its process."""
    loader = DataLoader(
        samples([3, 2, 4, 2]),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=1,
        collate_fn=Collator(attention="flex", window=2),
    )

    mask = create_mask(next(iter(loader))["attention_mask"].mask_mod, 1, 1, 5, 5, "cpu")

    expected = collate(samples([3, 2]), "bool", window=2)["attention_mask"]
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("attention", ["bool", "flex"])
@pytest.mark.parametrize("window", [None, 2])
def test_attention_that_is_not_causal_sees_the_whole_sample(
    samples: Samples, attention: str, window: int | None
) -> None:
    batch = collate(samples([3, 2]), attention, causal=False, window=window)

    mask = batch["attention_mask"]
    if attention == "flex":
        mask = create_mask(mask.mask_mod, 1, 1, 5, 5, "cpu")
    far = int(window is None)
    assert mask.int().tolist() == [
        [
            [
                [1, 1, far, 0, 0],
                [1, 1, 1, 0, 0],
                [far, 1, 1, 0, 0],
                [0, 0, 0, 1, 1],
                [0, 0, 0, 1, 1],
            ]
        ]
    ]


@pytest.mark.parametrize("attention", NAMES)
def test_borders_of_constant_length_repeat_their_end(samples: Samples, attention: str) -> None:
    """A CUDA graph replays one shape, and the longest length is an int in it."""
    collator = Collator(
        attention=attention,
        max_segments=5,
        sequence_len=8,
        pad_to_sequence_len=True,
        outputs=["cu_seqlens"],
    )
    borders, longest = NAMES[attention][:2]

    for lengths, expected in (([3, 2], [0, 3, 5, 8, 8, 8]), ([1, 4, 1], [0, 1, 5, 6, 8, 8])):
        batch = collator(samples(lengths))
        assert batch[borders].tolist() == batch["cu_seqlens"].tolist() == expected
        assert batch[borders].dtype == torch.int32
        assert batch[longest] == 8

    with pytest.raises(ValueError) as caught:
        collator(samples([1] * 6))
    assert str(caught.value) == (
        "the microbatch has 7 segments, padded tails among them, more than max_segments 5: raise "
        "it, or set sample_packing_bin_size"
    )


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"attention": "sdpa"}, "attention is 'sdpa', but must be one of none, bool, additive, "),
        (
            {"attention": "additive", "dtype": torch.float64},
            "dtype is torch.float64, but an additive mask is of torch.float32, torch.bfloat16, "
            "torch.float16",
        ),
        (
            {"attention": "bool", "dtype": torch.float16},
            "dtype is that of an additive mask, but attention is 'bool'",
        ),
        (
            {"attention": "flash", "window": 4},
            "window limits a mask, but attention='flash' makes none; set the window in the model",
        ),
        (
            {"attention": "bool", "max_segments": 4},
            "max_segments is the number of segments in boundaries, but attention='bool' has none; "
            "ask for outputs=('cu_seqlens',)",
        ),
        (
            {"attention": "none", "outputs": ["positions"]},
            "outputs has 'positions', but must be of cu_seqlens, cu_seqlens_padded, max_seqlen, "
            "segment_ids, seq_idx, shift_labels",
        ),
        (
            {"attention": "none", "pad_values": {"labels": 0}},
            "pad_values has 'labels', but the padding of input_ids is pad_token_id, and that of "
            "labels is -100",
        ),
        (
            {"attention": "flash", "causal": False, "align_samples_to": 4},
            "align_samples_to 4 leaves padding behind the samples, which they see if attention is "
            "not causal and attention='flash'; use a mask",
        ),
        ({"attention": "none", "split": "test"}, "split is 'test', but must be 'train' or 'eval'"),
    ],
)
def test_what_cannot_be_made_is_refused_before_the_first_batch(
    keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Collator(**keys)

    assert str(caught.value).startswith(text)


def test_attention_has_no_default() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'attention'"):
        Collator()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        (
            {"pad_token_id": None},  # as of a tokenizer that has none
            TypeError,
            "pad_token_id is None, but must be an integer; where a tokenizer has none, any id "
            "will do: padding is neither seen by samples nor trained on",
        ),
        ({"pad_token_id": 0.0}, TypeError, "pad_token_id is 0.0, but must be an integer"),
        ({"pad_token_id": True}, TypeError, "pad_token_id is True, but must be an integer"),
        ({"window": 0}, ValueError, "window is 0, but must be 1 or more"),
        ({"position_start": -1}, ValueError, "position_start is -1, but must be 0 or more"),
        (
            {"outputs": "seq_idx"},
            TypeError,
            "outputs is 'seq_idx', but must be a list of names: ['seq_idx']",
        ),
        ({"window": 1.5}, TypeError, "window is 1.5, but must be an integer"),
        (
            {"pad_token_id": 2**63},
            ValueError,
            "pad_token_id is 9223372036854775808, which does not fit into 64 bits",
        ),
        (
            {"pad_values": {"kind": -(2**63) - 1}},
            ValueError,
            "pad_values['kind'] is -9223372036854775809, which does not fit into 64 bits",
        ),
    ],
)
def test_numbers_that_are_none_are_refused(
    keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        Collator(attention="bool", **keys)

    assert str(caught.value) == text
