"""What two runs must agree on before a position of one means anything in the other.

A position is a number of microbatches. It names the same samples only in the same schedule, so a
state carries what the schedule was made from, as plain ints, strings and digests, and loading it
compares every fact by name. Settings that shape the tensors of a batch and not the order of samples
may change in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multipack._config import Config, Split

_SHAPE_KEYS = ("pad_to_multiple_of", "pad_to_sequence_len", "padded_tail")

_REMEDY = (
    "go back to what was saved, or load with ignore_data_skip=True, which starts the epoch anew: "
    "samples may then be repeated or skipped"
)


def order_settings(config: Config, split: Split, *, streaming: bool) -> dict[str, Any]:
    """Return the settings that the order of samples depends on."""
    settings = dict(vars(config))
    for key in _SHAPE_KEYS:
        del settings[key]
    seed = settings.pop("seed")
    if settings["data_seed"] is None:
        settings["data_seed"] = seed
    if split == "train":
        del settings["eval_batch_size"], settings["eval_sample_packing"]
    if not streaming:
        del settings["streaming_multipack_buffer_size"]
    return settings


def every_setting(config: Config, split: Split, *, streaming: bool) -> dict[str, Any]:
    """Return the settings that the order of samples or the shape of their batches depends on."""
    shape = {key: getattr(config, key) for key in _SHAPE_KEYS}
    return {**order_settings(config, split, streaming=streaming), **shape}


def refuse_other_version(state: Mapping[str, Any], version: int) -> None:
    """Refuse a state in a format that this release does not read.

    Raises:
        ValueError: If the state has another version.
    """
    if state.get("version") != version:
        raise ValueError(
            f"the state has version {state.get('version')}, but this release reads version "
            f"{version}"
        )


def refuse_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compare facts by name; those within ``settings`` are compared one by one.

    Raises:
        ValueError: If any differs; the text names each with its saved and its current value.
    """
    before, now = _flat(saved), _flat(current)
    differences = [
        f"{key} was {before.get(key)!r} and is now {value!r}"
        for key, value in now.items()
        if key not in before or before[key] != value
    ]
    if differences:
        raise ValueError(
            f"the state belongs to another order of samples: {'; '.join(differences)}; {_REMEDY}"
        )


def unavailable(reason: str) -> ValueError:
    """Make the error about a state that holds no usable position."""
    return ValueError(f"exact replay is unavailable: {reason}; {_REMEDY}")


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the settings beside the other facts."""
    return {**{k: v for k, v in facts.items() if k != "settings"}, **facts.get("settings", {})}
