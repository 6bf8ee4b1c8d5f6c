"""The collator: the tensors of a batch, from samples in any form, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from multipack import Collator, Config, boundaries, label_counts, plan

IGNORED = -100
Sample = dict[str, Any]
Samples = Callable[[list[int]], list[Sample]]


def collate(batch: Any, attention: str = "none", **keys: Any) -> dict[str, Any]:
    return Collator(attention=attention, **keys)(batch)


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a batch as lists, to compare whole batches."""
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }


def error_of(kind: type[Exception], batch: Any, **keys: Any) -> str:
    with pytest.raises(kind) as caught:
        collate(batch, **keys)
    return str(caught.value)


# ---- layouts ----


def test_samples_lie_end_to_end_with_positions_that_restart() -> None:
    batch = collate([{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}])

    assert lists(batch) == {
        "input_ids": [[11, 12, 13, 21, 22]],
        "labels": [[IGNORED, 12, 13, IGNORED, 22]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_every_tensor_is_rounded_up_alike(samples: Samples) -> None:
    """Padding input_ids after the other tensors were made left those short."""
    batch = collate(samples([3, 2]), "bool", pad_to_multiple_of=8)

    assert [tuple(batch[key].shape) for key in ("input_ids", "labels", "position_ids")] == [
        (1, 8)
    ] * 3
    assert tuple(batch["attention_mask"].shape) == (1, 1, 8, 8)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]


def test_the_padded_tail_is_one_sequence_and_not_one_for_each_token(samples: Samples) -> None:
    """Positions of 0 all through the tail made a sequence of each of its tokens."""
    batch = collate(samples([3, 2]), "flash", pad_to_multiple_of=16)

    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, *range(11)]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 16]
    assert boundaries(batch["position_ids"]).tolist() == [0, 3, 5, 16]


@pytest.mark.parametrize(
    ("tail", "offsets", "longest", "positions"),
    [
        ("own", [0, 3, 5, 8], 3, [0, 1, 2, 0, 1, 0, 1, 2]),
        ("last", [0, 3, 8], 5, [0, 1, 2, 0, 1, 2, 3, 4]),
        ("none", [0, 3, 5], 3, [0, 1, 2, 0, 1, 0, 1, 2]),
    ],
)
def test_the_padded_tail_belongs_to_what_the_setting_says(
    samples: Samples, tail: str, offsets: list[int], longest: int, positions: list[int]
) -> None:
    batch = collate(samples([3, 2]), "flash", pad_to_multiple_of=8, padded_tail=tail)

    assert batch["cu_seq_lens_q"].tolist() == offsets
    assert batch["max_length_q"] == longest
    assert batch["position_ids"].tolist() == [positions]


def test_no_segment_of_the_tail_is_longer_than_sequence_len(samples: Samples) -> None:
    batch = collate(
        samples([3, 2]), "flash", sequence_len=4, micro_batch_size=4, pad_to_sequence_len=True
    )

    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 13, 16]
    assert int(batch["position_ids"].max()) == 3


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({}, (1, 20)),
        ({"multipack_real_batches": True}, (2, 10)),
        ({"sample_packing": False}, (4, 10)),
        ({"sample_packing": False, "batch_flattening": True}, (1, 20)),
    ],
    ids=repr,
)
def test_rows_can_be_padded_to_the_capacity_of_the_layout(
    samples: Samples, keys: dict[str, Any], shape: tuple[int, int]
) -> None:
    made = samples([3, 2, 5, 1])
    rows: Any = [made[:2], made[2:]] if "multipack_real_batches" in keys else made

    batch = collate(rows, sequence_len=10, micro_batch_size=2, pad_to_sequence_len=True, **keys)

    assert tuple(batch["input_ids"].shape) == shape
    assert int((batch["labels"] != IGNORED).sum()) == 2 + 1 + 4 + 0


def test_labels_are_padded_as_far_as_the_ids(samples: Samples) -> None:
    batch = collate(samples([3, 2]), sequence_len=5, micro_batch_size=2, pad_to_sequence_len=True)

    assert batch["labels"].tolist() == [[IGNORED, 1, 2, IGNORED, 101] + [IGNORED] * 5]


