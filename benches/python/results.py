"""What the benches found, kept for a table: a JSON object on each line of a file.

`python benches/python/peers.py` runs the benches with ``--json FILE`` and makes docs/peers.md of
what they write.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


class Results:
    """Writes results to a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def add(
        self,
        setting: str,
        name: str,
        seconds: list[float],
        figures: Mapping[str, str] | None = None,
        fault: str | None = None,
    ) -> None:
        """Add what one contestant did.

        Args:
            setting: What all contestants of the same setting were given.
            name: The contestant, beginning with its package; the first of a setting is ours.
            seconds: Of each run.
            figures: How good its answer is, by column.
            fault: What is wrong with its answer; None: nothing.
        """
        if self.path is None:
            return
        entry = {
            "setting": setting,
            "name": name,
            "version": _version(re.split(r"\W", name)[0]),
            "median": statistics.median(seconds),
            "fastest": min(seconds),
            "runs": len(seconds),
            "figures": dict(figures or {}),
            "fault": fault,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results to a file")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all results in a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return None
