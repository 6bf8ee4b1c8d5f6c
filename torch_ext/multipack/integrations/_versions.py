"""The oldest version of each library that its adapter works with, and what is said of older ones.

The tests run with all of these at once (requirements-min.txt), and with the newest. What stands
against older ones: before transformers 5.3 the Trainer has no epochs that can be replaced, and
before 5.6 it divides the gradients of an accumulated step by its microbatches twice; before
TRL 1.7 its collator masks prompts, and not its data set; Lightning 2.4 goes on in the middle of an
accumulated step with other gradients.
"""

from __future__ import annotations

import re
from importlib import metadata

OLDEST = {
    "accelerate": "1.4.0",
    "datasets": "4.7.0",
    "lightning": "2.5.0",
    "torchdata": "0.10.0",
    "transformers": "5.6.0",
    "trl": "1.7.0",
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
