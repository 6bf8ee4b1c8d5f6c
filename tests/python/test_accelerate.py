"""Loaders of a plan under Accelerate: whole batches on every rank, epochs through all wrappers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_runs
from accelerate import Accelerator, skip_first_batches
from resume_cases import LAYOUTS
from torch.utils.data import DataLoader, default_convert

from multipack import (
    Collator,
    Config,
    MultipackBatchSampler,
    PackedDataset,
    RowDataset,
    StreamingMultipack,
)
from multipack.integrations.accelerate import load_state_dict, prepare, set_epoch

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = trainer_runs.chats(40)
LENGTHS = [len(sample["input_ids"]) for sample in SAMPLES]


def loader_of(accelerator: Any, **keys: Any) -> tuple[MultipackBatchSampler, DataLoader[Any]]:
    config = Config(**({"sequence_len": 24, "world_size": accelerator.num_processes} | keys))
    sampler = MultipackBatchSampler(LENGTHS, config=config, rank="all")
    collator = Collator(config, attention="none")
    return sampler, DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=collator)


def ids(loader: Any) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in loader]


def passes(layout: dict[str, Any]) -> dict[str, Any]:
    """Return what this process is given in passes of several kinds, and what it should be given."""
    accelerator = Accelerator(cpu=True)
    sampler, plain = loader_of(accelerator, **layout)
    loader = prepare(accelerator, plain)
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        plan, rank = sampler.plan, accelerator.process_index
        rows = [plan[rank, k] for k in range(len(plan))]
        collator = plain.collate_fn
        fixed = not sampler.config.sample_packing
        dataset = RowDataset(SAMPLES)
        expected.append(
            [collator(dataset[row[0] if fixed else row])["input_ids"].tolist() for row in rows]
        )
    set_epoch(loader, 0)
    found = {
        "expected": expected,
        "length": len(loader),
        "by themselves": [ids(loader) for _ in range(3)],
    }
    set_epoch(loader, 1)
    found["epoch 1"] = ids(loader)
    skipped = skip_first_batches(loader, 2)
    set_epoch(skipped, 2)
    found["epoch 2 skipped"] = ids(skipped)
    set_epoch(loader, 1)
    for number, _ in enumerate(loader):
        sampler.consumed()
        if number == 2:
            break
    state = sampler.state_dict()
    again, other = loader_of(accelerator, **layout)
    other = prepare(accelerator, other)
    load_state_dict(other, state)
    found["epoch 1 resumed"] = ids(other)
    assert again.epoch == 2
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_every_pass_has_this_rank_s_share_of_its_epoch(processes: int) -> None:
    layouts = ({}, {"sample_packing": False, "micro_batch_size": 3, "incomplete_batches": "fill"})
    for layout in layouts:
        for found in trainer_runs.run(passes, processes, layout):
            expected = found["expected"]
            assert expected[0] != expected[1] != expected[2]
            assert found["length"] == len(expected[0])
            assert found["by themselves"] == expected
            assert found["epoch 1"] == expected[1]
            assert found["epoch 2 skipped"] == expected[2][2:]
            assert found["epoch 1 resumed"] == expected[1][3:]


def gradients_of_a_step(layout: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients of a step of the example's loop with all samples."""
    sys.path.insert(0, str(EXAMPLES))
    step = importlib.import_module("accelerate_loop").step
    accelerator = Accelerator(cpu=True)
    config = Config(
        sequence_len=24,
        micro_batch_size=2,
        world_size=accelerator.num_processes,
        incomplete_batches="fill",
        **layout,
    )
    sampler = MultipackBatchSampler(LENGTHS, config=config, rank="all")
    collator = Collator(config, attention="bool")
    loader = DataLoader(RowDataset(SAMPLES), batch_sampler=sampler, collate_fn=collator)
    model, loader = prepare(accelerator, trainer_runs.tiny_llama(), loader)
    step(accelerator, model, list(loader))
    return {n: p.grad.numpy() for n, p in accelerator.unwrap_model(model).named_parameters()}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_gradients_of_its_samples_each_alone(layout: str, processes: int) -> None:
    for found in trainer_runs.run(gradients_of_a_step, processes, LAYOUTS[layout]):
        trainer_runs.check_gradients(found, SAMPLES)


def test_a_position_loaded_behind_the_loader_s_back_is_not_lost_in_silence() -> None:
    accelerator = Accelerator(cpu=True)
    sampler, plain = loader_of(accelerator)
    loader = prepare(accelerator, plain)
    sampler.load_state_dict({"epoch": 1, "batches": 2})
    with pytest.warns(UserWarning) as told:
        next(iter(loader))
    assert str(told[0].message) == (
        "set_epoch(0) leaves the position that was loaded, microbatch 2 of epoch 1: tell the "
        "loader or trainer its epoch"
    )


