"""NumPy's .npy format, read without trust.

NumPy allocates as much as a header says before it looks at the data. Here the data come first, and
a header that says something else is refused.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt


def parse(content: bytes) -> npt.NDArray[Any]:
    """Return the array that is the contents of a .npy file, as a read-only view of them.

    Raises:
        Exception: If it is none; NumPy raises many classes.
    """
    stream = io.BytesIO(content)
    versions = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(stream)
    if version not in versions:
        raise ValueError(f"version {version} of the format is unknown")
    shape, by_column, dtype = versions[version](stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    data = np.frombuffer(content, dtype, offset=stream.tell())
    return data.reshape(shape, order="F" if by_column else "C")
