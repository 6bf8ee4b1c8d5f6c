"""`PackedTrainer` on a stream: the same passes for all workers, ranks and restarts."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import trainer_runs
from resume_cases import LAYOUTS
from transformers import TrainerCallback

from multipack import Collator, Config, StreamingMultipack
from multipack.integrations.hf import PackedTrainer

# What is left over at the end of a pass is told each time.
pytestmark = pytest.mark.filterwarnings("ignore:the stream ended with")

SAMPLES = trainer_runs.chats(40)


class Again:
    """Samples that can be read again, and are neither a data set nor a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def shuffled() -> Any:
    """Return a stream of Hugging Face, with another order in each pass."""
    data = datasets.Dataset.from_list([{**sample, "source": "a"} for sample in SAMPLES])
    return data.to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=15)


def trainer(
    folder: Path, samples: Any, *, config: dict[str, Any] | None = None, **keys: Any
) -> PackedTrainer:
    """Make a trainer on a stream in buffers of 16 samples."""
    sizes = {"sequence_len": 24, "streaming_multipack_buffer_size": 16}
    return PackedTrainer(
        model=trainer_runs.tiny_llama(dropout=0.1),
        args=trainer_runs.arguments(folder, **({"max_steps": 14} | keys)),
        train_dataset=samples,
        config=Config(**sizes | (config or {})),
    )