def test_finished_batches_of_a_packed_dataset_are_taken() -> None:
    accelerator = Accelerator(cpu=True)
    collator = Collator(sequence_len=24, attention="none")
    tokens = torch.cat([torch.tensor(sample["input_ids"]) for sample in SAMPLES])
    offsets = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    data = PackedDataset(tokens, offsets, collator=collator)
    sampler = MultipackBatchSampler(LENGTHS, config=collator.config)
    loader = prepare(
        accelerator, DataLoader(data, batch_sampler=sampler, collate_fn=default_convert)
    )
    assert sum(batch["input_ids"].numel() for batch in loader) == sum(LENGTHS)
    with pytest.raises(TypeError) as error:
        prepare(accelerator, DataLoader(data, sampler=sampler, batch_size=None))
    assert str(error.value) == (
        "the DataLoader has a MultipackBatchSampler as sampler, which accelerate cannot share out: "
        "give it as batch_sampler, and for a PackedDataset "
        "collate_fn=torch.utils.data.default_convert"
    )


class FourProcesses:
    """An Accelerator as it looks on one of four processes."""

    num_processes = 4
    split_batches = False
    dispatch_batches: bool | None = None
    parallelism_config: Any = None
    gradient_accumulation_steps = 1


class Parallelism:
    """A configuration of parallelism inside a model."""

    def __init__(self, tp: int = 1, cp: int = 1, sp: int = 1) -> None:
        self.tp_size, self.cp_size, self.sp_size = tp, cp, sp


@pytest.mark.parametrize(
    ("setting", "keys", "rank", "text"),
    [
        ({"split_batches": True}, {}, "all", "the Accelerator has split_batches, which would cut"),
        ({"dispatch_batches": True}, {}, "all", "the Accelerator has dispatch_batches, which wou"),
        ({}, {"world_size": 2}, "all", "the plan has world_size 2, but the Accelerator has 4 data"),
        (
            {"gradient_accumulation_steps": 4},
            {"gradient_accumulation_steps": 2},
            "all",
            "the plan has gradient_accumulation_steps 2, but the Accelerator has 4: plan for as ma",
        ),
        (
            {"parallelism_config": Parallelism(tp=2)},
            {},
            "all",
            "the plan has world_size 4, but the Accelerator has 2 data-parallel ranks: plan for as",
        ),
        ({"parallelism_config": Parallelism(sp=2)}, {}, "all", "sequence parallelism (sp_size 2)"),
        (
            {"parallelism_config": Parallelism(cp=2)},
            {"world_size": 2},
            "all",
            "context parallelism (cp_size 2) attends over whole rows",
        ),
        ({}, {}, 1, "the sampler yields the microbatches of rank 1 alone, and the Accelerator wou"),
        (
            {},
            {"sample_packing": False, "incomplete_batches": "split"},
            "all",
            "incomplete_batches is 'split', which leaves microbatches of fewer samples",
        ),
    ],
)
def test_what_would_cut_batches_up_is_refused(
    setting: dict[str, Any], keys: dict[str, Any], rank: Any, text: str
) -> None:
    accelerator = FourProcesses()
    for name, value in setting.items():
        setattr(accelerator, name, value)
    config = Config(**({"sequence_len": 24, "world_size": 4} | keys))
    sampler = MultipackBatchSampler(LENGTHS, config=config, rank=rank)
    with pytest.raises(ValueError) as error:
        prepare(accelerator, DataLoader(RowDataset(SAMPLES), batch_sampler=sampler))
    assert str(error.value).startswith(text)


def test_a_model_in_stages_is_refused() -> None:
    model = torch.nn.Module()
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(pp_size=2))
    accelerator = Accelerator(cpu=True)
    _, loader = loader_of(accelerator)
    with pytest.raises(ValueError, match=r"pipeline parallelism \(pp_size 2\) has stages, which"):
        prepare(accelerator, model, loader)


def test_a_loader_of_no_plan_is_refused() -> None:
    loader = DataLoader(RowDataset(SAMPLES))
    with pytest.raises(ValueError, match="none of the objects is a DataLoader with a Multipack"):
        prepare(Accelerator(cpu=True), loader)
    with pytest.raises(TypeError, match="the DataLoader has no MultipackBatchSampler as its batch"):
        set_epoch(loader, 1)


def test_a_stream_is_not_shared_out_twice() -> None:
    """C78: Accelerate would deal the batches of this rank's stream out, or cut them up."""
    accelerator = Accelerator(cpu=True)
    _, plain = loader_of(accelerator)
    stream = StreamingMultipack(SAMPLES, collator=plain.collate_fn)
    with pytest.raises(ValueError) as error:
        prepare(accelerator, plain, DataLoader(stream, batch_size=None))
    assert str(error.value) == (
        "a DataLoader has a StreamingMultipack, whose batches are this rank's already, and the "
        "Accelerator would share them out again: leave the loader out, and move its batches to the "
        "device"
    )


def test_the_last_metrics_of_a_pass_are_gathered_whole(tmp_path: Path) -> None:
    first, second = trainer_runs.run(gathered, 2, tmp_path)
    assert first == second
    assert len(first) % 2 == 0
    assert first[-2:] == [10 * len(first) // 2 + rank for rank in range(2)]


def gathered(_: Path) -> list[int]:
    accelerator = Accelerator(cpu=True)
    _, plain = loader_of(accelerator, multipack_real_batches=True, micro_batch_size=3)
    loader = prepare(accelerator, plain)
    found = []
    for number, _ in enumerate(loader):
        mine = torch.tensor([10 * (number + 1) + accelerator.process_index])
        found += accelerator.gather_for_metrics(mine).tolist()
    return found
