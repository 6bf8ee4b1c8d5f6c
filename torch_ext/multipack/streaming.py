"""Batches from a stream, packed without knowing the whole of it.

The stream is cut into buffers of `streaming_multipack_buffer_size` samples, and each is planned
alone by ``torch.ops.multipack.plan``. The seed of a buffer is a hash of its tokens and of the
planning seed, so the same buffer is packed alike whenever and wherever it comes. Rows that fill no
round of ranks are not thrown away: their samples are the first of the next buffer.

Every rank, and every worker of its DataLoader, reads the whole stream and plans every buffer, and
collates its own share of the microbatches. So nobody waits for anybody, at the price of reading the
stream once per process. No more is held than one buffer and the samples of one round. Where the
lengths of all samples are known beforehand, `MultipackBatchSampler` packs denser, shuffles better
and reads every sample once.

    stream = StreamingMultipack(samples, sequence_len=4096, collator=Collator(attention="flash"))
    loader = DataLoader(stream, batch_size=None)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from multipack._agreement import check_agreement
from multipack._arrays import integer, shown
from multipack._config import Config, checked_rank, layout, make_config
from multipack._plan import Plan, count_labels, plan_tensors
from multipack._processes import warn_if_alone
from multipack._samples import token_array
from multipack._state import (
    order_settings,
    refuse_differences,
    refuse_other_kinds,
    refuse_other_version,
    unavailable,
)
from multipack._stats import NO_SAMPLES, Tally
from multipack.collate import Collator
from multipack.dataset import RowDataset

_VERSION = 1

_READ_ELSEWHERE = (
    "the stream was read by the workers of a DataLoader, which alone know how far they are; let "
    "torchdata's StatefulDataLoader keep their states, or use num_workers=0"
)

Sample: TypeAlias = "dict[str, Any]"


@runtime_checkable
class _Stateful(Protocol):
    """An iterable that knows its own position."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class StreamCounts:
    """What became of the samples of a stream, up to the end of the buffer at hand."""

    read: int = 0
    """Samples taken from the stream."""
    dropped: Mapping[str, Tally] = dataclasses.field(default_factory=dict)
    """Samples left out, by reason: ``over_long``, ``too_short``, ``unlabelled``."""
    truncated: Tally = NO_SAMPLES
    """Samples cut to `sequence_len`."""
    unused_samples: int = 0
    """Retained samples at the end of the stream that fill no round of ranks."""


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Where a buffer begins."""

    counts: StreamCounts = StreamCounts()
    carried: tuple[tuple[int, Sample], ...] = ()
    """Samples of the buffer before, with their numbers in the stream."""
    batches: int = 0
    """Microbatches of this rank before the buffer."""
    labelled: bool | None = None
    """Whether samples have labels; None: none was read yet."""
    source: Any = None
    """The state of the iterable, behind what was read; None: it has none, or nothing was read."""


@dataclasses.dataclass
class _Pass:
    """One iteration over the stream."""

    epoch: int = 0
    mark: _Mark = _Mark()
    position: int = 0
    """Microbatches of this rank that are done."""
    seed: int | None = None
    """Of the buffer that begins at the mark; None: it was not read yet."""
    counts: StreamCounts = StreamCounts()
    shares: tuple[int, int, int] | None = None
    """A DataLoader worker's number, how many there are, and the microbatch that number 0 began
    with; None: in no worker."""


class StreamingMultipack(IterableDataset[dict[str, Any]]):
    """Yields the finished microbatches of one rank from an iterable of samples.

    A sample is what `Collator` takes: a mapping with `input_ids` and, if it has them, `labels`.
    Samples without labels are pretraining samples: every token is supervised. A DataLoader takes
    the stream with ``batch_size=None``; with several workers its batches come in the order of a
    single process.

    Every rank is given the same iterable in the same order: one that deals its samples out to ranks
    would leave each rank with a share of a share. What deals them out to DataLoader workers, as the
    streams of Hugging Face do, may be given as it is, and yields everything here.

    What is left when the stream ends, and fills no round of ranks, is treated by
    `incomplete_batches`: ``drop`` leaves it out, with a warning that counts it; ``split`` does so
    where there are too few samples to split.

    After a full pass the next iteration is the next epoch, with or without `set_epoch`. It reads
    the iterable again, in the order that the iterable then has: an iterable with a `set_epoch` of
    its own, as those of Hugging Face have, is told the epoch. Workers that a DataLoader starts anew
    for each pass cannot know how many there were: with them `set_epoch` is needed.

        >>> stream = StreamingMultipack(
        ...     ({"input_ids": [i] * length} for i, length in enumerate([6, 6, 3], start=1)),
        ...     sequence_len=10,
        ...     sample_packing_sequentially=True,
        ...     collator=Collator(attention="none"),
        ... )
        >>> [batch["input_ids"].tolist() for batch in stream]
        [[[1, 1, 1, 1, 1, 1]], [[2, 2, 2, 2, 2, 2, 3, 3, 3]]]

    Args:
        iterable (Iterable): The samples. If it has `state_dict` and `load_state_dict`, resuming
            goes on from its own position, if that is exact; else the samples before are read again
            and passed over.
        config (Config): The settings; None: those of the collator.
        rank (int): This rank's number. Needed when `world_size` is more than 1.
        collator (Collator): Makes a batch of rows of samples.
        **keys: Settings by name; they override those of `config`.

    Raises:
        TypeError: If something is of the wrong kind.
        ValueError: As for `plan`; if the rank is missing or out of range; if
            `label_balance_window_optim_steps` is more than 1, or labels are to be balanced without
            packing; if the collator is for an evaluation, or would lay out what is planned in
            another way.

    Warns:
        UserWarning: If several processes would each train on all samples.
    """

    def __init__(
        self,
        iterable: Iterable[Mapping[str, Any]],
        config: Config | None = None,
        *,
        rank: int | None = None,
        collator: Callable[[Any], dict[str, Any]],
        **keys: Any,
    ) -> None:
        if not isinstance(iterable, Iterable):
            raise TypeError(
                f"iterable is a {type(iterable).__name__}, but must yield samples one by one"
            )
        if config is None and isinstance(collator, Collator):
            config = collator.config
        self.config = make_config(config, keys)
        self.rank = checked_rank(rank, self.config.world_size)
        warn_if_alone(self.config, "train")
        self.iterable = iterable
        self.collator = collator
        if self.config.label_balance_window_optim_steps > 1:
            raise ValueError(
                "label_balance_window_optim_steps is "
                f"{self.config.label_balance_window_optim_steps}, but must be 1 for a stream: the "
                "buffers of a stream do not say where optimizer steps begin"
            )
        if self.config.balance_labels and layout(self.config, "train") in ("padded", "flattened"):
            raise ValueError(
                "balance_labels with sample_packing: false needs all lengths at once, which a "
                "stream does not have: pack it, or use MultipackBatchSampler"
            )
        if isinstance(collator, Collator) and collator.split != "train":
            raise ValueError(
                "the collator is for split 'eval', but a stream is for training; evaluate with "
                "MultipackBatchSampler"
            )
        check_agreement("the stream", self.config, "train", collator)
        # Settings that cannot be planned with fail here and not at the first batch.
        plan_tensors(torch.empty(0, dtype=torch.int64), None, None, self.config, 0, "train")
        # The position that the next iteration begins with, and the one under way.
        self._start = _Pass()
        self._latest = self._start
        # Where the iterable began a pass that has not come to its end, in a list of one.
        self._origin: list[Any] | None = None
        # Microbatches of this rank in the latest pass that came to its end.
        self._passed = 0
        # The epoch that DataLoader workers have begun, in memory that they share with this process;
        # -1: none.
        self._begun_by_workers = torch.tensor(-1)
        self._begun_by_workers.share_memory_()  # type: ignore[no-untyped-call]
        # A hash of the first samples of epoch 0, in the same kind of memory; -1: none were read.
        self._first_samples = torch.tensor(-1)
        self._first_samples.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield microbatches from the start of the stream, or from the position loaded."""
        latest = self._latest = copy.copy(self._start)
        latest.counts = latest.mark.counts
        info = get_worker_info()
        if info is None:
            self._begun_by_workers.fill_(-1)
            latest.shares = None
        elif latest.shares is None or latest.shares[:2] != (info.id, info.num_workers):
            latest.shares = (info.id, info.num_workers, latest.position)
        if info is not None and info.id == 0:
            again = latest.position == 0 and int(self._begun_by_workers) == latest.epoch
            if again and hasattr(self.iterable, "set_epoch"):
                warnings.warn(
                    f"epoch {latest.epoch} of the stream is read again: workers that do not "
                    "persist begin where the stream of the main process stands; call set_epoch "
                    "before each epoch, or give the DataLoader persistent_workers=True",
                    stacklevel=2,
                )
            self._begun_by_workers.fill_(latest.epoch)
        return self._batches(latest)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration belongs to."""
        return self._start.epoch

    @property
    def counts(self) -> StreamCounts:
        """What became of the samples so far, in the latest iteration of this process."""
        return self._latest.counts

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the current one keeps its position.

        Args:
            epoch (int): From 0.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is negative.
        """
        epoch = integer("epoch", epoch, least=0)
        if epoch != self.epoch:
            self._go_to(_Pass(epoch=epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this process as plain data.

        Samples that wait for their turn are in it in so far as they cannot be read again: those
        that were carried over from the buffer before. The rest of the buffer is read anew. With
        DataLoader workers, each worker's copy knows how far it is, and is asked by torchdata's
        StatefulDataLoader; the copy in the main process does not know.

        Returns:
            dict[str, Any]: Numbers, strings, lists and dicts of them, and what the `state_dict` of
                the iterable holds. If the position is not known here, `replay_error` says why.
        """
        latest = self._latest
        mark = latest.mark
        unknown = get_worker_info() is None and int(self._begun_by_workers) >= 0
        return {
            "version": _VERSION,
            **self._identity(),
            "replay_error": _READ_ELSEWHERE if unknown else None,
            "epoch": latest.epoch,
            "position": None if unknown else latest.position,
            "buffer": {
                "seed": latest.seed,
                "batches": mark.batches,
                "labelled": mark.labelled,
                "counts": dataclasses.asdict(mark.counts),
                "carried": [[number, _to_state(sample)] for number, sample in mark.carried],
                "source": mark.source,
            },
            "shares": None if latest.shares is None else list(latest.shares),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, ignore_data_skip: bool = False) -> None:
        """Go to a saved position: the next iteration goes on from there.

        The iterable must yield what it yielded before. Where it does not, the iteration stops with
        an error at the first buffer.

        Args:
            state (Mapping): What `state_dict` returned. One that was saved in no worker serves all
                ranks; one from a DataLoader worker is for that worker.
            ignore_data_skip (bool): Do not go to the position, nor compare anything: start the
                current epoch anew. Samples may be repeated or skipped.

        Raises:
            TypeError: If an epoch or position is no integer.
            ValueError: If the state is of another version, was saved with other settings, or holds
                no position; the stream is then as it was.
        """
        if ignore_data_skip:
            self._go_to(_Pass(epoch=self.epoch))
            return
        refuse_other_version(state, _VERSION)
        refuse_differences(state, self._identity())
        if (fault := state.get("replay_error")) is not None:
            raise unavailable(fault)
        self._go_to(_pass_from(state))

    def _go_to(self, start: _Pass) -> None:
        """Let the next iteration begin somewhere; one under way no longer counts."""
        self._start = self._latest = start
        self._begun_by_workers.fill_(-1)

    def _batches(self, latest: _Pass) -> Iterator[dict[str, Any]]:
        """Yield what is left of a pass, then move on to the next epoch."""
        worker, workers, base = latest.shares or (0, 1, latest.position)
        fixed = layout(self.config, "train") in ("padded", "flattened")
        mark, expected = latest.mark, latest.seed
        source = self._source(latest.epoch, mark)
        ended = False
        while not ended:
            buffer, labelled = self._read(source, mark)
            samples = [sample for _, sample in buffer]
            seed = _seed(self.config, samples)
            if expected not in (None, seed):
                if mark.source is None:
                    raise unavailable(
                        "the stream yields other samples than before, among those from number "
                        f"{mark.counts.read} on"
                    )
                # The state of a Hugging Face stream leaves out what waits to be shuffled. To read
                # everything again is slow, but exact.
                mark = dataclasses.replace(mark, source=None)
                source = self._source(latest.epoch, mark)
                continue
            expected = None
            if latest.epoch == mark.counts.read == 0:
                self._first_samples.fill_(seed >> 1)  # an int64
            counts = self._counts(mark, buffer)
            ended = counts.read < mark.counts.read + self.config.streaming_multipack_buffer_size
            plan, rounds, rest = self._plan(samples, seed, ended)
            counts = _with_dropped(counts, plan, [number for number, _ in buffer])
            if ended:
                counts = dataclasses.replace(counts, unused_samples=len(rest))
            if worker == 0:
                _warn(mark.counts, counts, self.config)
            latest.mark, latest.seed, latest.counts = mark, seed, counts
            rows = RowDataset(samples)
            for k in range(rounds):
                number = mark.batches + k
                if number >= latest.position and (number - base) % workers == worker:
                    latest.position = number + 1
                    batch = plan[self.rank, k]
                    yield self.collator(rows[batch[0] if fixed else batch])
            mark = _Mark(
                counts=counts,
                carried=tuple(buffer[place] for place in rest),
                batches=mark.batches + rounds,
                labelled=labelled,
                source=_state_of(self.iterable),
            )
            # The samples of one buffer go before those of the next come.
            del buffer, samples, rows, plan
        # A newer iteration or a set_epoch has taken over otherwise.
        if self._latest is latest:
            self._origin, self._passed = None, mark.batches
            self._start = self._latest = _Pass(epoch=latest.epoch + 1, counts=latest.counts)

    def _source(self, epoch: int, mark: _Mark) -> Iterator[Mapping[str, Any]]:
        """Return the iterable's samples in an epoch from a mark on."""
        read, state = mark.counts.read, mark.source
        if hasattr(self.iterable, "set_epoch"):
            _own_epoch(self.iterable)
            self.iterable.set_epoch(epoch)
        with _as_if_alone():
            if isinstance(self.iterable, _Stateful):
                # It would go on from where a pass was given up, and samples would be lost.
                if self._origin is None:
                    self._origin = [_origin_of(self.iterable)]
                else:
                    _send_back(self.iterable, self._origin[0])
                if state is not None:
                    self.iterable.load_state_dict(state)
                    source = iter(self.iterable)
                    if _is_hugging_face(self.iterable):
                        # It would begin there whenever this epoch is read again.
                        first = list(itertools.islice(source, 1))
                        _send_back(self.iterable, self._origin[0])
                        source = itertools.chain(first, source)
                    return source
            source = iter(self.iterable)
            passed_over = sum(1 for _ in itertools.islice(source, read))
        if passed_over < read:
            raise unavailable(
                f"the stream ends after {passed_over} samples, but {read} were read before"
            )
        return source

    def _read(
        self, source: Iterator[Mapping[str, Any]], mark: _Mark
    ) -> tuple[list[tuple[int, Sample]], bool | None]:
        """Read a buffer: what was carried over, and new samples behind it.

        Returns:
            tuple: The samples with their numbers in the stream, and whether they have labels.
        """
        buffer, labelled = list(mark.carried), mark.labelled
        with _as_if_alone():
            new = itertools.islice(source, self.config.streaming_multipack_buffer_size)
            for number, sample in enumerate(new, mark.counts.read):
                taken = _taken(sample, number)
                if labelled is None:
                    labelled = "labels" in taken
                if ("labels" in taken) != labelled:
                    has, lacks = (0, number) if labelled else (number, 0)
                    raise ValueError(
                        f"sample {lacks} of the stream has no 'labels', but sample {has} has: give "
                        "them to all samples, or to none"
                    )
                buffer.append((number, taken))
        return buffer, labelled

    def _counts(self, mark: _Mark, buffer: list[tuple[int, Sample]]) -> StreamCounts:
        """Count the new samples of a buffer, and those among them that are not kept whole."""
        new = buffer[len(mark.carried) :]
        truncated = mark.counts.truncated
        if self.config.excess_length_strategy != "drop":
            for number, sample in new:
                length, bound = len(sample["input_ids"]), self.config.sequence_len or 0
                if length <= bound:
                    continue
                if self.config.excess_length_strategy == "raise":
                    raise ValueError(
                        f"sample {number} of the stream has {length} tokens, more than "
                        f"sequence_len {bound}; raise sequence_len, or set excess_length_strategy "
                        "to drop or truncate"
                    )
                truncated = truncated.plus(Tally(1, number, length))
        read = mark.counts.read + len(new)
        return dataclasses.replace(mark.counts, read=read, truncated=truncated)

    def _plan(self, samples: list[Sample], seed: int, ended: bool) -> tuple[Plan, int, list[int]]:
        """Plan a buffer.

        Returns:
            tuple: The plan, how many of its rounds are to be used, and the places in the buffer of
                the retained samples that are not in these.
        """
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples], dtype=torch.int64)
        counts = starts = None
        if samples and "labels" in samples[0]:
            labels = np.concatenate([sample["labels"] for sample in samples])
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            counts, starts = count_labels(torch.from_numpy(labels), offsets, self.config)

        def planned(policy: str) -> Plan:
            config = self.config.replace(data_seed=seed, incomplete_batches=policy)
            return plan_tensors(lengths, counts, starts, config, 0, "train")

        # Filled up, a plan holds all samples that are retained, and tells which end the last round.
        plan, policy = planned("fill"), self.config.incomplete_batches
        repeated = plan.report["repeated_samples"]
        if not repeated or (ended and policy == "fill"):
            return plan, len(plan), []
        rows = plan.row_offsets.numel() - 1
        if ended and policy == "split" and plan.report["retained"] >= rows:
            plan = planned("split")
            return plan, len(plan), []
        last_round = plan.batch_offsets[-1 - self.config.world_size]
        rest = plan.index[plan.row_offsets[last_round] : plan.index.numel() - repeated]
        return plan, len(plan) - 1, sorted(rest.tolist())

    def _identity(self) -> dict[str, Any]:
        """What the order of samples depends on, the samples aside."""
        return {"settings": order_settings(self.config, "train", streaming=True)}


