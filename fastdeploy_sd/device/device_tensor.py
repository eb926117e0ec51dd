"""What stands for a Paddle tensor where the memory is a device's that Paddle does not know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self, cast

import numpy.typing as npt
import paddle

from fastdeploy_sd.device.memory import DeviceMemory
from fastdeploy_sd.device.program.declaration import ANY, ELEMENT_BYTES
from fastdeploy_sd.device.program.host_op import array_dtype_name


class DeviceTensor:
    """A contiguous array in a device's memory; the host cannot read it where it is.

    Layers and recordings ask it for its dtype, shape and address, as they ask a Paddle tensor. `memory` is kept alive,
    `element` is the name of the elements' type in declarations.
    """

    __slots__ = ("address", "element", "memory", "shape")

    def __init__(self, memory: DeviceMemory, address: int, element: str, shape: Sequence[int]) -> None:
        self.memory, self.address, self.element, self.shape = memory, address, element, list(shape)
        assert memory.address <= address, "an array begins before its memory"
        assert address + self.num_bytes <= memory.address + memory.num_bytes, "an array ends after its memory"

    def __repr__(self) -> str:
        return f"<{self.element}{self.shape} of a device>"

    @property
    def dtype(self) -> paddle.dtype:
        """Paddle's name of its element type."""
        return cast("paddle.dtype", getattr(paddle, self.element))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.element]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ELEMENT_BYTES[self.element]

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        """Return True: others are not made."""
        return True

    def numel(self) -> int:
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


def element_of(dtype: npt.DTypeLike) -> str:
    """Return the name of an array's element type; uint16 is bfloat16. Raises ValueError: no op has such elements."""
    name = array_dtype_name(dtype)
    if name not in ANY:
        raise ValueError(f"array: expected elements of {', '.join(ANY)}, got {name}")
    return name


def dtype_name(dtype: Any) -> str:
    """Return the name that declarations have for a NumPy or Paddle dtype."""
    return str(dtype).removeprefix("paddle.") if isinstance(dtype, paddle.dtype) else array_dtype_name(dtype)
