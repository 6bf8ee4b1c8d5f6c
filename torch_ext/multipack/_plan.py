"""An epoch's schedule: which samples share a row, which rows a microbatch, and whose turn it is.

The planning itself is ``torch.ops.multipack.plan``: a pure function of lengths, label counts,
settings, seed and epoch, so every rank computes the same plan without talking to the others. A
`Plan` keeps it as three int64 tensors: 8 bytes for each planned sample and each row; lists are made
only for the microbatch that is asked for.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch

from multipack import ops
from multipack._arrays import Bools, Integers, bool_tensor, int64_tensor, integer, token_tensor
from multipack._config import Config, Split, checked_split, make_config, refuse_config
from multipack._plan_file import TENSORS, read, write
from multipack._stats import Stats
from multipack._verify import (
    check_equality,
    check_inputs,
    check_promises,
    check_what_is_given,
)

# From so many samples on, planning can take seconds, and Ctrl-C is to be heard meanwhile.
_LONG = 1_000_000
_PACKAGE = str(Path(__file__).parent)

_T = TypeVar("_T")


class Repeat(int):
    """The index of a sample that is repeated to fill a microbatch or a round of ranks.

    It is that index in every respect. `RowDataset` and `PackedDataset` know it by its class and
    set the sample's labels to -100, so that nothing is trained on, or evaluated, twice.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The schedule of one epoch over all ranks; plans are equal that agree in everything.

    For two ranks, one row in a microbatch and the rows [0, 3] and [2, 1], the tensors are
    index [0, 3, 2, 1], row_offsets [0, 2, 4] and batch_offsets [0, 1, 2]; ``plan[0, 0]`` is
    [[0, 3]] and ``plan[1, 0]`` is [[2, 1]].
    """

    index: torch.Tensor
    """int64 (M,): the samples of all rows, one row after the other."""
    row_offsets: torch.Tensor
    """int64 (R+1,): where each row begins in `index`, from 0 to M."""
    batch_offsets: torch.Tensor
    """int64 (B+1,): where each microbatch begins among the rows, from 0 to R.

    Number k·world_size + rank is microbatch k of a rank."""
    config: Config
    """The settings that it was made with."""
    report: Mapping[str, Any]
    """What the planner reports, as plain data."""

    def __len__(self) -> int:
        """Microbatches of each rank."""
        count: int = self.report["microbatches_per_rank"]
        return count

    def __getitem__(self, key: tuple[int, int]) -> list[list[int]]:
        """Return the rows of a rank's microbatch `k`.

        Args:
            key (tuple[int, int]): The rank and the microbatch, which is less than ``len(plan)``.

        Returns:
            list[list[int]]: For each row its samples, as plain ints, or as `Repeat` where they are
                repeated. In the layouts with a fixed number of samples there is one list, of all
                samples of the microbatch.

        Raises:
            IndexError: If the rank or the microbatch is out of range.
            TypeError: If the key is not two integers.
        """
        if not isinstance(key, tuple) or len(key) != 2:
            raise TypeError(
                f"a plan is indexed by rank and microbatch, plan[rank, k], not by {key!r}"
            )
        rank, k = integer("rank", key[0]), integer("k", key[1])
        world_size = self.config.world_size
        samples, offsets = ops.microbatch(
            self.index, self.row_offsets, self.batch_offsets, world_size, rank, k
        )
        flat: list[int] = samples.tolist()
        borders: list[int] = offsets.tolist()
        if repeated := self.report["repeated_samples"]:
            first = int(self.row_offsets[self.batch_offsets[k * world_size + rank]])
            real = max(0, self.index.numel() - repeated - first)
            flat[real:] = map(Repeat, flat[real:])
        return [flat[start:end] for start, end in itertools.pairwise(borders)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            self.report == other.report
            and self.config == other.config
            and all(getattr(self, name).equal(getattr(other, name)) for name in TENSORS)
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"Plan({self.report['layout']}, {len(self)} microbatches on each of "
            f"{self.config.world_size} ranks, {self.index.numel()} samples, digest {self.digest})"
        )

    @property
    def stats(self) -> Stats:
        """How full, how even, and what was left out; its text is a table."""
        return Stats.from_report(self.report)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that are equal on all ranks if their plans are."""
        digest: str = self.report["digest"]
        return digest

    def verify(
        self,
        lengths: Integers,
        label_counts: Integers | None = None,
        *,
        label_starts: Bools | None = None,
    ) -> None:
        """Check that this is the plan of these samples, and that it keeps every promise.

        Each retained sample is there once, beside marked repeats; no row holds more than its
        capacity; every rank has as many microbatches; and a fresh plan is equal to this one.

        Args:
            lengths: As for `plan`: what it was made from.
            label_counts: As for `plan`.
            label_starts: As for `plan`.

        Raises:
            TypeError: As for `plan`.
            ValueError: If something is wrong; the text says what, and where.
        """
        tokens = int64_tensor("lengths", lengths)
        counts = None if label_counts is None else int64_tensor("label_counts", label_counts)
        starts = None if label_starts is None else bool_tensor("label_starts", label_starts)
        check_what_is_given(self, counts, starts)
        split, epoch = self.report["split"], self.report["epoch"]
        fresh = plan_tensors(tokens, counts, starts, self.config, epoch, split)
        check_inputs(self, fresh)
        check_promises(self, tokens.numpy(), None if counts is None else counts.numpy())
        check_equality(self, fresh)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a NumPy archive, with its settings and its report as JSON.

        Equal plans make equal files, byte for byte, wherever and whenever they are written.

        Args:
            path (str | os.PathLike): The file, overwritten if it exists. No suffix is added.
        """
        arrays = {name: getattr(self, name).numpy() for name in TENSORS}
        write(path, arrays, self.config, self.report)


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan that `Plan.save` wrote.

    The file may come from anywhere: no code in it is run, it takes no more memory than a few times
    its size, and what comes back is of the right shape. Whether it is right is for `Plan.verify`.

    Args:
        path (str | os.PathLike): The file.

    Returns:
        Plan: Equal in everything to the saved one.

    Raises:
        ValueError: If the file is not a saved plan, is damaged, or was written by a newer format.
    """
    arrays, config, report = read(path)
    return Plan(
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        config=config,
        report=report,
    )


