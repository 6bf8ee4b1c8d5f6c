"""Settings in YAML files, where a key that is given twice is an error.

YAML forbids it, and PyYAML takes the last one without a word.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any


def read_yaml(path: str | PathLike[str]) -> Any:
    """Return what a file holds.

    Raises:
        ValueError: If it is not YAML, or gives a key twice; the text names both lines.
    """
    import yaml

    text = Path(path).read_text(encoding="utf-8")
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        held = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    left, seen = [root], set()
    while left:
        node = left.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))  # an alias may lead back to where it stands
        if isinstance(node, yaml.SequenceNode):
            left += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            left.append(value)
            line = key.start_mark.line + 1
            if key.value in lines and isinstance(key, yaml.ScalarNode):
                raise ValueError(
                    f"{path} has the key {key.value!r} twice, in line {lines[key.value]} and in "
                    f"line {line}: leave one out"
                )
            lines[str(key.value)] = line
    return held
