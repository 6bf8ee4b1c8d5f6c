"""Plans as files: they come back whole, and what is damaged is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import rows_of

import multipack
from multipack import load_plan, plan


def test_a_saved_plan_comes_back_whole(tmp_path: Path) -> None:
    made = plan(list(range(1, 60)), sequence_len=64, world_size=2, incomplete_batches="fill")
    path = tmp_path / "epoch.plan"

    made.save(path)
    loaded = load_plan(path)

    assert [path] == list(tmp_path.iterdir())
    assert made == loaded
    assert hash(made) == hash(loaded)
    assert rows_of(made) == rows_of(loaded)
    assert [type(s) for row in rows_of(made) for s in row] == [
        type(s) for row in rows_of(loaded) for s in row
    ]


def test_a_plan_is_written_alike_by_every_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy before 2.1 has no options here, and keeps every keyword as an array."""
    real = np.savez

    def savez(file: Any, **arrays: Any) -> None:
        assert all(isinstance(array, np.ndarray) for array in arrays.values())
        real(file, **arrays)

    monkeypatch.setattr(np, "savez", savez)
    plan([3, 5, 2], sequence_len=8).save(tmp_path / "epoch.plan")

    assert load_plan(tmp_path / "epoch.plan") == plan([3, 5, 2], sequence_len=8)


def test_a_plan_is_as_large_as_its_samples_and_not_as_their_masks(tmp_path: Path) -> None:
    """C61: the masks of these 10,000 rows would take 168 GB."""
    plan = multipack.plan([512] * 80_000, sequence_len=4096)
    path = tmp_path / "plan.npz"
    plan.save(path)

    assert len(plan.row_offsets) == 10_001
    assert sum(part.nbytes for part in (plan.index, plan.row_offsets, plan.batch_offsets)) < 1 << 20
    assert path.stat().st_size < 1 << 20


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    made = plan([4] * 100, sequence_len=4)
    path = tmp_path / "epoch.plan"
    made.save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["index"][[0, 1]] = arrays["index"][[1, 0]]
    with path.open("wb") as file:
        np.savez(file, **arrays)

    with pytest.raises(ValueError) as caught:
        load_plan(path)

    assert f"{path} is damaged: its checksum is not that of its contents; plan anew" == str(
        caught.value
    )


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    made = plan([4] * 100, sequence_len=4)
    path = tmp_path / "epoch.plan"
    made.save(path)
    whole = path.read_bytes()
    pickled = pickle.dumps({"index": [0]})

    for content in (whole[: len(whole) // 2], b"", b"hello", pickled):
        path.write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r" is not a saved plan, or only a part of one: make it with Plan\.save$",
        ):
            load_plan(path)
    np.savez(path.with_suffix(".npz"), index=np.zeros(3))
    with pytest.raises(
        ValueError, match=r" is not a saved plan, or only a part of one: make it with Plan\.save$"
    ):
        load_plan(path.with_suffix(".npz"))


def test_a_missing_plan_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "none")
