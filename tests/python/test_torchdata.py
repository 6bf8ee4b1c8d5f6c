"""torchdata's StatefulDataLoader, stopped anywhere and continued in a new one."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from multipack import Collator, MultipackBatchSampler, PackedDataset, StreamingMultipack
from multipack.integrations.torchdata import stateful_loader

LENGTHS = np.random.default_rng(0).integers(1, 9, 30).tolist()
SAMPLES = [{"input_ids": [number] * length} for number, length in enumerate(LENGTHS)]
COLLATOR = Collator(attention="none")

pytestmark = [
    # Python warns of forks while there are threads, as torch has them.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    # torchdata 0.11 calls what torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


def packed_data() -> PackedDataset:
    tokens = torch.tensor([token for sample in SAMPLES for token in sample["input_ids"]])
    return PackedDataset(tokens, [0, *itertools.accumulate(LENGTHS)], collator=COLLATOR)


def packed(workers: int, **options: Any) -> Any:
    sampler = MultipackBatchSampler(LENGTHS, sequence_len=8, world_size=2, rank=1)
    return stateful_loader(packed_data(), sampler, num_workers=workers, **options)


def rows(workers: int, **options: Any) -> Any:
    sampler = MultipackBatchSampler(
        LENGTHS, sequence_len=8, micro_batch_size=3, sample_packing=False
    )
    collator = Collator(attention="none", sample_packing=False)
    return stateful_loader(SAMPLES, sampler, collate_fn=collator, num_workers=workers, **options)


class Generated:
    """Samples that can be generated again, but have no position."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from SAMPLES


def stream(source: Iterable[Any], workers: int, **options: Any) -> Any:
    data = StreamingMultipack(
        source,
        sequence_len=8,
        world_size=2,
        rank=1,
        streaming_multipack_buffer_size=8,
        incomplete_batches="fill",
        collator=COLLATOR,
    )
    return stateful_loader(data, num_workers=workers, **options)


def generated(workers: int, **options: Any) -> Any:
    return stream(Generated(), workers, **options)


def hugging_face(workers: int, **options: Any) -> Any:
    source = Dataset.from_list(SAMPLES).to_iterable_dataset(num_shards=3)
    return stream(source.shuffle(seed=0, buffer_size=5), workers, **options)


def tokens(batches: Iterable[dict[str, Any]]) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in batches]


def continued(make: Any, state: Any, workers: int, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loader = make(workers, **options)
    loader.load_state_dict(torch.load(file, weights_only=True))
    return loader


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        (2, {}),
        (2, {"persistent_workers": True, "prefetch_factor": 3}),
        (2, {"snapshot_every_n_steps": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [packed, rows, generated, hugging_face])
def test_every_position_of_two_epochs_brings_back_exactly_the_rest(
    make: Any, workers: int, options: dict[str, Any]
) -> None:
    def of_epoch(loader: Any, epoch: int) -> Any:
        # A stream's workers that are started anew for each pass have to be told.
        if loader.dataset is not None and hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(epoch)
        return loader

    whole = make(workers, **options)
    epochs = [tokens(of_epoch(whole, epoch)) for epoch in range(3)]
    assert (epochs[0] == epochs[1]) == (make is generated)

    size = len(epochs[0])
    for epoch, position in [(0, 0), (0, 1), (0, size), (1, 2), (1, size - 1)]:
        running = make(workers, **options)
        for number in range(epoch):
            tokens(of_epoch(running, number))
        of_epoch(running, epoch)
        if position > 0:
            assert tokens(itertools.islice(running, position)) == epochs[epoch][:position]

        again = continued(make, running.state_dict(), workers, **options)

        assert tokens(of_epoch(again, epoch)) == epochs[epoch][position:]
        assert tokens(of_epoch(again, epoch + 1)) == epochs[epoch + 1]


def test_what_was_said_to_be_consumed_does_not_enter() -> None:
    """A callback or a loop that calls `consumed` as well must not change the loader's position."""
    expected = tokens(packed(2))
    running = packed(2)
    for number, _ in enumerate(running, 1):
        running.sampler.consumed()
        if number == 3:
            break

    assert tokens(continued(packed, running.state_dict(), 2)) == expected[3:]


def test_a_run_can_stop_twice_in_one_epoch() -> None:
    expected = tokens(packed(2))
    first = packed(2)
    list(itertools.islice(first, 2))
    second = continued(packed, first.state_dict(), 2)
    list(itertools.islice(second, 1))

    assert tokens(continued(packed, second.state_dict(), 2)) == expected[3:]


def test_another_order_is_refused() -> None:
    running = packed(0)
    list(itertools.islice(running, 2))
    sampler = MultipackBatchSampler(LENGTHS, sequence_len=8, world_size=2, rank=1, seed=1)
    again = stateful_loader(packed_data(), sampler)
    again.load_state_dict(running.state_dict())

    with pytest.raises(ValueError, match="data_seed was 0 and is now 1"):
        next(iter(again))


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "text"),
    [
        (
            (packed_data(),),
            {},
            TypeError,
            "sampler is a NoneType, but must be a MultipackBatchSampler",
        ),
        (
            (StreamingMultipack(SAMPLES, sequence_len=8, collator=COLLATOR), "a sampler"),
            {},
            TypeError,
            "a stream plans by itself: leave the sampler out",
        ),
        (
            (SAMPLES, MultipackBatchSampler(LENGTHS, sequence_len=8)),
            {},
            TypeError,
            "collate_fn is needed to make batches of samples: a multipack.Collator, or wrap the "
            "samples in a PackedDataset",
        ),
        (
            (packed_data(), MultipackBatchSampler([8], sequence_len=8, mask_first_label=False)),
            {},
            ValueError,
            "mask_first_label is False for the sampler, but True for the collator: give both the "
            "same config",
        ),
        (
            (packed_data(), MultipackBatchSampler([8], sequence_len=8, split="eval")),
            {},
            ValueError,
            "split is 'eval' for the sampler, but 'train' for the collator: give both the same "
            "split",
        ),
        (
            (packed_data(),),
            {"shuffle": True},
            ValueError,
            "shuffle is decided by the sampler or the stream: leave it out",
        ),
        (
            (packed_data(),),
            {"in_order": False},
            ValueError,
            "in_order=False gives batches that no position can name: leave it out",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        stateful_loader(*arguments, **options)

    assert str(caught.value) == text
