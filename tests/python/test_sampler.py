"""The batch sampler: exact lengths, equal ranks, epochs, and resuming where a run stopped."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import multipack
from multipack import MultipackBatchSampler, Repeat, ops

LENGTHS = [3, 5, 2, 6, 4, 4, 1, 7, 8, 2, 6, 3]


def sampler(lengths: Any = LENGTHS, **keys: Any) -> MultipackBatchSampler:
    return MultipackBatchSampler(lengths, **{"sequence_len": 8, **keys})


def six_batches(**keys: Any) -> MultipackBatchSampler:
    """Make a sampler of six microbatches a rank, each of one row of one sample."""
    return sampler([8] * 6 * keys.get("world_size", 1), **keys)


def take(batches: Any, n: int) -> list[Any]:
    return list(itertools.islice(batches, n))


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for row in batch for sample in row]


# ---- what it yields ----


def test_it_yields_rows_in_the_order_of_the_plan() -> None:
    made = sampler([3, 5, 2, 6], sample_packing_sequentially=True)

    assert list(made) == [[[0, 1]], [[2, 3]]]


@pytest.mark.parametrize(
    ("keys", "size", "batch"),
    [
        ({}, 1, [[0, 1, 2, 3]]),
        ({"multipack_real_batches": True}, 2, [[0, 1], [2, 3]]),
        ({"sample_packing": False}, 2, [0, 1]),
        ({"sample_packing": False, "batch_flattening": True}, 2, [0, 1]),
    ],
    ids=repr,
)
def test_a_batch_has_the_form_of_its_layout(
    keys: dict[str, Any], size: int, batch: list[Any]
) -> None:
    made = sampler([3, 5, 2, 6], micro_batch_size=2, sample_packing_sequentially=True, **keys)

    assert batch == next(iter(made))
    assert size == made.batch_size == len(batch)


def test_the_evaluation_has_its_own_size_and_the_same_order_every_time() -> None:
    made = sampler([8] * 10, split="eval", micro_batch_size=4, eval_batch_size=2)

    first = list(made)
    assert 5 == len(first) == len(made)
    assert first == list(made)
    assert list(range(10)) == sorted(flat(first))


def test_batches_hold_plain_ints() -> None:
    made = sampler(np.array(LENGTHS, np.int32), rank=np.int64(0))

    assert {int} == {type(sample) for sample in flat(made)}


def test_repeats_are_marked() -> None:
    made = sampler([8] * 5, split="eval", world_size=2, rank=1)

    assert [int, int, Repeat] == [type(sample) for sample in flat(made)]


def test_what_frameworks_ask_of_a_batch_sampler_is_there() -> None:
    """Accelerate multiplies by batch_size and reads drop_last and sampler at set-up."""
    made = sampler(micro_batch_size=2, multipack_real_batches=True)
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=made)

    found = loader.batch_sampler
    assert (found.batch_size, found.drop_last) == (2, True)
    assert list(range(len(LENGTHS))) == list(found.sampler)
    assert len(made) == len(loader)
    assert sampler(incomplete_batches="fill").drop_last is False
    assert sampler(split="eval").drop_last is False


# ---- ranks ----


def test_ranks_share_the_plan_out() -> None:
    ranks = [list(six_batches(world_size=2, rank=rank)) for rank in (0, 1)]
    together = list(six_batches(world_size=2, rank="all"))

    assert [len(ranks[0]), len(ranks[1]), len(together)] == [6, 6, 12]
    assert together == [batch for pair in zip(*ranks, strict=True) for batch in pair]
    assert list(range(12)) == sorted(flat(together))


def test_ranks_with_another_seed_are_told_apart_by_the_digest() -> None:
    """With seeds of their own, some samples are seen twice and others never."""
    ranks = [sampler([8] * 40, world_size=2, rank=rank, seed=11) for rank in (0, 1)]
    stray = sampler([8] * 40, world_size=2, rank=1, seed=12)

    assert ranks[0].plan.digest == ranks[1].plan.digest != stray.plan.digest
    assert list(range(40)) == sorted(flat(ranks[0]) + flat(ranks[1]))
    with pytest.raises(ValueError, match="data_seed was 11 and is now 12"):
        stray.load_state_dict(ranks[0].state_dict())


def test_a_framework_that_builds_it_anew_is_told_to_leave_it_alone() -> None:
    """Lightning calls the class with (sampler, batch_size=…, drop_last=…) on several devices."""
    made = sampler()

    with pytest.raises(TypeError) as caught:
        type(made)(made.sampler, batch_size=made.batch_size, drop_last=made.drop_last)

    assert str(caught.value) == (
        "lengths is a sampler: a framework seems to build the batch sampler anew, to share it out "
        "over ranks, which it does by itself; tell the framework to leave it alone "
        "(Lightning: Trainer(use_distributed_sampler=False))"
    )


def test_a_framework_that_deals_whole_batches_out_gets_each_ranks_share() -> None:
    """Wrapping a sampler that is already a rank's would leave each rank a quarter of the data."""
    for rank in (0, 1):
        dealt = list(six_batches(world_size=2, rank="all"))[rank::2]

        assert list(six_batches(world_size=2, rank=rank)) == dealt