class Endless(IterableDataset[dict[str, Any]]):
    """A stream, pass after pass as if it were one, for a trainer that counts steps and no epochs.

    The order is that of a single process with any number of workers: each goes on in the next pass
    with the microbatch whose turn it has. What gives nothing when it is read again, as a generator
    does, has come to its end.

    Args:
        stream (StreamingMultipack): The passes.
    """

    def __init__(self, stream: StreamingMultipack) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield microbatches from the start of epoch 0.

        Raises:
            ValueError: If there is none.
        """
        stream, info, before = self.stream, get_worker_info(), 0
        for epoch in itertools.count():
            shares = None if info is None else (info.id, info.num_workers, -before)
            stream._go_to(_Pass(epoch=epoch, shares=shares))
            yield from stream
            if stream._passed == 0:
                break
            before += stream._passed
        if before == 0:
            raise ValueError(
                "the stream gave no microbatch: what is retained of it does not fill one round of "
                f"{stream.config.world_size} ranks, see its warnings"
            )

    @property
    def samples(self) -> int:
        """A hash of the first buffer, whichever process has read it; -1: none has."""
        return int(self.stream._first_samples)

    def state_at(self, position: int) -> dict[str, Any]:
        """Return the state after so many microbatches of this rank, as plain data."""
        identity = self.stream._identity()
        return {"version": _VERSION, **identity, "position": position, "samples": self.samples}

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return how many microbatches of a rank are done in a state.

        Raises:
            TypeError: If it is no state.
            ValueError: If it was saved with other settings; the text names each.
        """
        refuse_other_version(state, _VERSION)
        refuse_differences(state, self.stream._identity())
        return integer("position", state.get("position"), least=0)

    def check_samples(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other samples. Only behind the first microbatch is it known.

        Raises:
            ValueError: If it is one.
        """
        # A state that was saved before anything was read says nothing.
        if state.get("samples", -1) not in (-1, self.samples):
            raise unavailable(
                "the stream yields other samples than before, or in another order, among the first "
                f"{self.stream.config.streaming_multipack_buffer_size}"
            )


@contextlib.contextmanager
def _as_if_alone() -> Iterator[None]:
    """Hide from the iterable that it runs in a DataLoader worker.

    Streams of Hugging Face would yield each worker its own samples, but here all workers read all.
    """
    info, worker_module._worker_info = worker_module._worker_info, None
    try:
        yield
    finally:
        worker_module._worker_info = info


def _own_epoch(iterable: Any) -> None:
    """Give the iterable of a worker an epoch of its own.

    The streams of Hugging Face keep theirs in memory that all workers share, and `set_epoch` adds
    the difference to it: two workers at once add it twice, and read another epoch than was meant.
    """
    epoch = getattr(iterable, "_epoch", None)
    if get_worker_info() is not None and isinstance(epoch, torch.Tensor):
        iterable._epoch = epoch.clone()


def _state_of(iterable: Iterable[Any]) -> Any:
    """Return a copy of the state of an iterable, or None if it has none, or cannot tell it.

    It is asked for whether or not anything will be saved, so that its fault must not end the pass.
    """
    if not isinstance(iterable, _Stateful):
        return None
    try:
        return copy.deepcopy(iterable.state_dict())
    except Exception as error:  # whatever the code of others may raise
        warnings.warn(
            f"the state of the iterable cannot be had ({type(error).__name__}: {error}): resuming "
            "will read the stream from its start, and pass over what was read",
            stacklevel=4,
        )
        return None


def _origin_of(iterable: Any) -> Any:
    """Return a copy of the state that the next iteration begins with.

    It is what the streams of Hugging Face were told to begin with: their own state stays where the
    last iteration stopped, though the next one starts anew.
    """
    if _is_hugging_face(iterable):
        return copy.deepcopy(iterable._starting_state_dict)
    return _state_of(iterable)


def _send_back(iterable: Any, origin: Any) -> None:
    """Let the next iteration begin where `_origin_of` said; what could not tell stays as it is."""
    if origin is not None or _is_hugging_face(iterable):
        iterable.load_state_dict(origin)


def _is_hugging_face(iterable: Any) -> bool:
    """Whether it keeps where it is to begin apart from where it is."""
    return hasattr(iterable, "_starting_state_dict")


def _taken(sample: Any, number: int) -> Sample:
    """Return a sample of the stream with its tokens and labels as arrays."""
    if not isinstance(sample, Mapping):
        raise TypeError(
            f"sample {number} of the stream is a {type(sample).__name__}, but a sample is a "
            "mapping with 'input_ids'"
        )
    if "input_ids" not in sample:
        raise ValueError(
            f"sample {number} of the stream has no 'input_ids', but {', '.join(sorted(sample))}"
        )
    taken = dict(sample)
    for key in taken.keys() & {"input_ids", "labels"}:
        taken[key] = np.asarray(token_array(taken[key], key, number))
    tokens, labels = len(taken["input_ids"]), len(taken.get("labels", taken["input_ids"]))
    if tokens != labels:
        raise ValueError(
            f"sample {number} of the stream has {tokens} input_ids but {labels} labels: give one "
            "for each token"
        )
    return taken


def _seed(config: Config, samples: list[Sample]) -> int:
    """Hash the tokens of a buffer and the planning seed."""
    seed = config.seed if config.data_seed is None else config.data_seed
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8)
    for sample in samples:
        tokens = np.ascontiguousarray(sample["input_ids"], dtype="<i8")
        digest.update(tokens.size.to_bytes(8, "little"))
        digest.update(tokens.data)
    return int.from_bytes(digest.digest(), "little")


def _with_dropped(counts: StreamCounts, plan: Plan, numbers: list[int]) -> StreamCounts:
    """Count what a plan has dropped; `numbers` are those of its samples in the stream."""
    dropped = {}
    for reason, tally in plan.stats.dropped.items():
        if tally.first is not None:
            tally = dataclasses.replace(tally, first=numbers[tally.first])
        dropped[reason] = counts.dropped.get(reason, NO_SAMPLES).plus(tally)
    return dataclasses.replace(counts, dropped=dropped)


def _warn(before: StreamCounts, now: StreamCounts, config: Config) -> None:
    """Tell once that samples are dropped or cut, and at the end what was left over."""

    def told(counts: StreamCounts) -> list[str]:
        fates = {**counts.dropped, "truncated": counts.truncated}
        return [f"{fate}: {tally}" for fate, tally in fates.items() if tally.count]

    if told(now) and not told(before):
        warnings.warn(
            f"of the first {now.read} samples of the stream some are not kept whole: "
            f"{', '.join(told(now))}; `counts` goes on counting",
            stacklevel=3,
        )
    if now.read == 0:
        warnings.warn(
            "the stream gave no sample; a generator can be read once only: give an iterable that "
            "starts anew",
            stacklevel=3,
        )
    if now.unused_samples:
        warnings.warn(
            f"the stream ended with {now.unused_samples} samples that do not fill a round of "
            f"{config.world_size} ranks and are left out; incomplete_batches: fill keeps them",
            stacklevel=3,
        )


def _to_state(sample: Sample) -> dict[str, Any]:
    """Write a sample as plain data; arrays that are no tokens as tensors, to keep their dtype."""

    def plain(key: str, value: Any) -> Any:
        if key in ("input_ids", "labels") or isinstance(value, np.generic):
            return value.tolist()
        return torch.tensor(value) if isinstance(value, np.ndarray) else value

    return {key: plain(key, value) for key, value in sample.items()}


def _pass_from(state: Mapping[str, Any]) -> _Pass:
    """Read a state. It may come from anywhere, so nothing in it is taken to be what it should be.

    Raises:
        TypeError: If a part is of the wrong kind; the text names it.
        ValueError: If a part is missing or out of range.
    """
    buffer, seed = _part(state, "buffer", Mapping), None
    if _get(buffer, "seed") is not None:
        seed = _get(buffer, "seed")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is {shown(seed)}, but must be an integer")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {shown(seed)}, but must be from 0 to {(1 << 64) - 1}")
    counts = _counts_from(_part(buffer, "counts", Mapping))
    carried = []
    for entry in _part(buffer, "carried", list, tuple):
        refuse_other_kinds("an entry of carried", entry, list, tuple)
        if len(entry) != 2:
            raise ValueError(f"an entry of carried has {len(entry)} parts: a number and a sample")
        number = integer("the number of a carried sample", entry[0], least=0)
        carried.append((number, _taken(entry[1], number)))
    shares = _part(state, "shares", list, tuple, type(None))
    if shares is not None:
        if len(shares) != 3:
            raise ValueError(f"shares has {len(shares)} entries, but must have 3")
        worker, workers, base = (integer("an entry of shares", share, least=0) for share in shares)
        if worker >= workers:
            raise ValueError(f"shares is of worker {worker}, but there are {workers}")
        shares = (worker, workers, base)
    return _Pass(
        epoch=integer("epoch", _get(state, "epoch"), least=0),
        mark=_Mark(
            counts=counts,
            carried=tuple(carried),
            batches=integer("batches", _get(buffer, "batches"), least=0),
            labelled=_part(buffer, "labelled", bool, type(None)),
            source=_get(buffer, "source"),
        ),
        position=integer("position", _get(state, "position"), least=0),
        seed=seed,
        counts=counts,
        shares=shares,
    )


def _counts_from(state: Mapping[str, Any]) -> StreamCounts:
    dropped = _part(state, "dropped", Mapping)
    return StreamCounts(
        read=integer("read", _get(state, "read"), least=0),
        dropped={str(reason): _tally_from(dropped, reason) for reason in dropped},
        truncated=_tally_from(state, "truncated"),
        unused_samples=integer("unused_samples", _get(state, "unused_samples"), least=0),
    )


def _tally_from(state: Mapping[str, Any], name: str) -> Tally:
    tally = _part(state, name, Mapping)

    def number(key: str) -> int | None:
        value = _get(tally, key)
        return None if value is None else integer(f"{key} of {name}", value, least=0)

    return Tally(number("count") or 0, number("first"), number("longest"))


def _part(state: Mapping[str, Any], key: str, *kinds: type) -> Any:
    """Return a part of a state that must be of one of these kinds."""
    value = _get(state, key)
    refuse_other_kinds(key, value, *kinds)
    return value


def _get(state: Mapping[str, Any], key: str) -> Any:
    """Return a part of a state that must be there."""
    if key not in state:
        raise ValueError(f"the state has no {key!r}")
    return state[key]
