"""Draws a microbatch as text: a letter for each sample, X for padding.

    [[ A A A A A A A A A A A B B B B B
       B C C C C C C C D D D D E E E E ]]

What is drawn are the tensors that `Collator` makes, with a number of its own for each sample
instead of token ids, so that padding, truncation and alignment are where training has them. A
character stands for several tokens, and shows the one in their middle: a sample shorter than a
character may be missing. Rows longer than `sequence_len` go on in the next line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import multipack
from multipack._config import Split, batch_size, capacity, layout

# Without X, and its small form that is easily taken for it. After these it begins anew.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWYZabcdefghijklmnopqrstuvwyz"
_CHARACTERS = 32
# Far more than anybody would look at.
_MOST_TOKENS = 1 << 26

Ids = npt.NDArray[np.int64]


def draw(
    plan: multipack.Plan,
    lengths: npt.NDArray[np.integer],
    rank: int,
    k: int,
    tokens_per_character: int | None = None,
) -> Iterator[str]:
    """Draws microbatch `k` of a rank, padded and as it is planned, line by line.

    Args:
        plan: what to draw from.
        lengths: (N,) what the plan was made from.
        rank: less than `world_size`.
        k: less than ``len(plan)``.
        tokens_per_character: None: as many as make a sample of `sequence_len` 32 characters.

    Raises:
        IndexError: if there is no such rank or microbatch.
        ValueError: if it is too large to be drawn.
    """
    config, split = plan.config, plan.report["split"]
    kind, size = layout(config, split), batch_size(config, split)
    tokens = config.sequence_len or 1
    rows = plan[rank, k]
    found = [int(lengths[sample]) for row in rows for sample in row]
    room = max(
        sum(found),
        size * max(found, default=0),
        len(rows) * max(capacity(config, split), config.pad_to_multiple_of),
    )
    if room > _MOST_TOKENS:
        raise ValueError(
            f"microbatch {k} of rank {rank} has room for {room:,} tokens, but no more than "
            f"{_MOST_TOKENS:,} can be drawn"
        )
    scale = tokens_per_character or -(-tokens // _CHARACTERS)
    samples = [sample for row in rows for sample in row]
    numbers = {sample: number for number, sample in enumerate(dict.fromkeys(samples), start=1)}
    yield (
        f"microbatch {k} of rank {rank}: {len(samples)} samples; a letter is a sample, X is "
        f"padding, a character is {scale:,} tokens"
    )
    yield ""
    width = -(-tokens // scale)
    padded = config.replace(
        sample_packing=False,
        eval_sample_packing=False,
        batch_flattening=False,
        multipack_real_batches=None,
        pad_to_sequence_len=False,
    )
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    yield from _titled(f"padded, {size} at a time", width)
    for batch in batches:
        yield from _picture(_collate(padded, split, [batch], numbers, lengths)[0], scale, width)
        yield ""
    if kind != "padded":
        name = {"flattened": "flattened", "one_row": "packed", "real_rows": "packed"}[kind]
        ids, borders = _collate(config, split, rows, numbers, lengths)
        yield from _titled(name, width)
        yield from _picture(ids, scale, width)
        yield ""
        yield from textwrap.wrap(f"cu_seqlens: {' '.join(map(str, borders))}", 100)
        yield ""
    legend = ", ".join(
        f"{_letter(number)} {sample} ({lengths[sample]:,})" for sample, number in numbers.items()
    )
    yield from textwrap.wrap(f"samples and their tokens: {legend}", 100)


def _collate(
    config: multipack.Config,
    split: Split,
    rows: list[list[int]],
    numbers: dict[int, int],
    lengths: npt.NDArray[np.integer],
) -> tuple[Ids, list[int]]:
    """The microbatch with the number of its sample for each token and 0 for padding, (R, L)."""
    batch = [
        [{"input_ids": np.full(lengths[sample], numbers[sample])} for sample in row] for row in rows
    ]
    collator = multipack.Collator(config, attention="flash", pad_token_id=0, split=split)
    made = collator(batch)
    return made["input_ids"].numpy(), made["cu_seq_lens_q"].tolist()


def _titled(title: str, width: int) -> Iterator[str]:
    yield f"{title}:"
    yield ""
    yield "   " + " ".join(str(column % 10) for column in range(width))


def _picture(ids: Ids, scale: int, width: int) -> Iterator[str]:
    """The rows in brackets, each in as many lines as it needs."""
    for number, row in enumerate(ids):
        middles = np.minimum(np.arange(0, len(row), scale) + scale // 2, len(row) - 1)
        letters = [_letter(int(i)) for i in row[middles]]
        starts = range(0, len(letters), width)
        for start in starts:
            opening = "   " if start else "[[ " if number == 0 else " [ "
            is_last_line = start == starts[-1]
            closing = " ]" if is_last_line else ""
            closing += "]" if is_last_line and number == len(ids) - 1 else ""
            yield opening + " ".join(letters[start : start + width]) + closing


def _letter(number: int) -> str:
    return "X" if number == 0 else _LETTERS[(number - 1) % len(_LETTERS)]
