"""The device's copies of the host arrays that the calls of a step read and write. Knows no op; needs no Paddle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.types import F32, I32, Rows

Logprobs = tuple[F32, I32, I32, F32]


class Output:
    """The output tokens of an in-flight step; `idle_s` is the device's idle time before it, 0 on the host."""

    idle_s = 0.0

    def extend(self) -> None:
        """Count the calls started since as part of the step: the device is idle only after them."""

    def take(self) -> None:
        """Wait for the tokens and put them in the host's arrays."""


_OUTPUT = Output()


class DeviceBuffers:
    """Host arrays as arguments of calls, and the copies between host and device: here the host, which copies nothing.

    The host prepares a step in its own arrays and reads the output there, wherever the model runs. A copy runs after
    the calls before it and before the calls after it.
    """

    def of(self, array: npt.NDArray[Any]) -> Any:
        """Return the argument of calls for an array."""
        return array

    def bind(self, op: HostOp, **arguments: Any) -> BoundCall:
        """Return a call of an op over arrays of the host, rows on a device and numbers; see HostOp.bind.

        The device's copy of an array that no step writes on the host has its present content.
        """
        return op.bind(**arguments)

    def send_plan(self) -> None:
        """Begin a step: copy what the host wrote for it, except grammar masks."""

    def send_masks(self) -> None:
        """Copy grammar masks, if any row has one in this step or had one in the step before."""

    def send_output(self) -> None:
        """Copy the output tokens of a step that another rank chose, and the rows they belong to."""

    def start_fetch(self) -> Output:
        """End a step: start to copy its output tokens to the host. One more step may begin before `Output.take`."""
        return _OUTPUT


HOST_BUFFERS = DeviceBuffers()


class RowsOnDevice:
    """Logits rows f32[L, V] that stay on the device; the host copies the few that it needs.

    Args:
        read: returns the content of such a tensor.
        find_logprobs: see ops.logprob_rows.LogprobRows.
    """

    def __init__(
        self, tensor: Any, read: Callable[[Any], npt.NDArray[Any]], find_logprobs: Callable[..., Logprobs]
    ) -> None:
        self.tensor, self._read, self._find_logprobs = tensor, read, find_logprobs
        self.shape: tuple[int, ...] = tuple(tensor.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def logprobs(self, rows: Rows, token_ids: I32, num_top: int) -> Logprobs:
        """Wait for the calls so far, and return what `token_logprobs` says of some rows."""
        return self._find_logprobs(self.tensor, rows, token_ids, num_top)

    def __getitem__(self, rows: slice | Rows) -> F32:
        """Wait for the calls so far, and return a copy of some rows."""
        indices = np.arange(len(self))[rows]
        if not len(indices):
            return np.zeros((0, *self.shape[1:]), np.float32)
        begin, end = int(indices.min()), int(indices.max()) + 1
        found: F32 = self._read(self.tensor[begin:end])[indices - begin]
        return found