def test_padded_samples_get_a_row_each(samples: Samples) -> None:
    batch = collate(samples([3, 2]), "flash", sample_packing=False, pad_token_id=9)

    assert lists(batch) == {
        "input_ids": [[0, 1, 2], [100, 101, 9]],
        "labels": [[IGNORED, 1, 2], [IGNORED, 101, IGNORED]],
        "position_ids": [[0, 1, 2], [0, 1, 0]],
        "cu_seq_lens_q": [0, 3, 5, 6],
        "cu_seq_lens_k": [0, 3, 5, 6],
        "max_length_q": 3,
        "max_length_k": 3,
    }


def test_a_fixed_number_of_samples_may_come_as_the_one_row_of_a_plan(samples: Samples) -> None:
    made = samples([3, 2])

    for keys in ({"sample_packing": False}, {"sample_packing": False, "batch_flattening": True}):
        assert lists(collate([made], **keys)) == lists(collate(made, **keys))


def test_real_rows_with_unequal_numbers_of_samples_share_flat_offsets(samples: Samples) -> None:
    """Stacking one list of offsets for each row fails; taking the first row's leaks."""
    a, b, c, d = samples([2, 2, 2, 6])

    batch = collate([[a, b, c], [d]], "flash", multipack_real_batches=True)

    assert tuple(batch["input_ids"].shape) == (2, 6)
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4, 6, 12]
    assert batch["max_length_q"] == 6


def test_every_row_restarts(samples: Samples) -> None:
    a, b, c, d = samples([3, 1, 2, 2])

    batch = collate([[a, b], [c, d]], "flash", multipack_real_batches=True)

    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch["max_length_q"] == 3


def test_the_figure_with_twelve_samples(samples: Samples) -> None:
    lengths = [11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3]
    keys = {"sequence_len": 16, "micro_batch_size": 4, "pad_to_sequence_len": True}

    own = collate(samples(lengths), "flash", **keys)
    last = collate(samples(lengths), "flash", padded_tail="last", **keys)

    borders = [0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60]
    assert own["cu_seq_lens_q"].tolist() == [*borders, 63, 64]
    assert last["cu_seq_lens_q"].tolist() == [*borders, 64]


def test_aligned_samples_have_the_borders_of_their_slots(samples: Samples) -> None:
    """The attention kernel sees slots; borders of the bare samples would let tokens leak."""
    batch = collate(samples([5, 7, 3]), "flash", align_samples_to=4, sequence_len=20)

    assert tuple(batch["input_ids"].shape) == (1, 20)
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 16, 20]
    assert batch["max_length_q"] == 8
    assert batch["labels"][0, 5:8].tolist() == [IGNORED] * 3


def test_empty_samples_never_reach_the_borders() -> None:
    batch = collate(
        [{"input_ids": ids} for ids in ([], [1], [], [2])], "flash", mask_first_label=False
    )

    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 2]
    assert batch["max_length_q"] == 1
    assert batch["labels"].tolist() == [[1, 2]]


def test_long_samples_are_cut_where_that_is_asked_for(samples: Samples) -> None:
    keys = {"sequence_len": 4, "micro_batch_size": 2, "excess_length_strategy": "truncate"}

    batch = collate(
        [{**sample, "weights": [0.5] * len(sample["input_ids"])} for sample in samples([6, 2])],
        **keys,
    )

    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 100, 101]]
    assert tuple(batch["weights"].shape) == (1, 6)


def test_long_samples_are_refused_otherwise(samples: Samples) -> None:
    """A planner that saw other lengths than these would have left the sample out."""
    for policy in ("drop", "raise"):
        text = error_of(
            ValueError,
            samples([2, 5]),
            sequence_len=4,
            micro_batch_size=2,
            excess_length_strategy=policy,
        )

        assert text == (
            "sample 1 of the microbatch has 5 tokens, more than sequence_len 4; plan with the "
            "lengths of this data, raise sequence_len, or set excess_length_strategy to truncate"
        )


