"""Settings in JSON and YAML that nobody should be able to do harm with: refused in a sentence.

What stands for more than there is, is read in a process that has 256 MiB more than it starts with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from limited import DEEP, limited

from multipack import Config
from multipack.integrations import axolotl
from multipack.ops import resolve_config


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ('{"seed": 1, "seed": 2}', ValueError, "setting 'seed' is given twice: leave one out"),
        (
            '{"seed": 1, "x": "' + "y" * (1 << 20) + '"}',
            ValueError,
            "the settings are not a JSON object: 1048596 bytes, more than 1048576",
        ),
        (
            '{"seed": "' + "y" * 500 + '"}',
            TypeError,
            f'seed is "{"y" * 99}… (502 characters), but must be an integer from 0 to {2**64 - 1}',
        ),
        (
            '{"' + "y" * 500 + '": 1}',
            ValueError,
            f"unknown setting '{'y' * 100}… (500 characters)'",
        ),
        (
            '{"seed": ' + DEEP,
            ValueError,
            "the settings are not a JSON object: recursion limit exceeded at line 1 column 136",
        ),
        (
            "[1]",
            ValueError,
            "the settings are not a JSON object: invalid type: sequence, expected a map at line 1 "
            "column 0",
        ),
    ],
    ids=["twice", "long", "long value", "long key", "deep", "list"],
)
def test_settings_in_json_that_are_none_are_refused(
    text: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        resolve_config(text)

    assert str(caught.value) == said


def test_a_number_comes_through_json_as_it_is() -> None:
    """One in ten was another one by a bit, and a digest of the settings with it."""
    for weight in (0.1, 135364.40322091896, 1.8802308925025002, 777.1234567890123, 1e-300):
        assert Config(balance_cost_linear=weight).balance_cost_linear == weight


def test_settings_that_no_json_holds_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        Config(seed=1 << 100_000)
    assert str(caught.value) == "seed is an integer of 100001 bits, which does not fit into 64 bits"
    with pytest.raises(TypeError) as caught_type:
        Config(seed=[[]])  # type: ignore[arg-type]
    assert str(caught_type.value) == "seed is a list, but a setting is a number, a bool or a string"


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(i + 1)}: &{chr(i + 1)} [{', '.join(['*' + chr(i)] * 8)}]\n" for i in range(97, 115)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{chr(i + 1)}: &{chr(i + 1)} {{<<: [*{chr(i)}, *{chr(i)}, *{chr(i)}, *{chr(i)}]}}\n"
    for i in range(97, 118)
)
YAML = {
    "a bomb": (BOMB + "seed: *s\n", "stands for more than 1,000,000 values, which no settings do"),
    "a bomb of merges": (MERGES, "stands for more than 1,000,000 values, which no settings do"),
    "an alias of itself": ("seed: &a [*a]\n", "has an alias inside of what it stands for"),
    "a key twice": (
        "seed: 1\nsequence_len: 8\nseed: 2\n",
        "has the key 'seed' twice, in line 1 and in line 3: leave one out",
    ),
    "deep": (DEEP, "is nested too deeply for settings"),
    "no date": (
        "seed: 2001-99-99\n",
        "holds a value that YAML cannot read: month must be in 1..12",
    ),
    "a list": ("- seed\n", "holds a list, but settings map keys to values"),
}


def test_hostile_yaml_is_refused_in_little_memory(tmp_path: Path) -> None:
    """Aliases are free until somebody walks through what they stand for, or prints it."""
    paths = {}
    for number, (fault, (content, _)) in enumerate(YAML.items()):
        paths[fault] = tmp_path / f"{number}.yml"
        paths[fault].write_text(content)

    for read_file in ("multipack.Config.from_yaml", "axolotl.from_yaml"):
        said = limited(*(f"{read_file}({str(path)!r})" for path in paths.values()))

        assert dict(zip(paths, said, strict=True)) == {
            fault: f"ValueError: {paths[fault]} {text}" for fault, (_, text) in YAML.items()
        }


def test_an_integer_without_end_inside_of_a_list_is_refused_by_its_size(tmp_path: Path) -> None:
    """Python writes integers of up to 4300 digits, and reads longer hexadecimal ones."""
    path = tmp_path / "settings.yml"
    path.write_text(f"accelerator_config: [1, 0x{'f' * 5000}]")

    with pytest.raises(ValueError, match=r"\[1, an integer of 20000 bits\] is no mapping"):
        axolotl.from_yaml(path)


def test_yaml_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.yml"
    path.write_bytes(b"seed: \xff\xfe")

    for read_file in (Config.from_yaml, axolotl.from_yaml):
        with pytest.raises(ValueError, match=r"settings\.yml is not YAML: unacceptable character"):
            read_file(path)


def test_anchors_and_merges_may_still_be_used(tmp_path: Path) -> None:
    path = tmp_path / "settings.yml"
    path.write_text("base: &base {seed: 1, data_seed: 2}\nuse:\n  <<: *base\n  seed: 3\n")

    with pytest.raises(ValueError, match="unknown setting 'base'"):
        Config.from_yaml(path)