def ids(batches: Any) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("source", [shuffled, lambda: Again(SAMPLES)], ids=["shuffled", "again"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_passes_come_one_after_another(source: Any, workers: int, tmp_path: Path) -> None:
    made = trainer(tmp_path, source(), dataloader_num_workers=workers)
    loader = made.get_train_dataloader()
    inner = made._train_stream.stream
    plain = StreamingMultipack(source(), inner.config, collator=inner.collator)
    expected = [ids(plain) for _ in range(3)]

    assert (expected[0] == expected[1]) == (source is not shuffled)
    assert len(expected[0]) % 3 != 0, "the case needs passes that 3 workers share unevenly"
    count = sum(map(len, expected))
    assert ids(itertools.islice(loader, count)) == [*itertools.chain(*expected)]


def stopped_and_continued(folder: Path) -> Any:
    """Train in one go, and again from a checkpoint in the second pass; say what was seen."""
    keys: dict[str, Any] = {
        "gradient_accumulation_steps": 3,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    whole = trainer(folder, shuffled(), **keys)
    whole.train()
    weights = [trainer_runs.weights(whole.model)]
    for workers in (0, 2):
        again = trainer(folder, shuffled(), dataloader_num_workers=workers, **keys)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-8"))
        assert again.state.global_step == 14
        weights.append(trainer_runs.weights(again.model))
    everything = {tuple(sample["input_ids"]) for sample in SAMPLES}
    passes = trainer(folder, Again(SAMPLES), config={"incomplete_batches": "fill"})
    batches = list(itertools.islice(passes.get_train_dataloader(), 100))
    return weights, [found for batch in batches for found in supervised(batch, everything)]


def supervised(batch: dict[str, Any], known: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the samples of a batch that have labels."""
    found = []
    for tokens, positions, labels in zip(
        *(batch[key].tolist() for key in ("input_ids", "position_ids", "labels")), strict=True
    ):
        starts = [i for i, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if any(label != -100 for label in labels[start:end]):
                found.append(tuple(tokens[start:end]))
    assert known.issuperset(found)
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_training_ends_with_the_same_weights(processes: int, tmp_path: Path) -> None:
    results = trainer_runs.run(stopped_and_continued, processes, tmp_path)

    for weights, _ in results:
        for other in weights[1:]:
            for name, value in weights[0].items():
                np.testing.assert_array_equal(other[name], value, err_msg=name)
    counts = Counter(sample for _, samples in results for sample in samples)
    assert len(counts) == len(SAMPLES)
    assert max(counts.values()) - min(counts.values()) <= 1  # the last pass was given up


def one_step(folder: Path) -> dict[str, Any]:
    """Train one step on a whole pass in each layout; return the gradients."""
    found = {}
    for layout, keys in LAYOUTS.items():
        config = {**keys, "incomplete_batches": "fill", "streaming_multipack_buffer_size": 100}
        made = trainer(folder, Again(SAMPLES), config=config)
        settings = made._collator("train").config
        plain = StreamingMultipack(
            Again(SAMPLES), settings, rank=0, collator=Collator(settings, attention="none")
        )
        made = trainer(
            folder,
            Again(SAMPLES),
            config=config,
            gradient_accumulation_steps=len(list(plain)),
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
        )
        made.model = made.model_wrapped = trainer_runs.tiny_llama()
        before = trainer_runs.weights(made.model)
        made.train()
        after = trainer_runs.weights(made.model)
        found[layout] = {name: before[name] - after[name] for name in before}
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_has_the_gradients_of_its_samples_each_alone(processes: int, tmp_path: Path) -> None:
    for found in trainer_runs.run(one_step, processes, tmp_path):
        for layout in LAYOUTS:
            trainer_runs.check_gradients(found[layout], SAMPLES)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(tmp_path, shuffled(), **keys).train()
    other = trainer(tmp_path, shuffled(), data_seed=3, per_device_train_batch_size=1, **keys)
    with pytest.raises(ValueError) as error:
        other.train(resume_from_checkpoint=True)
    assert str(error.value).startswith(
        "the state belongs to another order of samples: micro_batch_size was 2 and is now 1; "
        "data_seed was 11 and is now 3; "
    )
    again = trainer(tmp_path, shuffled(), ignore_data_skip=True, data_seed=3, **keys)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_checkpoint_of_another_stream_is_refused(workers: int, tmp_path: Path) -> None:
    """As a shuffle without a seed is another one each time."""
    keys: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(tmp_path, Again(SAMPLES), **keys).train()
    other = trainer(tmp_path, Again(SAMPLES[::-1]), dataloader_num_workers=workers, **keys)
    with pytest.raises(ValueError) as error:
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert str(error.value).startswith(
        "exact replay is unavailable: the stream yields other samples than before, or in another "
        "order, among the first 16; "
    )
    assert other.state.global_step == 2


def other_on_each_rank(folder: Path) -> str:
    """Train on streams that differ; return the error."""
    try:
        trainer(folder, Again(SAMPLES[int(os.environ["RANK"]) :])).train()
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_ranks_with_different_streams_are_refused(tmp_path: Path) -> None:
    told = trainer_runs.run(other_on_each_rank, 2, tmp_path)
    assert told == 2 * [
        "the ranks read different streams, each of which is dealt out to all of them: give every "
        "rank the same samples in the same order (a shuffle needs a seed)"
    ]


def test_a_generator_ends_the_training_with_its_last_sample(tmp_path: Path) -> None:
    made = trainer(tmp_path, iter(SAMPLES), max_steps=500)
    with pytest.warns(UserWarning) as told:
        made.train()
    steps = made.state.global_step
    assert 10 < steps < len(SAMPLES)
    assert str(told[-1].message) == (
        f"the stream gives nothing when it is read again, so the training ends after {steps} of "
        "500 steps: give an iterable that starts anew, as data sets do, or set max_steps to less"
    )


def test_a_generator_that_ends_within_a_step_says_what_nothing_is_learnt_from(
    tmp_path: Path,
) -> None:
    """The Trainer makes no step of what is left, so it has no part in the weights."""
    keys: dict[str, Any] = {"gradient_accumulation_steps": 5, "lr_scheduler_type": "constant"}
    made = trainer(tmp_path, iter(SAMPLES), max_steps=500, **keys)
    with pytest.warns(UserWarning) as told:
        made.train()
    steps, over = divmod(made._microbatch, 5)
    assert steps == made.state.global_step
    assert over > 0, "the case needs microbatches that fill no step"
    assert str(told[-1].message).startswith(
        "the stream gives nothing when it is read again, so the training ends after "
        f"{steps} of 500 steps, and nothing is learnt from {over} of 5 microbatches of the next: "
    )

    whole = trainer(tmp_path, Again(SAMPLES), max_steps=steps, **keys)
    whole.train()
    for name, value in trainer_runs.weights(made.model).items():
        np.testing.assert_array_equal(trainer_runs.weights(whole.model)[name], value)


def test_a_training_that_has_ended_is_not_said_to_lack_samples(tmp_path: Path) -> None:
    """Nothing is left to do, nor is anything wrong with the stream."""
    keys: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer(tmp_path, Again(SAMPLES), **keys).train()
    again = trainer(tmp_path, Again(SAMPLES), **keys)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


def test_a_callback_that_ends_the_epoch_ends_the_training(tmp_path: Path) -> None:
    class Enough(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 3

    made = trainer(tmp_path, Again(SAMPLES))
    made.add_callback(Enough())
    made.train()
    assert made.state.global_step == 3


def test_a_stream_without_a_microbatch_is_an_error(tmp_path: Path) -> None:
    samples = [{"input_ids": [1] * 25}]
    with (
        pytest.warns(UserWarning, match="over_long: 1"),
        pytest.raises(ValueError) as error,
    ):
        trainer(tmp_path, Again(samples)).train()
    assert str(error.value) == (
        "the stream gave no microbatch: what is retained of it does not fill one round of 1 ranks, "
        "see its warnings"
    )


def test_labels_by_another_name_are_refused(tmp_path: Path) -> None:
    samples = [
        {"input_ids": sample["input_ids"], "shift_labels": sample["labels"]} for sample in SAMPLES
    ]
    with pytest.raises(ValueError, match="the samples have 'shift_labels', but models shift 'labe"):
        trainer(tmp_path, Again(samples)).train()


def test_what_a_stream_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, shuffled(), include_num_input_tokens_seen="non_padding")
    assert str(error.value) == (
        "include_num_input_tokens_seen is 'non_padding', but the batches of a stream do not tell "
        "what is padding: set it to 'all'"
    )
