"""The pages' commands that install the package, followed to the letter in a new environment.

Run by `make test-install`, apart from the other tests, because it fetches torch, compiles its
bindings and needs six gigabytes of disk while it runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import PAGES, ROOT, blocks, installs

# What would lead to another environment, torch or target folder than a user's.
OURS = ("VIRTUAL_ENV", "PYTHONPATH", "CARGO_TARGET_DIR", "LIBTORCH", "LIBTORCH_USE_PYTORCH")


class Machine:
    """A folder with the sources, as cloned, and an environment of nothing but pip."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder / "sources"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in tracked.strip("\0").split("\0"):
            (self.sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.sources / name)
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        self.env = {name: value for name, value in os.environ.items() if name not in OURS}
        self.env["PATH"] = f"{folder / 'env' / 'bin'}:{os.environ['PATH']}"

    def run(self, code: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            ["bash", "-euc", code],
            cwd=folder or self.sources,
            env=self.env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    # Beside the sources, since a folder for temporary files may be small.
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        yield Machine(Path(folder))


def test_the_pages_install_what_their_examples_need(machine: Machine, tmp_path: Path) -> None:
    commands = [block.code for page in PAGES for block in blocks(page) if installs(block)]
    assert commands[0].startswith("pip install torch=="), "the README's come first"
    for code in commands:
        machine.run(code)

    assert machine.run(
        "python -c 'import multipack, torch; print(multipack.__version__, torch.__version__)'",
        tmp_path,
    ).split() == ["0.1.0+torch2.13", pinned_torch()]
    assert "eval_loss" in machine.run(f"python examples/hf_trainer.py {tmp_path}/run")
    (tmp_path / "chats.jsonl").write_text('{"text": "hello"}\n' * 20)
    table = machine.run("multipack report chats.jsonl --sequence-len 8", tmp_path)
    assert "recommended:" in table


def pinned_torch() -> str:
    """Return the version of the torch that all other tests run with."""
    code = "import torch; print(torch.__version__)"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()
