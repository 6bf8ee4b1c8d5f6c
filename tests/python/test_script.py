"""The ops in TorchScript: scripted, saved, loaded in a new process with and without the package."""

import json
import os
import subprocess
import sys

import pytest
import torch
from scripted import Planner
from torch import Tensor

import multipack
from multipack import ops


class Packer(torch.nn.Module):
    """Everything from samples to a mask, as a trainer in TorchScript would call it."""

    def forward(
        self, tokens: Tensor, offsets: Tensor, index: Tensor, row_offsets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pack, and use each op once."""
        ids, _, positions, segments, cu_seqlens, _, _, additive = torch.ops.multipack.collate(
            tokens, offsets, index, row_offsets, row_len=8, attention_mask="additive"
        )
        packed = torch.ops.multipack.pack_values(tokens, offsets, index, row_offsets, row_len=8)
        mask = torch.ops.multipack.block_mask(segments, window=2)
        borders = torch.ops.multipack.boundaries(positions)
        counts, _ = torch.ops.multipack.label_counts(tokens, offsets)
        assert packed.equal(ids)
        assert borders.equal(cu_seqlens)
        return ids, additive, mask, counts


class ListPacker(torch.nn.Module):
    """The list form, and a plan; results by name, which TorchScript has and eager torch has not."""

    def forward(self, samples: list[Tensor], config: str) -> tuple[Tensor, Tensor]:
        """Plan the samples, take the first microbatch, pack it."""
        lengths = torch.tensor([len(sample) for sample in samples])
        plan = torch.ops.multipack.plan(lengths, None, None, config)
        first = torch.ops.multipack.microbatch(
            plan.index, plan.row_offsets, plan.batch_offsets, 1, 0, 0
        )
        numbers: list[int] = first.index.tolist()
        chosen = [samples[i] for i in numbers]
        batch = torch.ops.multipack.collate_list(chosen, first.row_offsets)
        return batch.input_ids, batch.cu_seqlens


ARGS = (
    torch.arange(10, 15),
    torch.tensor([0, 3, 5]),
    torch.tensor([1, 0]),
    torch.tensor([0, 2]),
)
SAMPLES = [torch.arange(3), torch.arange(4), torch.arange(1)]
CONFIG = '{"sequence_len": 8}'


def test_scripted_equals_eager():
    for eager, found in zip(Packer()(*ARGS), torch.jit.script(Packer())(*ARGS), strict=True):
        torch.testing.assert_close(found, eager, rtol=0, atol=0)


def test_a_scripted_plan_packs_whole_samples():
    ids, borders = torch.jit.script(ListPacker())(SAMPLES, CONFIG)

    assert ids.shape == (1, 8)
    assert sorted(borders.diff().tolist()) == [1, 3, 4]


def in_new_process(path, first_line: str) -> subprocess.CompletedProcess[str]:
    return run_code(f"""
import torch
{first_line}
module = torch.jit.load({str(path)!r})
args = (torch.arange(10, 15), torch.tensor([0, 3, 5]), torch.tensor([1, 0]), torch.tensor([0, 2]))
print(module(*args)[0].tolist())
""")


# TorchScript is deprecated, by one class of warning or, from torch 2.14 on, the other.
IGNORED = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *IGNORED, "-c", code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "first_line",
    ["import multipack", f"torch.ops.load_library({str(multipack.library_path)!r})"],
)
def test_a_saved_module_runs_in_a_new_process(tmp_path, first_line):
    torch.jit.script(Packer()).save(tmp_path / "packer.pt")

    done = in_new_process(tmp_path / "packer.pt", first_line)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(Packer()(*ARGS)[0].tolist())


def test_a_saved_planner_runs_where_only_torch_is_imported(tmp_path):
    tokens, labels = torch.arange(10, 22), torch.arange(110, 122)
    offsets = torch.tensor([0, 3, 5, 9, 12])
    config = '{"sequence_len": 8, "gradient_accumulation_steps": 2, "balance_labels": true}'
    torch.jit.script(Planner()).save(tmp_path / "planner.pt")

    done = run_code(f"""
import json
import sys
import torch
torch.ops.load_library({str(multipack.library_path)!r})
module = torch.jit.load({str(tmp_path / "planner.pt")!r})
samples = torch.arange(10, 22), torch.arange(110, 122), torch.tensor([0, 3, 5, 9, 12])
made = [[part.tolist() for part in module(*samples, {config!r}, k)] for k in range(2)]
assert "multipack" not in sys.modules
print(json.dumps(made))
""")

    assert (done.returncode, done.stderr) == (0, "")
    planned = ops.plan(offsets.diff(), *ops.label_counts(labels, offsets), config)
    for k, found in enumerate(json.loads(done.stdout)):
        chosen = ops.microbatch(*planned[:3], 1, 0, k)
        batch = ops.collate(tokens, offsets, *chosen, labels=labels, attention_mask="bool")
        parts = batch.input_ids, batch.labels, batch.cu_seqlens, batch.attention_mask
        assert found == [part.tolist() for part in parts]


def test_a_saved_module_without_the_library_fails_as_torch_does(tmp_path):
    torch.jit.script(Packer()).save(tmp_path / "packer.pt")

    done = in_new_process(tmp_path / "packer.pt", "")

    assert done.returncode == 1
    assert "multipack::" in done.stderr
    assert "Unknown" in done.stderr


def test_errors_keep_their_sentence():
    tokens, offsets, _, row_offsets = ARGS

    with pytest.raises(Exception, match=r"index\[1\] is 7, but samples are numbered from 0 and"):
        torch.jit.script(Packer())(tokens, offsets, torch.tensor([0, 7]), row_offsets)


def test_eager_functions_and_scripts_share_their_defaults():
    batch = torch.ops.multipack.collate(*ARGS)

    for expected, found in zip(ops.collate(*ARGS), batch, strict=True):
        assert found.equal(expected)
