"""A C++ program that finds the package by CMake, links it and uses it."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import multipack

SOURCE = Path(__file__).resolve().parents[1] / "cpp"


class Packer(torch.nn.Module):
    """The smallest module that needs the library."""

    def forward(
        self,
        tokens: torch.Tensor,
        offsets: torch.Tensor,
        index: torch.Tensor,
        row_offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack into a row of 8."""
        made = torch.ops.multipack.collate(tokens, offsets, index, row_offsets, row_len=8)
        return made.input_ids, made.cu_seqlens


def test_a_program_that_finds_links_and_calls_the_library(tmp_path):
    torch.jit.script(Packer()).save(tmp_path / "packer.pt")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    prefixes = f"{multipack.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    run("cmake", "-S", str(SOURCE), "-B", "build", f"-DCMAKE_PREFIX_PATH={prefixes}")
    run("cmake", "--build", "build")
    said = run("build/consumer", "packer.pt")
    dynamic = run("readelf", "-d", "build/consumer")

    assert said == "all checks hold\n"
    assert "libmultipack.so" in dynamic, "dropped by the linker"
