"""Where a model's memory is and its recorded passes run. A CPU is the only device so far, and nobody else says so.

Another device has its own memory, copies in `wrap` and `read`, and captures a recording instead of calling the kernel
library. Knows no op.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastdeploy_sd.runtime import arena, tensors
from fastdeploy_sd.runtime.program import Inputs, Program, Recording


class Device(Protocol):
    """Memory and programs. Element types are NumPy's; uint16 is bfloat16."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
        """Return zeros; the system provides a page when it is first touched.

        Raises:
            MemoryError, OSError, OverflowError: the device has not that much.
        """
        ...

    def wrap(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a tensor of what is in a contiguous array: over its memory where the device can read that.

        Raises:
            ValueError: not contiguous, or of a type that tensors lack.
        """
        ...

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return what is in a tensor, bfloat16 as its bits: over its memory where the host can read that."""
        ...

    def arena(self, num_bytes: int) -> Tensor:
        """Return memory for programs that never run at the same time.

        Raises:
            ConfigError: the device has not that much.
        """
        ...

    def program(self, recording: Recording, inputs: Inputs, arena: Tensor | None = None) -> Program:
        """Return a recording made ready to run; see Program."""
        ...


class CpuDevice:
    """The host itself: tensors are over NumPy's memory, and the kernel library runs programs."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
        return tensors.from_numpy(tensors.aligned_zeros(shape, dtype))

    def wrap(self, array: npt.NDArray[Any]) -> Tensor:
        return tensors.from_numpy(array)

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        if tensor.dtype == paddle.bfloat16:
            return tensors.to_numpy(tensor.view(paddle.uint8)).view(np.uint16)
        return tensors.to_numpy(tensor)

    def arena(self, num_bytes: int) -> Tensor:
        return arena.allocate_arena(num_bytes)

    def program(self, recording: Recording, inputs: Inputs, arena: Tensor | None = None) -> Program:
        return Program(recording, inputs, arena)


DEVICE: Device = CpuDevice()
