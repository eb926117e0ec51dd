"""Arrays in a device's memory: where they are and what is in them. Knows no framework, no device and no op."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Self

from fastdeploy_sd.device.program.declaration import ELEMENT_BYTES


class DeviceMemory:
    """A piece of memory that is given back when nothing over it is left.

    Args:
        give_back: called with the address then.
    """

    __slots__ = ("__weakref__", "address", "num_bytes")

    def __init__(self, address: int, num_bytes: int, give_back: Callable[[int], object]) -> None:
        self.address, self.num_bytes = address, num_bytes
        weakref.finalize(self, give_back, address).atexit = False  # what a process has, its end gives back


class DeviceArray:
    """A contiguous array in a device's memory; the host cannot read it where it is.

    Attributes:
        memory: keeps it alive.
        address: of its first element.
        element: type of its elements, by its name in declarations.
        shape: a list, as Paddle's.
    """

    __slots__ = ("address", "element", "memory", "shape")

    def __init__(self, memory: DeviceMemory, address: int, element: str, shape: Sequence[int]) -> None:
        self.memory, self.address, self.element, self.shape = memory, address, element, list(shape)
        assert memory.address <= address, "an array begins before its memory"
        assert address + self.num_bytes <= memory.address + memory.num_bytes, "an array ends after its memory"

    def __repr__(self) -> str:
        return f"<{self.element}{self.shape} of a device>"

    @property
    def num_bytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.element]

    @property
    def row_bytes(self) -> int:
        """Of an element of the first dimension."""
        return math.prod(self.shape[1:]) * ELEMENT_BYTES[self.element]

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.address

    def is_contiguous(self) -> bool:
        """Return True: others are not made."""
        return True

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def at(self, offset: int, element: str, shape: Sequence[int]) -> Self:
        """Return an array over the same memory, `offset` bytes after the start of this one."""
        return type(self)(self.memory, self.address + offset, element, shape)

    def reshape(self, shape: Sequence[int]) -> Self:
        """Return the same elements in another shape."""
        assert math.prod(shape) == self.numel(), f"expected {self.numel()} elements, got {list(shape)}"
        return self.at(0, self.element, shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Self:
        """Return rows [begin, end) of the first dimension, over the same memory."""
        begin, end, step = rows.indices(self.shape[0])
        assert step == 1, f"expected rows that follow one another, got {rows}"
        return self.at(begin * self.row_bytes, self.element, (max(end - begin, 0), *self.shape[1:]))
