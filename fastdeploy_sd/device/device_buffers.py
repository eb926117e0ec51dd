"""What the calls of a step take for the host's arrays: these themselves, or their twins in the memory of a device.

The host prepares a step in arrays of its own, and looks at its output there, wherever the model runs. Knows no op and
no device; needs no Paddle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.program.bound_call import Call
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.types import F32, I32, Rows

Logprobs = tuple[F32, I32, I32, F32]


class Twins(Protocol):
    """The host's arrays for calls, and the copies between.

    Each copy follows the calls before it and is there for the calls behind it.
    """

    def of(self, array: npt.NDArray[Any]) -> Any:
        """Return what calls take for an array."""
        ...

    def bind(self, op: HostOp, **arguments: Any) -> Call:
        """Return a call of an op over arrays of the host, rows on a device and numbers; see HostOp.bind.

        An array that no step writes on the host is there as it is now, for calls to read or to write.
        """
        ...

    def send_plan(self) -> None:
        """Begin a step: copy what the host has written of it, but for the masks of grammars."""
        ...

    def send_masks(self) -> None:
        """Copy the masks of grammars, if any row of the step has one or had in the step before."""
        ...

    def send_output(self) -> None:
        """Copy the output tokens of a step that were chosen elsewhere, and what says whose they are."""
        ...

    def start_fetch(self) -> Output:
        """End a step: start to copy its output tokens back. One more step may begin before these are taken."""
        ...


class Output(Protocol):
    """The output tokens of a step, on their way.

    Attributes:
        idle_s: how long the device had nothing to do before the step, once that is known; 0 on the host, whose calls
            take its own time.
    """

    idle_s: float

    def extend(self) -> None:
        """Say that what was started since is the step's too: only behind it has the device nothing to do."""
        ...

    def take(self) -> None:
        """Wait for them, and have them in the host's arrays.

        Raises:
            ValueError: a kernel failed.
        """
        ...


class HostOutput:
    """Of calls that were the host's own."""

    idle_s = 0.0

    def extend(self) -> None:
        """See Output."""

    def take(self) -> None:
        """See Output."""


_THERE = HostOutput()


class HostTwins:
    """The calls are the host's own, over its arrays."""

    def of(self, array: npt.NDArray[Any]) -> Any:
        return array

    def bind(self, op: HostOp, **arguments: Any) -> Call:
        return op.bind(**arguments)

    def send_plan(self) -> None:
        pass

    def send_masks(self) -> None:
        pass

    def send_output(self) -> None:
        pass

    def start_fetch(self) -> HostOutput:
        return _THERE


HOST_TWINS = HostTwins()


class RowsOnDevice:
    """Rows that stay where the model wrote them; the few that the host wants are copied.

    Args:
        tensor: f32[L, V], of the device.
        read: returns the content of such a tensor.
        find_logprobs: see ops.logprob_rows.LogprobRows.

    Attributes:
        tensor: for calls.
        shape: its own.
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