@pytest.mark.parametrize(
    ("rank", "kind", "text"),
    [
        (
            None,
            ValueError,
            "rank is needed when world_size is 2: this rank's number, or 'all' for every rank's "
            "microbatches in global order",
        ),
        (2, ValueError, "rank is 2, but must be from 0 to 1, or 'all'"),
        (-1, ValueError, "rank is -1, but must be from 0 to 1, or 'all'"),
        (True, TypeError, "rank is True, but must be an integer"),
        ("one", TypeError, "rank is 'one', but must be an integer"),
    ],
)
def test_a_wrong_rank_is_refused(rank: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        six_batches(world_size=2, rank=rank)

    assert text == str(caught.value)


def test_one_rank_needs_no_number() -> None:
    assert sampler().rank == 0


# ---- length ----


@pytest.mark.parametrize(("policy", "count"), [("drop", 3), ("fill", 4)])
def test_the_length_is_counted_and_not_estimated(policy: str, count: int) -> None:
    """From the total, 35 tokens in rows of 8, one would expect 5 rows; there are 7."""
    for rank in (0, 1):
        made = sampler([5] * 7, world_size=2, rank=rank, incomplete_batches=policy)

        assert count == len(made) == len(list(made))


def test_the_length_is_exact_and_equal_on_all_ranks_in_every_epoch() -> None:
    """A length that is kept while the plan changes makes ranks wait for one another for ever."""
    seeded = np.random.default_rng(0)
    algorithms = itertools.cycle(["best_fit_decreasing", "tight", "first_fit", "next_fit"])
    for data_set in range(500):
        keys = {
            "sequence_len": 64,
            "sample_packing_algorithm": next(algorithms),
            "multipack_real_batches": bool(data_set % 3),
            "incomplete_batches": ["drop", "split", "fill"][data_set % 3],
            "world_size": 3,
            "seed": int(seeded.integers(1000)),
        }
        lengths = seeded.integers(1, 60, int(seeded.integers(15, 90)))
        samplers = [sampler(lengths, rank=rank, **keys) for rank in range(3)]

        for epoch in range(2):
            for made in samplers:
                made.set_epoch(epoch)
            promised = {len(made) for made in samplers}
            assert len(promised) == 1, (lengths, keys)
            assert promised == {len(list(made)) for made in samplers}, (lengths, keys)


@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "next_fit"])
def test_shuffling_never_gives_one_rank_more_than_another(algorithm: str) -> None:
    """Batches cut after shuffling, by tokens, came out in other numbers on each card."""
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    for seed in range(200):
        samplers = [
            sampler(
                lengths,
                sequence_len=64,
                sample_packing_algorithm=algorithm,
                world_size=3,
                rank=rank,
                seed=seed,
            )
            for rank in range(3)
        ]
        for _ in range(3):
            assert len({len(list(made)) for made in samplers}) == 1


