"""The settings as options of a command: one option for each key of `multipack.Config`.

Names, defaults and help come from the dataclass, so that a new key is an option at once; what is
right for it is for `Config` to say. An option is spelt with dashes or as the key is
(``--sequence-len``, ``--sequence_len``). Bools are ``--balance-labels`` and
``--no-balance-labels``; any other value is read as YAML would.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
import typing
import warnings
from pathlib import Path
from typing import Any

import yaml

from multipack import Config
from multipack._yaml import read_yaml
from multipack.integrations import axolotl

from ._errors import CliError


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config``, ``--axolotl`` and an option for each key."""
    group = parser.add_argument_group(
        "settings", "The keys of multipack.Config; options override the file."
    )
    files = group.add_mutually_exclusive_group()
    files.add_argument("--config", type=Path, metavar="FILE.yml", help="settings and nothing else")
    files.add_argument(
        "--axolotl", type=Path, metavar="FILE.yml", help="an Axolotl YAML, with Axolotl's defaults"
    )
    kinds = typing.get_type_hints(Config)
    texts = _docs()
    for field in dataclasses.fields(Config):
        default = "none" if field.default is None else str(field.default).lower()
        text = f"{texts[field.name]} [{default}]".replace("%", "%%")
        is_bool = bool in (kinds[field.name], *typing.get_args(kinds[field.name]))
        # The second spelling is taken, but not listed.
        for name, shown in {field.name: argparse.SUPPRESS, _dashed(field.name): text}.items():
            option = functools.partial(
                group.add_argument,
                f"--{name}",
                dest=field.name,
                default=argparse.SUPPRESS,
                help=shown,
            )
            if is_bool:
                option(action=_OneBool)
            else:
                option(action=_One, type=value_of, metavar="VALUE")


class _One(argparse.Action):
    """Keeps a value, and refuses a second one, in whichever spelling."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        _check_first(self, namespace)
        setattr(namespace, self.dest, values)


class _OneBool(argparse.BooleanOptionalAction):
    """The same for a bool."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        _check_first(self, namespace)
        super().__call__(parser, namespace, values, option_string)


def _check_first(action: argparse.Action, namespace: argparse.Namespace) -> None:
    # No option has a default, so what is there was given.
    if hasattr(namespace, action.dest):
        raise argparse.ArgumentError(action, "given twice: leave one out")


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def read_settings(args: argparse.Namespace) -> Config:
    """The settings of the file, overridden by the options; what the file warns of goes to stderr.

    Raises:
        CliError: The file cannot be read, settings are refused, or `sequence_len` is missing.
    """
    names = [field.name for field in dataclasses.fields(Config)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    path = args.config or args.axolotl
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if args.axolotl is not None:
                config = axolotl.from_yaml(path, **given).config
            else:
                config = (Config() if path is None else _plain(path)).replace(**given)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}") from error
    except (TypeError, ValueError) as error:
        raise CliError(str(error)) from error
    for warning in told:
        print(f"note: {warning.message}", file=sys.stderr)
    if config.sequence_len is None:
        raise CliError("sequence_len is not set: give --sequence-len, the most tokens of a sample")
    return config


def _plain(path: Path) -> Config:
    try:
        return Config.from_yaml(path)
    except (TypeError, ValueError) as error:
        text = str(error)
        if not text.startswith(str(path)):  # the text of what is no YAML does
            text = f"{path}: {text}"
        if _is_axolotl(path):
            text += " (an Axolotl YAML is for --axolotl)"
        raise CliError(text) from error


def _is_axolotl(path: Path) -> bool:
    """Whether a file has the key that no Axolotl YAML lacks."""
    try:
        keys = read_yaml(path)
    except ValueError:
        return False
    return isinstance(keys, dict) and "base_model" in keys


def value_of(text: str) -> Any:
    """Reads a value as YAML would, so that 8, true and null are what they seem."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _docs() -> dict[str, str]:
    """The docstring below each field, which Python itself does not keep."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Config)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, text in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(text.value.value).replace("`", "").split())
    return docs
