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
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from torch.utils.data import Sampler, SequentialSampler

from multipack._arrays import Bools, Integers, bool_tensor, int64_tensor, integer
from multipack._config import Config, Split, batch_size, checked_split, layout, make_config
from multipack._plan import Plan, plan_tensors

Batch: TypeAlias = "list[list[int]] | list[int]"

_VERSION = 1
# These shape the tensors of a batch and not the order of samples, so they may change between save
# and load.
_SHAPE_KEYS = (
    "pad_to_multiple_of",
    "pad_to_sequence_len",
    "padded_tail",
    "streaming_multipack_buffer_size",
)


@dataclasses.dataclass
class _Pass:
    """One iteration over an epoch, counted in microbatches as they are yielded."""

    epoch: int
    start: int
    count: int
    yielded: int = 0
    consumed: int = 0


class MultipackBatchSampler(Sampler[Batch]):
    """Yields the microbatches of one rank, or of all ranks, as sample indices.

    A packed microbatch is a list of rows, each a list of samples; in the layouts with a fixed
    number of samples it is a list of samples. ``len(batch) == sampler.batch_size`` either way,
    unless `incomplete_batches: split` has split a microbatch of a fixed number of samples.

    `len()` is the number of microbatches that a pass of the current epoch yields. It is exact
    because it is read off the epoch's plan, which is made once, when it is first needed. On
    shuffled data, ``first_fit``, ``next_fit`` and a group size can give another number in another
    epoch: `len()` then follows `set_epoch`.

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
            Needed when `world_size` is more than 1.
        label_starts: (N,) bools, as for `plan`.
        split (str): ``train`` or ``eval``.
        **keys: Settings by name; they override those of `config`.

    Raises:
        TypeError: As for `plan`, or if the rank is neither an integer nor ``"all"``.
        ValueError: As for `plan`, or if the rank is missing or out of range.
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
        **keys: Any,
    ) -> None:
        self.config = make_config(config, keys)
        self.rank = _checked_rank(rank, self.config.world_size)
        self.split = checked_split(split)
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
        self._cached: Plan | None = None
        self._epoch = 0
        self._start = 0
        self._state_follows_consumed = False
        # Plans at once, so that what cannot be planned fails here and not at the first batch.
        self._go_to(0, 0)

    def __len__(self) -> int:
        """Microbatches that a whole pass of the current epoch yields."""
        return self._count(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        """Yield microbatches from the start of the epoch, or from the position loaded."""
        self._latest = _Pass(self._epoch, self._start, len(self))
        return self._batches(self.plan, self._latest)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration belongs to."""
        return self._epoch

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch; its `stats` tell how full and how even it is."""
        self._cached = self._plan_of(self._epoch)
        return self._cached

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the current one keeps its position.

        An iteration under way goes on in its own epoch.

        Args:
            epoch (int): From 0.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is negative.
        """
        epoch = integer("epoch", epoch, least=0)
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    def total_steps(self, epochs: int) -> int:
        """Count the optimizer steps of a training, an incomplete last step of each epoch included.

        Where the number of microbatches differs by epoch, each epoch is planned to be counted.

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
        return sum(-(-len(self._plan_of(epoch)) // accumulation) for epoch in range(epochs))

    def consumed(self, n: int = 1) -> None:
        """Say that this rank has trained on `n` more microbatches of the latest iteration.

        From the first call on, the state follows what was consumed. Until then it follows what was
        yielded, which is ahead by what the workers of a DataLoader have fetched.

        Args:
            n (int): Microbatches since the last call.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is negative, or more were consumed than yielded.
        """
        consumed = self._latest.consumed + integer("n", n, least=0) * self._ranks_yielded
        if consumed > self._latest.yielded:
            raise ValueError(
                f"{consumed} microbatches are said to be consumed, but this iteration has yielded "
                f"{self._latest.yielded}"
            )
        self._latest.consumed = consumed
        self._state_follows_consumed = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data, which ``torch.load(weights_only=True)`` reads.

        Returns:
            dict[str, Any]: The version of this format; what the order of samples depends on: the
                settings, the split, ``order`` (``rank`` or ``all``), digests of the lengths and of
                the label counts; and the ``epoch`` with the ``position``, the microbatches of it
                that are done. At the end of a step it is the same on every rank, so one rank's
                state serves all.
        """
        latest = self._latest
        done = latest.consumed if self._state_follows_consumed else latest.yielded
        epoch, position = latest.epoch, latest.start + done
        if done > 0 and position >= latest.count:
            epoch, position = epoch + 1, 0
        return {"version": _VERSION, **self._identity(), "epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position: the next iteration goes on from there.

        Args:
            state (Mapping): What `state_dict` returned, here or on another rank.

        Raises:
            ValueError: If it is of another version, or was saved with other settings, lengths or
                label counts; the sampler is then as it was.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the state has version {state.get('version')}, but this release reads "
                f"version {_VERSION}"
            )
        saved, current = _flat(state), _flat(self._identity())
        differences = [
            f"{key} was {saved.get(key)!r} and is now {value!r}"
            for key, value in current.items()
            if saved.get(key) != value
        ]
        if differences:
            raise ValueError(
                "the state belongs to another order of samples: " + "; ".join(differences)
            )
        epoch = integer("epoch", state["epoch"], least=0)
        position = integer("position", state["position"], least=0)
        plan = self._plan_of(epoch)
        if position > self._count(plan):
            raise ValueError(
                f"position is {position}, but epoch {epoch} has {self._count(plan)} microbatches"
            )
        self._cached = plan
        self._go_to(epoch, position)

    def __getstate__(self) -> dict[str, Any]:
        # A plan is made again where it is needed, for less than it would cost to send.
        return {**self.__dict__, "_cached": None}

    @property
    def _ranks_yielded(self) -> int:
        return self.config.world_size if self.rank == "all" else 1

    def _count(self, plan: Plan) -> int:
        """Microbatches that a pass over a plan yields."""
        return len(plan) * self._ranks_yielded

    def _batches(self, plan: Plan, latest: _Pass) -> Iterator[Batch]:
        """Yield what is left of a plan, then move on to the next epoch."""
        fixed = self._layout in ("padded", "flattened")
        for number in range(latest.start, latest.count):
            if isinstance(self.rank, int):
                rows = plan[self.rank, number]
            else:
                k, rank = divmod(number, self.config.world_size)
                rows = plan[rank, k]
            latest.yielded += 1
            yield rows[0] if fixed else rows
        # A newer iteration or a set_epoch has taken over otherwise.
        if self._latest is latest:
            self._epoch, self._start = latest.epoch + 1, 0

    def _go_to(self, epoch: int, position: int) -> None:
        """Stand at a position; an iteration under way no longer counts."""
        self._epoch, self._start = epoch, position
        self._latest = _Pass(epoch, position, len(self))

    def _plan_of(self, epoch: int) -> Plan:
        """Return the plan of an epoch, which is the cached one if it can be."""
        if self.split == "eval":
            epoch = 0  # evaluation has one order
        if self._cached is not None and self._cached.report["epoch"] == epoch:
            return self._cached
        return plan_tensors(
            self._lengths, self._label_counts, self._label_starts, self.config, epoch, self.split
        )

    def _every_epoch_has_the_same_count(self) -> bool:
        """Whether the rows depend in number on the lengths alone, and not on their order."""
        config = self.config
        return (
            self.split == "eval"
            or self._layout in ("padded", "flattened")
            or config.sample_packing_sequentially
            or (
                config.sample_packing_algorithm == "best_fit_decreasing"
                and config.sample_packing_group_size is None
            )
        )

    def _identity(self) -> dict[str, Any]:
        """What the order of samples depends on."""
        settings = dict(vars(self.config))
        for key in _SHAPE_KEYS:
            del settings[key]
        seed = settings.pop("seed")
        if settings["data_seed"] is None:
            settings["data_seed"] = seed
        if self.split == "train":
            del settings["eval_batch_size"], settings["eval_sample_packing"]
        inputs = self.plan.report["inputs"]
        return {
            "settings": settings,
            "split": self.split,
            "order": "all" if self.rank == "all" else "rank",
            "lengths_digest": inputs["lengths"],
            "label_counts_digest": inputs["labels"],
        }


def _checked_rank(rank: object, world_size: int) -> int | Literal["all"]:
    """Return the rank as a plain int, or ``"all"``."""
    if rank == "all":
        return "all"
    if rank is None:
        if world_size > 1:
            raise ValueError(
                f"rank is needed when world_size is {world_size}: this rank's number, or 'all' for "
                "every rank's microbatches in global order"
            )
        return 0
    number = integer("rank", rank)
    if not 0 <= number < world_size:
        raise ValueError(f"rank is {number}, but must be from 0 to {world_size - 1}, or 'all'")
    return number


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the settings beside the other facts that an order depends on."""
    facts = {key: state.get(key) for key in ("split", "order")}
    digests = {key: state.get(key) for key in ("lengths_digest", "label_counts_digest")}
    return {**facts, **state.get("settings", {}), **digests}
