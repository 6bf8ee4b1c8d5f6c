"""Microbatches that know how they were planned, from the sampler to the collator.

The planner decides which samples share a row by their lengths, and counts the labels that enter the
loss; the collator lays out, cuts, aligns and masks. Where their settings differ, the batches look
right and are not: padded samples laid end to end in one row, rows that overflow, counts of labels
that are masked later. Neither of the two sees the other, but the microbatch passes through both. So
it carries the few settings that they must share, and the collator compares them with its own; and
the planned lengths, because a sample that has grown since makes its row longer than rows may be,
and nothing else would tell. Plain lists, made by hand or by a framework that deals microbatches out
anew, carry nothing and are taken as they are. Padding may differ: no plan depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import gt
from typing import Any, NamedTuple

from multipack._config import PACKED, Config, Layout, Split, layout


class Terms(NamedTuple):
    """The settings of a split that planning counts on and collating carries out."""

    split: Split
    layout: Layout
    sequence_len: int | None
    excess_length_strategy: str
    align_samples_to: int
    mask_first_label: bool

    @classmethod
    def of(cls, config: Config, split: Split) -> Terms:
        """Read them off the settings."""
        keys = (getattr(config, key) for key in cls._fields[2:])
        return cls(split, layout(config, split), *keys)

    def check(self, planner: str, theirs: Terms) -> None:
        """Refuse a collator that would make other batches than are planned.

        A collator without a `sequence_len` takes samples of any length, unless they were planned to
        be cut. One of another split will do where the layout is the same.

        Args:
            planner (str): What planned, as errors call it.
            theirs (Terms): The collator's.

        Raises:
            ValueError: If they differ; the text names the first setting that does.
        """
        any_length = theirs.sequence_len is None and self.excess_length_strategy != "truncate"
        for key in self._fields[1:]:
            ours, other = getattr(self, key), getattr(theirs, key)
            if ours != other and not (key == "sequence_len" and any_length):
                shared = "config" if self.split == theirs.split else "config and split"
                raise ValueError(
                    f"{key} is {ours!r} for {planner}, but {other!r} for the collator: give both "
                    f"the same {shared}"
                )


class Microbatch(list[Any]):
    """Samples or rows of samples, or their indices, with what they were planned on.

    Args:
        items: What it holds.
        terms (Terms): The settings.
        samples (int): How many samples were planned, retained or not.
        lengths (list[int]): The planned tokens of each sample in it, row after row.
        indices (Microbatch | None): What it was before the samples took the places of their
            indices; None: it still is.
    """

    __slots__ = ("indices", "lengths", "samples", "terms")

    indices: Microbatch | None
    lengths: list[int]
    samples: int
    terms: Terms

    def __init__(
        self,
        items: Iterable[Any],
        terms: Terms,
        samples: int,
        lengths: list[int],
        indices: Microbatch | None = None,
    ) -> None:
        super().__init__(items)
        self.terms = terms
        self.samples = samples
        self.lengths = lengths
        self.indices = indices

    def filled(self, items: Iterable[Any]) -> Microbatch:
        """Return one that holds the samples themselves."""
        return Microbatch(items, self.terms, self.samples, self.lengths, self)

    def check_data(self, count: int) -> None:
        """Refuse a data set that is not the one whose lengths were planned.

        Args:
            count (int): The samples of the data set.

        Raises:
            ValueError: If there are more or fewer than were planned.
        """
        if count != self.samples:
            raise ValueError(
                f"the sampler was given {self.samples} lengths, but the data set has {count} "
                "samples: give it the length of each"
            )

    def check_lengths(self, found: Sequence[int]) -> None:
        """Refuse samples that are longer than their rows have room for.

        Rows are packed by the planned lengths. Where they are not packed there is room for
        `sequence_len` tokens of each sample, so that samples may differ from one reading to the
        next. Samples that are cut may have been longer already. Shorter ones only leave rows
        emptier.

        Args:
            found (Sequence[int]): The tokens of each sample, in the order of the rows.

        Raises:
            ValueError: If a sample has more tokens; the text names the first.
        """
        if not any(map(gt, found, self.lengths)):
            return
        bound = self.terms.sequence_len
        cut = self.terms.excess_length_strategy == "truncate"
        packed = self.terms.layout in PACKED
        for number, (tokens, planned) in enumerate(zip(found, self.lengths, strict=True)):
            room = planned if packed or bound is None else bound
            if tokens > room and not (cut and bound is not None and room >= bound):
                rows = [row if isinstance(row, list) else [row] for row in self.indices or self]
                index = list(chain.from_iterable(rows))[number]
                raise ValueError(
                    f"sample {index} of the data set has {tokens} tokens, but {planned} were "
                    "planned for it: give the sampler the lengths that the collator gets"
                )
