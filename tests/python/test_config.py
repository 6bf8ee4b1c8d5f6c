"""Settings: the same in Python as in Rust, checked in one place, refused by name."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import importlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multipack
from multipack import Collator, Config, MultipackBatchSampler, ops
from multipack._config import batch_size, capacity, layout

PYTHON_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}


def error_of(kind: type[Exception], keys: dict[str, Any]) -> str:
    with pytest.raises(kind) as caught:
        Config(**keys)
    return str(caught.value)


def test_the_keys_and_defaults_are_those_of_rust() -> None:
    in_rust = json.loads(ops.resolve_config("{}"))

    assert list(in_rust.items()) == list(PYTHON_DEFAULTS.items())


def test_the_types_of_the_defaults_are_those_of_rust() -> None:
    in_rust = json.loads(ops.resolve_config("{}"))

    assert [type(value) for value in in_rust.values()] == [
        type(value) for value in PYTHON_DEFAULTS.values()
    ]


@pytest.mark.parametrize(
    "value", [np.int64(8), np.int32(8), np.uint8(8), torch.tensor(8)], ids=repr
)
def test_integers_of_other_libraries_become_plain_ints(value: Any) -> None:
    config = Config(sequence_len=value, micro_batch_size=value)

    assert (config.sequence_len, config.micro_batch_size) == (8, 8)
    assert type(config.sequence_len) is int
    assert Config(sequence_len=8, micro_batch_size=8) == config


def test_numpy_bools_and_floats_are_taken_for_bools_and_floats() -> None:
    config = Config(sample_packing=np.bool_(False), balance_cost_linear=np.float32(0.5))

    assert config.sample_packing is False
    assert config.balance_cost_linear == 0.5


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (True, TypeError, "true"),
        (8.0, TypeError, "8.0"),
        ("8", TypeError, '"8"'),
        ([8], TypeError, "[8]"),
        (np.bool_(True), TypeError, "true"),
        (0, ValueError, "0"),
        (-1, ValueError, "-1"),
        (2**31, ValueError, "2147483648"),
    ],
    ids=repr,
)
def test_a_wrong_count_is_refused_by_name_and_value(
    value: Any, kind: type[Exception], found: str
) -> None:
    for key in ("sequence_len", "micro_batch_size", "label_balance_window_optim_steps"):
        text = error_of(kind, {key: value})

        assert f"{key} is {found}, but must be an integer from 1 to 2147483647" == text


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        (
            {"sample_packing": 1},
            TypeError,
            "sample_packing is 1, but must be true or false",
        ),
        (
            {"excess_length_strategy": "cut"},
            ValueError,
            'excess_length_strategy is "cut", but must be one of drop, truncate, raise',
        ),
        (
            {"balance_cost_linear": float("nan")},
            ValueError,
            "balance_cost_linear is nan, but must be a finite number",
        ),
        (
            {"seed": object},
            TypeError,
            "seed is a type, but a setting is a number, a bool or a string",
        ),
        (
            {"sample_packing": True, "batch_flattening": True},
            ValueError,
            "batch_flattening lays a fixed number of samples end to end, so it needs "
            "sample_packing: false",
        ),
        (
            {"sequence_len": 10, "align_samples_to": 4},
            ValueError,
            "align_samples_to 4 must divide the row capacity 10",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_the_rule(
    keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    assert text == error_of(kind, keys)


UNKNOWN = "unknown setting 'sequnce_len', did you mean 'sequence_len'?"


@pytest.mark.parametrize(
    "make",
    [
        lambda keys: Config(**keys),
        lambda keys: Config().replace(**keys),
        lambda keys: multipack.plan([1], **keys),
        lambda keys: multipack.plan([1], config=Config(sequence_len=4), **keys),
        lambda keys: MultipackBatchSampler([1], **keys),
        lambda keys: Collator(attention="none", **keys),
    ],
    ids=["Config", "replace", "plan", "plan with config", "sampler", "collator"],
)
def test_an_unknown_key_is_refused_with_the_nearest_wherever_it_is_given(make: Any) -> None:
    with pytest.raises(ValueError) as caught:
        make({"sequnce_len": 8})

    assert str(caught.value) == UNKNOWN


def test_keywords_override_the_config() -> None:
    config = Config(sequence_len=4, seed=1)

    plan = multipack.plan([1], None, config, sequence_len=8)

    assert Config(sequence_len=8, seed=1) == plan.config
    assert config.sequence_len == 4


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        multipack.plan([1], None, {"sequence_len": 8})  # type: ignore[arg-type]

    assert (
        str(caught.value)
        == "config must be a multipack.Config or None, but is a dict; write Config(...), or give "
        "the settings as keywords"
    )


def test_equal_settings_are_equal_and_hash_alike() -> None:
    assert Config(seed=3) == Config(seed=3)
    assert hash(Config(seed=3)) == hash(Config(seed=3))
    assert Config(seed=3) != Config(seed=4)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1  # type: ignore[misc]


def test_replace_checks_the_whole() -> None:
    config = Config(sequence_len=8, align_samples_to=4)

    assert Config(sequence_len=16, align_samples_to=4) == config.replace(sequence_len=16)
    with pytest.raises(ValueError, match="must divide the row capacity 6"):
        config.replace(sequence_len=6)


def test_a_config_survives_pickle_copy_and_json() -> None:
    config = Config(sequence_len=8, data_seed=2**63, padded_tail="last")

    assert config == pickle.loads(pickle.dumps(config))
    assert config == copy.deepcopy(config)
    assert config == Config(**json.loads(config.to_json()))


def test_yaml_holds_settings_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("sequence_len: 4096\nsample_packing: false\nbalance_cost_linear: 0.5\n")

    assert Config(
        sequence_len=4096, sample_packing=False, balance_cost_linear=0.5
    ) == Config.from_yaml(path)


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        ("sequnce_len: 8", ValueError, UNKNOWN),
        ("sequence_len: '8'", TypeError, 'sequence_len is "8", but must be an integer from 1 to '),
        ("seed: 2026-01-01", TypeError, "seed is a date, but a setting is a number, a bool or a"),
        ("- sequence_len", ValueError, "holds a list, but settings map keys to values"),
        ("sequence_len: [", ValueError, "is not YAML: while parsing a flow node"),
    ],
)
def test_yaml_that_is_no_settings_is_refused(
    tmp_path: Path, content: str, kind: type[Exception], text: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)

    with pytest.raises(kind) as caught:
        Config.from_yaml(path)

    assert text in str(caught.value)


def test_an_empty_yaml_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.touch()

    assert Config() == Config.from_yaml(path)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"multipack_real_batches": True},
        {"sample_packing": False},
        {"sample_packing": False, "batch_flattening": True},
        {"sample_packing": False, "eval_sample_packing": True},
        {"eval_sample_packing": False, "multipack_real_batches": True},
    ],
    ids=repr,
)
def test_layout_size_and_capacity_are_what_the_planner_makes_of_them(
    keys: dict[str, Any], split: Any
) -> None:
    config = Config(sequence_len=8, micro_batch_size=3, eval_batch_size=2, **keys)

    plan = multipack.plan([8] * 12, None, config, split=split)

    assert plan.report["layout"] == layout(config, split)
    assert plan.report["capacity"] == capacity(config, split)
    assert len(plan) * batch_size(config, split) == 12


@pytest.mark.parametrize(
    "module", ["_config", "_plan", "collate", "dataset", "sampler", "streaming"]
)
def test_the_examples_in_the_docstrings_hold(module: str) -> None:
    names = {name: getattr(multipack, name) for name in multipack.__all__} | {"torch": torch}

    result = doctest.testmod(importlib.import_module(f"multipack.{module}"), extraglobs=names)

    assert result.attempted > 0
    assert result.failed == 0


def test_settings_given_by_position_are_refused() -> None:
    for given in ({"sequence_len": 8}, Config(sequence_len=8), 8):
        with pytest.raises(TypeError) as caught:
            Config(given)  # type: ignore[call-arg]
        assert str(caught.value) == (
            "settings are given by name, as in Config(sequence_len=4096), not by position: "
            f"{given!r}"
        )