def plan(
    lengths: Integers,
    label_counts: Integers | None = None,
    config: Config | None = None,
    *,
    label_starts: Bools | None = None,
    epoch: int = 0,
    split: Split = "train",
    **keys: Any,
) -> Plan:
    """Plan an epoch: pure, and the same on every rank, thread count and platform.

        >>> plan([3, 5, 2, 4], sequence_len=8, sample_packing_sequentially=True)[0, 0]
        [[0, 1]]

    Args:
        lengths: (N,) integers: tokens of each sample, as a list, a NumPy array of any integer
            dtype, or a tensor.
        label_counts: (N,) integers: supervised tokens of each sample, as `label_counts` counts
            them; None: pretraining samples, every token is supervised.
        config (Config): The settings; `sequence_len` is needed.
        label_starts: (N,) bools: whether each sample's first label is supervised; matters only when
            `mask_first_label` is off.
        epoch (int): From 0; another epoch is another order.
        split (str): ``train``, or ``eval``: its own batch size, one order, nothing left out, never
            balanced.
        **keys: Settings by name; they override those of `config`.

    Returns:
        Plan: The schedule.

    Raises:
        KeyboardInterrupt: Soon after Ctrl-C, however large the input, in the main thread.
        TypeError: If something is of the wrong kind.
        ValueError: If settings, lengths or label counts are out of range or do not fit together; if
            several ranks have fewer microbatches than ranks and `incomplete_batches` is ``drop``.

    Warns:
        UserWarning: For what the planner finds odd, such as an epoch without any sample.
    """
    refuse_config(label_counts)
    made = plan_tensors(
        int64_tensor("lengths", lengths, copy=False),
        None if label_counts is None else int64_tensor("label_counts", label_counts, copy=False),
        None if label_starts is None else bool_tensor("label_starts", label_starts),
        make_config(config, keys),
        integer("epoch", epoch),
        checked_split(split),
    )
    warn_of(made)
    return made


