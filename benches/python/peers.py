"""All comparisons with others in one run, as one page: docs/peers.md.

    make bench-peers

runs the benches below one after the other, each of which checks every answer, and writes their
medians beside one another. It takes about 15 minutes on two idle cores. What is not installed is
missing from the page; see benches/python/requirements.txt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from results import read

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SECTIONS = {
    "Planning": [
        "plan_peers.py --n 10000000 --rounds 3 --algorithms best_fit_decreasing "
        "--peers seqpacker,lightbinpack",
        "plan_peers.py --n 1000000 --rounds 3",
        "plan_peers.py --n 100000 --rounds 3 --peers seqpacker,lightbinpack,axolotl,trl",
        "plan_peers.py --n 100000 --rounds 3 --lengths triplets "
        "--algorithms tight,best_fit_decreasing",
    ],
    "Balancing": ["balance_peers.py --n 100000 --fixed 200000"],
    "Batches": ["batch_peers.py --parts flat,samples"],
    "Masks": ["batch_peers.py --parts masks,blocks"],
    "Attention": [
        "attention_peers.py --tokens 4096",
        "attention_peers.py --tokens 16384 --runs 1",
        "attention_peers.py --step --runs 1",
    ],
}

OPENING = """# Beside others

Made by `make bench-peers`, which installs the others as pinned, runs all of this in one go and
checks every answer, theirs too: {machine}, {cores} cores, Python {python}, torch {torch}. Seconds
are medians; *of ours* is the ratio of medians to the first line of multipack. multipack's time for
a plan is that of its Python API, with shuffling, statistics and digests; the others pack and do no
more.
"""


def main() -> None:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?", default=ROOT / "docs" / "peers.md")
    args = parser.parse_args()
    text = OPENING.format(
        machine=processor(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        torch=metadata.version("torch"),
    )
    for title, commands in SECTIONS.items():
        text += f"\n## {title}\n"
        for command in commands:
            print(f"python benches/python/{command}", flush=True)
            text += f"\n`python benches/python/{command}`\n" + "".join(tables(run(command)))
    args.page.write_text(text, "utf-8")


def run(command: str) -> list[dict[str, Any]]:
    """Run a bench and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        script, *options = command.split()
        subprocess.run(
            [sys.executable, str(HERE / script), *options, "--json", str(path)], check=True
        )
        return read(path)


def tables(results: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown for each setting."""
    made = []
    for setting, group in itertools.groupby(results, lambda result: result["setting"]):
        entries = list(group)
        ours = [e for e in entries if e["name"].startswith("multipack") and "not " not in e["name"]]
        columns = list(dict.fromkeys(key for entry in entries for key in entry["figures"]))
        header = [setting, "version", "seconds", "of ours", *columns, "answer"]
        lines = [header, ["---"] * len(header)]
        for entry in entries:
            ratio = entry["median"] / ours[0]["median"]
            lines.append(
                [
                    entry["name"],
                    entry["version"] or "",
                    digits(entry["median"]),
                    f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}",
                    *(entry["figures"].get(column, "") for column in columns),
                    entry["fault"] or "right",
                ]
            )
        made.append("\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return made


def digits(seconds: float) -> str:
    """Three digits, in the unit that they are read best in."""
    units = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
    size = next((size for size in units if seconds >= size), 1e-6)
    value, unit = seconds / size, units[size]
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def processor() -> str:
    """The name of the processor, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
