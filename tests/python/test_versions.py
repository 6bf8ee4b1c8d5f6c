"""The libraries that the adapters work with: the same versions wherever they are named."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from multipack.integrations._versions import OLDEST, require

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    """Return the versions that a file of requirements pins."""
    return dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / name).read_text(), re.MULTILINE))


def test_the_oldest_versions_are_those_of_the_test_set_up_and_of_the_extras() -> None:
    pinned = pins("requirements-min.txt")
    assert {library: pinned[library] for library in OLDEST} == OLDEST

    bounds = re.findall(r'"([\w-]+)>=([\w.]+)"', (ROOT / "pyproject.toml").read_text())
    assert {(library, bound) for library, bound in bounds if library in OLDEST} == set(
        OLDEST.items()
    )


def test_the_readme_names_the_versions_of_both_set_ups() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    named = {
        name: (first, last)
        for name, first, last in re.findall(
            r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE
        )
    }
    oldest, newest = pins("requirements-min.txt"), pins("requirements.txt")
    code = "import libtorch; print(libtorch.SUPPORTED[0], libtorch.SUPPORTED[-1])"
    torch = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert named.pop("torch") == tuple(torch.stdout.split())
    first, _ = named.pop("Python")
    assert f'requires-python = ">={first}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert named == {name: (oldest[name], newest[name]) for name in [*OLDEST, "numpy"]}


ADAPTERS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "torchdata": "torchdata",
    "transformers": "hf",
    "trl": "trl",
}


@pytest.mark.parametrize("library", ADAPTERS)
def test_an_adapter_of_an_older_library_says_so(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.1.2" if name == library else real(name)
    )
    for name in list(sys.modules):
        if name.startswith("multipack.integrations.") and not name.endswith("_versions"):
            monkeypatch.delitem(sys.modules, name)

    with pytest.raises(ImportError) as error:
        __import__(f"multipack.integrations.{ADAPTERS[library]}")

    assert str(error.value) == (
        f"{library} is 0.1.2, but multipack works with {OLDEST[library]} and newer: install "
        f"{library}>={OLDEST[library]}"
    )


@pytest.mark.parametrize(
    ("found", "accepted"),
    [("0.9.9", False), ("0.10.0", True), ("0.10.0rc1", True), ("0.11", True), ("1.0+cpu", True)],
)
def test_versions_are_compared_as_numbers(
    found: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    if accepted:
        require("torchdata")
    else:
        with pytest.raises(ImportError, match=r"torchdata is 0\.9\.9, but multipack works with"):
            require("torchdata")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(ImportError) as error:
        require("trl")
    assert str(error.value) == f"trl is not installed: install trl>={OLDEST['trl']}"
