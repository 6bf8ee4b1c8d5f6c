"""Block lists: those of torch's `create_block_mask`, and attention that follows them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

from multipack import flex_block_mask

LISTS = [
    side + kind
    for side in ("kv_", "full_kv_", "q_", "full_q_")
    for kind in ("num_blocks", "indices")
]


def borders(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def assert_as_torch_makes_it(cu_seqlens: torch.Tensor, rows: int, **options: Any) -> None:
    """Compare every list, entry by entry and behind their ends too."""
    mask = flex_block_mask(cu_seqlens, rows=rows, **options)
    causal, window = options.get("causal", True), options.get("window")
    row_len = int(cu_seqlens[-1]) // rows
    ids = torch.repeat_interleave(cu_seqlens.diff()).view(rows, row_len)

    def may_attend(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        allowed = ids[b, q] == ids[b, k]
        if causal:
            allowed = allowed & (k <= q)
        if window is not None:
            allowed = allowed & ((q - k).abs() < window)
        return allowed

    size = options.get("block_size", 128)
    expected = flex.create_block_mask(
        may_attend, rows, None, row_len, row_len, device="cpu", BLOCK_SIZE=size
    )
    assert (mask.shape, mask.BLOCK_SIZE) == (expected.shape, expected.BLOCK_SIZE)
    for name in LISTS:
        ours, theirs = getattr(mask, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), (name, cu_seqlens, options)
    # The mask function too, which decides inside partial blocks.
    dense = [
        flex.create_mask(made.mask_mod, rows, None, row_len, row_len, device="cpu")
        for made in (mask, expected)
    ]
    assert torch.equal(*dense)


def test_lists_are_those_of_torch(seeded: np.random.Generator) -> None:
    for _ in range(10):
        rows, row_len = int(seeded.integers(1, 4)), int(seeded.integers(1, 70))
        lengths: list[int] = []
        for _ in range(rows):
            most = int(seeded.choice([3, 20, 70]))
            left = row_len
            while left > 0:
                lengths.append(min(left, int(seeded.integers(1, most + 1))))
                left -= lengths[-1]
        assert_as_torch_makes_it(
            borders(*lengths),
            rows,
            block_size=int(seeded.choice([1, 2, 3, 8, 16, 64])),
            causal=bool(seeded.random() < 0.6),
            window=seeded.choice([None, 1, 2, 5, 30, 100]),
        )


def test_lists_of_the_usual_block_size_are_those_of_torch() -> None:
    assert_as_torch_makes_it(borders(300, 212), 1)
    assert_as_torch_makes_it(borders(128, 1, 255, 130, 384 - 130), 2)
    assert_as_torch_makes_it(borders(500), 1, window=200)


def test_the_worked_example() -> None:
    mask = flex_block_mask(borders(300, 212))

    assert mask.kv_num_blocks.tolist() == [[[1, 1, 3, 2]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 0, 0]]]
    assert mask.kv_indices[0, 0, 2, :3].tolist() == [0, 1, 2]
    assert mask.shape == (1, 1, 512, 512)


def test_boundaries_padded_with_their_end_change_nothing() -> None:
    cu_seqlens = torch.cat([borders(5, 3), torch.tensor([8, 8], dtype=torch.int32)])

    assert_as_torch_makes_it(cu_seqlens, 1, block_size=4)


@pytest.mark.parametrize("lengths", [[5, 3, 8], [16], [1] * 16])
def test_attention_is_that_of_each_sample_alone(lengths: list[int]) -> None:
    query, key, value = torch.randn(3, 1, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    debug = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, debug, True)  # run op by op instead of compiling for half a minute
        packed = flex.flex_attention(
            query, key, value, block_mask=flex_block_mask(borders(*lengths), block_size=4)
        )

    alone = [
        scaled_dot_product_attention(*parts, is_causal=True)
        for parts in zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, 2))


def test_batches_of_one_shape_share_a_compiled_program() -> None:
    """The lists and the segments are inputs of the program, not constants in it."""
    programs = []

    def count(program: torch.fx.GraphModule, inputs: Any) -> Any:
        programs.append(program)
        return program.forward

    torch._dynamo.reset()
    attend = torch.compile(
        lambda x, mask: flex.flex_attention(x, x, x, block_mask=mask), backend=count, fullgraph=True
    )
    x = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    for lengths in ([5, 3, 8], [4, 12], [2, 2, 2, 10]):
        packed = attend(x, flex_block_mask(borders(*lengths), block_size=4))
        alone = [
            scaled_dot_product_attention(part, part, part, is_causal=True)
            for part in x.split(lengths, 2)
        ]
        torch.testing.assert_close(packed, torch.cat(alone, 2))

    assert len(programs) == 1


def test_a_mask_moves_with_its_segments_and_passes_to_other_processes() -> None:
    """Torch's own `to` leaves what the mask function looks at behind."""
    mask = flex_block_mask(borders(5, 3), block_size=4)

    moved = mask.to("meta")
    assert moved.kv_indices.is_meta
    assert moved.mask_mod(*torch.zeros(4, 2, dtype=torch.int64, device="meta")).is_meta
    copied = pickle.loads(pickle.dumps(mask)).to("cpu")
    assert torch.equal(copied.kv_indices, mask.kv_indices)
    dense = [flex.create_mask(made.mask_mod, 1, 1, 8, 8, "cpu") for made in (mask, copied)]
    assert torch.equal(*dense)


@pytest.mark.parametrize(
    ("cu_seqlens", "options", "kind", "text"),
    [
        (
            torch.tensor([0.0, 3.0]),
            {},
            TypeError,
            "cu_seqlens has dtype torch.float32, but must be int32 or int64",
        ),
        (
            torch.zeros(1, 3, dtype=torch.int32),
            {},
            ValueError,
            "cu_seqlens has shape (1, 3), but must have one dimension, with one entry more than "
            "there are segments",
        ),
        (
            torch.tensor([1, 3]),
            {},
            ValueError,
            "cu_seqlens begins at 1 and has a step of 2, but must begin at 0 and not fall",
        ),
        (
            torch.tensor([0, 3, 2]),
            {},
            ValueError,
            "cu_seqlens begins at 0 and has a step of -1, but must begin at 0 and not fall",
        ),
        (
            torch.tensor([0, 3, 5]),
            {"rows": 2},
            ValueError,
            "cu_seqlens ends at 5, which 2 rows cannot share equally",
        ),
        (
            torch.tensor([0, 2, 7, 8]),
            {"rows": 2},
            ValueError,
            "segment 1 of cu_seqlens goes from 2 to 7, across the start of row 1 at 4: say how "
            "many rows there are, if not 2",
        ),
        (torch.tensor([0, 3]), {"rows": 0}, ValueError, "rows is 0, but must be 1 or more"),
        (torch.tensor([0, 3]), {"window": 0}, ValueError, "window is 0, but must be 1 or more"),
        (
            torch.tensor([0, 3]),
            {"block_size": 8.0},
            TypeError,
            "block_size is 8.0, but must be an integer",
        ),
    ],
)
def test_what_describes_no_rows_is_refused(
    cu_seqlens: torch.Tensor, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        flex_block_mask(cu_seqlens, **options)

    assert str(caught.value) == text
