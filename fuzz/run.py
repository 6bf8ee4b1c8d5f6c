"""Runs the fuzzers: random cases by the thousand, each against an obvious twin or a promise.

    python fuzz/run.py --time 60                         all targets, a minute in all
    python fuzz/run.py --time 3600 --only collate        one target, an hour
    python fuzz/run.py --only collate --seed 17 --cases 1         one case again

A case is made from its number alone. Where one fails, crashes, hangs or wants too much memory, the
last line that is printed makes it again. Each target runs in a process of its own, so that an abort
in the library is told like any other failure; two gigabytes above what the process starts with are
all the memory that it can have.

What the targets check stands in `targets.py`. The core is also fuzzed by coverage, which needs
nightly Rust: see `fuzz_targets/`.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import mmap
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
MEMORY = 2 << 30
# A case takes milliseconds; on a machine that does other things as well, not much more.
SECONDS_OF_A_CASE = 60


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", type=float, default=60, help="seconds in all (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", action="append", metavar="TARGET", help="may be given again")
    parser.add_argument("--seed", type=int, default=None, help="number of the first case")
    parser.add_argument("--cases", type=int, default=None, help="how many, in place of --time")
    parser.add_argument("--progress", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 40)
    if args.progress is not None:
        return work(args)

    sys.path.insert(0, str(HERE))
    names = args.only or list(target_names())
    share = args.time * args.jobs / len(names)
    waiting, running, failed = list(names), [], []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            running.append(Run(waiting.pop(0), args, share))
        for run in [run for run in running if run.process.poll() is not None]:
            running.remove(run)
            if not run.report():
                failed.append(run.name)
        time.sleep(0.05)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def target_names() -> list[str]:
    """The targets, from the source, for importing it takes seconds."""
    import ast

    tree = ast.parse((HERE / "targets.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(getattr(mark, "id", None) == "target" for mark in node.decorator_list)
    ]


class Run:
    """One target in a process of its own, which writes down what case it is at."""

    def __init__(self, name: str, args: argparse.Namespace, seconds: float) -> None:
        self.name = name
        self.folder = tempfile.TemporaryDirectory()
        self.progress = Path(self.folder.name) / "progress"
        self.progress.write_bytes(bytes(16))
        self.output = open(Path(self.folder.name) / "output", "w+")  # noqa: SIM115
        command = [sys.executable, __file__, "--only", name, "--seed", str(args.seed)]
        command += ["--time", str(seconds), "--progress", str(self.progress)]
        command += [] if args.cases is None else ["--cases", str(args.cases)]
        self.process = subprocess.Popen(
            command,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            cwd=self.folder.name,
            env={"OMP_NUM_THREADS": "2", **os.environ},
        )

    def report(self) -> bool:
        """Print how it went, and say whether it went well."""
        data = self.progress.read_bytes()
        seed, cases = int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")
        code = self.process.returncode
        print(f"{self.name:<12}{cases:>9,} cases, {'passed' if code == 0 else 'FAILED'}")
        if code != 0:
            self.output.seek(0)
            print(self.output.read())
            print(f"{self.name}: exit code {code}; the case again:")
            print(f"    python fuzz/run.py --only {self.name} --seed {seed} --cases 1", flush=True)
        self.output.close()
        self.folder.cleanup()
        return code == 0


def work(args: argparse.Namespace) -> int:
    """Run the cases of one target."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests/python")]
    import targets
    from draw import Draw

    (name,) = args.only
    run = targets.TARGETS[name]
    run(Draw(0))  # what is imported late takes no part of the memory
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    faulthandler.enable()
    warnings.simplefilter("ignore")
    with open(args.progress, "r+b") as file:
        progress = mmap.mmap(file.fileno(), 16)
    end = time.monotonic() + args.time
    for number in itertools.count():
        if number == args.cases or (args.cases is None and time.monotonic() >= end):
            return 0
        seed = args.seed + number
        progress[:] = seed.to_bytes(8, "little") + (number + 1).to_bytes(8, "little")
        faulthandler.dump_traceback_later(SECONDS_OF_A_CASE, exit=True)
        run(Draw(seed))
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