def test_the_length_changes_with_the_epoch_where_the_rows_do() -> None:
    """Or the test above could not fail."""
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    made = sampler(lengths, sequence_len=64, sample_packing_algorithm="next_fit")

    assert len({len(list(made)) for _ in range(5)}) > 1


def test_the_length_is_that_of_the_epoch_until_its_last_batch_is_consumed() -> None:
    """Workers have fetched the last batch long before."""
    lengths = np.random.default_rng(0).integers(1, 60, 20)
    made = sampler(lengths, sequence_len=64, sample_packing_algorithm="next_fit")
    loader = DataLoader(
        multipack.RowDataset(range(20)), batch_sampler=made, collate_fn=list, num_workers=2
    )
    counts = []
    for epoch in range(4):
        expected = len(multipack.plan(lengths, config=made.config, epoch=epoch))
        assert expected == len(loader)
        for _ in loader:
            counts.append(expected)

            assert expected == len(loader) == len(made)

    assert len(set(counts)) > 1
    held = iter(made)
    assert len(list(held)) == len(made)
    made.set_epoch(made.epoch)
    assert len(multipack.plan(lengths, config=made.config, epoch=5)) == len(made)


def test_length_iteration_and_state_need_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def collective(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective was called")

    for name in ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, collective)

    made = six_batches(world_size=2, rank=0)

    assert 6 == len(made) == len(list(made))
    assert made.state_dict()["epoch"] == 1


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the epochs that are planned from here on."""
    epochs: list[int] = []
    plan = ops.plan

    def listed(*arguments: Any) -> Any:
        epochs.append(arguments[4])
        return plan(*arguments)

    monkeypatch.setattr(ops, "plan", listed)
    return epochs


def test_an_epoch_is_planned_once(planned: list[int]) -> None:
    made = sampler()
    len(made)
    list(made)
    made.set_epoch(1)
    len(made)
    list(made)

    assert planned == [0, 1]


def test_what_was_planned_to_count_steps_is_not_planned_again(planned: list[int]) -> None:
    made = sampler(sample_packing_algorithm="next_fit")
    steps = made.total_steps(3)
    for _ in range(3):
        assert len(made) == len(list(made))

    assert steps == made.total_steps(3)
    assert planned == [0, 1, 2]


def test_where_all_epochs_are_alike_one_is_planned_to_count_steps(planned: list[int]) -> None:
    sampler().total_steps(50)

    assert planned == [0]


def test_plans_that_take_too_much_are_counted_and_not_kept(
    planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipack.sampler, "_KEPT_BYTES", 1000)
    made = sampler(sample_packing_algorithm="next_fit")

    steps = made.total_steps(20)
    assert steps == made.total_steps(20)
    assert planned == list(range(20))
    for _ in range(20):
        list(made)

    again = planned[20:]
    assert 20 - len(again) > 2
    assert again == list(range(20 - len(again), 20))


def test_the_state_at_the_end_of_the_last_epoch_plans_no_further_one(planned: list[int]) -> None:
    made = sampler()
    list(made)

    assert made.state_dict()["epoch"] == 1
    assert planned == [0]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, 18),
        ({"gradient_accumulation_steps": 4}, 6),
        ({"gradient_accumulation_steps": 3}, 6),
        ({"world_size": 2, "rank": "all", "gradient_accumulation_steps": 3}, 6),
        ({"gradient_accumulation_steps": 10}, 3),
    ],
    ids=repr,
)
def test_total_steps_count_the_incomplete_step_of_each_epoch(
    keys: dict[str, Any], steps: int
) -> None:
    assert steps == six_batches(**keys).total_steps(3)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sample_packing_bin_size": 3},
        {"sample_packing_group_size": 20},
        {"sample_packing_sequentially": True},
        {"sample_packing_algorithm": "first_fit"},
        {"sample_packing_algorithm": "next_fit"},
        {"sample_packing": False, "micro_batch_size": 7},
        {"incomplete_batches": "fill", "world_size": 2, "rank": 0},
        {"incomplete_batches": "split", "world_size": 3, "rank": "all"},
        {"split": "eval", "sample_packing_algorithm": "next_fit"},
    ],
    ids=repr,
)
def test_total_steps_are_those_that_the_epochs_have(keys: dict[str, Any]) -> None:
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 60, 150)
        made = sampler(lengths, sequence_len=64, gradient_accumulation_steps=4, **keys)
        ranks = made.config.world_size if keys.get("rank") == "all" else 1

        counts = [len(list(made)) // ranks for _ in range(4)]

        assert sum(-(-count // 4) for count in counts) == made.total_steps(4)


# ---- epochs ----


def test_epochs_advance_by_themselves() -> None:
    made = sampler()
    orders = [list(made) for _ in range(3)]

    again = sampler()
    for epoch, order in enumerate(orders):
        again.set_epoch(epoch)
        assert order == list(again)
    assert orders[0] != orders[1] != orders[2]
    assert made.epoch == 3


def test_epochs_advance_in_a_loop_that_counts_its_batches() -> None:
    """C68, C72: such a loop never comes to the end of an iteration."""

    def take(sampler: MultipackBatchSampler, n: int) -> list[Any]:
        batches = iter(sampler)
        return [next(batches) for _ in range(n)]

    sampler = MultipackBatchSampler(range(1, 41), sequence_len=64)
    epochs = [list(sampler) for _ in range(3)]
    n = len(epochs[0])
    assert epochs[0] != epochs[1]

    counted = MultipackBatchSampler(range(1, 41), sequence_len=64)
    assert [take(counted, n) for _ in range(3)] == epochs
    assert counted.epoch == 3
    counted.set_epoch(1)
    assert take(counted, n) == epochs[1]
    counted.set_epoch(1)
    assert take(counted, n) == epochs[1]

    resumed = MultipackBatchSampler(range(1, 41), sequence_len=64)
    resumed.load_state_dict({"epoch": 0, "batches": 2})
    assert take(resumed, n - 2) == epochs[0][2:]
    assert take(resumed, n) == epochs[1]


def test_set_epoch_gives_the_order_of_that_epoch_whenever_it_comes() -> None:
    made = sampler()
    orders = []
    for epoch in (0, 1, 0):
        made.set_epoch(epoch)
        orders.append(list(made))

    assert orders[0] == orders[2] != orders[1]


def test_set_epoch_leaves_an_iteration_under_way_alone() -> None:
    expected = list(six_batches())
    made = six_batches()

    batches = iter(made)
    begun = take(batches, 2)
    made.set_epoch(3)
    rest = list(batches)

    assert expected == begun + rest
    assert made.epoch == 3
    assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (3, 0)


def test_a_peek_at_the_first_batch_loses_nothing() -> None:
    made = six_batches()
    expected = list(six_batches())

    assert expected[0] == next(iter(made))
    assert expected == list(made)


@pytest.mark.parametrize(
    ("epoch", "kind", "text"),
    [
        (-1, ValueError, "epoch is -1, but must be 0 or more"),
        (True, TypeError, "epoch is True, but must be an integer"),
        (1.0, TypeError, "epoch is 1.0, but must be an integer"),
    ],
)
def test_a_wrong_epoch_is_refused(epoch: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        sampler().set_epoch(epoch)

    assert text == str(caught.value)


# ---- state ----


@pytest.mark.parametrize("rank", [0, 1, "all"])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(rank: Any) -> None:
    """Trainers call set_epoch after loading; it must not throw the position away."""
    running = six_batches(world_size=2, rank=rank)
    list(running)
    batches = iter(running)
    take(batches, 2)
    state = running.state_dict()
    rest = list(batches)

    resumed = six_batches(world_size=2, rank=rank)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)

    assert (state["epoch"], state["position"]) == (1, 2)
    assert rest == list(resumed)
    assert list(running) == list(resumed)


def test_a_run_can_stop_twice_in_one_epoch() -> None:
    expected = list(six_batches())
    seen = []
    state = None
    for n in (2, 3, 1):
        made = six_batches()
        if state is not None:
            made.load_state_dict(state)
        seen += take(iter(made), n)
        state = made.state_dict()

    assert expected == seen
    assert (state["epoch"], state["position"]) == (1, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_only_the_resumed_epoch_is_short(num_workers: int) -> None:
    running = six_batches()
    take(iter(running), 4)
    resumed = six_batches()
    resumed.load_state_dict(running.state_dict())
    loader = DataLoader(
        multipack.RowDataset(range(6)),
        batch_sampler=resumed,
        collate_fn=list,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )

    assert [len(list(loader)) for _ in range(3)] == [2, 6, 6]


def test_one_ranks_state_serves_the_others() -> None:
    first, second = (six_batches(world_size=2, rank=rank) for rank in (0, 1))
    take(iter(first), 4)

    resumed = six_batches(world_size=2, rank=1)
    resumed.load_state_dict(first.state_dict())

    assert list(second)[4:] == list(resumed)


def test_the_state_is_plain_data() -> None:
    state = six_batches().state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)

    assert state == torch.load(file, weights_only=True)
    assert len(pickle.dumps(state)) < 2000


def test_the_state_follows_what_was_consumed_once_that_is_told() -> None:
    """A loader's workers fetch ahead: what was yielded is not what was trained on."""
    made = six_batches()
    batches = iter(made)
    take(batches, 5)
    assert made.state_dict()["position"] == 5

    made.consumed(2)
    assert made.state_dict()["position"] == 2
    made.consumed()
    assert made.state_dict()["position"] == 3

    list(batches)
    assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (0, 3)
    made.consumed(3)
    assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (1, 0)

    take(iter(made), 4)
    assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (1, 0)


