"""Plans epochs into files, shows them, and checks them against the lengths.

  multipack plan make lengths.npy epoch0.plan --set sequence_len=4096 world_size=8
  multipack plan show epoch0.plan
  multipack plan verify epoch0.plan lengths.npy

Numbers are read from .npy files, from .json files that hold one list, and from any other file with
one number on each line, .jsonl among them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import multipack

from ._errors import CliError

HELP = "make, show and verify plans as files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `multipack plan`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    make = actions.add_parser("make", help="plan an epoch and save it", description=_make.__doc__)
    make.add_argument("lengths", type=Path, metavar="LENGTHS", help="tokens of each sample")
    make.add_argument("plan", type=Path, metavar="PLAN", help="the file to write")
    make.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="settings, which override those of --config",
    )
    make.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings and nothing else")
    make.add_argument("--epoch", type=int, default=0, help="from 0 (default: %(default)s)")
    make.add_argument("--split", choices=("train", "eval"), default="train")
    _add_label_counts(make)

    show = actions.add_parser("show", help="print a saved plan", description=_show.__doc__)
    show.add_argument("plan", type=Path, metavar="PLAN")

    verify = actions.add_parser("verify", help="check a saved plan", description=_verify.__doc__)
    verify.add_argument("plan", type=Path, metavar="PLAN")
    verify.add_argument("lengths", type=Path, metavar="LENGTHS", help="tokens of each sample")
    _add_label_counts(verify)


def _add_label_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--label-counts",
        type=Path,
        metavar="FILE",
        help="supervised tokens of each sample (default: every token is)",
    )


def run(args: argparse.Namespace) -> None:
    """Runs `multipack plan`.

    Raises:
        CliError: for a file that cannot be read or written, settings that cannot be planned with,
            and a plan that fails verification.
    """
    action = {"make": _make, "show": _show, "verify": _verify}[args.action]
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            action(args)
    except (OSError, ValueError, TypeError) as error:
        raise CliError(str(error)) from error
    for warning in told:
        print(f"note: {warning.message}")


def _make(args: argparse.Namespace) -> None:
    """Plans an epoch and saves it. Equal inputs make equal files."""
    config = multipack.Config() if args.config is None else multipack.Config.from_yaml(args.config)
    plan = multipack.plan(
        _numbers(args.lengths),
        _label_counts(args),
        config,
        epoch=args.epoch,
        split=args.split,
        **dict(map(_setting, args.set)),
    )
    plan.save(args.plan)
    _print(plan)


def _show(args: argparse.Namespace) -> None:
    """Prints what a saved plan is, and its statistics."""
    _print(multipack.load_plan(args.plan))


def _verify(args: argparse.Namespace) -> None:
    """Checks that a saved plan is that of these samples and keeps every promise.

    Each retained sample is there once, beside marked repeats; no row holds more than its capacity;
    every rank has as many microbatches; and a fresh plan is equal to it. Exit code 2 if not.
    """
    plan = multipack.load_plan(args.plan)
    plan.verify(_numbers(args.lengths), _label_counts(args))
    print(f"{args.plan} is the plan of these samples: digest {plan.digest}")


def _print(plan: multipack.Plan) -> None:
    report = plan.report
    print(f"{plan.digest}  {report['layout']}, {report['split']}, epoch {report['epoch']}")
    print(f"{len(plan):,} microbatches on each of {plan.config.world_size} ranks")
    print(plan.stats)


def _setting(text: str) -> tuple[str, Any]:
    """Reads KEY=VALUE; the value as YAML would, so that 8, true and null are what they seem."""
    key, equals, value = text.partition("=")
    if not equals:
        raise CliError(f"{text!r} is no setting: write KEY=VALUE, as in sequence_len=4096")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value


def _label_counts(args: argparse.Namespace) -> Any:
    return None if args.label_counts is None else _numbers(args.label_counts)


def _numbers(path: Path) -> Any:
    """Reads a file of integers."""
    if path.suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise CliError(f"{path} is not a NumPy array of numbers: {error}") from error
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise CliError(f"{path} is not JSON: {error}") from error
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [int(line) for line in lines]
    except ValueError:
        wrong = next(number for number, line in enumerate(lines, 1) if not _is_integer(line))
        raise CliError(
            f"line {wrong} of {path} is {lines[wrong - 1]!r}, but must be an integer"
        ) from None


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True
