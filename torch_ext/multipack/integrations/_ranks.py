"""Whether the ranks of a training follow one plan.

Every rank plans alone, and the plans agree because what they are made from does. Where it does not,
samples are trained on twice or never and nothing fails; or the ranks have different numbers of
microbatches, and all wait for ever at the end of the epoch. The causes are mundane: a seed that
depends on the rank, a data set that each process filters with randomness of its own, a forgotten
rank. So each process sends a digest of every input, less than two kilobytes, once, at the start,
and each judges all of them alike.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, TypeAlias

import torch.distributed as dist

from multipack._arrays import integer
from multipack._config import Config
from multipack._plan import Plan
from multipack._processes import process_count
from multipack._state import every_setting
from multipack.sampler import MultipackBatchSampler
from multipack.streaming import StreamingMultipack

Facts: TypeAlias = "dict[str, Any]"

_RANK = "rank"
_PLAN = "plan"


def check_ranks(
    source: MultipackBatchSampler | StreamingMultipack | Plan,
    *,
    peers: int = 1,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compare what all ranks are about to train on; raise on every rank if they do not agree.

    All processes of the group must call it, as with any collective operation; it is one
    `all_gather_object`. Call it once, after a position was loaded and before the first batch:

        dist.init_process_group()
        sampler = MultipackBatchSampler(
            lengths, sequence_len=4096, world_size=dist.get_world_size(), rank=dist.get_rank()
        )
        check_ranks(sampler)

    Compared are the settings that the order of samples or the shape of batches depends on, the
    lengths, the label counts, the rows of the plan, and the position; the ranks' numbers must each
    be given once. The streams' samples are compared as far as they are read, so a stream may be
    checked again after its first batch. Without a process group nothing is compared.

    Args:
        source (MultipackBatchSampler | StreamingMultipack | Plan): This rank's.
        peers (int): How many processes share one rank's batches: the tensor-parallel times the
            context-parallel size, times the stages of a pipeline.
        group (torch.distributed.ProcessGroup): The processes that take part; None: all. Given the
            data-parallel group of a device mesh, leave `peers` at 1.

    Raises:
        RuntimeError: If the ranks do not agree. The text, the same on all of them, says in what,
            and which ranks differ; their numbers are those in the group. Also if torchrun started
            several processes, but no process group was initialised.
        TypeError: If `source` is none of these, or `peers` is not an integer.
        ValueError: If `peers` is less than 1.
    """
    peers = integer("peers", peers, least=1)
    facts = _facts(source)
    if not (dist.is_available() and dist.is_initialized()):
        if (count := process_count()) > 1:
            raise RuntimeError(
                f"torchrun started {count} processes, but no process group is initialised, so each "
                "would train alone: call torch.distributed.init_process_group first"
            )
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    if faults := _faults(everyone, peers):
        raise RuntimeError(f"the ranks do not agree: {'; '.join(faults)}")


def _facts(source: MultipackBatchSampler | StreamingMultipack | Plan) -> Facts:
    """Return what must be the same on all ranks, by name, and this rank's number."""
    if isinstance(source, Plan):
        report = source.report
        return {
            **_settings(source.config, report["split"], streaming=False),
            **_inputs(source),
            "epoch": report["epoch"],
        }
    if isinstance(source, MultipackBatchSampler):
        state = source.state_dict()
        return {
            **_settings(source.config, source.split, streaming=False),
            **_inputs(source.plan),
            "epoch": state["epoch"],
            "position": state["position"],
            "order": state["order"],
            _RANK: source.rank,
        }
    if isinstance(source, StreamingMultipack):
        state = source.state_dict()
        return {
            **_settings(source.config, "train", streaming=True),
            "epoch": state["epoch"],
            "position": state["position"],
            "hash of the samples": state["buffer"]["seed"],
            _RANK: source.rank,
        }
    raise TypeError(
        f"source is a {type(source).__name__}, but must be a MultipackBatchSampler, a "
        "StreamingMultipack or a Plan"
    )


def _settings(config: Config, split: Any, *, streaming: bool) -> Facts:
    return {**every_setting(config, split, streaming=streaming), "split": split}


def _inputs(plan: Plan) -> Facts:
    """Return digests of what a plan was made from, and of its rows."""
    # The plan's own digest follows `seed`, which may differ where `data_seed` does not.
    rows = hashlib.blake2b(digest_size=16)
    for tensor in (plan.index, plan.row_offsets, plan.batch_offsets):
        rows.update(tensor.numpy().data)
    inputs = plan.report["inputs"]
    return {
        "lengths": inputs["lengths"],
        "label counts": inputs["labels"],
        "planner's version": plan.report["version"],
        _PLAN: rows.hexdigest(),
    }


def _faults(everyone: list[Facts], peers: int) -> list[str]:
    """Return a sentence about everything that is wrong."""
    shared = [{key: facts[key] for key in facts if key != _RANK} for facts in everyone]
    names = list(dict.fromkeys(itertools.chain.from_iterable(shared)))
    differing = [name for name in names if len(_holders(shared, name)) > 1]
    if differing != [_PLAN]:
        # It follows from the rest.
        differing = [name for name in differing if name != _PLAN]
    faults = [_difference(name, _holders(shared, name)) for name in differing]
    if faults:
        return [*faults, "give every rank the same data, in the same order, and the same settings"]

    world_size, count = shared[0]["world_size"], len(everyone)
    if world_size * peers != count:
        return [
            f"world_size is {world_size} and peers {peers}, but {count} processes take part: give "
            "world_size and rank of data parallelism, and as peers how many processes share a "
            "rank's batches"
        ]
    given = _holders(everyone, _RANK)
    if given.keys() <= {"None", "'all'"}:
        return []
    wrong = {number: ranks for number, ranks in given.items() if len(ranks) != peers}
    if not wrong:
        return []
    times = "once" if peers == 1 else f"{peers} times"
    return [
        *(f"rank={number} is given on {_ranks(ranks)}" for number, ranks in wrong.items()),
        f"each number must be given {times}",
    ]


def _holders(everyone: list[Facts], name: str) -> dict[str, list[int]]:
    """Return who has which value of a fact."""
    holders: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        holders.setdefault(repr(facts.get(name)), []).append(rank)
    return holders


def _difference(name: str, holders: dict[str, list[int]]) -> str:
    """Say who has which value, the few before the many."""
    parts = sorted(holders.items(), key=lambda item: (len(item[1]), -item[1][0]))
    values = [f"{value} on {_ranks(ranks)}" for value, ranks in parts]
    return f"{name}: {', '.join(values[:-1])}, but {values[-1]}"


def _ranks(ranks: list[int]) -> str:
    """Name ranks, which rise, three or more in a row by their first and last."""
    names = []
    for _, pairs in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in pairs]
        names += run if len(run) < 3 else [f"{run[0]} to {run[-1]}"]
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
