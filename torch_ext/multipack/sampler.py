"""A batch sampler for `torch.utils.data.DataLoader` that follows a plan.

It holds the lengths and the plan of the current epoch as tensors, hands out one microbatch at a
time as plain ints, and talks to nobody: length, iteration and state are computed on each rank
alone, and agree because the plans do.

    >>> sampler = MultipackBatchSampler([3, 5, 2], sequence_len=8, sample_packing_sequentially=True)
    >>> len(sampler), list(sampler)
    (2, [[[0, 1]], [[2]]])
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import Sampler, SequentialSampler

from multipack._arrays import Bools, Integers, bool_tensor, int64_tensor, integer, shown
from multipack._config import (
    PACKED,
    Config,
    Split,
    batch_size,
    checked_rank,
    checked_split,
    layout,
    make_config,
    refuse_config,
)
from multipack._microbatch import Microbatch, Terms
from multipack._plan import Plan, Repeat, plan_tensors, warn_of
from multipack._processes import warn_if_alone
from multipack._state import (
    is_same,
    order_settings,
    refuse_differences,
    refuse_other_kinds,
    refuse_other_version,
    unavailable,
)
from multipack.collate import IGNORED_LABEL

Batch: TypeAlias = "list[list[int]] | list[int]"

_VERSION = 1
# One more would not be an int64.
_EPOCHS = 1 << 63
# Plans of later epochs are kept from `total_steps` on while they take no more than this.
_KEPT_BYTES = 1 << 30


@dataclasses.dataclass
class _Pass:
    """One iteration over an epoch, counted in microbatches as they are yielded."""

    epoch: int
    start: int
    count: int = 0
    yielded: int = 0
    consumed: int = 0
    again: bool = False
    """Whether `set_epoch` has asked for the same epoch since."""
    ended: bool = False
    """Whether the end was met, so that the sampler stands at the next epoch."""
    fault: str | None = None
    """Why the position of this iteration is not known; None: it is."""


class _Batches(Iterator[Batch]):
    """An iteration over what is left of an epoch.

    It has a state of its own, of what it has yielded, for a loader that keeps the position and asks
    at the right moment. What the sampler was told to be consumed does not enter.
    """

    def __init__(self, sampler: MultipackBatchSampler) -> None:
        self._sampler = sampler
        self._terms = Terms.of(sampler.config, sampler.split)
        self._begin()

    def _begin(self) -> None:
        sampler = self._sampler
        if sampler._passed():
            sampler._epoch, sampler._start = sampler.epoch, 0
        self._plan = sampler._plan_from(sampler._epoch)
        self._pass = _Pass(sampler._epoch, sampler._start, sampler._count(self._plan))
        sampler._latest, sampler._loaded = self._pass, False
        sampler._iteration = weakref.ref(self)

    def _number(self) -> int:
        return self._pass.start + self._pass.yielded

    def __next__(self) -> Batch:
        sampler, current, number = self._sampler, self._pass, self._number()
        if number >= current.count:
            # A newer iteration or a set_epoch has taken over otherwise.
            if sampler._latest is current and sampler._epoch == current.epoch:
                sampler._epoch, sampler._start = current.epoch + 1, 0
                current.ended, current.again = True, False
            raise StopIteration
        rows = sampler._rows(self._plan, number)
        current.yielded += 1
        is_packed = sampler._layout in PACKED
        lengths = sampler._lengths.numpy()[list(chain.from_iterable(rows))].tolist()
        items = rows if is_packed else rows[0]
        return Microbatch(items, self._terms, len(sampler._lengths), lengths)

    def state_dict(self) -> dict[str, Any]:
        state = self._sampler._state(self._pass, self._pass.yielded)
        return {**state, "ended": self._number() >= self._pass.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        refuse_other_kinds("the state", state, Mapping)
        refuse_other_kinds("ended", state.get("ended"), bool)
        self._sampler.load_state_dict(state)
        if state["ended"]:
            # Nothing is left of this iteration; the sampler stands at the next epoch.
            self._pass = _Pass(self._sampler._epoch, 0)
        else:
            self._begin()


class MultipackBatchSampler(Sampler[Batch]):
    """Yields the microbatches of one rank, or of all ranks, as sample indices.

    A packed microbatch is a list of rows, each a list of samples; in the layouts with a fixed
    number of samples it is a list of samples. ``len(batch) == sampler.batch_size`` either way,
    unless `incomplete_batches: split` has split a microbatch of a fixed number of samples. The
    list also carries what of the settings matters to a collator, which refuses to be another's.

    `len()` is the number of microbatches that a pass of the current epoch yields. It is exact
    because it is read off the epoch's plan, which is made once, when it is first needed. On
    shuffled data, all algorithms but ``best_fit_decreasing``, and a group size, can give another
    number in another epoch: `len()` then follows `set_epoch`. It is that of the epoch under way as
    long as its iteration is held: a loop over a DataLoader holds it to the end, though workers have
    fetched the last batch before, and with `persistent_workers` until the next loop begins.

    An iteration begins at the start of the epoch or, after `load_state_dict`, at the position
    loaded, until that epoch has been passed: a peek at the first batch loses nothing. After a full
    pass the next iteration is the next epoch, with or without `set_epoch`.

    Args:
        lengths: (N,) integers: tokens of each sample.
        label_counts: (N,) integers: supervised tokens of each sample; None: every token is
            supervised.
        config (Config): The settings.
        rank (int | "all"): This rank's number. ``"all"``: every rank's microbatches, ordered by
            microstep and then by rank, for a framework that deals whole batches out to the ranks.
            Needed when `world_size` is more than 1. A framework that would build a batch sampler
            of its own from this one is to be told not to (Lightning:
            ``use_distributed_sampler=False``).
        label_starts: (N,) bools, as for `plan`.
        split (str): ``train`` or ``eval``.
        fingerprint (str): What names the contents of the data set, such as the fingerprint that
            Hugging Face keeps. It is saved with the position; a change alone is warned about.
        **keys: Settings by name; they override those of `config`.

    Raises:
        TypeError: As for `plan`, or if the rank is neither an integer nor ``"all"``.
        ValueError: As for `plan`, or if the rank is missing or out of range.

    Warns:
        UserWarning: As for `plan`, or if several processes would each train on all samples.
    """

    batch_size: int
    """Rows of a microbatch; samples, in the layouts with a fixed number of them."""
    drop_last: bool
    """Whether what fills no round of ranks is left out. What is yielded is always whole."""
    sampler: SequentialSampler
    """The indices of the data set; frameworks ask for the attribute."""

    def __init__(
        self,
        lengths: Integers,
        label_counts: Integers | None = None,
        config: Config | None = None,
        *,
        rank: int | Literal["all"] | None = None,
        label_starts: Bools | None = None,
        split: Split = "train",
        fingerprint: str | None = None,
        **keys: Any,
    ) -> None:
        if isinstance(lengths, Sampler):
            raise TypeError(
                "lengths is a sampler: a framework seems to build the batch sampler anew, to share "
                "it out over ranks, which it does by itself; tell the framework to leave it alone "
                "(Lightning: Trainer(use_distributed_sampler=False))"
            )
        self.config = make_config(config, keys)
        self.rank: int | Literal["all"] = "all"
        if rank != "all":
            self.rank = checked_rank(rank, self.config.world_size, or_all=True)
        self.split = checked_split(split)
        warn_if_alone(self.config, self.split)
        self.fingerprint = fingerprint
        refuse_config(label_counts)
        self._lengths = int64_tensor("lengths", lengths)
        self._label_counts = (
            None if label_counts is None else int64_tensor("label_counts", label_counts)
        )
        self._label_starts = (
            None if label_starts is None else bool_tensor("label_starts", label_starts)
        )
        self._layout = layout(self.config, split)
        self.batch_size = 1 if self._layout == "one_row" else batch_size(self.config, split)
        self.drop_last = split == "train" and self.config.incomplete_batches == "drop"
        self.sampler = SequentialSampler(range(self._lengths.numel()))
        # The current epoch's plan, and those of later epochs that `total_steps` made.
        self._plans: dict[int, Plan] = {}
        # Of every epoch that was planned: the microbatches of each rank, and the plan's digest.
        self._counts: dict[int, int] = {}
        self._digests: dict[int, str] = {}
        # The planner's warnings that were given.
        self._told: set[str] = set()
        self._epoch = 0
        self._start = 0
        # Whether the position was loaded, and no iteration has begun there.
        self._loaded = False
        self._latest = _Pass(0, 0)
        # The latest iteration, while someone holds it.
        self._iteration: weakref.ref[_Batches] | None = None
        self._state_follows_consumed = False
        # Plans at once, so that what cannot be planned fails here and not at the first batch.
        report = self.plan.report
        self._inputs: Mapping[str, Any] = report["inputs"]
        self._plan_version: int = report["version"]

    def __len__(self) -> int:
        """Microbatches that a whole pass of the current epoch yields."""
        return self._count(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        """Yield microbatches from the start of the epoch, or from the position loaded."""
        return _Batches(self)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration belongs to."""
        return self._epoch + self._passed()

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch; its `stats` tell how full and how even it is."""
        epoch, latest = self._epoch, self._latest
        # The workers of a loader meet the end of an epoch while its last batches are still to be
        # consumed; the loader holds the iteration until they are.
        held = self._iteration is not None and self._iteration() is not None
        if held and latest.ended and not latest.again:
            epoch = latest.epoch
        return self._plan_from(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the current one keeps its position.

        An iteration under way goes on in its own epoch.

        Args:
            epoch (int): From 0.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is negative.

        Warns:
            UserWarning: If a position was loaded in another epoch, and nothing came of it.
        """
        epoch = integer("epoch", epoch, least=0)
        if epoch != self._epoch:
            if self._loaded:
                warnings.warn(
                    f"set_epoch({epoch}) leaves the position that was loaded, microbatch "
                    f"{self._start} of epoch {self._epoch}: tell the loader or trainer its epoch",
                    stacklevel=2,
                )
            self._go_to(epoch, 0)
        self._latest.again = True

    def total_steps(self, epochs: int) -> int:
        """Count the optimizer steps of a training, an incomplete last step of each epoch included.

        Where the number of microbatches differs by epoch, each epoch is planned to be counted. Its
        plan is kept for its turn, as long as those kept take less than a gibibyte.

        Args:
            epochs (int): How many epochs, beginning with epoch 0.

        Returns:
            int: Optimizer steps, the same on every rank.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is negative.
        """
        epochs = integer("epochs", epochs, least=0)
        accumulation = self.config.gradient_accumulation_steps
        if self._every_epoch_has_the_same_count():
            return epochs * -(-len(self.plan) // accumulation)
        for epoch in range(epochs):
            if epoch not in self._counts:
                self._plan_of(epoch)
                if epoch < self._epoch or sum(map(_bytes, self._plans.values())) > _KEPT_BYTES:
                    del self._plans[epoch]
        return sum(-(-self._counts[epoch] // accumulation) for epoch in range(epochs))

    def consumed(self, n: int = 1) -> None:
        """Say that this rank has trained on `n` more microbatches of the latest iteration.

        From the first call on, the state follows what was consumed. Until then it follows what was
        yielded, which is ahead by what the workers of a DataLoader have fetched. torchdata's
        StatefulDataLoader counts by itself, and needs no call.

        More than was yielded cannot have been consumed. That is no reason to stop a training: the
        position of this iteration counts as unknown, and its states say so.

        Args:
            n (int): Microbatches since the last call.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is negative.

        Warns:
            UserWarning: If the position is no longer known.
        """
        latest = self._latest
        latest.consumed += integer("n", n, least=0) * self._ranks_yielded
        self._state_follows_consumed = True
        if latest.consumed > latest.yielded and latest.fault is None:
            latest.fault = (
                f"{latest.consumed} microbatches were said to be consumed when the iteration had "
                f"yielded {latest.yielded}"
            )
            warnings.warn(
                f"states of this iteration will not hold a position: {latest.fault}", stacklevel=2
            )

    def check_batch(self, batch: Mapping[str, Any], number: int | None = None) -> None:
        """Check that a finished batch has as many supervised tokens as were planned for it.

        Balancing, and a loss that is divided by counts that are known beforehand, rest on the
        counts that the sampler was given. Another collator that masks labels, or tokens that have
        changed since they were counted, make them wrong and nothing else would tell.

            for batch in loader:
                sampler.check_batch(batch)
                ...
                sampler.consumed()

        Args:
            batch (Mapping): With `labels` (R, L), of which the first in each row has nothing that
                predicts it, or else `shift_labels` (R, L), of which each one counts.
            number (int): Which microbatch of the latest iteration it is, from 0, as the iteration
                has yielded them; None: the next one after those that were consumed.

        Raises:
            IndexError: If the iteration has no such microbatch.
            TypeError: If `number` is not an integer.
            ValueError: If the batch has neither, or another number of supervised tokens.
        """
        latest = self._latest
        at = latest.start + (latest.consumed if number is None else integer("number", number, 0))
        plan = self._plan_of(latest.epoch)
        if at >= (count := self._count(plan)):
            raise IndexError(f"microbatch {at} is out of range: epoch {latest.epoch} has {count}")
        shifted = "labels" not in batch
        if shifted and "shift_labels" not in batch:
            raise ValueError("the batch has neither 'labels' nor 'shift_labels' to count")
        labels = torch.as_tensor(batch["shift_labels" if shifted else "labels"])
        # Counts without starts do not say which first labels are lost: all are counted then.
        tells = self._label_counts is None or self._label_starts is not None
        first = 1 if not shifted and (tells or self.config.mask_first_label) else 0
        found = int((labels[:, first:] != IGNORED_LABEL).sum())
        planned = sum(map(self._labels_of_row, self._rows(plan, at)))
        if found != planned:
            raise ValueError(
                f"microbatch {at} of epoch {latest.epoch} has {found} supervised tokens, but "
                f"{planned} were planned: labels must not be changed after they are counted; count "
                "them as they come out of the collator"
            )

    def state_dict(self, *, epochs: float | None = None) -> dict[str, Any]:
        """Return the position as plain data, which ``torch.load(weights_only=True)`` reads.

        Args:
            epochs (float): The position as a trainer counts it that skips what was done by itself,
                a number of epochs: 1.25 is a quarter into epoch 1. None: what was consumed or
                yielded.

        Returns:
            dict[str, Any]: The `version` of this format; what the order of samples depends on
                (`settings`, `split`, `order`, which is ``rank`` or ``all``, digests of lengths,
                label counts and plan, the planner's version) and the data set's `fingerprint`; the
                `epoch` with the `position`, the microbatches of it that are done. At the end of a
                step it is the same on every rank, so one rank's state serves all. If the position
                is not known, it is None, and `replay_error` says why.
        """
        latest = self._latest
        if epochs is None:
            done = latest.consumed if self._state_follows_consumed else latest.yielded
            state, fault = self._state(latest, done), latest.fault
        else:
            try:
                state, fault = self._state_at(*self._epoch_position({"epoch": epochs})), None
            except ValueError:
                state = self._state(latest, 0)
                fault = f"the trainer counted {epochs} epochs, which is not the end of a step"
        if fault is not None:
            state |= {"epoch": latest.epoch, "position": None, "replay_error": fault}
        return state

    def _state(self, latest: _Pass, done: int) -> dict[str, Any]:
        """Return the state of an iteration of which so many microbatches are done."""
        epoch, position = latest.epoch, latest.start + done
        if done > 0 and position >= latest.count:
            epoch, position = epoch + 1, 0
        return self._state_at(epoch, position)

    def _state_at(self, epoch: int, position: int) -> dict[str, Any]:
        return {
            "version": _VERSION,
            **self._identity(),
            "settings_digest": self._inputs["settings"],
            # The next epoch need not be planned to say that it has not begun.
            "plan_digest": self._digests.get(0 if self.split == "eval" else epoch),
            "fingerprint": self.fingerprint,
            "epoch": epoch,
            "position": position,
            "replay_error": None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, ignore_data_skip: bool = False) -> None:
        """Go to a saved position: the next iteration goes on from there.

        A checkpoint that was written without this sampler has no such state, but its trainer knows
        how far it was. That is taken as ``{"epoch": 1.25}``, a number of epochs as trainers count
        them, or ``{"epoch": 1, "batches": 6}``, microbatches of each rank in an epoch. Nothing says
        whether the order was the same, so such a position must at least be the end of an optimizer
        step.

        Args:
            state (Mapping): What `state_dict` returned, here or on another rank.
            ignore_data_skip (bool): Do not go to the position, nor compare anything: start at the
                beginning of the epoch that was saved, or stay in the current one if none was.
                Samples may be repeated or skipped.

        Raises:
            TypeError: If an epoch or position is no number.
            ValueError: If the state is of another version, was saved in another order of samples,
                or holds no usable position; the sampler is then as it was.

        Warns:
            UserWarning: If nothing but the data set's fingerprint has changed.
        """
        if ignore_data_skip:
            epoch = state.get("epoch") if isinstance(state, Mapping) else None
            if isinstance(epoch, int | float) and 0 <= epoch < _EPOCHS:
                self._go_to(int(epoch), 0)
            else:
                self._go_to(self._epoch, 0)
            return
        self._go_to(*self.position_of(state))
        self._loaded = True

    def position_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the position that a state names, without going there.

        For trainers that skip what was done by themselves: going there too would skip it twice.

        Args:
            state (Mapping): As for `load_state_dict`.

        Returns:
            tuple[int, int]: The epoch, and the microbatches of it that are done.

        Raises:
            TypeError, ValueError: As for `load_state_dict`.

        Warns:
            UserWarning: As for `load_state_dict`.
        """
        refuse_other_kinds("the state", state, Mapping)
        if "version" not in state and "epoch" in state:
            epoch, position = self._epoch_position(state)
        else:
            epoch, position = self._saved_position(state)
        count = self._count(self._plan_of(epoch))
        if position > count:
            raise ValueError(f"position is {position}, but epoch {epoch} has {count} microbatches")
        if position == count > 0:
            return epoch + 1, 0
        return epoch, position

    def _saved_position(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the epoch and the position of a state, which must belong to this order."""
        refuse_other_version(state, _VERSION)
        refuse_differences(state, self._identity())
        if (fault := state.get("replay_error")) is not None:
            raise unavailable(fault)
        epoch = integer("epoch", state.get("epoch"), least=0)
        position = integer("position", state.get("position"), least=0)
        plan = self._plan_of(epoch)
        # A plan's digest also follows settings that only shape batches, and may have changed.
        same_settings = state.get("settings_digest") == self._inputs["settings"]
        if state.get("plan_digest") is not None and same_settings:
            refuse_differences(state, {"plan_digest": plan.digest})
        before, now = state.get("fingerprint"), self.fingerprint
        if before is not None and now is not None and not is_same(before, now):
            warnings.warn(
                f"the data set's fingerprint was {shown(before)} and is now {now!r}; lengths and "
                "label counts are the same, so the order is too, but the texts may be others",
                stacklevel=4,
            )
        return epoch, position

    def _epoch_position(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the epoch and the position of a state that a trainer without this sampler kept."""
        epoch = state["epoch"]
        if "batches" in state:
            whole, done = integer("epoch", epoch, least=0), integer("batches", state["batches"], 0)
        else:
            if isinstance(epoch, bool) or not isinstance(epoch, int | float):
                raise TypeError(f"epoch is {shown(epoch)}, but must be a number")
            if not 0 <= epoch < _EPOCHS:
                raise unavailable(f"the saved epoch is {shown(epoch)}")
            whole = int(epoch)
            count = len(self._plan_of(whole))
            part = (epoch - whole) * count
            done = round(part)
            if abs(part - done) > 1e-3:
                raise unavailable(
                    f"the saved epoch {epoch} is {part:.3f} microbatches into epoch {whole}, which "
                    f"has {count}, and not a whole number of them"
                )
        accumulation = self.config.gradient_accumulation_steps
        if done % accumulation and done < len(self._plan_of(whole)):
            raise unavailable(
                f"{done} microbatches into epoch {whole} is not the end of an optimizer step of "
                f"{accumulation}"
            )
        return whole, done * self._ranks_yielded

    def __getstate__(self) -> dict[str, Any]:
        # A plan is made again where it is needed, for less than it would cost to send.
        return {**self.__dict__, "_plans": {}, "_iteration": None}

    def _passed(self) -> bool:
        """Whether the current epoch has been yielded whole, and was not asked for again.

        A loop that counts batches, as Lightning's does, never asks for one more than there are, and
        so never comes to the end of an iteration.
        """
        latest = self._latest
        whole = 0 < latest.count <= latest.start + latest.yielded
        return whole and latest.epoch == self._epoch and not latest.again

    @property
    def _ranks_yielded(self) -> int:
        return self.config.world_size if self.rank == "all" else 1

    def _count(self, plan: Plan) -> int:
        """Microbatches that a pass over a plan yields."""
        return len(plan) * self._ranks_yielded

    def _rows(self, plan: Plan, number: int) -> list[list[int]]:
        """The rows of a microbatch, counted as they are yielded."""
        if isinstance(self.rank, int):
            return plan[self.rank, number]
        k, rank = divmod(number, self.config.world_size)
        return plan[rank, k]

    def _labels_of_row(self, row: list[int]) -> int:
        """Supervised tokens that were planned for the samples of a row."""
        masked = self.config.mask_first_label
        index = torch.tensor([sample for sample in row if not isinstance(sample, Repeat)])
        if index.numel() == 0:
            return 0
        if self._label_counts is None:
            counts = self._lengths[index].clamp(max=self.config.sequence_len) - int(masked)
        else:
            counts = self._label_counts[index]
        # Nothing predicts the first token of a row of the batch.
        leading = index if self._layout == "padded" else index[:1]
        if masked:
            lost = 0
        elif self._label_starts is not None:
            lost = int(self._label_starts[leading].sum())
        else:
            lost = leading.numel() if self._label_counts is None else 0
        return int(counts.sum()) - lost

    def _go_to(self, epoch: int, position: int) -> None:
        """Stand at a position; an iteration under way no longer counts."""
        self._epoch, self._start, self._loaded = epoch, position, False
        self._latest = _Pass(epoch, position)

    def _plan_from(self, epoch: int) -> Plan:
        """Return the plan of an epoch, and let those of earlier ones go."""
        plan = self._plan_of(epoch)
        here = plan.report["epoch"]
        self._plans = {epoch: kept for epoch, kept in self._plans.items() if epoch >= here}
        return plan

    def _plan_of(self, epoch: int) -> Plan:
        """Return the plan of an epoch, made anew if it is not kept."""
        if self.split == "eval":
            epoch = 0  # evaluation has one order
        plan = self._plans.get(epoch)
        if plan is None:
            plan = plan_tensors(
                self._lengths,
                self._label_counts,
                self._label_starts,
                self.config,
                epoch,
                self.split,
            )
            warn_of(plan, self._told)
            self._plans[epoch] = plan
            self._counts[epoch] = len(plan)
            self._digests[epoch] = plan.digest
        return plan

    def _every_epoch_has_the_same_count(self) -> bool:
        """Whether the rows depend in number on the lengths alone, and not on their order."""
        config = self.config
        return (
            self.split == "eval"
            or self._layout not in PACKED
            or config.sample_packing_sequentially
            or (
                config.sample_packing_algorithm == "best_fit_decreasing"
                and config.sample_packing_group_size is None
            )
        )

    def _identity(self) -> dict[str, Any]:
        """What the order of samples depends on."""
        return {
            "settings": order_settings(self.config, self.split, streaming=False),
            "split": self.split,
            "order": "all" if self.rank == "all" else "rank",
            "lengths_digest": self._inputs["lengths"],
            "label_counts_digest": self._inputs["labels"],
            "plan_version": self._plan_version,
        }


def _bytes(plan: Plan) -> int:
    return plan.index.nbytes + plan.row_offsets.nbytes + plan.batch_offsets.nbytes
