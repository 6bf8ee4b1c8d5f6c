"""Statistics of plans, counted once more from the batches, sample by sample."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from multipack import Config, Plan, Repeat, plan
from multipack._config import Split, capacity, layout

SEQUENCE_LEN = 8


def settings(seeded: np.random.Generator) -> dict[str, Any]:
    """Draw settings that statistics depend on."""

    def one_of(*values: Any) -> Any:
        return values[int(seeded.integers(len(values)))]

    packed, sequentially = one_of(True, True, False), one_of(True, False, False)
    return {
        "sequence_len": SEQUENCE_LEN,
        "sample_packing": packed,
        "batch_flattening": not packed and one_of(True, False),
        "multipack_real_batches": packed and one_of(True, False),
        "sample_packing_sequentially": sequentially,
        "balance_labels": not sequentially and one_of(True, False),
        "balance_cost": one_of("auto", "tokens", "padded", "attention"),
        "balance_cost_linear": one_of(0.0, 3.5),
        "micro_batch_size": one_of(1, 2, 3),
        "eval_batch_size": one_of(None, 4),
        "gradient_accumulation_steps": one_of(1, 2, 3),
        "world_size": one_of(1, 2, 3),
        "incomplete_batches": one_of("drop", "split", "fill"),
        "excess_length_strategy": one_of("drop", "truncate"),
        "align_samples_to": one_of(1, 4),
        "pad_to_multiple_of": one_of(1, 3),
        "pad_to_sequence_len": one_of(True, False),
        "mask_first_label": one_of(True, False),
    }


class Twin:
    """Counts a plan by its microbatches."""

    def __init__(self, plan: Plan, split: Split, lengths: Any, counts: Any, starts: Any) -> None:
        self.config, self.split = plan.config, split
        self.lengths = np.minimum(lengths, SEQUENCE_LEN)
        self.counts, self.starts = counts, starts
        self.loads = [
            self.load(plan[rank, k])
            for k in range(len(plan))
            for rank in range(self.config.world_size)
        ]

    def load(self, rows: list[list[int]]) -> dict[str, Any]:
        """Count what a microbatch holds; repeats take up space and bring nothing."""
        config, lengths = self.config, self.lengths
        kind = layout(config, self.split)
        if kind == "padded":
            rows = [[sample] for sample in rows[0]]
        real = [sample for row in rows for sample in row if not isinstance(sample, Repeat)]
        align, multiple = config.align_samples_to, config.pad_to_multiple_of
        used = max(sum(-(-int(lengths[sample]) // align) * align for sample in row) for row in rows)
        width = -(-used // multiple) * multiple
        if config.pad_to_sequence_len:
            width = capacity(config, self.split)
        tokens, size = sum(int(lengths[sample]) for sample in real), width * len(rows)
        attention = config.balance_cost_linear * tokens + sum(int(lengths[s]) ** 2 for s in real)
        costs = {"tokens": tokens, "padded": size, "attention": attention}
        costs["auto"] = costs["padded" if kind == "padded" else "tokens"]
        return {
            "rows": len(rows),
            "tokens": tokens,
            "labels": sum(map(self.labels, rows)),
            "size": size,
            "cost": costs[config.balance_cost],
            "mean": tokens / len(real) if real else None,
        }

    def labels(self, row: list[int]) -> int:
        """Count the labels of a row that something predicts."""
        labels, masked = 0, self.config.mask_first_label
        for place, sample in enumerate(row):
            if isinstance(sample, Repeat):
                continue
            first = self.starts is None or bool(self.starts[sample])
            every = self.lengths[sample] if self.counts is None else self.counts[sample]
            # Counts leave out first labels that are masked; lengths do not.
            lost = self.counts is None if masked else first and place == 0
            labels += int(every) - int(lost)
        return labels

    def each(self, name: str, of: int = 1) -> list[int]:
        """Add up so many microbatches at a time; an incomplete end is left out."""
        values = [load[name] for load in self.loads]
        return [sum(values[at : at + of]) for at in range(0, len(values) - of + 1, of)]

    def statistics(self) -> dict[str, Any]:
        """Return every statistic that does not ask what would have been possible."""
        config, world = self.config, self.config.world_size
        step = world * (config.gradient_accumulation_steps if self.split == "train" else 1)
        rows, tokens, size = (sum(self.each(name)) for name in ("rows", "tokens", "size"))
        packed = layout(config, self.split) in ("one_row", "real_rows")
        space = rows * capacity(config, self.split) if packed else size
        costs, sizes = self.each("cost"), self.each("size")
        microsteps = [costs[at : at + world] for at in range(0, len(costs), world)]
        jumps = [abs(one - later) for one, later in zip(sizes, sizes[world:], strict=False)]
        means = [load["mean"] for load in self.loads]
        pairs = [pair for pair in itertools.pairwise(means) if None not in pair]
        return {
            "rows": rows,
            "efficiency": tokens / space if space else None,
            "mean_unpadded_length": mean(self.each("tokens")),
            "padding_tokens": size - tokens,
            "mean_labels": mean(self.each("labels")),
            "microbatch_label_std": deviation(self.each("labels")),
            "step_label_std": deviation(self.each("labels", step)),
            "step_token_std": deviation(self.each("tokens", step)),
            "rank_cost_imbalance": mean([max(c) * world / sum(c) for c in microsteps if sum(c)]),
            "rank_size_jump": mean(jumps),
            "length_correlation": correlation(pairs),
        }


def mean(values: list[Any]) -> float | None:
    return float(np.mean(values)) if values else None


def deviation(values: list[Any]) -> float | None:
    return float(np.std(values)) if values else None


def correlation(pairs: list[Any]) -> float | None:
    if len(pairs) < 2 or min(np.std(pairs, axis=0)) < 1e-6:
        return None
    return float(np.corrcoef(np.transpose(pairs))[0, 1])


def samples(seeded: np.random.Generator, keys: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Draw lengths, some of them over-long or 0, and labels that fit them."""
    lengths = seeded.integers(0, 11, int(seeded.integers(6, 90)))
    if seeded.random() < 0.4:
        return lengths, None, None
    kept = (
        np.minimum(lengths, SEQUENCE_LEN) if keys["excess_length_strategy"] != "drop" else lengths
    )
    labels = [seeded.random(length) < 0.6 for length in kept]
    starts = np.array([bool(of.any() and of[0]) for of in labels])
    masked = int(keys["mask_first_label"])
    return lengths, np.array([int(of[masked:].sum()) for of in labels]), starts


@pytest.mark.parametrize("split", ["train", "eval"])
def test_statistics_are_those_of_the_batches(seeded: np.random.Generator, split: Split) -> None:
    """In every layout; after dropping, splitting, filling, balancing; with and without labels."""
    planned = 0
    for _ in range(10):
        keys = settings(seeded)
        config = Config(**keys)
        lengths, counts, starts = samples(seeded, keys)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samples left out, which these inputs have
            try:
                made = plan(lengths, counts, config, label_starts=starts, split=split, epoch=1)
            except ValueError as error:
                if "at least one each is needed" in str(error) or "cannot be split" in str(error):
                    continue
                raise
        planned += 1

        found = vars(made.stats.after)
        expected = Twin(made, split, lengths, counts, starts).statistics()
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        if split == "eval" or not config.balance_labels:
            assert made.stats.before == made.stats.after

    assert planned > 4
