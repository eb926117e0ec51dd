"""Op calls that are made in every step: their params, arguments and results stay where they are.

A step's host work runs with cold caches, as gigabytes of weights pass through them in between. What counts is therefore
how many different objects it touches, and an argument that is the same array as in the last step is not looked at.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.library import CParams, function
from fastdeploy_sd.ops.native.arrays import Array, pointer


class StandingCall:
    """One op and its params. Keeps alive what they point to.

    Args:
        fields: the struct whose fields `bind` sets, `params` or one in it.
    """

    def __init__(self, op: str, params: CParams, fields: CParams | None = None) -> None:
        self._op, self._function = op, function(op)
        self._params = params
        self._reference = ctypes.byref(params)
        self._fields = params if fields is None else fields
        self._bound: dict[str, tuple[Array | None, tuple[int, ...]]] = {}

    def bind(self, name: str, array: Array | None, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        """Point a field at an array; None = the null pointer.

        Raises:
            ValueError: shape, dtype or contiguity of the array is off.
        """
        bound = self._bound.get(name)
        if bound is None or bound[0] is not array or bound[1] != shape:
            setattr(self._fields, name, pointer(name, array, shape, dtype))
            self._bound[name] = array, shape

    def run(self) -> None:
        """Call the op.

        Raises:
            ValueError: the kernel refused its arguments; the text names op and argument.
        """
        error = self._function(self._reference)
        if error:
            raise ValueError(f"{self._op}: {error.decode()}")


class Room:
    """An array that holds the results of call after call, with room for more than the last one needed.

    Attributes:
        whole: [capacity, *row_shape]; replaced when it grows.
    """

    def __init__(self, dtype: npt.DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.whole: npt.NDArray[Any] = np.empty((0, *row_shape), dtype)
        self._first = self.whole

    def reserve(self, num_rows: int) -> bool:
        """Have room for that many rows; returns whether it had to grow, which loses what was in it."""
        if num_rows <= len(self.whole):
            return False
        self.whole = np.empty((1 << (num_rows - 1).bit_length(), *self.whole.shape[1:]), self.whole.dtype)
        self._first = self.whole
        return True

    def first(self, num_rows: int) -> npt.NDArray[Any]:
        """A view of the first rows; the same object as long as it is asked for as many."""
        if len(self._first) != num_rows:
            self._first = self.whole[:num_rows]
        return self._first