def test_consumption_counts_on_from_a_resumed_position() -> None:
    running = six_batches()
    take(iter(running), 2)
    resumed = six_batches()
    resumed.load_state_dict(running.state_dict())

    take(iter(resumed), 3)
    resumed.consumed(1)

    assert resumed.state_dict()["position"] == 3


def test_consumption_is_counted_per_rank_where_all_are_yielded() -> None:
    made = six_batches(world_size=2, rank="all")
    take(iter(made), 8)

    made.consumed(3)

    assert made.state_dict()["position"] == 6


SAVED = {"micro_batch_size": 2, "world_size": 2, "rank": 0, "seed": 5}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"micro_batch_size": 1}, "micro_batch_size was 2 and is now 1"),
        ({"world_size": 1}, "world_size was 2 and is now 1"),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps was 1 and is now 2",
        ),
        ({"seed": 6}, "data_seed was 5 and is now 6"),
        ({"sequence_len": 16}, "sequence_len was 8 and is now 16"),
        ({"rank": "all"}, "order was 'rank' and is now 'all'"),
        ({"split": "eval"}, "split was 'train' and is now 'eval'; go back"),
        (
            {"split": "eval", "eval_batch_size": 4},
            "split was 'train' and is now 'eval'; eval_batch_size was not saved and is now 4; go",
        ),
        (
            {"micro_batch_size": 1, "seed": 6},
            "micro_batch_size was 2 and is now 1; data_seed was 5 and is now 6",
        ),
    ],
    ids=repr,
)
def test_a_state_of_other_settings_is_refused_by_name(changed: dict[str, Any], text: str) -> None:
    saved = sampler([8] * 12, **SAVED)
    take(iter(saved), 1)
    made = sampler([8] * 12, **{**SAVED, **changed})
    before = made.state_dict()

    with pytest.raises(ValueError) as caught:
        made.load_state_dict(saved.state_dict())

    assert f"the state belongs to another order of samples: {text}" in str(caught.value)
    assert before == made.state_dict()


