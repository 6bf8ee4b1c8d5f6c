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

import copy
import dataclasses
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from multipack._agreement import check_agreement
from multipack._arrays import integer
from multipack._config import PACKED, Config, checked_rank, layout, make_config
from multipack._plan import Plan, count_labels, plan_tensors
from multipack._processes import warn_if_alone
from multipack._state import (
    order_settings,
    refuse_differences,
    refuse_other_version,
    unavailable,
)
from multipack._stats import NO_SAMPLES, Tally
from multipack._stream_source import Sample, Source, as_if_alone, checked
from multipack._stream_state import (
    VERSION,
    Mark,
    Pass,
    StreamCounts,
    pass_from,
    sample_to_state,
)
from multipack.collate import Collator
from multipack.dataset import RowDataset

__all__ = ["StreamCounts", "StreamingMultipack"]

_READ_ELSEWHERE = (
    "the stream was read by the workers of a DataLoader, which alone know how far they are; let "
    "torchdata's StatefulDataLoader keep their states, or use num_workers=0"
)


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
        self._source = Source(iterable)
        self.collator = collator
        if self.config.label_balance_window_optim_steps > 1:
            raise ValueError(
                "label_balance_window_optim_steps is "
                f"{self.config.label_balance_window_optim_steps}, but must be 1 for a stream: the "
                "buffers of a stream do not say where optimizer steps begin"
            )
        if self.config.balance_labels and layout(self.config, "train") not in PACKED:
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
        self._start = Pass()
        self._latest = self._start
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
            if again and self._source.has_epochs:
                warnings.warn(
                    f"epoch {latest.epoch} of the stream is read again: workers that do not "
                    "persist begin where the stream of the main process stands; call set_epoch "
                    "before each epoch, or give the DataLoader persistent_workers=True",
                    stacklevel=2,
                )
            self._begun_by_workers.fill_(latest.epoch)
        return self._batches(latest)

    @property
    def iterable(self) -> Iterable[Mapping[str, Any]]:
        """The samples, as they were given."""
        return self._source.iterable

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
            self._go_to(Pass(epoch=epoch))

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
            "version": VERSION,
            **self._identity(),
            "replay_error": _READ_ELSEWHERE if unknown else None,
            "epoch": latest.epoch,
            "position": None if unknown else latest.position,
            "buffer": {
                "seed": latest.seed,
                "batches": mark.batches,
                "labelled": mark.labelled,
                "counts": dataclasses.asdict(mark.counts),
                "carried": [[number, sample_to_state(sample)] for number, sample in mark.carried],
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
            self._go_to(Pass(epoch=self.epoch))
            return
        refuse_other_version(state, VERSION)
        refuse_differences(state, self._identity())
        if (fault := state.get("replay_error")) is not None:
            raise unavailable(fault)
        self._go_to(pass_from(state))

    def _go_to(self, start: Pass) -> None:
        """Let the next iteration begin somewhere; one under way no longer counts."""
        self._start = self._latest = start
        self._begun_by_workers.fill_(-1)

    def _batches(self, latest: Pass) -> Iterator[dict[str, Any]]:
        """Yield what is left of a pass, then move on to the next epoch."""
        worker, workers, base = latest.shares or (0, 1, latest.position)
        is_packed = layout(self.config, "train") in PACKED
        mark, expected = latest.mark, latest.seed
        source = self._source.samples(latest.epoch, mark.counts.read, mark.source)
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
                source = self._source.samples(latest.epoch, mark.counts.read, None)
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
                    yield self.collator(rows[batch if is_packed else batch[0]])
            mark = Mark(
                counts=counts,
                carried=tuple(buffer[place] for place in rest),
                batches=mark.batches + rounds,
                labelled=labelled,
                source=self._source.state(),
            )
            # The samples of one buffer go before those of the next come.
            del buffer, samples, rows, plan
        # A newer iteration or a set_epoch has taken over otherwise.
        if self._latest is latest:
            self._source.end()
            self._passed = mark.batches
            self._start = self._latest = Pass(epoch=latest.epoch + 1, counts=latest.counts)

    def _read(
        self, source: Iterator[Mapping[str, Any]], mark: Mark
    ) -> tuple[list[tuple[int, Sample]], bool | None]:
        """Read a buffer: what was carried over, and new samples behind it.

        Returns:
            tuple: The samples with their numbers in the stream, and whether they have labels.
        """
        buffer, labelled = list(mark.carried), mark.labelled
        with as_if_alone():
            new = itertools.islice(source, self.config.streaming_multipack_buffer_size)
            for number, given in enumerate(new, mark.counts.read):
                sample = checked(given, number)
                if labelled is None:
                    labelled = "labels" in sample
                if ("labels" in sample) != labelled:
                    has, lacks = (0, number) if labelled else (number, 0)
                    raise ValueError(
                        f"sample {lacks} of the stream has no 'labels', but sample {has} has: give "
                        "them to all samples, or to none"
                    )
                buffer.append((number, sample))
        return buffer, labelled

    def _counts(self, mark: Mark, buffer: list[tuple[int, Sample]]) -> StreamCounts:
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