def plan_tensors(
    lengths: torch.Tensor,
    label_counts: torch.Tensor | None,
    label_starts: torch.Tensor | None,
    config: Config,
    epoch: int,
    split: Split,
) -> Plan:
    """Plan from tensors and settings that are already checked, without warnings; see `plan`."""

    def work() -> ops.PlanTensors:
        return ops.plan(
            lengths, label_counts, label_starts, config.to_json(), epoch, split == "eval"
        )

    is_long = lengths.numel() >= _LONG and threading.current_thread() is threading.main_thread()
    index, row_offsets, batch_offsets, report = _interruptible(work) if is_long else work()
    facts = json.loads(report.numpy().tobytes())
    return Plan(index, row_offsets, batch_offsets, config, facts)


def _interruptible(work: Callable[[], _T]) -> _T:
    """Run `work`, which holds no lock of Python, so that signals are handled meanwhile.

    Python runs signal handlers in the main thread, between two of its instructions: so the main
    thread waits in short steps. After an interrupt the work goes on unheard, and the process ends
    after it: a thread that comes back from C++ while Python shuts down would abort the process.
    """
    outcome: Future[_T] = Future()
    running = threading.Event()

    def run() -> None:
        running.set()
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="multipack plan")
    try:
        thread.start()
    except KeyboardInterrupt:
        # Python waits at its end for threads that run, not for one that is about to. If it was not
        # even made, this waits in vain.
        running.wait(5)
        raise
    # Not in `join`: Python 3.11 takes a thread for ended when an interrupt comes there.
    while not wait([outcome], timeout=0.1).done:
        pass
    thread.join()
    return outcome.result()


def warn_of(plan: Plan, told: set[str] | None = None) -> None:
    """Warn of what the planner found odd, at the line that called this package.

    Args:
        plan (Plan): What the planner made.
        told (set[str]): What was warned of before, which is not said again; it is added to.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    told = set() if told is None else told
    for text in plan.report["warnings"]:
        if text not in told:
            told.add(text)
            warnings.warn(text, stacklevel=level)


def label_counts(
    labels: Integers,
    offsets: Integers,
    config: Config | None = None,
    *,
    shifted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the labels of each sample that really enter the loss.

    For labels [-100, 7, 8, 9, -100] and offsets [0, 3, 5] the counts are [2, 0] and the starts
    [False, True]: the 9 is the first label of its sample, which is masked unless `mask_first_label`
    is off.

    Args:
        labels: (T,) int32 or int64: the labels of all samples, end to end; -100 is not supervised.
            Not copied.
        offsets: (N+1,) integers: where each sample begins in `labels`.
        config (Config): Its `mask_first_label` is followed, and its `sequence_len` where over-long
            samples are truncated.
        shifted (bool): The labels are a `shift_labels` column: the one at i is the target of
            position i, and the last of a sample is -100. Every other one than -100 counts then,
            and no sample loses one by standing first in its row.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: int64 (N,) counts, and bool (N,): whether the sample's
            first label is supervised (False where `shifted`); the two arguments of `plan`.

    Raises:
        TypeError: If the labels are not int32 or int64, or the offsets not integers.
        ValueError: If the offsets fall, or end past the labels.
    """
    settings = make_config(config, {})
    if shifted:
        settings = settings.replace(mask_first_label=False)
    counts, starts = count_labels(
        token_tensor("labels", labels), int64_tensor("offsets", offsets), settings
    )
    return counts, starts.new_zeros(starts.shape) if shifted else starts


def count_labels(
    labels: torch.Tensor, offsets: torch.Tensor, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count as `label_counts` does, from tensors: int32 or int64 `labels`, int64 `offsets`."""
    cut = config.excess_length_strategy == "truncate"
    return ops.label_counts(
        labels,
        offsets,
        max_sample_len=(config.sequence_len or 0) if cut else 0,
        mask_first_label=config.mask_first_label,
    )