def test_a_batch_of_the_evaluation_has_its_layout_and_size(samples: Samples) -> None:
    config = Config(
        sequence_len=4,
        micro_batch_size=3,
        eval_batch_size=2,
        eval_sample_packing=False,
        pad_to_sequence_len=True,
    )

    def shape(split: Any) -> tuple[int, ...]:
        batch = Collator(config, attention="none", split=split)(samples([3, 2]))
        return tuple(batch["input_ids"].shape)

    assert shape("train") == (1, 12)
    assert shape("eval") == (2, 4)


# ---- labels ----


def test_no_label_crosses_a_border() -> None:
    batch = collate([{"input_ids": [11, 12]}, {"input_ids": [21, 22]}])

    shifted = batch["labels"][0, 1:]
    assert shifted[shifted != IGNORED].tolist() == [12, 22]


def test_the_loss_of_a_row_is_that_of_its_samples() -> None:
    """As a model with shifted labels computes it, once packed and once for each sample alone."""
    made = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}, {"input_ids": [5, 6]}]
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))

    def loss(batch: dict[str, Any], logits: torch.Tensor) -> float:
        return float(cross_entropy(logits[:-1], batch["labels"][0, 1:], reduction="sum"))

    alone = [
        loss(collate([sample]), logits[start:end])
        for sample, (start, end) in zip(made, itertools.pairwise([0, 3, 4, 6]), strict=True)
    ]
    assert loss(collate(made), logits) == pytest.approx(sum(alone))


def test_supervised_tokens_are_counted_alike_everywhere() -> None:
    """Three of the five labels of samples of 3 and 2 tokens enter the loss: one border each."""
    made = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]

    batch = collate(made, sequence_len=8)
    counts, starts = label_counts([1, 2, 3, 4, 5], [0, 3, 5])
    planned = plan([3, 2], counts, label_starts=starts, sequence_len=8)

    assert int((batch["labels"] != IGNORED).sum()) == 3
    assert int(counts.sum()) == 3
    assert planned.stats.after.mean_labels == 3.0
    assert plan([3, 2], sequence_len=8).stats.after.mean_labels == 3.0


def test_the_first_label_can_be_kept() -> None:
    batch = collate([{"input_ids": [11, 12]}, {"input_ids": [21, 22]}], mask_first_label=False)

    assert batch["labels"].tolist() == [[11, 12, 21, 22]]


def test_supervised_spans_stay_at_their_tokens() -> None:
    """Spans moved by the lengths of earlier answers, not of earlier samples, hit prompts."""
    first = {"input_ids": [1, 2, 3, 4, 5], "labels": [IGNORED] * 3 + [4, 5]}
    second = {"input_ids": [6, 7, 8, 9], "labels": [IGNORED] * 2 + [8, 9]}

    labels = collate([first, second])["labels"][0]

    assert (labels != IGNORED).nonzero().flatten().tolist() == [3, 4, 7, 8]


def test_a_real_token_that_equals_the_pad_id_keeps_its_label() -> None:
    batch = collate([{"input_ids": [5, 2], "labels": [5, 2]}], pad_token_id=2, pad_to_multiple_of=4)

    assert batch["input_ids"].tolist() == [[5, 2, 2, 2]]
    assert batch["labels"].tolist() == [[IGNORED, 2, IGNORED, IGNORED]]


def test_padding_is_written_every_time() -> None:
    """Memory that was never written would hold whatever was there before."""
    for _ in range(200):
        torch.full((1 << 12,), 7)
        batch = collate([{"input_ids": [1, 2, 3]}], pad_token_id=9, pad_to_multiple_of=8)

        assert lists(batch) == {
            "input_ids": [[1, 2, 3, 9, 9, 9, 9, 9]],
            "labels": [[IGNORED, 2, 3, IGNORED, IGNORED, IGNORED, IGNORED, IGNORED]],
            "position_ids": [[0, 1, 2, 0, 1, 2, 3, 4]],
        }


# ---- attention ----


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


