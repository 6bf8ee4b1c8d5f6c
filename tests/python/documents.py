"""The code blocks of a Markdown page, and what each kind of block promises.

A block is fenced, or indented by four spaces after a blank line, which makes it one of a shell:

    ```python        is run, with those before it on the page
    ```text          is what the Python block before it prints
    ```console       commands after `$ `, each with what it prints; so is an indented block with `$`
    ```sh            is run by a shell, as is any other indented block: by `make test-install` if it
                     installs the package, by `.ci/run` if it calls make, else with the page
    ```yaml          settings of multipack; ```yaml axolotl: of Axolotl
    ```cpp, ```cmake a program, and the file that builds it
    ```rust          is run by cargo, from src/lib.rs

In what is printed, `…` stands for anything: alone on a line for lines, else for characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """A code block."""

    kind: str
    line: int
    """Of its first line of code, from 1."""
    code: str


ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

KINDS = {"python", "text", "console", "sh", "yaml", "yaml axolotl", "cpp", "cmake", "rust"}


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in order.

    Raises:
        ValueError: If a block is of no known kind, or is not closed.
    """
    lines = page.read_text("utf-8").splitlines()
    at = 0
    while at < len(lines):
        if lines[at].startswith("```"):
            end = next((i for i in range(at + 1, len(lines)) if lines[i] == "```"), None)
            if end is None:
                raise ValueError(f"{page.name}:{at + 1}: a block that is not closed")
            kind, code = lines[at][3:], lines[at + 1 : end]
            if kind not in KINDS:
                raise ValueError(f"{page.name}:{at + 1}: a block of kind {kind!r}")
            yield Block(kind, at + 2, "\n".join(code))
            at = end + 1
        elif lines[at].startswith("    ") and not (at and lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            code = [line[4:] for line in lines[at:end]]
            kind = "console" if code[0].startswith("$ ") else "sh"
            yield Block(kind, at + 1, "\n".join(code).rstrip())
            at = end
        else:
            at += 1


def installs(block: Block) -> bool:
    """Whether a block is commands of pip."""
    return block.kind == "sh" and block.code.startswith("pip ")


def commands(block: Block) -> list[tuple[str, str]]:
    """Split a console into its commands, each with what it prints."""
    found: list[list[str]] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            found.append([line[2:]])
        else:
            found[-1].append(line)
    return [(command, "\n".join(printed)) for command, *printed in found]


def matches(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed."""
    pattern = ""
    for line in shown.strip("\n").splitlines():
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            parts = map(re.escape, line.rstrip().split("…"))
            pattern += r"[^\n]*?".join(parts) + r" *\n"
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None
