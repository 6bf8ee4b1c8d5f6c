"""C++ programs that find the package by CMake, link it and use it.

One tries the header (tests/cpp), the other is the example of a trainer (examples/cpp), which has a
twin in Python.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripted import Planner

import multipack

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def attempt(folder: Path, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    env = ENVIRONMENT | variables
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)


def run(folder: Path, *command: object) -> str:
    done = attempt(folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure(folder: Path, source: str, package: str = multipack.cmake_prefix_path):
    prefixes = f"{package};{torch.utils.cmake_prefix_path}"
    return "cmake", "-S", ROOT / source, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefixes}"


def build(folder: Path, source: str) -> Path:
    run(folder, *configure(folder, source))
    run(folder, "cmake", "--build", folder)
    return folder


def test_a_program_that_finds_links_and_calls_the_library(tmp_path, another_torch):
    torch.jit.script(Planner()).save(tmp_path / "planner.pt")

    built = build(tmp_path, "tests/cpp") / "consumer"
    said = run(tmp_path, built, "planner.pt")
    dynamic = run(tmp_path, "readelf", "-d", built)

    assert said == "all checks hold\n"
    assert "libmultipack.so" in dynamic, "dropped by the linker"

    # Started with another torch than the library was built for.
    refused = attempt(tmp_path, built, "planner.pt", **another_torch)
    minor = ".".join(torch.__version__.split(".")[:2])
    assert refused.returncode != 0
    assert refused.stderr.splitlines()[0] == (
        f"multipack: the library was built for torch {minor}, but this is torch 2.99: it has no "
        "ops here; build it again for this torch"
    )
    assert (
        "there is no multipack::collate: the multipack library was built for another torch, as it "
        "said when it was loaded"
    ) in refused.stderr


def test_cmake_finds_the_package_under_an_install_prefix(tmp_path):
    for part in ("include", "lib", "share"):
        shutil.copytree(Path(multipack.__file__).parent / part, tmp_path / "prefix" / part)

    said = run(tmp_path, *configure(tmp_path / "build", "tests/cpp", f"{tmp_path}/prefix"), "-LA")

    assert f"multipack_DIR:PATH={tmp_path}/prefix/share/cmake/multipack\n" in said


def test_cmake_names_both_torch_versions_where_they_differ(tmp_path):
    package = tmp_path / "multipack"
    cmake = package / "share" / "cmake"
    shutil.copytree(multipack.cmake_prefix_path, cmake)
    (package / "lib").mkdir()
    (package / "lib" / "libmultipack.json").write_text(json.dumps({"torch": "2.11.1"}))

    done = attempt(tmp_path, *configure(tmp_path / "build", "tests/cpp", str(cmake)))

    found = torch.__version__.split("+")[0]
    assert done.returncode != 0
    assert (
        f"multipack was built for torch 2.11.1, but CMake found torch {found}: name torch 2.11 in "
        "CMAKE_PREFIX_PATH, or build multipack for this one"
    ) in re.sub(r"\s+", " ", done.stderr)


@functools.cache
def python_trainer():
    path = ROOT / "examples" / "cpp" / "trainer.py"
    spec = importlib.util.spec_from_file_location("cpp_trainer_twin", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the program ``trainer`` and its ``data.pt``."""
    folder = build(tmp_path_factory.mktemp("trainer"), "examples/cpp")
    python_trainer().make(folder / "data.pt", samples=200)
    return folder


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path, weights_only=True))


def losses(said: str) -> list[float]:
    lines = [line.split() for line in said.splitlines()]
    assert [int(line[1]) for line in lines] == list(range(1, len(lines) + 1))
    return [float(line[3]) for line in lines]


def test_the_trainer_with_and_without_masks_equals_its_python_twin(workplace):
    twin = python_trainer()
    trained = {}
    for attention in ("multipack", "sdpa"):
        folder = workplace / attention
        record = workplace / f"{attention}.pt"
        flags = ("--attention", attention, "--record", record)
        trained[attention] = losses(run(workplace, "./trainer", "data.pt", folder, *flags))
        expected = list(twin.train(workplace / "data.pt", attention))
        torch.testing.assert_close(trained[attention], expected, rtol=1e-5, atol=1e-5)

        found = read(record)
        names = set()
        for step, (epoch, plan, batches) in enumerate(
            twin.steps(workplace / "data.pt", attention), 1
        ):
            for name in ("index", "row_offsets", "batch_offsets"):
                names.add(f"plan{epoch}.{name}")
                assert found[f"plan{epoch}.{name}"].equal(getattr(plan, name)), (epoch, name)
            for number, batch in enumerate(batches):
                for name in ("input_ids", "labels", "position_ids", "cu_seqlens"):
                    names.add(f"step{step}.{number}.{name}")
                    assert found[f"step{step}.{number}.{name}"].equal(batch[name]), (step, name)
        assert found.keys() == names

    torch.testing.assert_close(trained["multipack"], trained["sdpa"], rtol=1e-5, atol=1e-5)
    assert trained["sdpa"][-1] < trained["sdpa"][0]
    twin.Model(0.0).load_state_dict(read(workplace / "sdpa" / "weights.pt"))


def test_the_trainer_goes_on_exactly(workplace):
    def train(folder: str, *flags: object) -> str:
        flags = ("--dropout", 0.1, "--save-every", 100, *flags)
        return run(workplace, "./trainer", "data.pt", folder, *flags)

    whole = train("whole")
    steps = len(whole.splitlines())
    # Within the first epoch, at its end, within the second one, and to the end.
    stops = [2, steps // 2 - 2, 1]
    parts = "".join(train("parts", "--steps", stop) for stop in stops) + train("parts")

    assert parts == whole
    expected = read(workplace / "whole" / "weights.pt")
    found = read(workplace / "parts" / "weights.pt")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_the_trainer_says_what_is_wrong(workplace):
    python_trainer().make(workplace / "other.pt", samples=100)
    run(workplace, "./trainer", "data.pt", "stopped", "--steps", 1)
    torch.save(
        {"tokens": torch.arange(3), "labels": torch.arange(3), "offsets": torch.tensor([0, 4])},
        workplace / "short.pt",
    )

    changed = attempt(workplace, "./trainer", "other.pt", "stopped")
    short = attempt(workplace, "./trainer", "short.pt", "short")

    assert (changed.returncode, changed.stderr) == (
        1,
        "trainer: stopped/checkpoint.pt is of other data or settings\n",
    )
    assert short.returncode == 1
    assert short.stderr.startswith("trainer: offsets")
