"""Reading the code blocks of a page: nothing that looks like one is passed over."""

from __future__ import annotations

from pathlib import Path

import documents
import pytest

PAGE = """
# Title

```python
a = 1

b = 2
```

    make demo

- a list

    of two paragraphs

    $ multipack plan
    told
    $ multipack report
"""


def test_blocks_have_kinds_and_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)

    found = list(documents.blocks(page))

    assert [(block.kind, block.line) for block in found] == [
        ("python", 5),
        ("sh", 10),
        ("sh", 14),
    ]
    assert found[0].code == "a = 1\n\nb = 2"
    assert found[2].code == "of two paragraphs\n\n$ multipack plan\ntold\n$ multipack report"


def test_a_console_is_split_into_commands() -> None:
    block = documents.Block("console", 1, "$ a\ntold\n\nmore\n$ b")

    assert documents.commands(block) == [("a", "told\n\nmore"), ("b", "")]


@pytest.mark.parametrize("text", ["```\nplain\n```\n", "```java\n```\n", "```python\nopen\n"])
def test_a_block_that_nobody_runs_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)

    with pytest.raises(ValueError, match=r"page.md:1: a block "):
        list(documents.blocks(page))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a\nb", "a  \nb\n", True),
        ("a", "a\nb\n", False),
        ("a\n…", "a\nb\nc\n", True),
        ("…\nc", "a\nb\nc\n", True),
        ("a … c", "a 17 c\n", True),
        ("a … c", "a\nc\n", False),
        ("a.c", "abc\n", False),
        ("a…", "a, and so on\n", True),
    ],
)
def test_dots_stand_for_anything_and_nothing_else_does(
    shown: str, printed: str, same: bool
) -> None:
    assert documents.matches(shown, printed) == same
