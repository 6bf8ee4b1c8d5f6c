"""A sampler and a collator with different settings: seen wherever the microbatch passes through."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from multipack import Collator, Config, MultipackBatchSampler, PackedDataset, RowDataset

LENGTHS = [3, 5, 2, 6, 4, 4]
SAMPLES = [{"input_ids": list(range(length))} for length in LENGTHS]

Make = Callable[[Config, Collator], Any]


def rows(config: Config, collator: Collator) -> Any:
    """Make the loader of a data set of samples."""
    sampler = MultipackBatchSampler(LENGTHS, config=config)
    return DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=collator)


def in_workers(config: Config, collator: Collator) -> Any:
    """Make the same with a worker, to which microbatches are pickled."""
    sampler = MultipackBatchSampler(LENGTHS, config=config)
    return DataLoader(
        RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=collator, num_workers=1
    )


def packed(config: Config, collator: Collator) -> Any:
    """Make the loader of flat buffers."""
    sampler = MultipackBatchSampler(LENGTHS, config=config)
    tokens = torch.cat([torch.tensor(sample["input_ids"]) for sample in SAMPLES])
    offsets = [0, *itertools.accumulate(len(sample["input_ids"]) for sample in SAMPLES)]
    return DataLoader(
        PackedDataset(tokens, offsets, collator=collator), sampler=sampler, batch_size=None
    )


@pytest.mark.parametrize("make", [rows, in_workers, packed])
@pytest.mark.parametrize("count", [5, 7])
def test_lengths_of_another_data_set_are_refused(
    make: Make, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples whose lengths are forgotten would never be trained on."""
    monkeypatch.setattr(f"{__name__}.SAMPLES", (SAMPLES * 2)[:count])
    config = Config(sequence_len=8)
    loader = make(config, Collator(config, attention="none"))

    with pytest.raises(
        ValueError,
        match=f"the sampler was given 6 lengths, but the data set has {count} samples: give it the "
        "length of each",
    ):
        next(iter(loader))


