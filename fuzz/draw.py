"""What a fuzzer draws its cases from: numbers near every edge, JSON of any shape, damaged bytes.

A case is a function of one integer, its seed, so that a failure can be had again from the number
that was printed. Python's generator is used because its numbers are the same in every version.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Where counters, dtypes and products of two of them end.
EDGES = [
    *(0, 1, 2, 3, 7, 8, 255, 256, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1),
]
WEIRD = [
    *(None, True, False, "", "17", "auto", [], {}, 0.0, -0.0, 0.5, 1e18, 1e300),
    *(float("nan"), float("inf"), -(2**63), 2**63, 2**64, 10**30, -(10**30)),
]
TEXT = string.ascii_letters + string.digits + "_-\\\"'{}[]:,. \t\n\0é\u2028\U0001f600"


class Draw(random.Random):
    """A seeded source of values."""

    def chance(self, share: float) -> bool:
        """True in this share of the cases."""
        return self.random() < share

    def one_of(self, values: Sequence[T]) -> T:
        """One of these."""
        return values[self.randrange(len(values))]

    def sizes(self, count: int, most: int) -> list[int]:
        """So many numbers from 0 to `most`, mostly small, or all alike."""
        kind = self.randrange(4)
        if kind == 0:
            return [self.randint(0, most)] * count
        if kind == 1:
            return [self.randint(0, most) for _ in range(count)]
        return [min(most, int(self.expovariate(3 / (most + 1)))) for _ in range(count)]

    def integer(self) -> int:
        """Any integer, mostly small or at an edge of 64 bits."""
        kind = self.randrange(4)
        if kind == 0:
            return self.randint(-3, 40)
        if kind == 1:
            return self.one_of(EDGES) + self.randint(-1, 1)
        if kind == 2:
            return -self.one_of(EDGES)
        return self.randint(-(2**63), 2**63 - 1)

    def int64(self) -> int:
        """One that torch and NumPy take: wider ones they refuse in their own words."""
        return max(-(2**63), min(2**63 - 1, self.integer()))

    def text(self, most: int = 12) -> str:
        """Characters, some of which need to be escaped."""
        return "".join(self.choices(TEXT, k=self.randint(0, most)))

    def value(self, depth: int = 2) -> Any:
        """Anything that JSON, YAML or a state may hold."""
        kind = self.randrange(8 if depth > 0 else 5)
        if kind <= 1:
            return self.one_of(WEIRD)
        if kind == 2:
            return self.integer()
        if kind == 3:
            return self.text()
        if kind == 4:
            return self.uniform(-1e6, 1e6)
        if kind == 5:
            return {self.text(): self.value(depth - 1) for _ in range(self.randrange(3))}
        return [self.value(depth - 1) for _ in range(self.randrange(4))]

    def damaged(self, content: bytes) -> bytes:
        """These bytes with some of them changed, cut out, doubled or swapped for edges."""
        data = bytearray(content)
        for _ in range(self.randint(1, 6)):
            if not data:
                break
            at = self.randrange(len(data))
            kind = self.randrange(7)
            if kind == 0:
                data[at] ^= 1 << self.randrange(8)
            elif kind == 1:
                data[at] = self.randrange(256)
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                del data[at : at + self.randint(1, 8)]
            elif kind == 4:
                data[at:at] = data[at : at + self.randint(1, 64)]
            elif kind == 5:
                width = self.one_of([2, 4, 8])
                number = self.one_of([*EDGES, -1, -2]) % (1 << (8 * width))
                data[at : at + width] = number.to_bytes(width, "little")
            else:
                # Texts: another number in the place of one.
                digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
                if digits:
                    place = self.one_of(digits)
                    data[place : place + 1] = str(self.integer()).encode()
        return bytes(data)

    def changed(self, value: Any, depth: int = 4) -> Any:
        """Plain data with one part of it taken away, replaced or added."""
        if isinstance(value, dict) and value and depth and self.chance(0.9):
            key = self.one_of(list(value))
            rest = {k: v for k, v in value.items() if k != key}
            kind = self.randrange(12)
            if kind == 0:
                return rest
            if kind == 1:
                return {**value, self.text(): self.value()}
            return {**value, key: self.changed(value[key], depth - 1)}
        if isinstance(value, list) and value and depth and self.chance(0.9):
            at = self.randrange(len(value))
            kind = self.randrange(6)
            if kind == 0:
                return value[:at] + value[at + 1 :]
            if kind == 1:
                return value[:at] + value[at : at + 1] + value[at:]
            return [*value[:at], self.changed(value[at], depth - 1), *value[at + 1 :]]
        if isinstance(value, int) and self.chance(0.5):
            return self.integer()
        return self.value()
