"""The wheel: what is in it, and that it works where it is installed."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def test_one_wheel_serves_every_python(wheel):
    assert re.fullmatch(r"multipack-[\d.]+-py3-none-\w+\.whl", wheel.name)


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


def test_the_wheel_requires_its_torch(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))

    assert "Requires-Dist: torch==2.13.*" in archive.read(metadata).decode()


def test_the_library_finds_torch_beside_itself_and_needs_little_of_it(wheel, tmp_path):
    library = zipfile.ZipFile(wheel).extract("multipack/lib/libmultipack.so", tmp_path)
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED.*\[(.+)\]", dynamic)

    assert re.findall(r"RUNPATH.*\[(.+)\]", dynamic) == ["$ORIGIN/../../torch/lib"]
    assert {name for name in needed if "torch" in name or "c10" in name} == {
        "libtorch_cpu.so",
        "libc10.so",
    }


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
    ("torch_version", "sentence"),
    [
        (
            None,
            "has no torch: run 'pip install torch==2.13.0 setuptools setuptools-rust', then 'pip "
            "install --no-build-isolation .' (with build isolation pip hides your torch)",
        ),
        (
            "2.14.1+cpu",
            "has torch 2.14.1+cpu: run 'pip install torch==2.13.0', then 'pip install "
            "--no-build-isolation .'",
        ),
    ],
)
def test_without_the_right_torch_the_build_ends_in_one_sentence(tmp_path, torch_version, sentence):
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
        f"multipack is built against torch 2.13.0, but {sys.executable} {sentence}"
    )
