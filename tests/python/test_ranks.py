"""The check that all ranks follow one plan, in real process groups."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from processes import run

from multipack import Collator, MultipackBatchSampler, StreamingMultipack, plan
from multipack.integrations import check_ranks
from multipack.integrations._ranks import _faults

LENGTHS = [3, 4, 5, 2, 7, 6, 1, 8, 4, 7, 7, 8]
RANKS = 3
SAME = "give every rank the same data, in the same order, and the same settings"


def sampler(rank: Any, lengths: list[int] = LENGTHS, **keys: Any) -> MultipackBatchSampler:
    keys = {"sequence_len": 8, "world_size": RANKS, **keys}
    return MultipackBatchSampler(lengths, rank=rank, **keys)


def stream(rank: int, first: int = 0, **keys: Any) -> StreamingMultipack:
    keys = {"sequence_len": 8, "world_size": RANKS, **keys}
    samples = [{"input_ids": list(range(first, first + length))} for length in LENGTHS]
    return StreamingMultipack(samples, rank=rank, collator=Collator(attention="none"), **keys)


def started(source: StreamingMultipack) -> StreamingMultipack:
    next(iter(source))
    return source


def at(rank: int, batches: int) -> MultipackBatchSampler:
    source = sampler(rank)
    source.load_state_dict({"epoch": 0, "batches": batches})
    return source


# What each rank checks, and the whole error; None: there is none.
CASES: dict[str, tuple[Callable[[int], Any], dict[str, Any], str | None]] = {
    "equal": (sampler, {}, None),
    "all": (lambda rank: sampler("all"), {}, None),
    "plans": (lambda rank: plan(LENGTHS, sequence_len=8, world_size=RANKS), {}, None),
    "streams": (lambda rank: started(stream(rank)), {}, None),
    "numbers in another order": (lambda rank: sampler(2 - rank), {}, None),
    "peers": (lambda rank: sampler(0, world_size=1), {"peers": RANKS}, None),
    "seed of the model": (lambda rank: sampler(rank, seed=rank, data_seed=1), {}, None),
    # C81
    "lengths": (
        lambda rank: sampler(rank, [*LENGTHS[:-1], 5] if rank == 1 else LENGTHS),
        {},
        f"lengths: 'X' on rank 1, but 'X' on ranks 0 and 2; {SAME}",
    ),
    "label counts": (
        lambda rank: sampler(rank, label_counts=LENGTHS if rank < 2 else None),
        {},
        f"label counts: None on rank 2, but 'X' on ranks 0 and 1; {SAME}",
    ),
    # C76
    "seed": (
        lambda rank: sampler(rank, seed=11 + rank),
        {},
        f"data_seed: 13 on rank 2, 12 on rank 1, but 11 on rank 0; {SAME}",
    ),
    "settings": (
        lambda rank: sampler(rank, pad_to_multiple_of=8 if rank == 0 else 1, micro_batch_size=2),
        {},
        f"pad_to_multiple_of: 8 on rank 0, but 1 on ranks 1 and 2; {SAME}",
    ),
    "position": (
        lambda rank: at(rank, 1 if rank else 0),
        {},
        f"position: 0 on rank 0, but 1 on ranks 1 and 2; {SAME}",
    ),
    "streams of other samples": (
        lambda rank: started(stream(rank, first=rank // 2)),
        {},
        f"hash of the samples: X on rank 2, but X on ranks 0 and 1; {SAME}",
    ),
    "order": (
        lambda rank: sampler("all" if rank == 1 else rank),
        {},
        f"order: 'all' on rank 1, but 'rank' on ranks 0 and 2; {SAME}",
    ),
    "same number": (
        lambda rank: sampler(min(rank, 1)),
        {},
        "rank=1 is given on ranks 1 and 2; each number must be given once",
    ),
    "forgotten rank": (
        lambda rank: sampler(None, world_size=1),
        {},
        "world_size is 1 and peers 1, but 3 processes take part: give world_size and rank of "
        "data parallelism, and as peers how many processes share a rank's batches",
    ),
    "peers are too many": (
        lambda rank: sampler(min(rank, 1), world_size=2),
        {"peers": 2},
        "world_size is 2 and peers 2, but 3 processes take part: give world_size and rank of "
        "data parallelism, and as peers how many processes share a rank's batches",
    ),
    "another kind": (
        lambda rank: sampler(rank) if rank else plan(LENGTHS, sequence_len=8, world_size=RANKS),
        {},
        f"position: None on rank 0, but 0 on ranks 1 and 2; order: None on rank 0, but 'rank' on "
        f"ranks 1 and 2; {SAME}",
    ),
}


def check_all(rank: int) -> dict[str, str | None]:
    """Return the error of each case."""
    errors: dict[str, str | None] = {}
    for name, (make, keys, _) in CASES.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "world_size is 1")
            source = make(rank)
        errors[name] = None
        try:
            check_ranks(source, **keys)
        except RuntimeError as error:
            errors[name] = str(error)
    return errors


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str | None]]:
    """Check all cases in one start of the processes."""
    return run(check_all, RANKS)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_hears_the_same(name: str, errors: list[dict[str, str | None]]) -> None:
    of_rank = [error[name] for error in errors]

    assert of_rank == [of_rank[0]] * RANKS
    text = CASES[name][2]
    if text is None:
        assert of_rank[0] is None
    else:
        assert of_rank[0] is not None
        digests = re.sub(r"'[0-9a-f]{32}'", "'X'", of_rank[0])
        assert f"the ranks do not agree: {text}" == re.sub(r"\b\d{15,}\b", "X", digests)


def check_within(rank: int) -> str | None:
    """Check two groups of data-parallel ranks alone, then all processes."""
    replica, number = divmod(rank, 2)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    check_ranks(sampler(number, world_size=2, seed=replica), group=groups[replica])
    check_ranks(sampler(number, world_size=2), peers=2)
    with pytest.raises(RuntimeError) as caught:
        check_ranks(sampler(number, world_size=2, seed=replica), peers=2)
    return str(caught.value)


def test_groups_are_checked_alone_or_together() -> None:
    text = f"the ranks do not agree: data_seed: 1 on ranks 2 and 3, but 0 on ranks 0 and 1; {SAME}"

    assert run(check_within, 4) == [text] * 4


def test_many_ranks_are_named_by_their_runs() -> None:
    facts = [{"data_seed": 7 if rank in (5, 300, 301, 302, 700) else 0} for rank in range(1024)]

    assert _faults(facts, 1)[0] == (
        "data_seed: 7 on ranks 5, 300 to 302 and 700, but 0 on ranks 0 to 4, 6 to 299, 303 to 699 "
        "and 701 to 1023"
    )


def test_a_single_process_is_not_checked() -> None:
    check_ranks(sampler(1))


def test_torchrun_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(RuntimeError) as caught:
        check_ranks(sampler(1))

    assert str(caught.value) == (
        "torchrun started 2 processes, but no process group is initialised, so each would train "
        "alone: call torch.distributed.init_process_group first"
    )


@pytest.mark.parametrize("make", [sampler, stream])
def test_a_loop_that_forgets_its_rank_is_told(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = (
        "world_size is 1, but there are 4 processes: each will train on all samples; give "
        "world_size=4 and rank, unless the processes share every batch, as tensor-parallel ones do"
    )

    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as caught:
        make(0, world_size=1)

    assert caught[0].filename == __file__


def test_an_evaluation_on_one_of_the_ranks_is_nothing_special(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")

    sampler(None, world_size=1, split="eval")


@pytest.mark.parametrize(
    ("source", "peers", "kind", "text"),
    [
        (
            LENGTHS,
            1,
            TypeError,
            "source is a list, but must be a MultipackBatchSampler, a StreamingMultipack or a Plan",
        ),
        (sampler(0), True, TypeError, "peers is True, but must be an integer"),
        (sampler(0), 0, ValueError, "peers is 0, but must be 1 or more"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    source: Any, peers: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        check_ranks(source, peers=peers)

    assert str(caught.value) == text
