"""Which torch multipack can be built for, and the environment in which Cargo builds it.

The library is compiled against torch's C++ classes and works with the minor version that it was
compiled against, and no other. That is the torch of the interpreter that runs this file: setup.py
asks here, and make runs Cargo through

    python libtorch.py cargo test --release --features torch

which sets the environment and then becomes the command.

The bindings that we use, torch-sys 0.26, are written for torch 2.13. On 2.12 they compile as they
are; on 2.14 and 2.15 they need C++20 and a few functions that torch removed (cpp/removed.h), none
of which we call. On 2.11 they do not compile.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from importlib import metadata
from pathlib import Path

# The minor versions that it compiles with: `make test TORCH=2.14`. CI has that of BINDINGS.
SUPPORTED = ["2.12", "2.13", "2.14", "2.15"]
# The one that torch-sys is written for.
BINDINGS = "2.13"

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """Return the version of this interpreter's torch, such as 2.13.0+cu130.

    Raises:
        SystemExit: If there is no torch, or one that multipack cannot be built for.
    """
    install = (
        f"run 'pip install torch=={BINDINGS}.* setuptools setuptools-rust', then 'pip install "
        "--no-build-isolation .' (with build isolation pip hides your torch)"
    )
    wanted = f"multipack is built for torch {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{wanted}, but {sys.executable} has no torch: {install}") from None
    if minor(found) not in SUPPORTED:
        raise SystemExit(f"{wanted}, but {sys.executable} has torch {found}: {install}")
    return found


def minor(version: str) -> str:
    """Cut a version to its first two numbers."""
    return ".".join(version.split(".")[:2])


def environment() -> dict[str, str]:
    """Return the environment for Cargo.

    torch-sys is told the folder of torch, rather than to ask Python for it, because Cargo builds
    again when the folder is another one. Going back and forth wants two target folders, as make has
    them.
    """
    found = minor(version())
    # Other ways to say where torch is, which would come before the folder.
    others = ("LIBTORCH_USE_PYTORCH", "LIBTORCH_INCLUDE", "LIBTORCH_LIB")
    env = {name: value for name, value in os.environ.items() if name not in others}
    env["LIBTORCH"] = str(Path(importlib.util.find_spec("torch").origin).parent)
    if SUPPORTED.index(found) > SUPPORTED.index(BINDINGS):
        flags = f"-std=c++20 -include {shlex.quote(str(ROOT / 'cpp' / 'removed.h'))}"
        env["CXXFLAGS"] = " ".join([env.get("CXXFLAGS", ""), flags])
        env["CC_SHELL_ESCAPED_FLAGS"] = "1"
    return env


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
