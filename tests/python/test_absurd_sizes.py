"""Sizes that cannot be meant, and memory that is not there: an error, and the process goes on.

Rust ends a process whose list cannot grow, so what grows with the input or with a setting is asked
for beforehand: see src/memory.rs.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from limited import limited

ONE_SAMPLE = "torch.arange(9), torch.tensor([0, 9]), torch.tensor([0]), torch.tensor([0, 1])"
COLLATE = f"torch.ops.multipack.collate({ONE_SAMPLE}, {{}})"
PACK = f"torch.ops.multipack.pack_values({ONE_SAMPLE}, {{}})"
PLAN = "plan({}).digest != ''"
ATTEND = "multipack.attention(*[torch.zeros(1, 1, 8)] * 3, torch.tensor([0, 1]), {}).sum().item()"
ATTEND_MANY = "multipack.attention(*[torch.zeros(1, 1, 8).expand({}, 1, 8)] * 3, torch.tensor([0]))"
EXPANDED = "torch.zeros(1, dtype=torch.int64).expand({})"

CASES = [
    # Lengths and settings.
    (PLAN.format("[2**62], sequence_len=8"), "True"),
    (PLAN.format("[2**63 - 1] * 3, sequence_len=8, excess_length_strategy='truncate'"), "True"),
    (PLAN.format("[2**63], sequence_len=8"), "ValueError: lengths holds 9223372036854775808"),
    (PLAN.format("[5], sequence_len=2**40"), "ValueError: sequence_len is 1099511627776, but"),
    (PLAN.format("[5], sequence_len=8, micro_batch_size=2**31"), "ValueError: micro_batch_size is"),
    (
        PLAN.format("[5], sequence_len=8, micro_batch_size=2**31 - 1"),
        "ValueError: micro_batch_size",
    ),
    (PLAN.format("[5], sequence_len=8, epoch=2**64"), "ValueError: epoch is 18446744073709551616,"),
    (
        PLAN.format("[5, 6], sequence_len=8, world_size=2**31 - 1, incomplete_batches='fill'"),
        "ValueError: filling the last round",
    ),
    (
        PLAN.format("[5, 6], sequence_len=8, world_size=2**31 - 1, split='eval'"),
        "ValueError: filling the last round",
    ),
    (PLAN.format("[5, 6], sequence_len=8, world_size=2**31 - 1"), "ValueError: 2 complete micro"),
    (
        PLAN.format("[5], sequence_len=8, world_size=2**24, incomplete_batches='fill'"),
        "RuntimeError: not enough memory: filling the last round of 16777216 ranks would repeat "
        "16777215 samples or rows, and 1610612640 bytes could not be had; use fewer ranks or "
        "smaller batches",
    ),
    (
        PLAN.format(
            "[1], sequence_len=1, sample_packing=False, micro_batch_size=2**24, split='eval'"
        ),
        "RuntimeError: not enough memory: filling the last round of 1 rank would repeat 16777215 "
        "samples or rows, and 1610612640 bytes could not be had; use fewer ranks or smaller "
        "batches",
    ),
    (
        PLAN.format(
            "[1], sequence_len=1, sample_packing=False, micro_batch_size=2**31 - 1, split='eval'"
        ),
        "ValueError: filling the last round",
    ),
    # Steps and ranks that no list could hold, and nothing to put into them.
    (
        PLAN.format(
            "[5], [5], sequence_len=8, gradient_accumulation_steps=2**31 - 1, balance_labels=True"
        ),
        "True",
    ),
    (
        PLAN.format("[5], [5], sequence_len=4, world_size=2**31 - 1, balance_labels=True"),
        "True",
    ),
    # Batches.
    (COLLATE.format("row_len=2**40"), "ValueError: a batch of shape (1, "),
    (COLLATE.format("row_len=2**31 - 1"), "RuntimeError: torch: [enforce fail at alloc_cpu"),
    (
        COLLATE.format("row_len=2**31 - 1, max_sample_len=1"),
        "RuntimeError: not enough memory: 85899345880 bytes could not be had; use fewer samples or "
        "smaller rows",
    ),
    (COLLATE.format("pad_to_multiple_of=2**62"), "ValueError: a batch of shape (1, "),
    (COLLATE.format("align_samples_to=2**62"), "ValueError: a batch of shape (1, "),
    (COLLATE.format("max_sample_len=2**63 - 1")[:-1] + ")[4].tolist()", "[0, 9]"),
    (COLLATE.format("position_start=2**62"), "ValueError: position_start is"),
    (PACK.format("row_len=2**31 - 1"), "RuntimeError: torch: [enforce fail at alloc_cpu"),
    (
        "multipack.block_mask(torch.zeros(2**20, dtype=torch.int8))",
        "ValueError: a mask of shape (1, 1, 1048576, ",
    ),
    (
        "multipack.block_mask(torch.zeros(30000, dtype=torch.int8))",
        "RuntimeError: torch: [enforce fail at alloc_cpu",
    ),
    (
        "multipack.block_mask(torch.zeros(2**20, 1, dtype=torch.int64))",
        "RuntimeError: not enough memory: 268435456 bytes could not be had; use fewer samples or "
        "smaller rows",
    ),
    (
        f"multipack.boundaries({EXPANDED.format('2**40')})",
        "RuntimeError: torch: [enforce fail at alloc_cpu",
    ),
    (
        "multipack.boundaries(torch.zeros(2**25, dtype=torch.int8))",
        "RuntimeError: torch: [enforce fail at alloc_cpu",
    ),
    (
        f"ops.collate_list([{EXPANDED.format('2**61')}] * 9, torch.tensor([0, 9]))",
        "RuntimeError: torch: Storage size calculation overflowed",
    ),
    # More samples than there is memory for.
    (
        f"torch.ops.multipack.microbatch({EXPANDED.format('2**24')}, torch.tensor([0, 2**24]), "
        "torch.tensor([0, 1]), 1, 0, 0)",
        "RuntimeError: not enough memory: 134217728 bytes could not be had; use fewer samples or "
        "smaller rows",
    ),
    (
        "torch.ops.multipack.collate_list([torch.arange(9)] * 2**21, torch.tensor([0, 2**21]))",
        "RuntimeError: not enough memory: 402653184 bytes could not be had; use fewer samples or "
        "smaller rows",
    ),
    (
        "torch.ops.multipack.plan(torch.ones(1, dtype=torch.int64), None, "
        "torch.ones(1, dtype=torch.bool).expand(100 << 20), '{\"sequence_len\": 8}', 0, False)",
        "RuntimeError: not enough memory: 104857600 bytes could not be had; use fewer samples or "
        "smaller rows",
    ),
    (
        "plan(torch.ones(2**22, dtype=torch.int64), sequence_len=8)",
        "RuntimeError: not enough memory: 402653184 bytes could not be had; use fewer samples or "
        "smaller rows",
    ),
    (
        f"plan({EXPANDED.format('2**40')}, sequence_len=8)",
        "RuntimeError: [enforce fail at alloc_cpu",
    ),
    # Attention.
    (ATTEND.format("max_seqlen=2**62"), "0.0"),
    (ATTEND.format("window=2**62"), "0.0"),
    (
        ATTEND_MANY.format("2**31"),
        "ValueError: q has 2147483648 tokens",
    ),
    (
        ATTEND_MANY.format("2**30"),
        "RuntimeError: [enforce fail at alloc_cpu",
    ),
    # And the process goes on.
    (PLAN.format("[5, 6], sequence_len=8"), "True"),
]


def test_what_cannot_be_had_is_an_error_and_the_next_call_works() -> None:
    said = limited(*(line for line, _ in CASES), mebibytes=256)

    wrong = [
        f"{line}: {found}"
        for (line, expected), found in zip(CASES, said, strict=True)
        if not found.startswith(expected)
    ]
    assert not wrong, "\n".join(wrong)


SWEEP = """
import os, resource, sys
from pathlib import Path
import torch
import multipack
torch.set_num_threads(1)
n = 1 << 18
lengths = torch.from_numpy(__import__("numpy").random.default_rng(0).integers(1, 900, n))
counts = lengths // 3
keys = eval(sys.argv[1])
multipack.plan(lengths[:99], counts[:99], **keys)
for limit in map(int, sys.argv[2:]):
    child = os.fork()
    if child == 0:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (limit << 20),) * 2)
        try:
            multipack.plan(lengths, counts, **keys)
        except (RuntimeError, MemoryError) as error:
            os._exit(0 if "memory" in str(error) or isinstance(error, MemoryError) else 3)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("keys", "enough"),
    [
        ({}, 64),
        (
            {
                "sample_packing_algorithm": "first_fit",
                "incomplete_batches": "split",
                "world_size": 7,
            },
            64,
        ),
        (
            {
                "sample_packing_algorithm": "tight",
                "multipack_real_batches": True,
                "micro_batch_size": 4,
            },
            64,
        ),
        # What balancing takes grows with the microbatches, and with the sets of samples in a row.
        ({"balance_labels": True, "world_size": 4, "gradient_accumulation_steps": 4}, 128),
        ({"balance_labels": True, "sample_packing": False, "micro_batch_size": 4}, 64),
        ({"balance_labels": True, "sample_packing": False}, 128),
        (
            {
                "balance_labels": True,
                "sequence_len": 2250,
                "multipack_real_batches": True,
                "micro_batch_size": 64,
            },
            160,
        ),
    ],
    ids=str,
)
def test_planning_with_less_and_less_memory_ends_in_an_error_and_never_in_an_abort(
    keys: dict[str, object], enough: int
) -> None:
    """A quarter of a million samples, from no memory to enough of it, in MiB."""
    settings = {"sequence_len": 4096, **keys}
    limits = [enough * part // 8 for part in range(9)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SWEEP, repr(settings), *map(str, limits)],
        capture_output=True,
        text=True,
        timeout=240,
    )

    codes = [int(code) for code in done.stdout.split()]
    assert set(codes) == {0, 1}, (codes, done.stderr)
    assert codes == sorted(codes)