@pytest.mark.parametrize("make", [rows, in_workers, packed])
@pytest.mark.parametrize(
    ("length", "limit"), [(5, 8), (9, 8), (9, None)], ids=["fits", "too long", "no limit"]
)
def test_a_sample_longer_than_planned_is_refused(
    make: Make, length: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row would be longer than rows may be, and only the memory of a device would tell."""
    grown = [*SAMPLES[:2], {"input_ids": list(range(length))}, *SAMPLES[3:]]
    monkeypatch.setattr(f"{__name__}.SAMPLES", grown)
    loader = make(Config(sequence_len=8), Collator(sequence_len=limit, attention="none"))

    with pytest.raises(
        ValueError,
        match=f"sample 2 of the data set has {length} tokens, but 2 were planned for it: give the "
        "sampler the lengths that the collator gets",
    ):
        list(loader)


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize(("strategy", "most"), [("drop", 8), ("truncate", 11)])
def test_samples_of_unpacked_batches_may_grow_up_to_sequence_len(
    strategy: str, most: int, flattened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a tokenizer that drops out at random: no row gets longer than rows may be."""
    monkeypatch.setattr(f"{__name__}.SAMPLES", [{"input_ids": list(range(most))}] * len(SAMPLES))
    config = Config(
        sequence_len=8,
        sample_packing=False,
        batch_flattening=flattened,
        micro_batch_size=2,
        excess_length_strategy=strategy,
    )
    batches = list(rows(config, Collator(config, attention="none")))
    assert sum(batch["input_ids"].numel() for batch in batches) == 8 * len(SAMPLES)

    monkeypatch.setattr(f"{__name__}.SAMPLES", [{"input_ids": list(range(9))}] * len(SAMPLES))
    config = config.replace(excess_length_strategy="drop")
    with pytest.raises(
        ValueError, match=r"sample \d of the data set has 9 tokens, but \d were pla"
    ):
        list(rows(config, Collator(config.replace(sequence_len=None), attention="none")))


@pytest.mark.filterwarnings("ignore:of 6 samples 1 cut")
@pytest.mark.parametrize("make", [rows, packed])
def test_samples_that_are_cut_may_be_longer_than_planned(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are as long as `sequence_len` in the batch; a shorter sample would grow."""
    config = Config(sequence_len=5, excess_length_strategy="truncate")
    grown = [*SAMPLES[:3], {"input_ids": list(range(9))}, *SAMPLES[4:]]
    monkeypatch.setattr(f"{__name__}.SAMPLES", grown)
    loader = make(config, Collator(config, attention="none"))
    assert sum(batch["input_ids"].numel() for batch in loader) == 3 + 5 + 2 + 5 + 4 + 4

    grown[0] = {"input_ids": list(range(4))}
    with pytest.raises(ValueError, match="sample 0 of the data set has 4 tokens, but 3 were"):
        list(make(config, Collator(config, attention="none")))


def test_a_pair_longer_than_planned_is_refused() -> None:
    sampler = MultipackBatchSampler([4, 4], sequence_len=8)
    pairs = [{"chosen_input_ids": [1, 2], "rejected_input_ids": [3] * count} for count in (2, 3)]

    with pytest.raises(ValueError, match="sample 1 of the data set has 5 tokens, but 4 were"):
        Collator(sequence_len=8, attention="none")(RowDataset(pairs)[next(iter(sampler))])


@pytest.mark.parametrize("make", [rows, in_workers, packed])
def test_a_packed_collator_refuses_the_batches_of_a_padded_sampler(make: Make) -> None:
    """It would lay the samples of a padded batch end to end, in one row."""
    config = Config(sequence_len=8, sample_packing=False, micro_batch_size=2)
    loader = make(config, Collator(sequence_len=8, attention="none"))

    with pytest.raises(
        ValueError,
        match="layout is 'padded' for the sampler, but 'one_row' for the collator: give both the "
        "same config",
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ({}, {"sample_packing": False}, "layout is 'one_row'"),
        ({}, {"multipack_real_batches": True}, "layout is 'one_row'"),
        ({"multipack_real_batches": True}, {}, "layout is 'real_rows'"),
        (
            {"sample_packing": False, "batch_flattening": True},
            {"sample_packing": False},
            "layout is 'flattened' for the sampler, but 'padded' for the collator",
        ),
        ({}, {"align_samples_to": 4}, "align_samples_to is 1 for the sampler, but 4"),
        ({}, {"mask_first_label": False}, "mask_first_label is True for the sampler, but False"),
        ({}, {"sequence_len": 4}, "sequence_len is 8 for the sampler, but 4 for the collator"),
        (
            {"excess_length_strategy": "truncate"},
            {},
            "excess_length_strategy is 'truncate' for the sampler, but 'drop' for the collator",
        ),
    ],
    ids=repr,
)
def test_settings_that_make_other_batches_are_refused(
    ours: dict[str, Any], theirs: dict[str, Any], text: str
) -> None:
    collator = Collator(**{"sequence_len": 8, **theirs}, attention="none")

    with pytest.raises(ValueError, match=text):
        next(iter(rows(Config(sequence_len=8, **ours), collator)))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"multipack_real_batches": True, "micro_batch_size": 2},
        {"sample_packing": False, "micro_batch_size": 2},
        {"sample_packing": False, "batch_flattening": True, "micro_batch_size": 2},
        {"align_samples_to": 4, "mask_first_label": False, "excess_length_strategy": "truncate"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("make", [rows, packed])
def test_one_config_for_both_is_right(make: Make, keys: dict[str, Any]) -> None:
    config = Config(sequence_len=8, **keys)

    assert len(list(make(config, Collator(config, attention="none")))) > 0


def test_settings_that_a_collator_does_not_need_may_differ() -> None:
    """Ranks, seeds, and the shape of the rows are nothing that a plan and a batch must share."""
    config = Config(sequence_len=8, world_size=1, seed=5, gradient_accumulation_steps=2)
    collators = [
        Collator(attention="none"),
        Collator(sequence_len=8, pad_to_multiple_of=8, padded_tail="last", attention="none"),
    ]

    for collator in collators:
        assert len(list(rows(config, collator))) == 3


def test_batches_of_an_evaluation_are_compared_by_what_they_are() -> None:
    """A trainer has one collator for both; it serves where both have one layout."""
    sampler = MultipackBatchSampler(LENGTHS, sequence_len=8, split="eval")
    padded = MultipackBatchSampler(LENGTHS, sequence_len=8, split="eval", eval_sample_packing=False)
    collator = Collator(padded.config, attention="none")

    assert collator(RowDataset(SAMPLES)[next(iter(sampler))])["input_ids"].shape[0] == 1
    with pytest.raises(ValueError, match="layout is 'padded' for the sampler, but 'one_row'"):
        collator(RowDataset(SAMPLES)[next(iter(padded))])


def test_lists_made_by_hand_are_taken_as_they_are() -> None:
    collator = Collator(attention="none")

    assert tuple(collator([SAMPLES[0], SAMPLES[1]])["input_ids"].shape) == (1, 8)
    assert tuple(collator([[SAMPLES[0]], [SAMPLES[1]]])["input_ids"].shape) == (2, 5)


def test_a_microbatch_is_a_list_and_stays_what_it_is() -> None:
    batch = next(iter(MultipackBatchSampler(LENGTHS, sequence_len=8)))

    for other in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert isinstance(other, list)
        assert batch == list(batch) == other
        with pytest.raises(ValueError, match="for the sampler, but"):
            Collator(sample_packing=False, attention="none")(RowDataset(SAMPLES)[other])
