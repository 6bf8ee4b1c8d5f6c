"""The wheel: what is in it, and that it works where it is installed.

It is built from the sources, so these tests run beside them; `make test-wheel` runs all others from
a folder without.
"""

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = ".".join(metadata.version("torch").split(".")[:2])
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_serves_every_python_and_one_torch(wheel):
    torch = re.escape(TORCH)

    assert re.fullmatch(rf"multipack-[\d.]+\+torch{torch}-py3-none-\w+\.whl", wheel.name)


def test_the_wheel_holds_the_package_the_library_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    sources = {
        str(path.relative_to(ROOT / "torch_ext"))
        for path in (ROOT / "torch_ext" / "multipack").rglob("*.py")
    }
    assert names == sources | {
        "multipack/cli/report.html",
        "multipack/py.typed",
        "multipack/lib/libmultipack.so",
        "multipack/lib/libmultipack.json",
        "multipack/include/multipack/multipack.h",
        "multipack/share/cmake/multipack/multipack-config.cmake",
    }


def test_the_wheel_requires_its_torch_and_has_the_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}

    assert f"Requires-Dist: torch=={TORCH}.*" in archive.read(f"{folder}/METADATA").decode()
    assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def library(wheel, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("library")
    return zipfile.ZipFile(wheel).extract("multipack/lib/libmultipack.so", folder)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_library_finds_torch_beside_itself_and_needs_little_of_it(library):
    dynamic = output("readelf", "-d", library)

    assert re.findall(r"R(?:UN)?PATH.*\[(.+)\]", dynamic) == ["$ORIGIN/../../torch/lib"]
    # No libpython, and no libtorch_cuda: one file for every Python, and for torch with CUDA or not.
    assert set(re.findall(r"NEEDED.*\[(.+)\]", dynamic)) == {
        "libtorch_cpu.so",
        "libc10.so",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libm.so.6",
        "libc.so.6",
        "ld-linux-x86-64.so.2",
    }


def test_the_library_exports_its_versions_and_nothing_else(library):
    """A program may load other libraries with cxx in them, whose functions have the same names."""
    exported = [
        line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()
    ]

    assert exported == ["multipack_abi_version", "multipack_version"]


def test_the_installed_wheel_works_from_another_folder(wheel, tmp_path):
    subprocess.run(
        [*PIP, "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(wheel)],
        check=True,
        capture_output=True,
    )
    code = """
import multipack, torch
print(multipack.__file__)
print(multipack.boundaries(torch.tensor([0, 1, 0])).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{tmp_path}/multipack/__init__.py", "[0, 2, 3]"]


@pytest.mark.parametrize(
    ("torch_version", "found"), [(None, "has no torch"), ("2.11.0+cpu", "has torch 2.11.0+cpu")]
)
def test_without_the_right_torch_the_build_ends_in_one_sentence(tmp_path, torch_version, found):
    code = f"""
import runpy, sys
from importlib import metadata
real = metadata.version
def version(name):
    if name != "torch":
        return real(name)
    if {torch_version!r} is None:
        raise metadata.PackageNotFoundError(name)
    return {torch_version!r}
metadata.version = version
sys.argv = ["setup.py", "build_rust", "--inplace"]
runpy.run_path({str(ROOT / "setup.py")!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"multipack is built for torch 2.12, 2.13, 2.14 or 2.15, but {sys.executable} {found}: run "
        "'pip install torch==2.13.* setuptools setuptools-rust', then 'pip install "
        "--no-build-isolation .' (with build isolation pip hides your torch)"
    )
