"""Find and load the shared library that holds the ops.

Importing this module registers the ops with torch. The library is ``lib/libmultipack.so`` next to
this file, or the file that the environment variable ``MULTIPACK_LIBRARY`` names, for example a
debug build. It works with one minor version of torch only, because it is compiled against torch's
C++ classes; ``lib/libmultipack.json``, written when it was built, says which one. Before it is
loaded, that version is compared, because a library for another torch may fail with an undefined
symbol; and the file's size with what its own header says, because a library that was cut off would
end the process. After it is loaded, its version is compared with this package's.

Loading the same file twice does nothing, and a second copy under another path finds the ops taken
and leaves them alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from importlib import metadata
from pathlib import Path

import torch

_OPS = (
    "attention",
    "block_mask",
    "boundaries",
    "collate",
    "collate_list",
    "label_counts",
    "microbatch",
    "pack_values",
    "plan",
    "resolve_config",
)
_REBUILD = "'pip install --no-build-isolation .' in the folder of its sources"


def load(path: Path) -> None:
    """Load the library at `path`.

    Args:
        path (Path): The shared library; a file of the same name ending in ``.json`` may stand
            beside it.

    Raises:
        ImportError: If there is no such file, if it is damaged, was built for another torch or of
            another version of multipack, or if it cannot be loaded.
    """
    if not path.is_file():
        raise ImportError(
            f"multipack's library is missing: there is no file {path}; install multipack with 'pip "
            "install --no-build-isolation .' in its folder, or set MULTIPACK_LIBRARY to the library"
        )
    if fault := _fault(path):
        raise ImportError(
            f"multipack's library {path} is damaged: {fault}; build it again for torch "
            f"{torch.__version__} with {_REBUILD}"
        )
    record = path.with_suffix(".json")
    if record.is_file():
        try:
            built_for = str(json.loads(record.read_text())["torch"])
        except (ValueError, KeyError, TypeError) as error:
            raise ImportError(
                f"{record} does not say which torch multipack's library was built for: build it "
                f"again for torch {torch.__version__} with {_REBUILD}"
            ) from error
        if _minor(built_for) != _minor(torch.__version__):
            raise ImportError(
                f"multipack's library {path} was built for torch {built_for}, but this is torch "
                f"{torch.__version__}: install torch {_minor(built_for)}, or build multipack again "
                f"for this torch with {_REBUILD}"
            )
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"multipack's library {path} does not load: {error.__cause__ or error}; build it again "
            f"for torch {torch.__version__} with {_REBUILD}"
        ) from error
    # A library without a record finds out by itself, and registers nothing then: cpp/library.h.
    if not hasattr(torch.ops.multipack, "resolve_config"):
        raise ImportError(
            f"multipack's library {path} was not built for torch {torch.__version__}: build it "
            f"again with {_REBUILD}"
        )
    _refuse_other_version(path)


def _fault(path: Path) -> str | None:
    """Return what is wrong with a file that claims to be in Linux's ELF format, or None.

    The system maps such a file without a look at its length, and ends the process when it comes to
    a page that is not there; of one for another processor it says that there is no such file.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if sys.platform != "linux" or not header.startswith(b"\x7fELF") or len(header) < 64:
        return None  # whatever it is, the system says so by itself
    with open(torch._C.__file__, "rb") as file:
        ours = file.read(20)
    # Width, byte order and processor.
    if (header[4:6], header[18:20]) != (ours[4:6], ours[18:20]):
        return "it is for another processor than this Python"
    # The table of sections is the last thing in a file.
    (table,) = struct.unpack_from("=Q", header, 40)
    entry_size, entries = struct.unpack_from("=HH", header, 58)
    size, end = path.stat().st_size, table + entry_size * entries
    return None if size >= end else f"it has {size} bytes, but its header says {end}"


def _refuse_other_version(path: Path) -> None:
    """Refuse a library that another release has left behind.

    Raises:
        ImportError: If it is of another version, or lacks ops.
    """
    ours = metadata.version("multipack").split("+")[0]
    remedy = f"build it again with {_REBUILD}, or unset MULTIPACK_LIBRARY"
    try:
        version = ctypes.CDLL(str(path.resolve())).multipack_version
    except AttributeError:
        raise ImportError(
            f"multipack's library {path} is older than the package, which is {ours}: {remedy}"
        ) from None
    version.restype = ctypes.c_char_p
    found = version().decode()
    if found != ours:
        raise ImportError(
            f"multipack's library {path} is of version {found}, but the package is {ours}: {remedy}"
        )
    if missing := [name for name in _OPS if not hasattr(torch.ops.multipack, name)]:
        raise ImportError(
            f"multipack's library {path} is of version {found}, but lacks the ops "
            f"{', '.join(missing)}: {remedy}"
        )


def _minor(version: str) -> str:
    """Cut a version to major.minor, which is what torch's C++ classes may change with."""
    return ".".join(version.split(".")[:2])


_here = Path(__file__).resolve().parent
#: The shared library, for C++ programs that load or link it.
library_path = os.environ.get("MULTIPACK_LIBRARY") or str(_here / "lib" / "libmultipack.so")
#: Where CMake finds the package ``multipack``; for ``CMAKE_PREFIX_PATH``.
cmake_prefix_path = str(_here / "share" / "cmake")

load(Path(library_path))
