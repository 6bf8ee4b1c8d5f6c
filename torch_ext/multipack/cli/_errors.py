"""What a command may tell the user when it cannot go on: one sentence.

A command raises `CliError`; `multipack.cli.main` prints its text to stderr and exits with code 2.
Anything else that escapes is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata


class CliError(Exception):
    """A fault of the input, the options or the environment, told in one sentence."""


def require(command: str, packages: Iterable[str]) -> None:
    """Checks that the optional packages of a command are installed, without importing them.

    Args:
        command: the command as the user typed it, `multipack demo`.
        packages: their names on PyPI.

    Raises:
        CliError: names every absent package and the one command that installs them.
    """
    absent = [package for package in packages if not _installed(package)]
    if absent:
        raise CliError(
            f"{command} needs {', '.join(absent)}, not installed here; "
            f"`pip install {' '.join(absent)}` brings what is missing"
        )


def _installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
