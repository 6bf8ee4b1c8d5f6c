"""What a stream takes: samples of all kinds, settings and collators, and what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from streams import (
    Samples,
    ids,
    quiet,
    samples_of,
    stream,
)

from multipack import Collator, Config, StreamingMultipack

# ---- samples ----


def test_samples_without_labels_are_supervised_whole() -> None:
    (batch,) = quiet(stream([3, 2]))

    assert (batch["labels"] != -100).sum() == 3


def test_labels_are_counted_and_kept() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [4, 5], "labels": [-100, -100]},
        {"input_ids": [6, 7], "labels": [6, -100]},
    ]
    made = StreamingMultipack(samples, sequence_len=8, collator=Collator(attention="none"))

    with pytest.warns(UserWarning) as caught:
        (batch,) = list(made)

    assert [str(warning.message) for warning in caught] == [
        "of the first 3 samples of the stream some are not kept whole: "
        "unlabelled: 2 (first: sample 1, longest: 2 tokens); `counts` goes on counting"
    ]
    assert batch["labels"].tolist() == [[-100, 2, 3]]


def test_samples_left_out_are_counted_through_all_buffers_and_told_once() -> None:
    lengths = [3, 9, 0, 8, 12, 3, 3, 11]
    made = stream(lengths, streaming_multipack_buffer_size=2)

    with pytest.warns(UserWarning) as caught:
        batches = ids(made)

    assert sorted(samples_of(batches)) == [0, 3, 5, 6]
    assert [str(warning.message) for warning in caught] == [
        "of the first 2 samples of the stream some are not kept whole: "
        "over_long: 1 (first: sample 1, longest: 9 tokens); `counts` goes on counting"
    ]
    assert {
        reason: (tally.count, tally.first, tally.longest)
        for reason, tally in made.counts.dropped.items()
        if tally.count
    } == {"over_long": (3, 1, 12), "too_short": (1, 2, 0)}
    assert made.counts.read == 8


def test_counts_go_on_after_resuming() -> None:
    lengths = [3, 9, 8, 8, 12, 3, 3, 11]
    running = stream(lengths, streaming_multipack_buffer_size=2)
    with pytest.warns(UserWarning, match="over_long: 1"):
        ids(iter(running), 2)
    again = stream(lengths, streaming_multipack_buffer_size=2)
    again.load_state_dict(running.state_dict())

    ids(again)

    tally = again.counts.dropped["over_long"]
    assert (tally.count, tally.first, tally.longest) == (3, 1, 12)


def test_over_long_samples_can_be_cut() -> None:
    made = stream([9, 3, 12], excess_length_strategy="truncate")

    with pytest.warns(UserWarning, match="truncated: 2"):
        batches = ids(made)

    assert Counter({1: 8, 2: 3, 3: 8}) == Counter(
        token for batch in batches for row in batch for token in row if token
    )


def test_a_cut_sample_that_waits_is_counted_once() -> None:
    made = stream(
        [9, 9, 9, 9, 9],
        excess_length_strategy="truncate",
        world_size=2,
        rank=0,
        streaming_multipack_buffer_size=1,
        incomplete_batches="fill",
    )

    with pytest.warns(UserWarning, match="truncated: 1"):
        ids(made)

    assert made.counts.truncated.count == 5


def test_an_over_long_sample_can_be_an_error() -> None:
    made = stream([3] * 50 + [9], excess_length_strategy="raise")

    with pytest.raises(ValueError) as caught:
        list(made)

    assert str(caught.value) == (
        "sample 50 of the stream has 9 tokens, more than sequence_len 8; raise sequence_len, or "
        "set excess_length_strategy to drop or truncate"
    )


@pytest.mark.parametrize(
    ("samples", "kind", "text"),
    [
        (
            [[1, 2]],
            TypeError,
            "sample 0 of the stream is a list, but a sample is a mapping with 'input_ids'",
        ),
        ([{"ids": [1]}], ValueError, "sample 0 of the stream has no 'input_ids', but ids"),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            ValueError,
            "sample 0 of the stream has 2 input_ids but 1 labels: give one for each token",
        ),
        (
            [{"input_ids": [1, 2], "labels": [1, 2]}] * 45 + [{"input_ids": [1]}],
            ValueError,
            "sample 45 of the stream has no 'labels', but sample 0 has: give them to all samples, "
            "or to none",
        ),
        (
            [{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}],
            ValueError,
            "sample 0 of the stream has no 'labels', but sample 1 has: give them to all samples, "
            "or to none",
        ),
        (
            [{"input_ids": [1]}, {"input_ids": [[1, 2]]}],
            TypeError,
            "input_ids of sample 1 has shape (1, 2), but must be one number for each token, of "
            "shape (2,)",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_sample_is_refused_by_its_number(
    samples: Any, kind: type[Exception], text: str
) -> None:
    made = stream(iter(samples))

    with pytest.raises(kind) as caught:
        list(made)

    assert text == str(caught.value)


# ---- settings ----


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        (
            {"label_balance_window_optim_steps": 32},
            ValueError,
            "label_balance_window_optim_steps is 32, but must be 1 for a stream: the buffers of a "
            "stream do not say where optimizer steps begin",
        ),
        (
            {"balance_labels": True, "sample_packing": False},
            ValueError,
            "balance_labels with sample_packing: false needs all lengths at once, which a stream "
            "does not have: pack it, or use MultipackBatchSampler",
        ),
        (
            {"sequence_len": None},
            ValueError,
            "sequence_len is needed to plan: the most tokens of one sample",
        ),
        (
            {"world_size": 2},
            ValueError,
            "rank is needed when world_size is 2: this rank's number",
        ),
        ({"world_size": 2, "rank": 2}, ValueError, "rank is 2, but must be from 0 to 1"),
        ({"rank": "all"}, TypeError, "rank is 'all', but must be an integer"),
        (
            {"collator": Collator(attention="none", split="eval")},
            ValueError,
            "the collator is for split 'eval', but a stream is for training; evaluate with "
            "MultipackBatchSampler",
        ),
    ],
    ids=repr,
)
def test_what_a_stream_cannot_do_is_refused_at_once(
    keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        stream(**keys)

    assert text == str(caught.value)


def test_what_is_no_iterable_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        StreamingMultipack(3, sequence_len=8, collator=list)  # type: ignore[arg-type]

    assert str(caught.value) == "iterable is a int, but must yield samples one by one"


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (
            {},
            {"mask_first_label": False},
            "mask_first_label is True for the stream, but False for the collator",
        ),
        (
            {"align_samples_to": 4},
            {},
            "align_samples_to is 4 for the stream, but 1 for the collator",
        ),
        (
            {"sample_packing": False},
            {"sample_packing": False, "batch_flattening": True},
            "layout is 'padded' for the stream, but 'flattened' for the collator",
        ),
        ({}, {"sequence_len": 16}, "sequence_len is 8 for the stream, but 16 for the collator"),
        (
            {"excess_length_strategy": "truncate"},
            {"excess_length_strategy": "truncate"},
            "sequence_len is 8 for the stream, but None for the collator",
        ),
    ],
)
def test_a_collator_that_would_make_other_batches_is_refused(
    ours: dict[str, Any], theirs: dict[str, Any], text: str
) -> None:
    config, collator = Config(sequence_len=8, **ours), Collator(attention="none", **theirs)

    with pytest.raises(ValueError) as caught:
        StreamingMultipack([], config, collator=collator)

    assert str(caught.value) == f"{text}: give both the same config"


def test_a_collator_need_not_know_what_it_does_not_use() -> None:
    made = stream([3, 2], collator=Collator(attention="flash", pad_to_multiple_of=8))

    assert [tuple(batch["input_ids"].shape) for batch in made] == [(1, 8)]


def test_the_settings_of_the_collator_are_those_of_the_stream() -> None:
    collator = Collator(attention="none", sequence_len=8, pad_to_multiple_of=4)

    made = StreamingMultipack(Samples([3, 2]), collator=collator)

    assert collator.config == made.config
    assert [tuple(batch["input_ids"].shape) for batch in made] == [(1, 8)]


def test_any_function_of_rows_is_a_collator() -> None:
    made = stream([3, 2, 8], collator=lambda rows: {"rows": [len(row) for row in rows]})

    assert sorted(batch["rows"] for batch in made) == [[1], [2]]
