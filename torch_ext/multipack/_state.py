"""What two runs must agree on before a position of one means anything in the other.

A position is a number of microbatches. It names the same samples only in the same schedule, so a
state carries what the schedule was made from, as plain ints, strings and digests, and loading it
compares every fact by name. Settings that shape the tensors of a batch and not the order of samples
may change in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multipack._arrays import shown
from multipack._config import Config, Split

_SHAPE_KEYS = ("pad_to_multiple_of", "pad_to_sequence_len", "padded_tail")

_KINDS: dict[type, str] = {
    Mapping: "a mapping",
    list: "a list",
    tuple: "a tuple",
    bool: "a bool",
    type(None): "None",
}

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
    """Refuse what is no state, or is one in a format that this release does not read.

    Raises:
        TypeError: If it is no mapping.
        ValueError: If the state has another version.
    """
    refuse_other_kinds("the state", state, Mapping)
    found = state.get("version")
    if not is_same(found, version):
        raise ValueError(
            f"the state has version {shown(found)}, but this release reads version {version}"
        )


def refuse_other_kinds(name: str, value: object, *kinds: type) -> None:
    """Refuse a part of a state that is of none of these kinds.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(value, kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        raise TypeError(f"{name} is {shown(value)}, but must be {wanted}")


def is_same(one: object, other: object) -> bool:
    """Whether two plain values are equal; what is no plain value, such as a tensor, never is."""
    plain = (type(None), bool, int, float, str)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def refuse_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compare facts by name; those within ``settings`` are compared one by one.

    What was not saved counts as None, which is what a setting has that was not given.

    Raises:
        ValueError: If any differs; the text names each with its saved and its current value.
    """
    refuse_other_kinds("settings", saved.get("settings", {}), Mapping)
    before, now = _flat(saved), _flat(current)
    differences = [
        f"{key} was {shown(before[key]) if key in before else 'not saved'} and is now {value!r}"
        for key, value in now.items()
        if not is_same(before.get(key), value)
    ]
    if differences:
        raise ValueError(
            f"the state belongs to another order of samples: {'; '.join(differences)}; {_REMEDY}"
        )


def unavailable(reason: object) -> ValueError:
    """Make the error about a state that holds no usable position."""
    text = reason if isinstance(reason, str) and len(reason) < 1000 else shown(reason)
    return ValueError(f"exact replay is unavailable: {text}; {_REMEDY}")


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the settings beside the other facts."""
    return {**{k: v for k, v in facts.items() if k != "settings"}, **facts.get("settings", {})}
