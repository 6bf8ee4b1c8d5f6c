"""Integers in any of the forms that people hold them in, as plain ints and as tensors for the ops.

What describes samples (lengths, counts, offsets) is copied into dense int64 tensors: one pass and
eight bytes for each number, so that later changes to the caller's data cannot reach a plan. What
holds the tokens of a whole data set is viewed, never copied. Nothing is rounded or cut: floats and
bools are refused.
"""

from __future__ import annotations

import operator
import reprlib
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_BEYOND = 1 << 63


class _Short(reprlib.Repr):
    """Values in little room. Python refuses to write an integer of thousands of digits at all."""

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= 256 else f"an integer of {bits} bits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 3

Integers: TypeAlias = torch.Tensor | npt.NDArray[np.integer] | Sequence[int]
Bools: TypeAlias = torch.Tensor | npt.NDArray[np.bool_] | Sequence[bool]


def shown(value: object) -> str:
    """Return a value as an error prints it: in full, unless it is long or deeply nested."""
    return _SHORT.repr(value)


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of 64 bits, of Python or NumPy or torch, as a plain int.

    Args:
        name (str): What the value is called in errors.
        value: An integer.
        least (int): The smallest allowed; None: any is.

    Raises:
        TypeError: If it is not an integer; a bool is none.
        ValueError: If it is less than `least`, or does not fit into 64 bits with a sign.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}, but must be an integer")
    if least is not None and number < least:
        raise ValueError(f"{name} is {shown(number)}, but must be {least} or more")
    if not -_BEYOND <= number < _BEYOND:
        raise ValueError(f"{name} is {shown(number)}, which does not fit into 64 bits")
    return number


def int64_tensor(name: str, values: Integers, *, copy: bool = True) -> torch.Tensor:
    """Turn integers into an int64 tensor of the same shape.

    Args:
        name (str): What the values are called in errors.
        values: Integers of any width.
        copy (bool): Whether the tensor must have memory of its own. Without it, int64 values are
            viewed where they are, to be read and not to be kept.

    Returns:
        torch.Tensor: int64, dense, on the device that a tensor was on and else on the CPU.

    Raises:
        TypeError: If the values are not integers.
        ValueError: If one does not fit into 64 bits with a sign.
    """
    if isinstance(values, torch.Tensor):
        dtype = values.dtype
        if (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) and values.numel():
            raise TypeError(f"{name} must hold integers, but is a tensor of {dtype}")
        if copy:
            return values.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        return values.to(torch.int64).contiguous()
    array = _array(name, values)
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name} must hold integers, but is an array of {array.dtype}")
    if array.dtype == np.uint64 and array.size > 0 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds {array.max()}, more than {np.iinfo(np.int64).max}")
    # Torch warns of memory that must not be written.
    make = np.array if copy or not array.flags.writeable else np.asarray
    return torch.from_numpy(make(array, dtype=np.int64, order="C"))


def token_tensor(name: str, values: Integers) -> torch.Tensor:
    """View int32 or int64 tokens or labels, read-only ones included, as a tensor.

    Raises:
        TypeError: If the values are integers of another width, or no integers.
    """
    if not isinstance(values, torch.Tensor):
        array = _array(name, values)
        if array.dtype not in (np.int32, np.int64) and array.size > 0:
            raise TypeError(f"{name} must be int32 or int64, but is an array of {array.dtype}")
        values = _viewed(array if array.size > 0 else array.astype(np.int64))
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, but is a tensor of {values.dtype}")
    return values


def value_tensor(name: str, values: Any) -> torch.Tensor:
    """View numbers of any width, read-only ones included, as a tensor.

    Raises:
        TypeError: If the values are no numbers.
    """
    if isinstance(values, torch.Tensor):
        return values
    array = _array(name, values)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"{name} must hold numbers, but is an array of {array.dtype}")
    return _viewed(array)


def bool_tensor(name: str, values: Bools) -> torch.Tensor:
    """Copy bools into a tensor of the same shape.

    Raises:
        TypeError: If the values are not bools.
    """
    if not isinstance(values, torch.Tensor):
        array = _array(name, values)
        if array.dtype != bool and array.size > 0:
            raise TypeError(f"{name} must hold bools, but is an array of {array.dtype}")
        return torch.from_numpy(np.array(array, dtype=bool, order="C"))
    if values.dtype != torch.bool:
        raise TypeError(f"{name} must hold bools, but is a tensor of {values.dtype}")
    return values.clone(memory_format=torch.contiguous_format)


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:
        raise TypeError(f"{name} must be numbers, but is of lists of unequal lengths") from None


def _viewed(array: npt.NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns that writing to a read-only array is undefined; nothing here writes.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