def test_a_state_of_other_lengths_or_labels_is_refused() -> None:
    saved = MultipackBatchSampler([8, 8, 7], [4, 5, 6], sequence_len=8)

    for lengths, counts, field in (
        ([8, 8, 6], [4, 5, 6], "lengths_digest"),
        ([8, 8, 7], [4, 5, 5], "label_counts_digest"),
        ([8, 8, 7], None, "label_counts_digest"),
    ):
        made = MultipackBatchSampler(lengths, counts, sequence_len=8)
        with pytest.raises(ValueError, match=f"another order of samples: {field} was '[0-9a-f]+'"):
            made.load_state_dict(saved.state_dict())


def test_what_only_shapes_batches_may_change() -> None:
    saved = six_batches(pad_to_multiple_of=64, data_seed=3)
    take(iter(saved), 2)
    made = six_batches(pad_to_sequence_len=True, seed=3, eval_batch_size=4)

    made.load_state_dict(saved.state_dict())

    assert made.state_dict()["position"] == 2


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": None, "epoch": 1}], ids=repr)
def test_a_state_of_another_version_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        sampler().load_state_dict(state)

    assert f"the state has version {state.get('version')}, but this release reads version 1" == str(
        caught.value
    )


def test_a_position_past_the_end_is_refused() -> None:
    made = six_batches()

    with pytest.raises(ValueError) as caught:
        made.load_state_dict({**made.state_dict(), "position": 7})

    assert str(caught.value) == "position is 7, but epoch 0 has 6 microbatches"


