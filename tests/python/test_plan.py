"""Plans: what they hold, what they leave out, and what they say of themselves."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from plans import ALGORITHMS, rows_of

from multipack import Config, Plan, Repeat, plan


def sorted_rows(plan: Plan) -> list[list[int]]:
    return sorted(sorted(row) for row in rows_of(plan))


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([3], [[0]]),
        ([4], [[0]]),
        ([8], [[0]]),
        ([2, 2, 2, 2], [[0, 1, 2, 3]]),
        ([8, 8], [[0], [1]]),
        ([5, 5, 5], [[0], [1], [2]]),
    ],
)
def test_every_sample_is_in_one_row(lengths: list[int], rows: list[list[int]]) -> None:
    assert rows == sorted_rows(plan(lengths, sequence_len=8))


def test_a_sample_is_dropped_whole_and_counted_with_one_warning() -> None:
    """A packer that cuts would lose tokens, one that filters later would plan an empty row."""
    with pytest.warns(UserWarning) as caught:
        made = plan([6, 11, 2, 12], sequence_len=8)

    assert sorted_rows(made) == [[0, 2]]
    assert [str(warning.message) for warning in caught] == [
        "of 4 samples 2 dropped as longer than sequence_len 8 (first: 1, longest: 12 tokens)"
    ]
    stats = made.stats
    assert stats.retained == 2
    assert (
        stats.dropped["over_long"].count,
        stats.dropped["over_long"].first,
        stats.dropped["over_long"].longest,
    ) == (2, 1, 12)


def test_a_sample_longer_than_many_rows_is_dropped_like_any_other() -> None:
    """Splitting it would run its positions past the capacity."""
    with pytest.warns(UserWarning, match="1 dropped as longer than sequence_len 10"):
        made = plan([25, 4, 4], sequence_len=10)

    assert sorted_rows(made) == [[1, 2]]


def test_what_survives_a_dropped_sample_is_complete() -> None:
    with pytest.warns(UserWarning, match="1 dropped as longer than sequence_len 4"):
        made = plan([5, 2, 3, 1], sequence_len=4)

    assert sorted_rows(made) == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([], "no samples were given, so the plan is empty"),
        (
            [9],
            "no sample is retained, so the plan is empty: of 1 samples 1 dropped as longer than "
            "sequence_len 8 (first: 0, longest: 9 tokens)",
        ),
        (
            [0, 0],
            "no sample is retained, so the plan is empty: of 2 samples 2 dropped as shorter than "
            "min_sample_len (first: 0, longest: 0 tokens)",
        ),
    ],
)
def test_nothing_to_plan_is_an_empty_plan_and_one_warning(lengths: list[int], text: str) -> None:
    with pytest.warns(UserWarning) as caught:
        made = plan(lengths, sequence_len=8)

    assert [text] == [str(warning.message) for warning in caught]
    assert len(made) == 0
    assert made.stats.retained == 0
    assert made.stats.after.efficiency is None


def test_an_over_long_sample_can_be_an_error() -> None:
    with pytest.raises(ValueError) as caught:
        plan([3, 9], sequence_len=8, excess_length_strategy="raise")

    assert (
        str(caught.value)
        == "sample 1 has 9 tokens, more than sequence_len 8; raise sequence_len, or set "
        "excess_length_strategy to drop or truncate"
    )


def test_an_over_long_sample_can_be_cut() -> None:
    with pytest.warns(UserWarning, match="1 cut to sequence_len 8"):
        made = plan([9, 8], sequence_len=8, excess_length_strategy="truncate")

    assert sorted_rows(made) == [[0], [1]]
    assert made.stats.truncated.count == 1


def test_empty_samples_are_skipped_and_counted() -> None:
    with pytest.warns(UserWarning, match="2 dropped as shorter than min_sample_len"):
        made = plan([0, 2, 0], sequence_len=8)

    assert sorted_rows(made) == [[1]]
    assert made.stats.dropped["too_short"].count == 2


def test_samples_without_labels_are_dropped_where_counts_are_given() -> None:
    with pytest.warns(UserWarning, match="10 dropped as having no supervised token"):
        made = plan([4] * 10, [0] * 10, sequence_len=4)

    assert len(made) == 0
    assert made.stats.dropped["unlabelled"].count == 10


def test_samples_without_labels_can_be_kept() -> None:
    made = plan([4, 4], [0, 3], sequence_len=4, drop_unlabelled=False)

    assert sorted_rows(made) == [[0], [1]]
    assert made.stats.after.mean_labels == 1.5


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({}, [[4], [4]]),
        ({"multipack_real_batches": True}, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ({"sample_packing": False}, [[4], [4]]),
        ({"sample_packing": False, "batch_flattening": True}, [[4], [4]]),
    ],
    ids=repr,
)
def test_the_layout_says_how_samples_share_a_microbatch(
    keys: dict[str, Any], shape: list[list[int]]
) -> None:
    made = plan([8] * 8, sequence_len=8, micro_batch_size=4, **keys)

    assert shape == [[len(row) for row in made[0, k]] for k in range(len(made))]


def test_evaluation_has_its_own_batch_size_and_leaves_nothing_out() -> None:
    made = plan([8] * 7, sequence_len=8, micro_batch_size=4, eval_batch_size=2, split="eval")

    assert [len(row) for row in rows_of(made)] == [2, 2, 2, 1]


@pytest.mark.parametrize("sequentially", [False, True])
def test_a_single_incomplete_microbatch_is_an_empty_plan_and_a_warning(sequentially: bool) -> None:
    with pytest.warns(UserWarning) as caught:
        made = plan(
            [9],
            sequence_len=10,
            micro_batch_size=2,
            multipack_real_batches=True,
            sample_packing_sequentially=sequentially,
        )

    assert [str(warning.message) for warning in caught] == [
        "no complete microbatch, so the plan is empty: 1 row, but a microbatch needs 2; "
        "incomplete_batches: fill or split keeps them"
    ]
    assert len(made) == 0
    assert made.stats.after.efficiency is None


@pytest.mark.parametrize("sequentially", [False, True])
def test_statistics_count_only_the_rows_that_are_used(sequentially: bool) -> None:
    made = plan(
        [9] * 5,
        sequence_len=10,
        micro_batch_size=2,
        multipack_real_batches=True,
        sample_packing_sequentially=sequentially,
    )

    assert len(made) == 2
    assert (made.stats.after.rows, made.stats.after.efficiency) == (4, 0.9)
    assert made.stats.unused_samples == 1


def test_fewer_rows_than_ranks_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError) as caught:
        plan([5, 5, 5], sequence_len=5, world_size=4)

    assert (
        str(caught.value)
        == "3 complete microbatches for 4 ranks: at least one each is needed; lower "
        "micro_batch_size or sequence_len, use fewer ranks, or set incomplete_batches to fill"
    )


def test_a_round_can_be_filled_with_marked_repeats() -> None:
    made = plan([5, 5, 5], sequence_len=5, world_size=4, incomplete_batches="fill")

    rows = rows_of(made)
    assert [isinstance(row[0], Repeat) for row in rows] == [False, False, False, True]
    assert sorted(row[0] for row in rows[:3]) == [0, 1, 2]
    assert rows[3] in rows[:3]
    assert made.stats.repeated_samples == 1


def test_a_microbatch_can_hold_samples_and_repeats() -> None:
    made = plan([5] * 5, sequence_len=8, micro_batch_size=3, sample_packing=False, split="eval")

    kinds = [[isinstance(sample, Repeat) for sample in made[0, k][0]] for k in range(len(made))]
    assert kinds == [[False] * 3, [False, False, True]]


def test_a_small_evaluation_reaches_every_rank() -> None:
    alone = plan([3, 3], sequence_len=64, split="eval")
    together = plan([3, 3], sequence_len=64, split="eval", world_size=2)

    assert 1 == len(alone) == len(together)
    assert [type(sample) for sample in together[0, 0][0]] == [int, int]
    assert [type(sample) for sample in together[1, 0][0]] == [Repeat, Repeat]


def test_a_repeat_is_its_index_and_survives_pickling() -> None:
    repeat = pickle.loads(pickle.dumps(Repeat(7)))

    assert repeat == 7
    assert type(repeat) is Repeat
    assert "abcdefgh"[repeat] == "h"


def test_indices_are_plain_ints() -> None:
    made = plan(np.array([3, 4, 5]), sequence_len=8)

    assert {int} == {type(sample) for row in rows_of(made) for sample in row}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ((0, 2), "k is 2, but must be from 0 to 1"),
        ((0, -1), "k is -1, but must be from 0 to 1"),
        ((2, 0), "rank is 2, but must be from 0 to 1"),
        ((-1, 0), "rank is -1, but must be from 0 to 1"),
    ],
)
def test_a_rank_or_microbatch_out_of_range_is_named_with_its_bounds(
    key: tuple[int, int], text: str
) -> None:
    made = plan([4] * 4, sequence_len=4, world_size=2)

    with pytest.raises(IndexError) as caught:
        made[key]

    assert text == str(caught.value)


def test_the_tensors_are_offsets_into_the_level_below() -> None:
    made = plan([3, 5, 4, 2, 6, 1], sequence_len=8, sample_packing_sequentially=True, world_size=2)

    assert made.index.tolist() == [0, 1, 2, 3]
    assert made.row_offsets.tolist() == [0, 2, 4]
    assert made.batch_offsets.tolist() == [0, 1, 2]
    assert {torch.int64} == {made.index.dtype, made.row_offsets.dtype, made.batch_offsets.dtype}
    assert (made[0, 0], made[1, 0]) == ([[0, 1]], [[2, 3]])


@pytest.mark.parametrize("key", [0, (0,), (0, 0, 0), "ab"], ids=repr)
def test_a_plan_is_indexed_by_rank_and_microbatch(key: Any) -> None:
    with pytest.raises(TypeError) as caught:
        plan([4], sequence_len=4)[key]

    assert str(caught.value) == (
        f"a plan is indexed by rank and microbatch, plan[rank, k], not by {key!r}"
    )


def test_totals_beyond_32_bits_are_right() -> None:
    made = plan(np.full(300_000, 8192, np.int32), sequence_len=16_384)

    assert 150_000 == len(made) == made.stats.after.rows
    assert made.stats.after.efficiency == 1.0
    assert made.stats.after.mean_unpadded_length * len(made) == 2_457_600_000


def test_a_microbatch_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        plan([8192], sequence_len=8192, micro_batch_size=300_000)

    assert (
        str(caught.value)
        == "micro_batch_size 300000 × sequence_len 8192 is more than 2147483647 tokens, "  # noqa: RUF001
        "the most that the int32 cu_seqlens of one microbatch can count"
    )


def test_samples_over_half_the_capacity_get_a_row_each() -> None:
    """The worst case of a first fit that looks at every open row: quadratic in the samples."""
    for algorithm in ("best_fit_decreasing", "first_fit", "next_fit"):
        made = plan(np.full(100_000, 6), sequence_len=10, sample_packing_algorithm=algorithm)

        assert len(made) == 100_000


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_plans_keep_every_promise(seeded: np.random.Generator, algorithm: str) -> None:
    n = int(seeded.integers(1, 300))
    lengths = seeded.integers(0, 40, n)
    capacity = int(seeded.integers(8, 64))
    bin_size = int(seeded.integers(1, 6)) if seeded.random() < 0.5 else None
    keys: dict[str, Any] = {
        "sequence_len": capacity,
        "sample_packing_algorithm": algorithm,
        "sample_packing_bin_size": bin_size,
        "sample_packing_sequentially": bool(
            algorithm not in ("first_fit", "tight") and seeded.random() < 0.3
        ),
        "world_size": int(seeded.integers(1, 4)),
        "micro_batch_size": int(seeded.integers(1, 4)),
        "multipack_real_batches": True,
        "incomplete_batches": "fill",
        "seed": int(seeded.integers(1000)),
    }

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples left out, which these inputs are meant to have
        made = plan(lengths, **keys)

    rows = rows_of(made)
    real = [sample for row in rows for sample in row if not isinstance(sample, Repeat)]
    retained = np.flatnonzero((lengths >= 1) & (lengths <= capacity)).tolist()
    assert retained == sorted(real)
    assert all(sum(lengths[row]) <= capacity for row in rows)
    assert all(len(row) <= (bin_size or n) for row in rows)
    assert len(rows) == len(made) * keys["world_size"] * keys["micro_batch_size"]
    assert made.stats.retained == len(retained)
    if keys["sample_packing_sequentially"]:
        assert retained == real


def test_stats_are_read_off_the_report() -> None:
    made = plan([4, 4, 6, 2], [1, 3, 5, 1], sequence_len=8, sample_packing_sequentially=True)

    stats = made.stats
    assert stats.before == stats.after
    assert (
        stats.after.rows,
        stats.after.lower_bound,
        stats.after.efficiency,
        stats.after.mean_unpadded_length,
        stats.after.padding_tokens,
    ) == (2, 2, 1.0, 8.0, 0)
    assert (stats.after.mean_labels, stats.after.microbatch_label_std) == (5.0, 1.0)


def test_stats_print_as_a_table() -> None:
    with pytest.warns(UserWarning, match="1 dropped as longer"):
        made = plan([4, 9, 3], sequence_len=8)

    lines = str(made.stats).splitlines()
    assert lines[0] == "retained samples                       2"
    assert lines[1] == "dropped: over_long      1 (first: sample 1, longest: 9 tokens)"
    assert lines[2] == "                                  before           after"
    assert "efficiency                        0.8750          0.8750" in lines
    assert "length correlation                     -               -" in lines


def test_plans_are_equal_that_agree_in_everything() -> None:
    lengths = [3, 5, 2, 4, 7]
    made = plan(lengths, sequence_len=8)

    assert made == plan(lengths, config=Config(sequence_len=8))
    for other in (
        plan(lengths, sequence_len=8, epoch=1),
        plan(lengths, sequence_len=8, split="eval"),
        plan([3, 5, 2, 4, 6], sequence_len=8),
        plan(lengths, sequence_len=8, pad_to_multiple_of=8),
        dataclasses.replace(made, index=made.index.flip(0)),
        made.digest,
    ):
        assert made != other


@pytest.mark.parametrize(
    "keys",
    [
        {"sequence_len": 16},
        {"align_samples_to": 8},
        {"pad_to_multiple_of": 8},
        {"seed": 1},
        {"balance_labels": True},
    ],
    ids=repr,
)
def test_plans_of_other_settings_have_other_digests(keys: dict[str, Any]) -> None:
    lengths = [3, 5, 2, 4, 7]

    assert plan(lengths, lengths, sequence_len=8).digest != (
        plan(lengths, lengths, Config(sequence_len=8), **keys).digest
    )


def test_inputs_that_differ_are_told_apart() -> None:
    one, other = plan([3, 4, 5], sequence_len=8), plan([3, 4, 6], sequence_len=8)

    assert one.report["inputs"]["lengths"] != other.report["inputs"]["lengths"]
    assert one.report["inputs"]["settings"] == other.report["inputs"]["settings"]


def test_a_plan_prints_short() -> None:
    made = plan([4] * 4, sequence_len=4, world_size=2)

    assert (
        f"Plan(one_row, 2 microbatches on each of 2 ranks, 4 samples, digest {made.digest})"
        == repr(made)
    )
    json.dumps(made.report)


def test_balancing_without_label_counts_says_what_it_goes_by() -> None:
    with pytest.warns(UserWarning) as caught:
        plan([3, 4, 5] * 5, sequence_len=8, balance_labels=True)

    assert [str(warning.message) for warning in caught] == [
        "balance_labels has no label counts to go by, so every token counts as supervised; give "
        "label_counts where prompts are masked"
    ]
