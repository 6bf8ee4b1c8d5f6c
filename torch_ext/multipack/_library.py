"""Find and load the shared library that holds the ops.

Importing this module registers the ops with torch. The library is ``lib/libmultipack.so`` next to
this file, or the file that the environment variable ``MULTIPACK_LIBRARY`` names, for example a
debug build. It works with one minor version of torch only, because it is compiled against torch's
C++ classes; ``lib/libmultipack.json``, written when it was built, says which one. The versions are
compared first: a library for another torch may fail with an undefined symbol.

Loading the same file twice does nothing, and a second copy under another path finds the ops taken
and leaves them alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

_REBUILD = "'pip install --no-build-isolation .' in the folder of its sources"


def load(path: Path) -> None:
    """Load the library at `path`.

    Args:
        path (Path): The shared library; a file of the same name ending in ``.json`` may stand
            beside it.

    Raises:
        ImportError: If there is no such file, if it was built for another torch, or if it cannot be
            loaded.
    """
    if not path.is_file():
        raise ImportError(
            f"multipack's library is missing: there is no file {path}; install multipack with 'pip "
            "install --no-build-isolation .' in its folder, or set MULTIPACK_LIBRARY to the library"
        )
    record = path.with_suffix(".json")
    if record.is_file():
        built_for = json.loads(record.read_text())["torch"]
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


def _minor(version: str) -> str:
    """Cut a version to major.minor, which is what torch's C++ classes may change with."""
    return ".".join(version.split(".")[:2])


_here = Path(__file__).resolve().parent
#: The shared library, for C++ programs that load or link it.
library_path = os.environ.get("MULTIPACK_LIBRARY") or str(_here / "lib" / "libmultipack.so")
#: Where CMake finds the package ``multipack``; for ``CMAKE_PREFIX_PATH``.
cmake_prefix_path = str(_here / "share" / "cmake")

load(Path(library_path))
