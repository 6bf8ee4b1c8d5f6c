"""Which of a trainer's checkpoints are whole, and where in the data they were taken.

A trainer writes a checkpoint file by file, and each rank its own. A process killed in between
leaves a folder that looks like a checkpoint. So a file of ours, `multipack.json`, is there first
and says that the checkpoint is not whole yet; when all ranks are done it is replaced, in one step,
by one with the position in the data and the size of every file. A checkpoint without such a file
is from before multipack was used; its trainer wrote `trainer_state.json` last.

Sizes are compared, not contents: what was cut off by a kill or a full disk is found, for one
`stat` a file.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "multipack.json"
_UNFINISHED = "multipack.json.tmp"
_TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def begin(folder: str | os.PathLike[str]) -> None:
    """Say that a checkpoint is being written; make the folder if there is none."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    _replace(folder, {"whole": False})


def finish(folder: str | os.PathLike[str], sampler: Mapping[str, Any]) -> None:
    """Say that a checkpoint is whole, and where the sampler stood."""
    _replace(folder, {"whole": True, "sampler": sampler, "files": _sizes(folder)})


def sampler_state(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the state of the sampler, or None if the checkpoint is from before multipack."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["sampler"]
    return state


def fault_of(folder: str | os.PathLike[str]) -> str | None:
    """Return what is missing from a checkpoint, or None if it is whole."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / FILE).exists():
        try:
            json.loads((folder / _TRAINER_STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return f"{_TRAINER_STATE} is missing or cut off"
        return None
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except ValueError:
        return f"{FILE} is cut off"
    if not record["whole"]:
        return "the process ended while it was being written"
    found = _sizes(folder)
    for name, size in record["files"].items():
        if found.get(name) != size:
            return f"{name} had {size} bytes and now has {found.get(name, 'none')}"
    return None


def choose(asked: str | os.PathLike[str], *, newest: bool) -> str:
    """Return the checkpoint to resume from, which is whole.

    Args:
        asked: The folder of a checkpoint or, with `newest`, the folder that holds them.
        newest (bool): Whether to take the last one.

    Returns:
        str: What was asked for or, if that is the newest checkpoint and not whole, the newest one
            before it that is.

    Raises:
        ValueError: If there is none.

    Warns:
        UserWarning: If it is not what was asked for.
    """
    folder = Path(asked) if newest else Path(asked).parent
    candidates = sorted(_checkpoints(folder).items(), reverse=True)
    if newest:
        if not candidates:
            raise ValueError(f"{folder} holds no checkpoint to resume from")
        first = candidates[0][1]
    else:
        first = Path(asked)
    fault = fault_of(first)
    if fault is None:
        return str(first)
    told = f"{first} is not whole: {fault}"
    if not candidates or first.name != candidates[0][1].name:
        raise ValueError(
            f"{told}; resume from another checkpoint, or delete {FILE} in it to use what is there"
        )
    for _, earlier in candidates[1:]:
        if fault_of(earlier) is None:
            warnings.warn(f"{told}; resuming from {earlier} instead", stacklevel=3)
            return str(earlier)
    raise ValueError(f"{told}, and there is no whole checkpoint before it: start anew")


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by their steps."""
    if not folder.is_dir():
        return {}
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in matches if match is not None}


def _sizes(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Return the size of each file of a checkpoint, but for ours."""
    root = Path(folder)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in files
        if path.name not in (FILE, _UNFINISHED)
    }


def _replace(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write our file in one step: it is the old one, or the new one, at any time."""
    unfinished = Path(folder) / _UNFINISHED
    unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
    os.replace(unfinished, Path(folder) / FILE)