def test_flash_attention_gets_borders_and_plain_ints(samples: Samples) -> None:
    batch = collate(samples([3, 2]), "flash")

    assert list(batch) == [
        "input_ids",
        "labels",
        "position_ids",
        "cu_seq_lens_q",
        "max_length_q",
        "cu_seq_lens_k",
        "max_length_k",
    ]
    for side in ("q", "k"):
        offsets = batch[f"cu_seq_lens_{side}"]
        assert (offsets.dtype, offsets.tolist()) == (torch.int32, [0, 3, 5])
        assert offsets.is_contiguous()
        assert type(batch[f"max_length_{side}"]) is int


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"attention": "sdpa"}, "attention is 'sdpa', but must be one of none, bool, additive, "),
        *(
            (
                {"attention": attention},
                f"attention='{attention}' is not part of this version, which has none, bool, "
                "additive, flash",
            )
            for attention in ("varlen", "flex", "multipack")
        ),
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
        ({"window": 1.5}, TypeError, "window is 1.5, but must be an integer"),
    ],
)
def test_numbers_that_are_none_are_refused(
    keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        Collator(attention="bool", **keys)

    assert str(caught.value) == text


# ---- forms of samples ----


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy int32": lambda ids: np.array(ids, np.int32),
    "numpy int64": lambda ids: np.array(ids, np.int64),
    "numpy uint64": lambda ids: np.array(ids, np.uint64),
    "numpy strided": lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
    "tensor int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "tensor int64": torch.tensor,
    "tensor strided": lambda ids: torch.tensor(ids).repeat_interleave(2)[::2],
    "list of tensors": lambda ids: [torch.tensor(i) for i in ids],
}


@pytest.mark.parametrize("form", FORMS)
def test_samples_in_any_form_make_the_same_batch(samples: Samples, form: str) -> None:
    expected = collate(samples([3, 1, 2]), "flash")

    batch = collate(
        [{key: FORMS[form](value) for key, value in s.items()} for s in samples([3, 1, 2])], "flash"
    )

    assert lists(batch) == lists(expected)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_forms_may_be_mixed_in_one_row(samples: Samples) -> None:
    made = samples([3, 1, 2, 4])
    mixed = [
        {"input_ids": form(sample["input_ids"]), "labels": other(sample["labels"])}
        for sample, form, other in zip(
            made,
            (list, FORMS["numpy int32"], FORMS["tensor int64"], FORMS["tensor int32"]),
            (FORMS["tensor int32"], list, FORMS["numpy int64"], FORMS["numpy int32"]),
            strict=True,
        )
    ]

    assert lists(collate(mixed)) == lists(collate(made))


def test_a_sample_may_be_any_mapping(samples: Samples) -> None:
    assert lists(collate([UserDict(s) for s in samples([3, 2])])) == lists(collate(samples([3, 2])))


def test_samples_without_labels_are_supervised_at_every_token() -> None:
    batch = collate([{"input_ids": [5, 6, 7]}])

    assert batch["labels"].tolist() == [[IGNORED, 6, 7]]


def test_read_only_samples_are_taken_without_a_warning_and_left_alone() -> None:
    ids = np.array([1, 2, 3, 4])
    ids.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = collate([{"input_ids": ids, "labels": ids}], mask_first_label=False)

    for value in batch.values():
        value.fill_(0)
    assert ids.tolist() == [1, 2, 3, 4]


def test_outputs_own_their_memory() -> None:
    """Even where one sample fills the row and nothing would have to be copied."""
    ids = torch.tensor([1, 2, 3])
    batch = collate([{"input_ids": ids, "labels": ids, "weights": ids}], mask_first_label=False)

    for key in ("input_ids", "labels", "weights"):
        assert batch[key].data_ptr() != ids.data_ptr()
        batch[key].fill_(0)
    assert ids.tolist() == [1, 2, 3]


def test_samples_can_be_collated_twice(samples: Samples) -> None:
    made = [{**s, "attention_mask": [1] * len(s["input_ids"])} for s in samples([3, 2])]
    before = copy.deepcopy(made)

    assert lists(collate(made, "bool")) == lists(collate(made, "bool"))
    assert made == before


