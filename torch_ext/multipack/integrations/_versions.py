"""The oldest version of each library that its adapter works with, and what is said of older ones.

The tests run with all of these at once (requirements-min.txt), and with the newest.
"""

from __future__ import annotations

import re
from importlib import metadata

OLDEST = {
    "accelerate": "1.4.0",
    "datasets": "3.0.0",
    "lightning": "2.5.0",
    "torchdata": "0.10.0",
    "transformers": "5.3.0",
    "trl": "0.24.0",
}


def require(*libraries: str) -> None:
    """Refuse libraries that are older than the adapters work with.

    Raises:
        ImportError: If one is, or is not installed.
    """
    for library in libraries:
        oldest = OLDEST[library]
        try:
            found = metadata.version(library)
        except metadata.PackageNotFoundError:
            raise ImportError(f"{library} is not installed: install {library}>={oldest}") from None
        if _numbers(found) < _numbers(oldest):
            raise ImportError(
                f"{library} is {found}, but multipack works with {oldest} and newer: install "
                f"{library}>={oldest}"
            )


def _numbers(version: str) -> list[int]:
    """Return the numbers of a release; of a pre-release those of what it leads to."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
