"""The device of the process: its memory, and where recorded passes run. Chosen once. Knows no op."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastdeploy_sd.device import tensors
from fastdeploy_sd.device.buffer import Event, HostDeviceBuffer
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.device.program.program import Inputs, Program, Recording, allocate_arena
from fastdeploy_sd.types import Bytes

# Who writes rows makes copies of them.
_ROWS_AT_ONCE = 1024


class Device:
    """Memory and programs: here the host's, over NumPy's memory. Element types are NumPy's; uint16 is bfloat16.

    CudaDevice overrides everything: a GPU has its own memory, copies in `wrap` and `read`, and runs calls
    asynchronously and in order.
    """

    kind: Literal["cpu", "gpu"] = "cpu"
    text = "cpu"

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
        """Return zeros; the system provides a page of the host's when it is first touched.

        Raises MemoryError, OSError, OverflowError: the device has not that much.
        """
        return tensors.from_numpy(tensors.aligned_zeros(shape, dtype))

    def wrap(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a tensor of what is in a contiguous array: over its memory where the device can read that.

        Raises ValueError: not contiguous, or of a type that tensors lack; MemoryError: the device has not that much.
        """
        return tensors.from_numpy(array)

    def filled(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, write: Callable[[slice, npt.NDArray[Any]], object]
    ) -> Tensor:
        """Return a tensor whose rows `write` writes, some at a time, into an array of theirs.

        Raises MemoryError, OSError: the device has not that much.
        """
        array: npt.NDArray[Any] = np.empty(shape, dtype)
        for begin in range(0, len(array), _ROWS_AT_ONCE):
            rows = slice(begin, min(begin + _ROWS_AT_ONCE, len(array)))
            write(rows, array[rows])
        return self.wrap(array)

    def loading(self, num_bytes: int) -> contextlib.AbstractContextManager[object]:
        """Take large things, num_bytes or so, up piece by piece in the body; all have arrived at its end.

        Raises MemoryError: there is no memory for the pieces; ValueError: a kernel failed.
        """
        return contextlib.nullcontext(num_bytes)

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return what is in a tensor, bfloat16 as its bits: over its memory where the host can read that.

        Else it waits for what was started, and copies.
        """
        if tensor.dtype == paddle.bfloat16:
            # As bytes, Paddle's view of a slice would begin at another place.
            return tensors.to_numpy(tensor.view(paddle.int16)).view(np.uint16)
        return tensors.to_numpy(tensor)

    def num_bytes(self, tensor: Tensor) -> int:
        """Return how many bytes a tensor has."""
        return self.read(tensor).nbytes

    def write(self, tensor: Tensor, array: npt.NDArray[Any], begin: int = 0) -> None:
        """Copy an array into the rows of a tensor from `begin` on, after the calls so far.

        Raises ValueError: of another type or shape than the rows.
        """
        rows = self.read(tensor)[begin : begin + len(array)]
        if rows.dtype != array.dtype or rows.shape != array.shape:
            raise ValueError(f"array: expected {rows.dtype}{list(rows.shape)}, got {array.dtype}{list(array.shape)}")
        rows[:] = array

    def prepare_overwrites(self, num_bytes: int) -> None:
        """Take what `overwrite` needs for so many bytes at a time, while nothing runs that waits.

        Raises MemoryError: there is not that much.
        """

    def overwrite(self, address: int, num_bytes: int, write: Callable[[Bytes], object]) -> None:
        """Have `write` write all of u8[num_bytes], and put it where nothing that runs reads, while other calls run.

        Any thread may call it, one at a time. Raises ValueError: it did not arrive.
        """
        write(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)))

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Start to copy one tensor of the device over another, after the calls so far.

        Raises ValueError: they have not as many bytes.
        """
        self.write(to, self.read(source))

    def arena(self, num_bytes: int) -> Tensor:
        """Return memory for programs that never run at the same time.

        Raises ConfigError: the device has not that much.
        """
        return allocate_arena(num_bytes)

    def program(self, recording: Recording, inputs: Inputs, arena: Tensor | None = None) -> Program:
        """Return a recording made ready to run; see Program."""
        return Program(recording, inputs, arena)

    def buffer(self, array: npt.NDArray[Any]) -> HostDeviceBuffer:
        """Return a buffer of a contiguous host array, with its content on the device."""
        return HostDeviceBuffer(array)

    def bind(self, op: HostOp, **arguments: Any) -> BoundCall:
        """Return a call of an op on arrays of the device; see HostOp.bind.

        Raises ConfigError: the device has no such op.
        """
        return op.bind(**arguments)

    def event(self) -> Event:
        """Return an event that was never recorded."""
        return Event()

    def wait(self) -> None:
        """Return when all that was started is done, and what was downloaded is where the host reads it.

        Raises DeviceLost: a kernel failed; nothing that was started is of use, nor is the device.
        """


_HOST = Device()
_chosen = _HOST


def device() -> Device:
    return _chosen


def choose(gpu: Device | None) -> Device:
    """Make a device the process's, before anything is allocated, and return it; None = the host."""
    global _chosen  # noqa: PLW0603 (one device per process)
    _chosen = _HOST if gpu is None else gpu
    return _chosen


def constant(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a tensor with a copy of a small array in the device's memory; raises ValueError as Device.wrap."""
    copy: npt.NDArray[Any] = tensors.aligned_zeros(array.shape, array.dtype)
    copy[...] = array
    return device().wrap(copy)
