"""Plans epochs into files, shows and compares them, and checks them against the data.

  multipack plan make chats.jsonl epoch0.plan --sequence-len 4096 --world-size 8
  multipack plan show epoch0.plan
  multipack plan show epoch0.plan chats.jsonl --rank 3 --microbatch 17
  multipack plan verify epoch0.plan chats.jsonl
  multipack plan diff epoch0.plan other.plan

DATA is what `multipack report` reads, by the same options. Samples are numbered as they are read,
so a record that cannot be used ends the command: there is no passing over it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import multipack
from multipack._plan_file import is_plan

from . import reading, settings
from ._errors import CliError

if TYPE_CHECKING:
    from .sources import Lengths

# From so many samples on, planning takes more than a moment, and says that it has begun.
_MANY = 5_000_000

HELP = "make, show, verify and compare plans as files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `multipack plan`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    make = actions.add_parser("make", help="plan an epoch and save it", description=_make.__doc__)
    make.usage = "%(prog)s DATA [DATA ...] PLAN [options] [settings]"
    _add_data(make, "+")
    make.add_argument("plan", type=Path, metavar="PLAN", help="the file to write")
    make.add_argument("--epoch", type=int, default=0, help="from 0 (default: %(default)s)")
    make.add_argument("--split", choices=("train", "eval"), default="train")
    settings.add_settings(make)

    show = actions.add_parser("show", help="print a saved plan", description=_show.__doc__)
    show.add_argument("plan", type=Path, metavar="PLAN")
    _add_data(show, "*")
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
    _add_data(verify, "+")

    diff = actions.add_parser("diff", help="compare two saved plans", description=_diff.__doc__)
    diff.add_argument("a", type=Path, metavar="A")
    diff.add_argument("b", type=Path, metavar="B")


def _add_data(parser: argparse.ArgumentParser, count: str) -> None:
    text = "files of one kind, or a folder" + (", to draw a microbatch" if count == "*" else "")
    parser.add_argument("data", nargs=count, type=Path, metavar="DATA", help=text)
    reading.add_reading(parser)


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
    except OSError as error:
        # What a file that is already open raises does not name it.
        where = "" if error.filename is None else f"{error.filename}: "
        raise CliError(f"{where}{error.strerror or error}") from error
    except (ValueError, TypeError, IndexError) as error:
        raise CliError(str(error)) from error
    for warning in told:
        print(f"note: {warning.message}")
    return code or 0


def _make(args: argparse.Namespace) -> None:
    """Plans an epoch and saves it. Equal inputs make equal files."""
    config = settings.read_settings(args)
    _check_target(args.plan)
    data = _read(args, config)
    plan = multipack.plan(
        data.lengths,
        data.label_counts,
        config,
        label_starts=data.label_starts,
        epoch=args.epoch,
        split=args.split,
    )
    try:
        plan.save(args.plan)
    except OSError as error:
        raise CliError(f"cannot write {args.plan}: {error.strerror or error}") from error
    _print(plan)


def _check_target(path: Path) -> None:
    """Checks that a plan may be written there, before the work: data that were named last stay."""
    if path.is_dir() or (path.is_file() and not is_plan(path)):
        raise CliError(
            f"{path} is there, and is no plan: name DATA, and after it the file to write, or "
            "remove it"
        )
    if not path.parent.is_dir():
        raise CliError(f"cannot write {path}: there is no folder {path.parent}")


def _read(args: argparse.Namespace, config: multipack.Config) -> Lengths:
    data, notes = reading.read_data(args.data, args, config)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    if len(data.lengths) >= _MANY:
        print(f"planning {len(data.lengths):,} samples", file=sys.stderr)
    return data


def _show(args: argparse.Namespace) -> None:
    """Prints what a saved plan is, and its statistics; with the data, draws a microbatch.

    The drawing has a letter for each sample and X for padding, first padded and then as planned.
    """
    from . import drawing

    plan = multipack.load_plan(args.plan)
    _print(plan)
    if not args.data:
        return
    if args.scale is not None and args.scale < 1:
        raise ValueError(f"--scale is {args.scale}, but must be 1 or more")
    lengths = np.asarray(_read(args, plan.config).lengths)
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
        where = ", ".join(map(str, args.data))
        raise ValueError(f"{args.plan} was made from other lengths than those of {where}")


def _verify(args: argparse.Namespace) -> None:
    """Checks that a saved plan is that of these samples and keeps every promise.

    Each retained sample is there once, beside marked repeats; no row holds more than its capacity;
    every rank has as many microbatches; and a fresh plan is equal to it. Exit code 2 if not.
    """
    plan = multipack.load_plan(args.plan)
    data = _read(args, plan.config)
    plan.verify(data.lengths, data.label_counts, label_starts=data.label_starts)
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
