"""The console script `multipack`.

A command is a module with three names: `HELP` (one line), `add_arguments(parser)` and `run(args)`.
It is listed in `COMMANDS` and must import its heavy packages inside `run`, so that `multipack
--help` stays quick and works without them. What goes wrong on the user's side is one sentence on
stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import multipack

from . import demo, plan, report
from ._errors import CliError

COMMANDS = {"demo": demo, "plan": plan, "report": report}


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong option is one sentence as every other error, without the usage text.

    And options may stand anywhere between files.
    """

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        # Of nested parsers the innermost has the last word, and knows the options.
        self.set_defaults(parser=self)
        self._is_intermixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse cannot mix them where there are subparsers, loses a file after ``--``, and until
        # Python 3.12 comes back here.
        if self._subparsers is not None or self._is_intermixing or "--" in args:
            return super().parse_known_args(args, namespace)
        self._is_intermixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixing = False

    def error(self, message: str) -> NoReturn:
        raise CliError(f"{message}; see `{self.prog} --help`")

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Raises for what no parser knows, and names the option that it may have been."""
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        self.error(
            f"unrecognized arguments: {' '.join(unknown)}"
            + (f"; did you mean {near[0]}?" if near else "")
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="multipack",
        description="Packs samples of uneven length for language-model training.",
    )
    parser.add_argument("--version", action="version", version=f"multipack {multipack.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command_parser = commands.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(command_parser)
        command_parser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0, or what the command returned; 2 after an error, which is told on stderr;
        130 if the user interrupted; 141 if nobody reads on.
    """
    try:
        args, unknown = _parser().parse_known_args(argv)
        if unknown:
            args.parser.refuse(unknown)
        code: int | None = args.run(args)
        sys.stdout.flush()
    except CliError as error:
        print(f"multipack: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"multipack: not enough memory: {error}".removesuffix(": "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever reads has seen enough, as `head` does; what is left must not fail at exit again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code or 0
