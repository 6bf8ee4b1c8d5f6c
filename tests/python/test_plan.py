"""Plans: what they hold, what they leave out, and that they are the same everywhere."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multipack
from multipack import Config, Plan, Repeat, load_plan, plan


def rows_of(plan: Plan) -> list[list[int]]:
    """All rows of a plan, microbatch after microbatch."""
    return [
        row
        for k in range(len(plan))
        for rank in range(plan.config.world_size)
        for row in plan[rank, k]
    ]


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
        "no complete microbatch, so the plan is empty: 1 rows, but a microbatch needs 2; "
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


LENGTHS = [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS,
        tuple(LENGTHS),
        range(1, 13, 2),
        np.arange(1, 13)[::2],
        np.arange(1, 13, dtype=np.uint8)[::2],
        np.array(LENGTHS, np.uint16),
        np.array(LENGTHS, np.int32),
        np.array(LENGTHS, np.uint64),
        np.array(LENGTHS, ">i4"),
        np.array([LENGTHS, LENGTHS]).T[:, 0],
        torch.tensor(LENGTHS, dtype=torch.int16),
        torch.arange(1, 13)[::2],
        torch.tensor([LENGTHS, LENGTHS]).T[:, 1],
    ],
    ids=lambda lengths: f"{type(lengths).__name__} {getattr(lengths, 'dtype', '')}",
)
def test_lengths_in_any_form_give_the_same_plan(lengths: Any) -> None:
    assert plan(LENGTHS, sequence_len=12).digest == plan(lengths, sequence_len=12).digest


def test_lengths_may_be_expanded_or_read_only() -> None:
    constant = np.full(6, 4)
    constant.flags.writeable = False

    digest = plan([4] * 6, sequence_len=12).digest

    assert digest == plan(torch.tensor([4]).expand(6), sequence_len=12).digest
    assert digest == plan(constant, sequence_len=12).digest


@pytest.mark.parametrize(
    ("lengths", "kind", "text"),
    [
        ([1.5], TypeError, "lengths must hold integers, but is an array of float64"),
        (["3"], TypeError, "lengths must hold integers, but is an array of <U1"),
        ([True], TypeError, "lengths must hold integers, but is an array of bool"),
        (
            torch.tensor([3.0]),
            TypeError,
            "lengths must hold integers, but is a tensor of torch.float32",
        ),
        ([[3]], ValueError, "lengths has shape [1, 1], but must be one-dimensional"),
        (
            np.array([2**64 - 1], np.uint64),
            ValueError,
            "lengths holds 18446744073709551615, more than 9223372036854775807",
        ),
        ([[1], [2, 3]], TypeError, "lengths must be numbers, but is of lists of unequal lengths"),
        (None, TypeError, "lengths must hold integers, but is an array of object"),
        (
            torch.empty(3, dtype=torch.int64, device="meta"),
            ValueError,
            "multipack::plan runs on the CPU, but lengths is on meta: move it there with .cpu(), "
            "and the results back",
        ),
        ([3, -1], ValueError, "sample 1 has length -1, but a length is 0 or more tokens"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        plan(lengths, sequence_len=8)

    assert text == str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"label_counts": [1]},
            ValueError,
            "label_counts has 1 entries, but lengths has 2: give one entry per sample",
        ),
        (
            {"label_counts": [1, 1], "label_starts": [0, 1]},
            TypeError,
            "label_starts must hold bools, but is an array of int64",
        ),
        ({"split": "test"}, ValueError, "split is 'test', but must be 'train' or 'eval'"),
        ({"epoch": 0.5}, TypeError, "epoch is 0.5, but must be an integer"),
        ({"epoch": -1}, ValueError, "epoch is -1, but must be 0 or more"),
        (
            {"config": Config()},
            ValueError,
            "sequence_len is needed to plan: the most tokens of one sample",
        ),
    ],
)
def test_other_arguments_that_do_not_fit_are_refused(
    arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        plan([3, 4], **{"config": Config(sequence_len=8), **arguments})

    assert text == str(caught.value)


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


@pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
def test_an_epoch_is_a_permutation_of_equal_samples(form: Any) -> None:
    """Shuffling a tensor in place by swapping views once duplicated some entries."""
    for seed in range(50):
        made = plan(form([4] * 64), sequence_len=4, seed=seed)

        assert list(range(64)) == sorted(made.index.tolist())
        assert made.digest == plan([4] * 64, sequence_len=4, seed=seed).digest


def test_what_is_left_out_differs_by_epoch() -> None:
    used: set[int] = set()
    for epoch in range(20):
        index = plan([4] * 10, sequence_len=4, world_size=4, epoch=epoch).index.tolist()
        assert len(set(index)) == 8
        used.update(index)

    assert set(range(10)) == used


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    lengths = list(range(1, 40))

    def digest(**keys: Any) -> str:
        return plan(lengths, sequence_len=64, **keys).digest

    assert digest() == digest()
    assert digest(epoch=1) != digest(epoch=0)
    assert digest(seed=1) != digest(seed=0)
    # Were the two added, epoch 1 of seed 0 would be epoch 0 of seed 1.
    first = plan(lengths, sequence_len=64, seed=0, epoch=1).index
    assert first.tolist() != plan(lengths, sequence_len=64, seed=1, epoch=0).index.tolist()


ALGORITHMS = ("best_fit_decreasing", "tight", "first_fit", "next_fit")


def lognormal(seeded: np.random.Generator, n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths with a long tail, as those of chats are."""
    return np.clip(seeded.lognormal(5, 1, n), 1, 2048).astype(np.int64)


