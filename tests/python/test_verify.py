"""Plans as files: equal everywhere, and checked before they are trusted."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multipack import Plan, load_plan, plan

LENGTHS = [3, 5, 2, 6, 9, 4, 1, 8]
COUNTS = [2, 1, 1, 5, 3, 0, 1, 6]


def planned(**keys: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples left out
        return plan(LENGTHS, COUNTS, **{"sequence_len": 8, **keys})


def changed(made: Plan, **changes: Any) -> Plan:
    """Return a plan with other tensors, or with other facts in its report."""
    report = {**made.report, **{k: v for k, v in changes.items() if k in made.report}}
    tensors = {k: torch.tensor(v) for k, v in changes.items() if k not in made.report}
    return dataclasses.replace(made, report=report, **tensors)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"excess_length_strategy": "truncate", "align_samples_to": 4},
        {"drop_unlabelled": False, "min_sample_len": 3},
        {"micro_batch_size": 2, "multipack_real_batches": True},
        {"micro_batch_size": 3, "sample_packing": False},
        {"micro_batch_size": 3, "sample_packing": False, "batch_flattening": True},
        {"world_size": 3},
        {"world_size": 3, "incomplete_batches": "fill"},
        {"world_size": 3, "incomplete_batches": "split"},
        {"sample_packing_bin_size": 1, "epoch": 3},
        {"sample_packing_algorithm": "tight"},
    ],
    ids=repr,
)
def test_a_plan_that_was_saved_keeps_its_promises(
    keys: dict[str, Any], split: Any, tmp_path: Path
) -> None:
    made = planned(split=split, **keys)
    made.save(tmp_path / "plan")

    load_plan(tmp_path / "plan").verify(LENGTHS, COUNTS)
    load_plan(tmp_path / "plan").verify(np.array(LENGTHS), torch.tensor(COUNTS))


def random_settings(seeded: np.random.Generator) -> dict[str, Any]:
    """Draw settings from all that shape a plan."""

    def one_of(*values: Any) -> Any:
        return values[int(seeded.integers(len(values)))]

    packed = one_of(True, True, False)
    sequentially = one_of(False, False, True)
    algorithms = ["best_fit_decreasing", "next_fit", "tight", "first_fit"]
    return {
        "sequence_len": 32,
        "sample_packing": packed,
        "batch_flattening": not packed and one_of(True, False),
        "multipack_real_batches": packed and one_of(True, False),
        "sample_packing_algorithm": one_of(*algorithms[: 2 if sequentially else 4]),
        "sample_packing_sequentially": sequentially,
        "balance_labels": not sequentially and one_of(True, False),
        "sample_packing_bin_size": one_of(None, 1, 3),
        "sample_packing_group_size": one_of(None, 50),
        "micro_batch_size": one_of(1, 2, 5),
        "gradient_accumulation_steps": one_of(1, 3),
        "world_size": one_of(1, 2, 3),
        "incomplete_batches": one_of("drop", "fill", "split"),
        "excess_length_strategy": one_of("drop", "truncate"),
        "min_sample_len": one_of(1, 4),
        "drop_unlabelled": one_of(True, False),
        "align_samples_to": one_of(1, 4) if packed else 1,
        "seed": one_of(0, 7),
    }


def test_random_plans_keep_their_promises(seeded: np.random.Generator) -> None:
    """All strategies, layouts and policies, checked by the plainest means."""
    planned = 0
    for _ in range(25):
        lengths = seeded.integers(0, 40, int(seeded.integers(40, 300)))
        counts = np.minimum(seeded.integers(0, 40, len(lengths)), np.minimum(lengths, 32))
        labels = counts if seeded.random() < 0.5 else None
        split: Any = "eval" if seeded.random() < 0.3 else "train"
        keys = random_settings(seeded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samples left out, which these inputs have
            try:
                made = plan(lengths, labels, split=split, epoch=int(seeded.integers(5)), **keys)
            except ValueError as error:
                if "cannot be split over" in str(error):
                    continue
                raise
        made.verify(lengths, labels)
        planned += 1

    assert planned > 15


@pytest.mark.parametrize(
    ("lengths", "counts", "what"),
    [
        ([3, 5, 2, 6, 9, 4, 1, 7], COUNTS, "lengths"),
        (LENGTHS, [2, 1, 1, 5, 3, 0, 1, 5], "labels"),
    ],
)
def test_a_plan_of_other_samples_is_refused(lengths: Any, counts: Any, what: str) -> None:
    made = planned(drop_unlabelled=False)

    with pytest.raises(ValueError, match=f"the {what} are not those that the plan was made from"):
        made.verify(lengths, counts)


def test_labels_are_given_to_check_a_plan_if_it_was_made_with_them() -> None:
    with_labels, without = planned(), plan(LENGTHS, sequence_len=16)

    with pytest.raises(ValueError) as caught:
        with_labels.verify(LENGTHS)
    assert str(caught.value) == "the plan was made with label counts: give them, to check it"
    with pytest.raises(ValueError) as caught:
        without.verify(LENGTHS, COUNTS)
    assert (
        str(caught.value) == "the plan was made without label counts: leave them out, to check it"
    )


# The rows are [3, 5], [2, 6], [1], [8], and samples 4 and 5 are left out; in order, for two ranks.
GOOD = {"sample_packing_sequentially": True, "world_size": 2}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"index": [0, 1, 2, 3, 6, 6]},
            "sample 6 is planned more than once, and is not marked as a repeat",
        ),
        ({"index": [0, 1, 2, 3, 6, 5]}, "sample 5 is planned, but the settings leave it out"),
        ({"index": [0, 1, 2, 3, 6, 8]}, "entry 5 of index is sample 8, but there are 8 samples"),
        ({"index": [0, 1, 2, 3, 6, -1]}, "entry 5 of index is sample -1, but there are 8 samples"),
        (
            {"index": [0, 1, 2, 3, 6], "row_offsets": [0, 2, 4, 5], "batch_offsets": [0, 1, 2, 3]},
            "the plan has 3 microbatches, but 2 ranks with 2 each have 4",
        ),
        (
            {"row_offsets": [0, 2, 4, 5, 7]},
            "row_offsets must go from 0 to 6, the number of samples",
        ),
        (
            {"row_offsets": [0, 2, 2, 4, 6]},
            "row_offsets does not rise at entry 1, but nothing may be empty",
        ),
        ({"batch_offsets": [0, 1, 2, 3]}, "batch_offsets must go from 0 to 4, the number of rows"),
        ({"row_offsets": [0, 3, 4, 5, 6]}, "row 0 holds 10 tokens, more than 8"),
        (
            {"index": [0, 1, 2, 3], "row_offsets": [0, 1, 2, 3, 4]},
            "2 retained samples are not planned (first: 6), but the report says 0",
        ),
        (
            {"repeated_samples": 1},
            "sample 7 is marked as a repeat, but is planned nowhere else",
        ),
        (
            {"index": [1, 0, 2, 3, 6, 7]},
            "index differs from a fresh plan from entry 0 on: it was changed, or made by another "
            "version of the planner (it says 1, and this is 1)",
        ),
        ({"digest": "0" * 32}, "the report differs from that of a fresh plan in digest"),
    ],
    ids=repr,
)
def test_a_plan_that_breaks_a_promise_is_refused_with_the_place(
    changes: dict[str, Any], text: str
) -> None:
    made = planned(**GOOD)
    assert made.index.tolist() == [0, 1, 2, 3, 6, 7]
    assert made.row_offsets.tolist() == [0, 2, 4, 5, 6]

    with pytest.raises(ValueError) as caught:
        changed(made, **changes).verify(LENGTHS, COUNTS)

    assert text == str(caught.value)


@pytest.mark.parametrize(
    ("keys", "changes", "text"),
    [
        (
            {"sample_packing_bin_size": 1, **GOOD},
            {"row_offsets": [0, 2, 3, 4, 5, 6], "batch_offsets": [0, 1, 2, 3, 5]},
            "microbatch 3 holds 2 rows, more than 1",
        ),
        (
            {"sample_packing": False, "micro_batch_size": 3},
            {"row_offsets": [0, 2, 6]},
            "row 1 holds 4 samples, more than 3",
        ),
    ],
)
def test_limits_on_samples_and_rows_are_checked(
    keys: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    made = planned(**keys)
    count = (len(changes.get("batch_offsets", made.batch_offsets)) - 1) // made.config.world_size

    with pytest.raises(ValueError) as caught:
        changed(made, microbatches_per_rank=count, **changes).verify(LENGTHS, COUNTS)

    assert text == str(caught.value)


def test_a_plan_is_the_same_file_wherever_and_whenever_it_is_written(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, multipack\n"
        "lengths = numpy.random.default_rng(0).integers(1, 2048, 20_000)\n"
        "multipack.plan(lengths, sequence_len=4096, world_size=3).save(sys.argv[1])\n"
    )
    files = []
    for number, (seed, threads, zone) in enumerate(
        (("0", "1", "UTC"), ("1", "2", "Asia/Tokyo"), ("2", "8", "America/Lima"))
    ):
        files.append(tmp_path / str(number))
        subprocess.run(
            [sys.executable, "-c", code, files[-1]],
            env={"PYTHONHASHSEED": seed, "MULTIPACK_NUM_THREADS": threads, "TZ": zone},
            check=True,
        )

    assert len({file.read_bytes() for file in files}) == 1
