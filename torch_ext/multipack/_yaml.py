"""Settings in YAML files, which may come from anywhere.

YAML forbids a key that is given twice, and PyYAML takes the last one without a word. Its aliases
let a few lines stand for more values than memory can hold, as soon as somebody walks through them
or prints them. So the nodes are looked at before anything is made of them: time and memory are in
proportion to the file.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

# Values that a file may stand for: a thousand times what the longest configurations have.
_MOST_VALUES = 1_000_000


class _RefusedError(ValueError):
    """What is said in our words already."""


def read_yaml(path: str | PathLike[str]) -> Any:
    """Return what a file holds.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not YAML, gives a key twice (the text names both lines), or stands for
            too many values.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_bytes())
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root, path)
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for settings") from None
    except _RefusedError as error:
        raise ValueError(str(error)) from None
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        # Of what looks like a date or a number and is none.
        raise ValueError(f"{path} holds a value that YAML cannot read: {error}") from error


def _check(root: Any, path: str | PathLike[str]) -> None:
    """Refuse keys that are given twice, and more values than a file may stand for."""
    import yaml

    # Values that a node stands for; None while that is being counted.
    sizes: dict[int, int | None] = {}

    def size(node: Any) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) in sizes:
            known = sizes[id(node)]
            if known is None:
                raise _RefusedError(f"{path} has an alias inside of what it stands for")
            return known
        sizes[id(node)] = None
        children = node.value
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated(node, path)
            children = [part for pair in node.value for part in pair]
        total = 1 + sum(map(size, children))
        if total > _MOST_VALUES:
            raise _RefusedError(
                f"{path} stands for more than {_MOST_VALUES:,} values, which no settings do"
            )
        sizes[id(node)] = total
        return total

    size(root)


def _refuse_repeated(mapping: Any, path: str | PathLike[str]) -> None:
    """Refuse a key that is given twice; what is merged in may be overridden."""
    lines: dict[str, int] = {}
    for key, _ in mapping.value:
        if not isinstance(key.value, str):
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise _RefusedError(
                f"{path} has the key {key.value!r} twice, in line {lines[key.value]} and in line "
                f"{line}: leave one out"
            )
        lines[key.value] = line
