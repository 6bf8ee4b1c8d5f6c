"""Python in a process of its own that cannot have much memory.

What would take gigabytes is an error there, and what would end the process is seen.
"""

from __future__ import annotations

import json
import subprocess
import sys

# Nested deeper than any reader of JSON or YAML can follow.
DEEP = "[" * 100_000

_PROGRAM = """
import json, resource, sys, warnings
from pathlib import Path
import torch
import multipack
from multipack import Collator, Config, ops, plan
from multipack.cli import main
from multipack.integrations import axolotl
warnings.simplefilter("ignore")
torch.set_num_threads(1)
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (int(sys.argv[1]) << 20),) * 2)
for line in sys.argv[2:]:
    try:
        said = repr(eval(line))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("said:" + json.dumps(said.splitlines()[0]))
"""


def limited(*lines: str, mebibytes: int = 256) -> list[str]:
    """Evaluate lines with so much memory beyond what the process starts with.

    Returns:
        list[str]: For each line the first line of its value or of its error.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(mebibytes), *lines],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    said = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    return [json.loads(line.removeprefix("said:")) for line in said]
