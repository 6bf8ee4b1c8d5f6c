"""Microbatches that know how they were planned, from the sampler to the collator.

The planner decides which samples share a row by their lengths, and counts the labels that enter the
loss; the collator lays out, cuts, aligns and masks. Where their settings differ, the batches look
right and are not: padded samples laid end to end in one row, rows that overflow, counts of labels
that are masked later. Neither of the two sees the other, but the microbatch passes through both. So
it carries the few settings that they must share, and the collator compares them with its own. Plain
lists, made by hand or by a framework that deals microbatches out anew, carry nothing and are taken
as they are. Padding may differ: no plan depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from multipack._config import Config, Layout, Split, layout


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
    """Samples or rows of samples, or their indices, with the terms that they were planned on.

    Args:
        items: What it holds.
        terms (Terms): The settings.
        samples (int): How many samples were planned, retained or not.
    """

    __slots__ = ("samples", "terms")

    samples: int
    terms: Terms

    def __init__(self, items: Iterable[Any], terms: Terms, samples: int) -> None:
        super().__init__(items)
        self.terms = terms
        self.samples = samples

    def filled(self, items: Iterable[Any]) -> Microbatch:
        """Return one that holds the samples themselves."""
        return Microbatch(items, self.terms, self.samples)

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