def pairs(plan: Plan) -> set[tuple[int, int]]:
    """All pairs of samples that share a row."""
    return {pair for row in rows_of(plan) for pair in itertools.combinations(sorted(row), 2)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_shares_a_row_differs_by_epoch(seed: int, algorithm: str) -> None:
    """A packer that sorts would put the same samples together in every epoch.

    Samples of equal length take turns: here each length has a hundred.
    """
    lengths = np.random.default_rng(seed).permutation(np.repeat(np.arange(100, 500, 20), 100))
    first, second = (
        pairs(plan(lengths, sequence_len=2048, sample_packing_algorithm=algorithm, epoch=epoch))
        for epoch in (0, 1)
    )

    assert len(first & second) < 0.15 * len(first)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_neighbouring_microbatches_are_not_alike(
    seeded: np.random.Generator, algorithm: str
) -> None:
    """Sorted by length they would be, and the loss would go up and down with them."""
    made = plan(lognormal(seeded, 5000), sequence_len=2048, sample_packing_algorithm=algorithm)

    correlation = made.stats.after.length_correlation
    assert correlation is not None
    assert abs(correlation) <= 3 / len(made) ** 0.5


def test_data_seed_stands_in_for_seed() -> None:
    lengths = list(range(1, 40))

    alone = plan(lengths, sequence_len=64, seed=5).index.tolist()

    assert alone == plan(lengths, sequence_len=64, seed=1, data_seed=5).index.tolist()


def test_other_processes_and_thread_counts_make_the_same_plan() -> None:
    """Ranks must agree without talking: no hash order, no thread order."""
    code = (
        "import multipack, numpy; "
        "lengths = numpy.random.default_rng(0).integers(1, 2048, 20_000); "
        "print(multipack.plan(lengths, sequence_len=4096, world_size=3).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "MULTIPACK_NUM_THREADS": threads, "OMP_NUM_THREADS": "8"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("0", "1"), ("1", "2"), ("2", "8"))
    }

    assert len(digests) == 1


def digest_of_many() -> str:
    return plan(np.random.default_rng(0).integers(1, 2048, 200_000), sequence_len=4096).digest


def test_a_forked_child_makes_the_same_plan() -> None:
    """After the parent has used its threads, which the child does not have."""
    here = digest_of_many()

    with multiprocessing.get_context("fork").Pool(1) as child:
        assert here == child.apply_async(digest_of_many).get(timeout=60)


def test_planning_can_be_interrupted() -> None:
    """A real Ctrl-C: the planner was still at work when Python heard it."""
    code = (
        "import os, signal, threading, time\n"
        "import numpy, multipack\n"
        # A shell that runs the tests in the background has it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "lengths = numpy.random.default_rng(0).integers(1, 4096, 1_000_000)\n"
        "def planners():\n"
        "    return [t for t in threading.enumerate() if t.name == 'multipack plan']\n"
        "def interrupt():\n"
        "    while not planners():\n"
        "        time.sleep(0.001)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "try:\n"
        "    multipack.plan(lengths, sequence_len=4096, sample_packing_algorithm='tight')\n"
        "except KeyboardInterrupt:\n"
        "    print(len(planners()), 'planner at work')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 planner at work\n"


def test_a_long_plan_is_the_same_in_any_thread_and_its_errors_are_too() -> None:
    lengths = np.random.default_rng(0).integers(1, 4096, 1_000_000)
    with ThreadPoolExecutor() as pool:
        elsewhere = pool.submit(plan, lengths, sequence_len=4096).result()

    assert elsewhere.digest == plan(lengths, sequence_len=4096).digest
    lengths[-1] = -1
    with pytest.raises(ValueError, match="sample 999999 has length -1"):
        plan(lengths, sequence_len=4096)


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


def test_a_saved_plan_comes_back_whole(tmp_path: Path) -> None:
    made = plan(list(range(1, 60)), sequence_len=64, world_size=2, incomplete_batches="fill")
    path = tmp_path / "epoch.plan"

    made.save(path)
    loaded = load_plan(path)

    assert [path] == list(tmp_path.iterdir())
    assert made == loaded
    assert hash(made) == hash(loaded)
    assert rows_of(made) == rows_of(loaded)
    assert [type(s) for row in rows_of(made) for s in row] == [
        type(s) for row in rows_of(loaded) for s in row
    ]


def test_a_plan_is_written_alike_by_every_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy before 2.1 has no options here, and keeps every keyword as an array."""
    real = np.savez

    def savez(file: Any, **arrays: Any) -> None:
        assert all(isinstance(array, np.ndarray) for array in arrays.values())
        real(file, **arrays)

    monkeypatch.setattr(np, "savez", savez)
    plan([3, 5, 2], sequence_len=8).save(tmp_path / "epoch.plan")

    assert load_plan(tmp_path / "epoch.plan") == plan([3, 5, 2], sequence_len=8)


def test_a_plan_is_as_large_as_its_samples_and_not_as_their_masks(tmp_path: Path) -> None:
    """C61: the masks of these 10,000 rows would take 168 GB."""
    plan = multipack.plan([512] * 80_000, sequence_len=4096)
    path = tmp_path / "plan.npz"
    plan.save(path)

    assert len(plan.row_offsets) == 10_001
    assert sum(part.nbytes for part in (plan.index, plan.row_offsets, plan.batch_offsets)) < 1 << 20
    assert path.stat().st_size < 1 << 20


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


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    made = plan([4] * 100, sequence_len=4)
    path = tmp_path / "epoch.plan"
    made.save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["index"][[0, 1]] = arrays["index"][[1, 0]]
    with path.open("wb") as file:
        np.savez(file, **arrays)

    with pytest.raises(ValueError) as caught:
        load_plan(path)

    assert f"{path} is damaged: its checksum is not that of its contents; plan anew" == str(
        caught.value
    )


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    made = plan([4] * 100, sequence_len=4)
    path = tmp_path / "epoch.plan"
    made.save(path)
    whole = path.read_bytes()
    pickled = pickle.dumps({"index": [0]})

    for content in (whole[: len(whole) // 2], b"", b"hello", pickled):
        path.write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r" is not a saved plan, or only a part of one: make it with Plan\.save$",
        ):
            load_plan(path)
    np.savez(path.with_suffix(".npz"), index=np.zeros(3))
    with pytest.raises(
        ValueError, match=r" is not a saved plan, or only a part of one: make it with Plan\.save$"
    ):
        load_plan(path.with_suffix(".npz"))


def test_a_missing_plan_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "none")


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


def test_label_counts_are_of_labels_that_enter_the_loss() -> None:
    counts, starts = multipack.label_counts([-100, 7, 8, 9, -100, 5], [0, 3, 5, 5, 6])

    assert counts.tolist() == [2, 0, 0, 0]
    assert starts.tolist() == [False, True, False, True]
    assert (torch.int64, torch.bool) == (counts.dtype, starts.dtype)


def test_label_counts_follow_the_first_label_and_truncation() -> None:
    labels = np.array([1, 2, 3, 4, 5], np.int32)
    labels.flags.writeable = False

    def counts(**keys: Any) -> list[int]:
        return multipack.label_counts(labels, [0, 5], Config(**keys))[0].tolist()

    assert counts(sequence_len=3) == [4]
    assert counts(mask_first_label=False) == [5]
    assert counts(sequence_len=3, excess_length_strategy="truncate") == [2]


def test_labels_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError) as caught:
        multipack.label_counts([0.5], [0, 1])

    assert str(caught.value) == "labels must be int32 or int64, but is an array of float64"
    with pytest.raises(ValueError, match="offsets"):
        multipack.label_counts([1, 2], [0, 3])


def test_settings_in_the_place_of_label_counts_are_named() -> None:
    for make in (plan, multipack.MultipackBatchSampler):
        with pytest.raises(
            TypeError, match=r"label_counts is a Config: write config=\.\.\. for it"
        ):
            make([3, 4], Config(sequence_len=8))  # type: ignore[arg-type]
