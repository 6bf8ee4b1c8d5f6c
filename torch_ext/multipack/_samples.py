"""Samples as people hold them, joined key by key into flat arrays.

A sample is a mapping whose keys have one number for each token or one number for the whole sample,
in a list, an array or a tensor. Joining is one NumPy pass for each key. What cannot be joined, or
would shift what follows it, is refused by sample and key before anything is laid out.

A preference pair is a sample with two sides, under keys that begin with ``chosen_`` and
``rejected_``. It is read as two samples, one behind the other, that never part.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Sample: TypeAlias = "Mapping[str, Any]"

PAIR = ("chosen_", "rejected_")
# Tokens of a run that torch joins on one thread, whatever comes with the last sample of it.
_SHORT = 16_384
_MOST = 2**63 - 1  # of int64
_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", "loss_weights")


class Samples:
    """The samples of a microbatch by their keys.

    Args:
        samples: The mappings.

    Attributes:
        prefixes: What the keys of each side begin with; an empty prefix where there are no pairs.
        lengths: Tokens of each side of each sample, in the order in which they are laid out.
        token_keys: The further keys with one number for each token, without their prefix; rising.
        number_keys: The keys with one number for each sample, in full; rising.

    Raises:
        TypeError: If something is no sample, or holds what cannot be collated.
        ValueError: If only some samples have a key, there are no `input_ids`, or a side of a pair
            is missing.
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples
        keys = _shared_keys(samples)
        self.prefixes = PAIR if "chosen_input_ids" in keys else ("",)
        if self.prefixes == PAIR:
            keys = _checked_pair_keys(keys)
        if self.prefixes[0] + "input_ids" not in keys:
            raise ValueError(f"the samples have no 'input_ids', but {', '.join(sorted(keys))}")
        first = samples[0]
        known = {prefix + key for prefix in self.prefixes for key in _KNOWN}
        self.number_keys = [key for key in sorted(keys.difference(known)) if _is_number(first[key])]
        others = keys.difference(known, self.number_keys)
        self.token_keys = sorted({key.removeprefix(self._prefix_of(key)) for key in others})
        self._keys = keys
        self._tokens: npt.NDArray[Any] | None = None
        self._plain = _plain_tensors(self._values("input_ids"))
        if self._plain is None:
            self._tokens, self.lengths = self._joined("input_ids", "iu")
        else:
            self.lengths = list(map(torch.Tensor.numel, self._plain))
        if self.prefixes == PAIR and 0 in self.lengths:
            name = self._name("input_ids", self.lengths.index(0))
            raise ValueError(f"{name} is empty, but both sides of a pair have tokens")

    def has(self, key: str) -> bool:
        """Whether the samples have a key, with its prefix where there is one."""
        return self.prefixes[0] + key in self._keys

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor] | None] | None:
        """Return the token ids and labels of each sample as they are; None if not all are tensors.

        What else could be wrong with them (their device, fewer labels than tokens, other dtypes) is
        found by the op that takes them, and told by `tokens` and `labels`.
        """
        if self._plain is None or not self.has("labels"):
            return None if self._plain is None else (self._plain, None)
        labels = self._values("labels")
        return (self._plain, labels) if set(map(type, labels)) == {torch.Tensor} else None

    def tokens(self) -> torch.Tensor:
        """Return the token ids, end to end; int32 or int64.

        Raises:
            TypeError: If tensors are not in main memory.
        """
        if self._tokens is None:
            self._tokens, _ = self._joined("input_ids", "iu")
        return torch.from_numpy(self._tokens)

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each sample begins among the joined ones, and the number of each."""
        return torch.from_numpy(offsets_of(self.lengths)), torch.arange(len(self.lengths))

    def labels(self) -> torch.Tensor | None:
        """Return the labels, end to end; None where the samples have none.

        Raises:
            TypeError: If they are one number for each sample.
            ValueError: If a sample has more or fewer of them than tokens.
        """
        if not self.has("labels"):
            return None
        return torch.from_numpy(self._column("labels", "iu"))

    def values(self, key: str) -> torch.Tensor:
        """Return what the samples hold for each token under a further key, end to end.

        Raises:
            TypeError: If it is something else than numbers.
            ValueError: If a sample has more or fewer of them than tokens.
        """
        parts = self._values(key)
        for part in parts:
            if isinstance(part, torch.Tensor) and part.dtype in _UNKNOWN_TO_NUMPY:
                return self._bits(key, parts, part.dtype)
        return torch.from_numpy(self._column(key, "iufb"))

    def loss_weights(self) -> torch.Tensor | None:
        """Return the weight of each token, end to end; None where the samples have none.

        One weight for a sample is that of each of its tokens.

        Raises:
            TypeError: If they are no numbers.
            ValueError: If a sample has neither one nor one for each token.
        """
        if not self.has("loss_weights"):
            return None
        weights = self._values("loss_weights")
        if not _is_number(weights[0]):
            return self.values("loss_weights")
        for side, weight in enumerate(weights):
            if not _is_number(weight):
                raise TypeError(
                    f"{self._name('loss_weights', side)} is {type(weight).__name__}, but sample 0 "
                    "has one number there"
                )
        each = torch.tensor([float(weight) for weight in weights])
        return each.repeat_interleave(torch.tensor(self.lengths))

    def numbers(self, key: str) -> torch.Tensor:
        """Return one number for each sample, as torch makes them of Python numbers.

        Raises:
            TypeError: If a sample has something else there.
            ValueError: If an integer does not fit int64, or not the float32 that fractions of other
                samples make of it.
        """
        values = [sample[key] for sample in self._samples]
        for number, value in enumerate(values):
            if not _is_number(value):
                raise TypeError(
                    f"{key} of sample {number} is {type(value).__name__}, but sample 0 has one "
                    "number there"
                )
        plain = [value.item() if hasattr(value, "item") else value for value in values]
        for number, value in enumerate(plain):
            if isinstance(value, int) and not -_MOST - 1 <= value <= _MOST:
                raise ValueError(
                    f"{key} of sample {number} is {value}, but integers are int64, from "
                    f"{-_MOST - 1} to {_MOST}"
                )
        made = torch.tensor(plain)
        if made.is_floating_point():
            for number, (value, held) in enumerate(zip(plain, made.tolist(), strict=True)):
                if isinstance(value, int) and value != held:
                    raise _rounded(f"{key} of sample {number}", value, made.dtype)
        return made

    def check_masks(self) -> None:
        """Refuse padding in samples, which would be trained on.

        Raises:
            ValueError: If an `attention_mask` is not all ones.
        """
        if not self.has("attention_mask"):
            return
        # Counting takes a fifth of joining, which is left to find out what is wrong.
        if all(
            isinstance(mask, list) and len(mask) == mask.count(1) == length
            for mask, length in zip(self._values("attention_mask"), self.lengths, strict=True)
        ):
            return
        joined = self._column("attention_mask", "iub")
        if not (joined == 1).all():
            side, token = _place(int(np.argmax(joined != 1)), self.lengths)
            raise ValueError(
                f"{self._sample(side)} has {self._key('attention_mask', side)} 0 at token {token}, "
                "but samples come without padding: tokenise with padding=False, or cut the "
                "padding off"
            )

    def check_positions(self, start: int) -> None:
        """Refuse positions that are not those that the batch will have, counting from `start`.

        Raises:
            TypeError: If they are not one for each token, as those with an axis for time, height
                and width are.
            ValueError: If they count otherwise.
        """
        if not self.has("position_ids"):
            return
        positions = self._column("position_ids", "iu")
        expected = np.arange(len(positions)) + start
        expected -= np.repeat(offsets_of(self.lengths)[:-1], self.lengths)
        if not np.array_equal(positions, expected):
            place = int(np.argmax(positions != expected))
            side, token = _place(place, self.lengths)
            raise ValueError(
                f"{self._sample(side)} has {self._key('position_ids', side)} {positions[place]} "
                f"at token {token}, but positions are made anew and count from {start}: drop the "
                "key"
            )

    def pair_lengths(self) -> list[int]:
        """Return the tokens of both sides of each pair."""
        chosen, rejected = self.lengths[::2], self.lengths[1::2]
        return [sum(sides) for sides in zip(chosen, rejected, strict=True)]

    def _prefix_of(self, key: str) -> str:
        """Return the prefix of a per-token key."""
        for prefix in self.prefixes:
            if key.startswith(prefix):
                return prefix
        raise TypeError(
            f"{key} of sample 0 is {type(self._samples[0][key]).__name__}, but what a pair does "
            "not have on either side is one number; drop the key if no model takes it"
        )

    def _values(self, key: str) -> list[Any]:
        if len(self.prefixes) == 1:
            return list(map(itemgetter(key), self._samples))
        keys = [prefix + key for prefix in self.prefixes]
        return [sample[key] for sample in self._samples for key in keys]

    def _sample(self, side: int) -> str:
        return f"sample {side // len(self.prefixes)}"

    def _key(self, key: str, side: int) -> str:
        return self.prefixes[side % len(self.prefixes)] + key

    def _name(self, key: str, side: int) -> str:
        return f"{self._key(key, side)} of {self._sample(side)}"

    def _joined(self, key: str, kinds: str) -> tuple[npt.NDArray[Any], list[int]]:
        """Join what the samples hold under a key, and return the length of each."""
        tensors = _joined_tensors(self._values(key))
        if tensors is not None:
            return tensors
        parts = []
        for side, (sample, prefix) in enumerate(itertools.product(self._samples, self.prefixes)):
            name, number = prefix + key, side // len(self.prefixes)
            parts.append(token_array(sample[name], name, number, kinds))
        joined = np.concatenate(parts)
        if joined.dtype.kind == "f":
            self._check_integers(key, parts)
        return joined, [len(part) for part in parts]

    def _check_integers(self, key: str, parts: list[Any]) -> None:
        """Refuse integers that are rounded where other samples have fractions."""
        for side, part in enumerate(parts):
            array = np.asarray(part)
            if array.dtype.kind != "f" and array.size > 0:
                large = array[np.argmax(array.astype(np.float64).astype(array.dtype) != array)]
                if int(float(large)) != large:
                    raise _rounded(self._name(key, side), int(large), torch.float64)

    def _column(self, key: str, kinds: str) -> npt.NDArray[Any]:
        """Join what the samples hold under a key, which must be one number for each token."""
        joined, found = self._joined(key, kinds)
        self._check_lengths(key, found)
        return joined

    def _check_lengths(self, key: str, found: list[int]) -> None:
        if found != self.lengths:
            side = next(i for i, length in enumerate(self.lengths) if found[i] != length)
            raise ValueError(
                f"{self._sample(side)} has {self.lengths[side]} {self._key('input_ids', side)} but "
                f"{found[side]} {self._key(key, side)}: give one for each token"
            )

    def _bits(self, key: str, parts: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Join tensors of a dtype that NumPy does not know."""
        for side, part in enumerate(parts):
            if not isinstance(part, torch.Tensor) or part.dtype != dtype or part.dim() != 1:
                found = type(part).__name__
                if isinstance(part, torch.Tensor):
                    found = f"a {part.dtype} tensor of shape {tuple(part.shape)}"
                raise TypeError(
                    f"{self._name(key, side)} is {found}, but where one sample has {dtype} all "
                    "have it, one number for each token"
                )
            if part.device.type != "cpu" or part.requires_grad:
                raise _not_here(part, self._key(key, side), side // len(self.prefixes))
        self._check_lengths(key, [len(part) for part in parts])
        width = torch.uint8 if dtype.itemsize == 1 else torch.int16
        return torch.cat([part.view(width) for part in parts]).view(dtype)


_UNKNOWN_TO_NUMPY = frozenset(
    {
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
)


def _plain_tensors(values: list[Any]) -> list[torch.Tensor] | None:
    """Return the values if all are tensors of one dimension; None for all else."""
    if set(map(type, values)) != {torch.Tensor}:
        return None
    return values if set(map(torch.Tensor.dim, values)) == {1} else None


def _joined_tensors(values: list[Any]) -> tuple[npt.NDArray[Any], list[int]] | None:
    """Join plain tensors of token ids, in half the time of one array each; None for all else."""
    if _plain_tensors(values) is None:
        return None  # told with the sample's number, as what follows is
    dtypes = {value.dtype for value in values}
    if dtypes != {torch.int64} and dtypes != {torch.int32}:
        return None
    lengths = [value.numel() for value in values]
    joined = torch.empty(sum(lengths), dtype=values[0].dtype)
    try:
        # Torch copies short runs at once, and wakes threads up for long ones, which takes longer.
        start = first = end = 0
        for last, length in enumerate(lengths, 1):
            end += length
            if end - start >= _SHORT or last == len(lengths):
                torch.cat(values[first:last], out=joined[start:end])
                start, first = end, last
    except RuntimeError:  # not all in main memory
        return None
    return joined.numpy(), lengths


def offsets_of(lengths: list[int]) -> npt.NDArray[np.int64]:
    """Return where each sample begins: for lengths 3 and 2, [0, 3, 5]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def token_array(values: Any, key: str, sample: int, kinds: str = "iu") -> Any:
    """Return what a sample holds under a key, one number for each token, for NumPy to join.

    Args:
        values: A list, an array or a tensor.
        key (str): The key, for errors.
        sample (int): The sample's number, for errors.
        kinds (str): The NumPy kinds that are allowed.

    Returns:
        array.array | np.ndarray: One-dimensional; integers are int32 or int64.

    Raises:
        TypeError: If it is something else.
        ValueError: If an integer does not fit int64.
    """
    if isinstance(values, list):
        try:
            # 24 ns a token on lists of about 100 ints; np.asarray takes 31, torch.tensor 118.
            buffer = array("q")
            buffer.fromlist(values)
            return buffer
        except (TypeError, OverflowError):
            pass  # not all are ints of 64 bits: what they are is NumPy's to find out
    if isinstance(values, torch.Tensor):
        try:
            values = values.numpy()
        except (TypeError, RuntimeError):  # another device, a dtype unknown to NumPy, a gradient
            raise _not_here(values, key, sample) from None
    try:
        part = np.asarray(values)
    except ValueError:  # nested lists of unequal lengths
        part = np.empty(0, object)
    # Torch has no floats of more than 8 bytes, which are the long doubles of NumPy.
    known = part.dtype.kind in kinds and part.dtype.itemsize <= 8
    if part.ndim != 1 and known:
        wanted = f"one number for each token, of shape ({part.shape[-1] if part.ndim else 'L'},)"
        raise TypeError(f"{key} of sample {sample} has shape {part.shape}, but must be {wanted}")
    if not known and (part.size > 0 or part.dtype == object):
        kind = "numbers, one for each token or one for the sample" if "f" in kinds else "integers"
        found = type(values).__name__
        if isinstance(values, np.ndarray):
            found = f"an array of {part.dtype}"
        raise TypeError(
            f"{key} of sample {sample} is {found}, but must hold {kind}; drop the key if no model "
            "takes it"
        )
    if part.dtype == np.uint64 and part.size > 0 and int(part.max()) > _MOST:
        raise ValueError(
            f"{key} of sample {sample} has {part.max()}, but integers are int64, up to {_MOST}"
        )
    if part.dtype.kind in "iu" or part.size == 0:
        return part if part.dtype == np.int32 else part.astype(np.int64, copy=False)
    if not isinstance(values, list) or part.dtype.kind != "f":
        return part
    held = part.astype(np.float32)
    for value, rounded in zip(values, held.tolist(), strict=True):
        if isinstance(value, int) and value != rounded:
            raise _rounded(f"{key} of sample {sample}", value, torch.float32)
    return held


def _rounded(name: str, value: int, dtype: torch.dtype) -> ValueError:
    return ValueError(
        f"{name} has the integer {value} where there are fractions as well, and {dtype} cannot "
        "hold it: give integers everywhere, or floats"
    )


def _not_here(tensor: torch.Tensor, key: str, sample: int) -> TypeError:
    return TypeError(
        f"{key} of sample {sample} is a {tensor.dtype} tensor on {tensor.device}, but samples are "
        "collated on the CPU, without gradients, from dtypes that NumPy has; convert it, and move "
        "the finished batch"
    )


def _shared_keys(samples: Sequence[Any]) -> frozenset[str]:
    """Return the keys, which all samples must have."""
    # By types, of which there are few.
    if not all(issubclass(kind, Mapping) for kind in set(map(type, samples))):
        for number, sample in enumerate(samples):
            if not isinstance(sample, Mapping):  # what stands in for one has another type
                raise TypeError(
                    f"sample {number} is a {type(sample).__name__}, but a sample is a mapping with "
                    "'input_ids'"
                )
    keys = frozenset(samples[0])
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"the samples have the key {key!r}, but keys are strings")
    for number, sample in enumerate(samples):
        if sample.keys() != keys:
            key = min(keys.symmetric_difference(sample), key=str)
            has, lacks = (number, 0) if key in sample else (0, number)
            raise ValueError(
                f"sample {lacks} has no '{key}', but sample {has} has: give it to all samples, or "
                "to none"
            )
    return keys


def _checked_pair_keys(keys: frozenset[str]) -> frozenset[str]:
    """Return the keys of pairs, which must be the same on both sides."""
    for key in sorted(keys):
        for prefix, other in (PAIR, PAIR[::-1]):
            if key.startswith(prefix) and other + key.removeprefix(prefix) not in keys:
                raise ValueError(
                    f"the samples have '{key}', but no '{other}{key.removeprefix(prefix)}': both "
                    "sides of a pair have the same keys"
                )
    if "input_ids" in keys:
        raise ValueError(
            "the samples have 'input_ids' beside 'chosen_input_ids': give samples or pairs"
        )
    return keys


def _place(token: int, lengths: list[int]) -> tuple[int, int]:
    """Return which sample a token of the joined samples is in, and where in it."""
    offsets = offsets_of(lengths)
    sample = int(np.searchsorted(offsets, token, side="right")) - 1
    return sample, token - int(offsets[sample])


def _is_number(value: Any) -> bool:
    """Whether a value is one number, of Python, NumPy or torch."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if isinstance(value, torch.Tensor):
            return value.ndim == 0
        return value.ndim == 0 and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    return isinstance(value, int | float)
