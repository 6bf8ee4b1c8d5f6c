"""The collator: the tensors of a batch, row by row and token by token."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from collating import FORMS, IGNORED, Sample, Samples, collate, error_of, lists
from torch.nn.functional import cross_entropy

from multipack import Collator, Config, boundaries, label_counts, plan

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


@pytest.mark.parametrize(("length", "row_len"), [(16, 16), (17, 32), (1, 16)])
def test_a_length_that_is_a_multiple_already_is_left_alone(length: int, row_len: int) -> None:
    """Rounding a length that counts one token too many pads by a whole block, or loses a label."""
    batch = collate([{"input_ids": list(range(1, length + 1))}], pad_to_multiple_of=16)

    assert batch["input_ids"].shape == (1, row_len)
    assert batch["labels"].tolist() == [
        [IGNORED, *range(2, length + 1), *[IGNORED] * (row_len - length)]
    ]


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


def test_positions_can_begin_anywhere(samples: Samples) -> None:
    batch = collate(samples([3, 2]), position_start=2, pad_to_multiple_of=8)

    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, 2, 3, 4]]
    assert boundaries(batch["position_ids"]).tolist() == [0, 3, 5, 8]


def test_a_tail_can_be_kept_within_the_longest_sample(samples: Samples) -> None:
    """Some rotary embeddings change with the largest position of a batch, a real one or not."""
    batch = collate(samples([3, 2]), "flash", pad_to_multiple_of=12, cut_tail=True)

    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 11, 12]
    assert batch["max_length_q"] == 3


OUTPUTS = {
    "cu_seqlens": [0, 3, 5, 8, 12, 14, 16],
    "cu_seqlens_padded": [0, 3, 5, 8, 12, 14, 16],
    "max_seqlen": 4,
    "segment_ids": [[1, 1, 1, 2, 2, 0, 0, 0], [1, 1, 1, 1, 2, 2, 0, 0]],
    "seq_idx": [[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 1, 1, 2, 2]],
    "shift_labels": [
        [1, 2, -100, 101, -100, -100, -100, -100],
        [201, 202, 203, -100, 301, -100, -100, -100],
    ],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_further_outputs(samples: Samples, name: str) -> None:
    a, b, c, d = samples([3, 2, 4, 2])
    plain = collate([[a, b], [c, d]], multipack_real_batches=True, pad_to_multiple_of=8)

    batch = collate(
        [[a, b], [c, d]], multipack_real_batches=True, pad_to_multiple_of=8, outputs=[name]
    )

    assert batch.keys() - plain.keys() == {name}
    assert lists(batch)[name] == OUTPUTS[name]
    if isinstance(batch[name], torch.Tensor):
        assert batch[name].dtype == (torch.int64 if name == "shift_labels" else torch.int32)
        assert batch[name].is_contiguous()


@pytest.mark.parametrize("outputs", [["seq_idx", "segment_ids"], ["segment_ids", "seq_idx"]])
def test_numbers_of_segments_from_0_and_from_1_can_both_be_had(
    samples: Samples, outputs: list[str]
) -> None:
    """Made of the same memory where only one of them is handed out."""
    batch = collate(samples([3, 2]), outputs=outputs)

    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]


def test_both_kinds_of_borders_of_aligned_samples_can_be_had(samples: Samples) -> None:
    """Ranks that split a row want the slots, and what counts tokens the true lengths."""
    batch = collate(
        samples([5, 7, 3]),
        "flash",
        align_samples_to=4,
        outputs=["cu_seqlens", "cu_seqlens_padded", "max_seqlen", "seq_idx"],
    )

    assert batch["cu_seqlens"].tolist() == [0, 5, 12, 15]
    assert batch["cu_seqlens_padded"].tolist() == [0, 8, 16, 20]
    assert batch["max_seqlen"] == 7
    assert (batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]) == ([0, 8, 16, 20], 8)
    assert batch["seq_idx"].tolist() == [[0] * 8 + [1] * 8 + [2] * 4]


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


def test_the_first_answer_token_is_trained_behind_a_prompt_of_one() -> None:
    """Masks that were shifted once more than labels lose it."""
    batch = collate([{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5]}] * 2)

    assert batch["labels"].tolist() == [[-100, 2, 3, 4, 5] * 2]


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
