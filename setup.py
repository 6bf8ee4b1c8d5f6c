"""Build the wheel: the Python package, and the shared library that Cargo makes of the rest.

Everything that is data stands in pyproject.toml; here is what is not: where the library goes, which
libtorch it is built against, and what the wheel is called. The library does not link Python, so one
wheel serves every CPython 3.

It is built against the torch of the interpreter that runs this file. Hence no build isolation: in
an isolated environment there is no torch, and pip would fetch another than the one that you will
run with.
"""

import json
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools_rust import Binding, RustExtension
from setuptools_rust.build import build_rust

# The version that tch 0.26 is written for. Its build script refuses others, in more words than we
# do.
TORCH = "2.13.0"
# Where the library finds torch once it is installed: from site-packages/multipack/lib.
INSTALLED_RPATH = b"$ORIGIN/../../torch/lib"


def torch_version() -> str:
    """Return the version of this interpreter's torch, if it is the right one."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise SystemExit(
            f"multipack is built against torch {TORCH}, but {sys.executable} has no torch: run "
            f"'pip install torch=={TORCH} setuptools setuptools-rust', then 'pip install "
            "--no-build-isolation .' (with build isolation pip hides your torch)"
        ) from None
    if version.split("+")[0] != TORCH and "LIBTORCH_BYPASS_VERSION_CHECK" not in os.environ:
        raise SystemExit(
            f"multipack is built against torch {TORCH}, but {sys.executable} has torch {version}: "
            f"run 'pip install torch=={TORCH}', then 'pip install --no-build-isolation .'"
        )
    return version


def cargo_environment() -> dict[str, str]:
    """Make torch-sys, which runs the first `python` or `python3` that it finds, find this one."""
    env = dict(os.environ, LIBTORCH_USE_PYTORCH="1")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env.pop("VIRTUAL_ENV", None)
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    return env


class BuildLibrary(build_rust):
    """Build the library, put it into multipack/lib, and write down which torch it is for."""

    def get_dylib_ext_path(self, ext: RustExtension, name: str) -> str:
        """Return the path without the suffix of an extension module, which the library is not."""
        return str(Path(super().get_dylib_ext_path(ext, name)).with_name("libmultipack.so"))

    def run_for_extension(self, ext: RustExtension) -> None:
        """Build and install."""
        version = torch_version()
        super().run_for_extension(ext)
        library = Path(self.get_dylib_ext_path(ext, ext.name))
        forget_build_folder(library)
        library.with_suffix(".json").write_text(json.dumps({"torch": version}) + "\n")
        # For C++ programs; cmake_prefix_path and the CMake file know where these lie.
        package = library.parents[1]
        shutil.copytree("cpp/include", package / "include", dirs_exist_ok=True)
        shutil.copytree("cpp/cmake", package / "share/cmake/multipack", dirs_exist_ok=True)


def forget_build_folder(library: Path) -> None:
    """Cut the absolute folder, there for tests, from the places where the library seeks torch."""
    data = library.read_bytes()
    start = data.find(INSTALLED_RPATH + b":")
    if start >= 0:
        start += len(INSTALLED_RPATH)
        end = data.index(b"\0", start)
        library.write_bytes(data[:start] + bytes(end - start) + data[end:])


class Wheel(bdist_wheel):
    """A wheel for any Python 3 on this platform."""

    def run(self) -> None:
        """Build from nothing: setuptools would pack modules of an earlier build that are gone."""
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag."""
        return ("py3", "none", super().get_tag()[2])


def version() -> str:
    """Return the version of the crate, which is the version of everything."""
    manifest = Path(__file__).with_name("Cargo.toml").read_text()
    return re.search(r'^version = "(.+)"$', manifest, re.MULTILINE)[1]


setup(
    version=version(),
    cmdclass={"build_rust": BuildLibrary, "bdist_wheel": Wheel},
    rust_extensions=[
        RustExtension(
            "multipack.lib.libmultipack",
            binding=Binding.NoBinding,
            features=["torch"],
            cargo_manifest_args=["--locked"],
            debug=False,
            env=cargo_environment(),
        )
    ],
    zip_safe=False,
)
