"""Every code block of README.md and docs/ does what it says.

What is done with a block depends on its kind, see `documents`. A page's blocks run in order, in a
folder of their own, which has the examples; the names and files that a page leaves to its reader
are given by `READERS`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import numpy as np
import pytest
import torch
from documents import PAGES, ROOT, Block, blocks

import multipack
from multipack.cli import main

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

Names = dict[str, Any]

# What Lightning says to everybody.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|treespec|TreeSpec)"),
    pytest.mark.filterwarnings("ignore:.*set_vital. is deprecated"),
]


def llama(**keys: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **keys,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def chats(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and label counts of the benches: lognormal, a Beta share of each supervised."""
    sys.path.insert(0, str(ROOT / "benches" / "python"))
    try:
        from balance_peers import shares_of_answers
    finally:
        del sys.path[0]
    return shares_of_answers(n)


def readme(names: Names) -> None:
    """A model on disk, a data set of Hugging Face, label buffers, and files of lengths."""
    import datasets

    model = llama()
    model.save_pretrained("model")
    lengths, counts = chats(100_000)
    np.save("lengths.npy", lengths)
    np.save("labels.npy", counts)
    samples = [{"input_ids": list(range(1, n + 1))} for n in (11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3)]
    offsets = np.cumsum([0, *(len(sample["input_ids"]) for sample in samples)])
    names |= {
        "model": model,
        "name": "model",
        "dataset": datasets.Dataset.from_list(samples),
        "multipack": multipack,
        "lengths": np.diff(offsets),
        "offsets": offsets,
        "labels": np.where(np.arange(offsets[-1]) % 3 < 1, -100, 7),
        "rank": 0,
    }


READERS: dict[str, Callable[[Names], None]] = {"README.md": readme}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    names: Names = {"__name__": "page"}
    READERS.get(page.name, lambda names: None)(names)
    printed: str | None = None
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.kind == "python":
            printed = run(block, page, names)
        elif block.kind == "text":
            assert printed is not None, f"{where}: no Python block before it printed this"
            assert_shown(where, block.code, printed)
            printed = None
        elif block.kind == "console":
            for command, shown in documents.commands(block):
                assert_shown(f"{where}: {command}", shown, output(command))
        elif block.kind == "cmake":
            Path("CMakeLists.txt").write_text(block.code, "utf-8")
        elif block.kind == "cpp":
            Path("main.cpp").write_text(block.code, "utf-8")
        elif block.kind == "rust":
            include = f'include_str!("../{page.relative_to(ROOT)}")'
            assert include in (ROOT / "src" / "lib.rs").read_text("utf-8"), f"{where}: not tested"
        elif block.kind == "sh":
            if block.code.startswith("make "):
                for command in block.code.splitlines():
                    assert_in_ci(where, command)
            elif not documents.installs(block):
                printed = shell(where, block)
        elif block.kind.startswith("yaml"):
            read_settings(block)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links {target}"
    for name, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]*)\)", text):
        if "://" not in name:
            there = (page.parent / name) if name else page
            titles = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.M)
            assert anchor in map(slug, titles), f"{page.name} links {name}#{anchor}"


def test_figures_are_what_their_script_makes(tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "figures" / "make.py"))
    made["main"](tmp_path)

    committed = ROOT / "docs" / "figures"
    names = sorted(path.name for path in committed.glob("*.svg"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_text() == (committed / name).read_text(), (
            f"{name} has changed: run python docs/figures/make.py, and look at it"
        )


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def run(block: Block, page: Path, names: Names) -> str:
    """Run Python, with the page's line numbers in its tracebacks."""
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(code, names)
    return told.getvalue()


def shell(where: str, block: Block) -> str:
    """Run commands, those of Cargo in the sources; return what they print."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", block.code],
        cwd=ROOT if "cargo " in block.code else None,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
    return done.stdout


def assert_in_ci(where: str, command: str) -> None:
    words = shlex.join(shlex.split(command, comments=True))
    lanes = (ROOT / ".ci" / "run").read_text("utf-8")
    assert re.search(rf"^lane \w+ {re.escape(words)}$", lanes, re.M), f"{where}: {words}"


def assert_shown(where: str, shown: str, printed: str) -> None:
    if shown.strip():
        assert documents.matches(shown, printed), f"{where}: shows\n{shown}\nbut it is\n{printed}"


def output(command: str) -> str:
    """What a command prints, without its progress; `multipack` runs in this process, as is quicker.

    With `; echo $?` behind it, a command may fail, and what it says of that counts as printed.
    """
    command, may_fail = re.subn(r"; echo \$\?$", "", command)
    program, *arguments = shlex.split(command, comments=True)
    if program == "multipack":
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        printed, faults = out.getvalue(), err.getvalue()
    else:
        assert program in ("cat", "head", "ls", "printf", "build/mine"), command
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        code, printed, faults = done.returncode, done.stdout, done.stderr
    if may_fail:
        return f"{printed}{faults}{code}\n"
    assert code == 0, faults
    return printed


def read_settings(block: Block) -> None:
    """Read YAML as the user would."""
    path = Path("settings.yml")
    path.write_text(block.code, "utf-8")
    if block.kind == "yaml":
        multipack.Config.from_yaml(path)
    else:
        from multipack.integrations import axolotl

        axolotl.from_yaml(path)