def test_a_collator_survives_pickle_and_copy(samples: Samples) -> None:
    collator = Collator(sequence_len=8, attention="additive", dtype=torch.bfloat16, window=3)
    expected = lists(collator(samples([3, 2])))

    assert lists(pickle.loads(pickle.dumps(collator))(samples([3, 2]))) == expected
    assert lists(copy.deepcopy(collator)(samples([3, 2]))) == expected
    assert len(pickle.dumps(collator)) < 3000


# ---- further keys ----


def test_keys_with_a_number_for_each_token_are_laid_out_like_the_tokens() -> None:
    batch = collate(
        [
            {"input_ids": [1, 2, 3], "token_type_ids": [0, 1, 1], "weights": [0.5, 1.0, 2.0]},
            {"input_ids": [4], "token_type_ids": [1], "weights": [4.0]},
        ],
        pad_to_multiple_of=3,
        pad_values={"token_type_ids": -1},
    )

    assert batch["token_type_ids"].tolist() == [[0, 1, 1, 1, -1, -1]]
    assert batch["weights"].tolist() == [[0.5, 1.0, 2.0, 4.0, 0.0, 0.0]]
    assert (batch["token_type_ids"].dtype, batch["weights"].dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64]
)
def test_per_token_arrays_keep_their_dtype(dtype: Any) -> None:
    values = np.array([1, 0, 1], dtype)

    batch = collate([{"input_ids": [1, 2, 3], "values": values}])

    assert torch.equal(batch["values"], torch.from_numpy(values)[None])


def test_keys_with_one_number_for_each_sample_are_stacked() -> None:
    batch = collate(
        [
            {"input_ids": [1, 2], "score": 0.5, "source": 3, "kept": True},
            {"input_ids": [3], "score": np.float32(1.5), "source": torch.tensor(4), "kept": False},
        ]
    )

    assert (batch["score"].dtype, batch["score"].tolist()) == (torch.float32, [0.5, 1.5])
    assert (batch["source"].dtype, batch["source"].tolist()) == (torch.int64, [3, 4])
    assert (batch["kept"].dtype, batch["kept"].tolist()) == (torch.bool, [True, False])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            "a story",
            "text of sample 0 is str, but must hold numbers, one for each token or one for the "
            "sample; drop the key if no model takes it",
        ),
        (
            None,
            "text of sample 0 is NoneType, but must hold numbers, one for each token or one for "
            "the sample; drop the key if no model takes it",
        ),
        (
            ["a", "b"],
            "text of sample 0 is list, but must hold numbers, one for each token or one for the "
            "sample; drop the key if no model takes it",
        ),
        (
            [[1], [2, 3]],
            "text of sample 0 is list, but must hold numbers, one for each token or one for the "
            "sample; drop the key if no model takes it",
        ),
        (
            [[1, 2], [3, 4]],
            "text of sample 0 has shape (2, 2), but must be one number for each token, of shape "
            "(2,)",
        ),
        (
            torch.ones(2, dtype=torch.bfloat16),
            "text of sample 0 is a torch.bfloat16 tensor on cpu, but samples are collated on the "
            "CPU, without gradients, from dtypes that NumPy has; convert it, and move the "
            "finished batch",
        ),
    ],
)
def test_keys_that_hold_anything_else_are_refused_by_name(value: Any, text: str) -> None:
    assert error_of(TypeError, [{"input_ids": [1, 2], "text": value}]) == text


def test_a_key_that_is_a_number_in_one_sample_and_not_in_another_is_refused() -> None:
    batch = [{"input_ids": [1], "score": 1}, {"input_ids": [2], "score": [1]}]

    assert error_of(TypeError, batch) == (
        "score of sample 1 is list, but sample 0 has one number there"
    )


# ---- what it refuses ----


@pytest.mark.parametrize("key", ["labels", "attention_mask", "position_ids", "weights"])
def test_keys_of_other_lengths_than_the_ids_are_refused(samples: Samples, key: str) -> None:
    """Joined without a look, they would slide along for all samples that follow."""
    made = samples([4, 3, 2, 5, 1, 2])
    for sample in made:
        sample.setdefault(key, [1] * len(sample["input_ids"]))
    made[3][key] = made[3][key][:4]

    assert error_of(ValueError, made) == (
        f"sample 3 has 5 input_ids but 4 {key}: give one for each token"
    )