# ---- as an object ----


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_like_the_original(copied: Any) -> None:
    made = six_batches(world_size=2, rank=1)
    made.set_epoch(2)
    take(iter(made), 4)
    made.load_state_dict(made.state_dict())

    other = copied(made)

    assert made.state_dict() == other.state_dict()
    assert list(made) == list(other)
    assert list(made) == list(other)


def test_a_pickled_sampler_holds_its_lengths_and_no_plan() -> None:
    made = sampler(np.full(10_000, 8))

    assert len(pickle.dumps(made)) < 8 * 10_000 + 10_000


def test_later_changes_of_the_lengths_do_not_reach_it() -> None:
    for lengths in (np.array(LENGTHS), torch.tensor(LENGTHS)):
        made = sampler(lengths)
        expected = list(sampler())
        lengths[:] = 1

        assert expected == list(made)
        made.set_epoch(0)
        assert expected == list(made)


def test_millions_of_samples_are_kept_as_tensors() -> None:
    """Lists of ints would be copied into every worker, one reference count after the other."""
    n = 1_000_000
    made = sampler(np.full(n, 4), label_counts=np.full(n, 3))

    held = [value for value in vars(made).values() if isinstance(value, torch.Tensor)]
    plan = made.plan

    assert 16 * n == sum(tensor.nbytes for tensor in held)
    assert plan.index.nbytes + plan.row_offsets.nbytes + plan.batch_offsets.nbytes <= 16 * n + 16
    assert not [value for value in vars(made).values() if isinstance(value, list | tuple)]


def test_a_planners_warning_is_given_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        made = sampler([3, 9, 4])
        for _ in range(3):
            list(made)

    assert [str(warning.message) for warning in caught] == [
        "of 3 samples 1 dropped as longer than sequence_len 8 (first: 1, longest: 9 tokens)"
    ]


def test_a_planners_warning_points_at_the_users_line() -> None:
    keys = {"sequence_len": 8, "excess_length_strategy": "truncate"}
    for use in (MultipackBatchSampler, multipack.plan):
        with pytest.warns(UserWarning, match="of 3 samples 1 cut to sequence_len 8") as caught:
            use([3, 9, 4], **keys)
        assert [__file__] == [warning.filename for warning in caught]


def test_what_cannot_be_planned_fails_at_once() -> None:
    with pytest.raises(ValueError, match="1 complete microbatch for 2 ranks"):
        sampler([8], world_size=2, rank=0)
