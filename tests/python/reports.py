"""Files that the tests of the report read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def write_lines(path: Path, *lines: Any) -> Path:
    """A JSON-lines file; a string is a line as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return path


def write_lengths(path: Path, n: int = 400) -> Path:
    """Uneven lengths with uneven label counts."""
    random = np.random.default_rng(7)
    lengths = np.minimum(np.ceil(random.lognormal(3, 1, n)), 128).astype(np.int64)
    counts = np.ceil(lengths * random.beta(1.2, 1.8, n)).astype(np.int64)
    np.savez(path, lengths=lengths, label_counts=counts)
    return path