@pytest.mark.parametrize("key", ["labels", "input_ids", "weights"])
def test_a_key_that_only_some_samples_have_is_refused(key: str) -> None:
    made: list[Sample] = [{"input_ids": [1], "labels": [1], "weights": [1]} for _ in range(3)]
    del made[2][key]

    assert error_of(ValueError, made) == (
        f"sample 2 has no '{key}', but sample 0 has: give it to all samples, or to none"
    )
    assert error_of(ValueError, made[::-1]) == (
        f"sample 0 has no '{key}', but sample 1 has: give it to all samples, or to none"
    )


def test_samples_without_ids_are_refused() -> None:
    assert error_of(ValueError, [{"ids": [1], "labels": [1]}]) == (
        "the samples have no 'input_ids', but ids, labels"
    )


@pytest.mark.parametrize("label", [1, np.int64(1), torch.tensor(1)], ids=repr)
def test_one_label_for_a_whole_sample_is_refused(label: Any) -> None:
    assert error_of(TypeError, [{"input_ids": [1, 2, 3], "labels": label}]) == (
        "labels of sample 0 has shape (), but must be one number for each token, of shape (L,)"
    )


@pytest.mark.parametrize(
    ("ids", "shape", "wanted"),
    [
        (torch.ones(1, 5, dtype=torch.int64), "(1, 5)", "(5,)"),
        (torch.ones(2, 5, dtype=torch.int64), "(2, 5)", "(5,)"),
        (np.ones((1, 5), np.int64), "(1, 5)", "(5,)"),
        ([[1, 2, 3, 4, 5]], "(1, 5)", "(5,)"),
        ([torch.ones(5, dtype=torch.int64)], "(1, 5)", "(5,)"),
        (torch.tensor(3), "()", "(L,)"),
    ],
)
def test_ids_of_another_shape_are_refused(ids: Any, shape: str, wanted: str) -> None:
    """The len() of a [1, 5] tensor is 1, which is no length of a sample."""
    assert error_of(TypeError, [{"input_ids": ids}]) == (
        f"input_ids of sample 0 has shape {shape}, but must be one number for each token, of "
        f"shape {wanted}"
    )


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1.5, 2.0], "list"),
        (["a"], "list"),
        ("abc", "str"),
        (None, "NoneType"),
        ([2**64], "list"),
        (np.ones(3), "an array of float64"),
    ],
    ids=repr,
)
def test_ids_that_are_no_integers_are_refused(ids: Any, found: str) -> None:
    batch = [{"input_ids": [1]}, {"input_ids": ids}]

    assert error_of(TypeError, batch) == (
        f"input_ids of sample 1 is {found}, but must hold integers; drop the key if no model "
        "takes it"
    )


@pytest.mark.parametrize(
    ("mask", "token"),
    [([0, 0, 1, 1], 0), ([1, 0, 1, 1], 1), ([1, 1, 1, 0], 3)],
    ids=["left", "inside", "right"],
)
@pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
def test_samples_that_come_padded_are_refused(mask: list[int], token: int, form: Any) -> None:
    """Taken with their padding they would be trained on it, as positions count it in."""
    batch = [
        {"input_ids": [4, 5], "attention_mask": form([1, 1])},
        {"input_ids": [0, 0, 4, 6], "attention_mask": form(mask)},
    ]

    assert error_of(ValueError, batch) == (
        f"sample 1 has attention_mask 0 at token {token}, but samples come without padding: "
        "tokenise with padding=False, or cut the padding off"
    )


def test_a_pad_id_inside_a_sample_is_a_token() -> None:
    batch = collate([{"input_ids": [4, 0, 6], "attention_mask": [1, 1, 1]}], pad_token_id=0)

    assert batch["input_ids"].tolist() == [[4, 0, 6]]
    assert batch["labels"].tolist() == [[IGNORED, 0, 6]]


