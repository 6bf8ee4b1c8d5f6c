"""Build the wheel: the Python package, and the shared library that Cargo makes of the rest.

Everything that is data stands in pyproject.toml; here is what is not: where the library goes, which
torch the wheel requires, and what it is called. The library does not link Python, so one wheel
serves every CPython 3.

It is built against the torch of the interpreter that runs this file: see libtorch.py. Hence no
build isolation: in an isolated environment there is no torch, and pip would fetch another than the
one that you will run with. The version says which torch it was, as in 0.1.0+torch2.13.
"""

import json
import re
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools_rust import Binding, RustExtension
from setuptools_rust.build import build_rust

sys.path.insert(0, str(Path(__file__).parent))  # pip runs this file without its folder there
import libtorch

TORCH = libtorch.version()
# Where the library finds torch once it is installed: from site-packages/multipack/lib.
INSTALLED_RPATH = b"$ORIGIN/../../torch/lib"


class BuildLibrary(build_rust):
    """Build the library, put it into multipack/lib, and write down which torch it is for."""

    def get_dylib_ext_path(self, ext: RustExtension, name: str) -> str:
        """Return the path without the suffix of an extension module, which the library is not."""
        return str(Path(super().get_dylib_ext_path(ext, name)).with_name("libmultipack.so"))

    def run_for_extension(self, ext: RustExtension) -> None:
        """Build and install."""
        super().run_for_extension(ext)
        library = Path(self.get_dylib_ext_path(ext, ext.name))
        forget_build_folder(library)
        library.with_suffix(".json").write_text(json.dumps({"torch": TORCH}) + "\n")
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
    """Return the version of the crate, which is the version of everything, and the torch."""
    manifest = Path(__file__).with_name("Cargo.toml").read_text()
    crate = re.search(r'^version = "(.+)"$', manifest, re.MULTILINE)[1]
    return f"{crate}+torch{libtorch.minor(TORCH)}"


setup(
    version=version(),
    install_requires=[f"torch=={libtorch.minor(TORCH)}.*", "numpy>=1.26", "pyyaml", "tqdm"],
    cmdclass={"build_rust": BuildLibrary, "bdist_wheel": Wheel},
    rust_extensions=[
        RustExtension(
            "multipack.lib.libmultipack",
            binding=Binding.NoBinding,
            features=["torch"],
            cargo_manifest_args=["--locked"],
            debug=False,
            env=libtorch.environment(),
        )
    ],
    zip_safe=False,
)
