"""Plans epochs into files, shows and compares them, and checks them against the lengths.

  multipack plan make lengths.npy epoch0.plan --set sequence_len=4096 world_size=8
  multipack plan show epoch0.plan
  multipack plan show epoch0.plan lengths.npy --rank 3 --microbatch 17
  multipack plan verify epoch0.plan lengths.npy
  multipack plan diff epoch0.plan other.plan

Numbers are read from .npy files, from .json files that hold one list, and from any other file with
one number on each line, .jsonl among them.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import multipack
from multipack._arrays import shown

from ._errors import CliError
from .data import BadRecordError, parse_json
from .settings import value_of

HELP = "make, show, verify and compare plans as files"


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
    show.add_argument(
        "lengths",
        type=Path,
        nargs="?",
        metavar="LENGTHS",
        help="tokens of each sample, to draw a microbatch",
    )
    show.add_argument("--rank", type=int, default=0, help="whose (default: %(default)s)")
    show.add_argument("--microbatch", type=int, default=0, help="which (default: %(default)s)")
    show.add_argument(
        "--scale",
        type=int,
        metavar="TOKENS",
        help="tokens of a character (default: a 32nd of sequence_len)",
    )

    verify = actions.add_parser("verify", help="check a saved plan", description=_verify.__doc__)
    verify.add_argument("plan", type=Path, metavar="PLAN")
    verify.add_argument("lengths", type=Path, metavar="LENGTHS", help="tokens of each sample")
    _add_label_counts(verify)

    diff = actions.add_parser("diff", help="compare two saved plans", description=_diff.__doc__)
    diff.add_argument("a", type=Path, metavar="A")
    diff.add_argument("b", type=Path, metavar="B")


def _add_label_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--label-counts",
        type=Path,
        metavar="FILE",
        help="supervised tokens of each sample (default: every token is)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `multipack plan`.

    Returns:
        The exit code: 1 if two plans that were compared differ, else 0.

    Raises:
        CliError: for a file that cannot be read or written, settings that cannot be planned with,
            and a plan that fails verification.
    """
    action = {"make": _make, "show": _show, "verify": _verify, "diff": _diff}[args.action]
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            code = action(args)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise CliError(str(error)) from error
    for warning in told:
        print(f"note: {warning.message}")
    return code or 0


def _make(args: argparse.Namespace) -> None:
    """Plans an epoch and saves it. Equal inputs make equal files."""
    config = multipack.Config() if args.config is None else multipack.Config.from_yaml(args.config)
    settings: dict[str, Any] = {}
    for key, value in map(_setting, args.set):
        if key in settings:
            raise CliError(f"setting {key!r} is given twice: leave one out")
        settings[key] = value
    plan = multipack.plan(
        _numbers(args.lengths),
        _label_counts(args),
        config,
        epoch=args.epoch,
        split=args.split,
        **settings,
    )
    plan.save(args.plan)
    _print(plan)


def _show(args: argparse.Namespace) -> None:
    """Prints what a saved plan is, and its statistics; with the lengths, draws a microbatch.

    The drawing has a letter for each sample and X for padding, first padded and then as planned.
    """
    from . import drawing

    plan = multipack.load_plan(args.plan)
    _print(plan)
    if args.lengths is None:
        return
    if args.scale is not None and args.scale < 1:
        raise ValueError(f"--scale is {args.scale}, but must be 1 or more")
    lengths = np.asarray(_numbers(args.lengths))
    _check_lengths(plan, lengths, args)
    print()
    print("\n".join(drawing.draw(plan, lengths, args.rank, args.microbatch, args.scale)))


def _check_lengths(plan: multipack.Plan, lengths: Any, args: argparse.Namespace) -> None:
    """Checks that a plan was made from these lengths, whatever the labels were."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split, epoch = plan.report["split"], plan.report["epoch"]
        config = plan.config.replace(balance_labels=False)
        fresh = multipack.plan(lengths, config=config, epoch=epoch, split=split)
    if fresh.report["inputs"]["lengths"] != plan.report["inputs"]["lengths"]:
        raise ValueError(f"{args.plan} was made from other lengths than those of {args.lengths}")


def _verify(args: argparse.Namespace) -> None:
    """Checks that a saved plan is that of these samples and keeps every promise.

    Each retained sample is there once, beside marked repeats; no row holds more than its capacity;
    every rank has as many microbatches; and a fresh plan is equal to it. Exit code 2 if not.
    """
    plan = multipack.load_plan(args.plan)
    plan.verify(_numbers(args.lengths), _label_counts(args))
    print(f"{args.plan} is the plan of these samples: digest {plan.digest}")


def _diff(args: argparse.Namespace) -> int:
    """Says what differs between two saved plans, and why. Exit code 1 if something does."""
    from . import plan_diff

    a, b = multipack.load_plan(args.a), multipack.load_plan(args.b)
    for name, path, plan in (("A", args.a, a), ("B", args.b, b)):
        print(f"{name}: {path}, {_headline(plan)}")
    why, what = list(plan_diff.reasons(a, b)), list(plan_diff.changes(a, b))
    if a.digest == b.digest and not why and not what:
        print("the plans are equal")
        return 0
    print("why:")
    unexplained = (
        "the settings, samples and planner are the same: a file was changed; multipack plan verify "
        "says which"
    )
    for line in why or [unexplained]:
        print(f"  {line}")
    print("what:")
    for line in what or ["the schedules are equal all the same"]:
        print(f"  {line}")
    return 1


def _print(plan: multipack.Plan) -> None:
    print(_headline(plan))
    ranks = plan.config.world_size
    where = "" if ranks == 1 else f" on each of {ranks} ranks"
    print(f"{len(plan):,} microbatch{'' if len(plan) == 1 else 'es'}{where}")
    print(plan.stats)


def _headline(plan: multipack.Plan) -> str:
    report = plan.report
    return f"{plan.digest}  {report['layout']}, {report['split']}, epoch {report['epoch']}"


def _setting(text: str) -> tuple[str, Any]:
    """Reads KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals:
        raise CliError(f"{text!r} is no setting: write KEY=VALUE, as in sequence_len=4096")
    return key, value_of(value)


def _label_counts(args: argparse.Namespace) -> Any:
    return None if args.label_counts is None else _numbers(args.label_counts)


def _numbers(path: Path) -> Any:
    """Reads a file of integers."""
    if path.suffix == ".npy":
        try:
            # Mapped, for what is only read would take as much memory as the header says.
            numbers = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(numbers, np.ndarray):
                raise TypeError("an archive of several arrays")
            return numbers
        except OSError:
            raise
        except Exception as error:  # NumPy raises many classes for what is no array
            raise CliError(
                f"{path} is not a NumPy array of numbers, or only a part of one"
            ) from error
    if path.suffix == ".json":
        try:
            return parse_json(path.read_bytes())
        except BadRecordError as error:
            raise CliError(f"{path} is {error}") from error
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [int(line) for line in lines]
    except ValueError:
        wrong = next(number for number, line in enumerate(lines, 1) if not _is_integer(line))
        raise CliError(
            f"line {wrong} of {path} is {shown(lines[wrong - 1])}, but must be an integer"
        ) from None


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True