def test_positions_that_count_from_0_are_taken_and_others_refused() -> None:
    batch: list[Sample] = [
        {"input_ids": [1, 2], "position_ids": [0, 1]},
        {"input_ids": [3, 4, 5], "position_ids": [0, 1, 2]},
    ]
    assert collate(batch)["position_ids"].tolist() == [[0, 1, 0, 1, 2]]

    batch[1]["position_ids"] = [0, 1, 7]
    assert error_of(ValueError, batch) == (
        "sample 1 has position_ids 7 at token 2, but positions are made anew and count from 0: "
        "drop the key"
    )


@pytest.mark.parametrize(
    ("batch", "keys", "kind", "text"),
    [
        ([], {}, ValueError, "the microbatch is empty, but a batch has at least one sample"),
        (
            [{"input_ids": [1]}, [{"input_ids": [1]}]],
            {},
            TypeError,
            "the microbatch mixes samples and rows of samples: give either",
        ),
        (
            ["text"],
            {},
            TypeError,
            "sample 0 is a str, but a sample is a mapping with 'input_ids'",
        ),
        (
            [{"input_ids": [1]}],
            {"multipack_real_batches": True},
            ValueError,
            "multipack_real_batches has several rows, but the microbatch is a list of samples: "
            "give a list of rows, as the sampler yields them",
        ),
    ],
)
def test_what_is_no_microbatch_is_refused(
    batch: Any, keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    assert error_of(kind, batch, **keys) == text


def test_an_empty_row_is_refused(samples: Samples) -> None:
    assert error_of(ValueError, [samples([2]), []], multipack_real_batches=True) == (
        "row 1 starts at 1 and ends at 1 of index: every row has at least one sample"
    )


def test_a_mask_too_large_for_memory_is_refused_before_it_is_made() -> None:
    batch = [{"input_ids": np.zeros(131_072, np.int64)}]

    assert error_of(ValueError, batch, attention="bool") == (
        "a mask of shape (1, 1, 131072, 131072) takes 17179869184 bytes, more than the 8589934592 "
        "that a mask may take; use attention that reads cu_seqlens, or fewer or shorter rows"
    )


# ---- random batches against a plain twin ----


def plainly(rows: list[list[Sample]], multiple: int) -> dict[str, Any]:
    """What a collator does, told one token at a time."""
    longest = max(sum(len(sample["input_ids"]) for sample in row) for row in rows)
    row_len = -(-longest // multiple) * multiple
    batch: dict[str, Any] = {"input_ids": [], "labels": [], "position_ids": []}
    borders = [0]
    for row in rows:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for sample in row:
            ids += sample["input_ids"]
            labels += [IGNORED, *sample["labels"][1:]]
            positions += range(len(sample["input_ids"]))
            borders.append(borders[-1] + len(sample["input_ids"]))
        tail = row_len - len(ids)
        batch["input_ids"].append(ids + [7] * tail)
        batch["labels"].append(labels + [IGNORED] * tail)
        batch["position_ids"].append([*positions, *range(tail)])
        if tail:
            borders.append(borders[-1] + tail)
    longest_segment = max(end - start for start, end in itertools.pairwise(borders))
    for side in ("q", "k"):
        batch[f"cu_seq_lens_{side}"] = borders
        batch[f"max_length_{side}"] = longest_segment
    return batch


def test_random_batches_are_those_of_the_plain_twin(seeded: np.random.Generator) -> None:
    forms = [FORMS[form] for form in ("list", "numpy int32", "tensor int64")]
    rows: list[list[Sample]] = []
    for _ in range(int(seeded.integers(1, 4))):
        row = []
        for length in seeded.integers(1, 20, int(seeded.integers(1, 6))).tolist():
            labels = seeded.integers(0, 1000, length)
            labels[seeded.random(length) < 0.5] = IGNORED
            ids = seeded.integers(0, 1000, length)
            row.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
        rows.append(row)
    multiple = int(seeded.integers(1, 9))
    formed = [
        [
            {key: forms[int(seeded.integers(3))](value) for key, value in sample.items()}
            for sample in row
        ]
        for row in rows
    ]

    batch = collate(
        formed, "flash", multipack_real_batches=True, pad_to_multiple_of=multiple, pad_token_id=7
    )

    assert lists(batch) == plainly(rows, multiple)
