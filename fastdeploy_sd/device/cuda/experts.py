"""The experts of a rank on its GPU, which other ranks' GPUs read and write the rows and results of."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_sd.device.cuda.memory import pinned_zeros
from fastdeploy_sd.device.expert_service import ExpertService, ServiceShape
from fastdeploy_sd.device.expert_types import ExpertLayer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.types import I64

if TYPE_CHECKING:
    from fastdeploy_sd.device.cuda.library import CudaLibrary

_STATUS_WORDS = 3  # failure, missing, is_aborted: see ExpertStatus in custom_ops/cuda/expert_gpu.h
# By ExpertFailure; a rank is named before them.
_FAILURES = (
    "",
    "did not run its experts in time",
    "has ended, and no other has its experts",
    "could not run its experts",
    "asked for experts that no rank has",
)


def expert_bytes(library: CudaLibrary, shape: ServiceShape, layers: Iterable[ExpertLayer]) -> int:
    """Return what a rank takes of its GPU's memory to give rows, and to run its experts, besides these."""
    service = struct_type("ExpertServiceOpenParams")(**shape.params())
    params = [struct_type("ExpertServiceLayerParams")(**layer.params()) for layer in layers]
    return max(library.number("expert_bytes", ctypes.byref(service), ctypes.byref(layer)) for layer in params)


class GpuExperts:
    """What runs a service's experts on a GPU, and gives this rank's rows to others; before any layer is registered.

    A GPU cannot refuse: where a rank does not come, a pass ends with wrong values, and `verify` says so. It is called
    when the pass has been waited for, before anything of it is used.

    Args:
        stream: of the passes.
        fd: of the service's segment.
        timeout_s: how long a GPU waits for another rank's.

    Raises ValueError: the driver or the system gives no memory that others can open.
    """

    def __init__(self, library: CudaLibrary, stream: int, service: ExpertService, fd: int, timeout_s: float) -> None:
        self._library, self._stream = library, stream
        self._service = service.handle
        self.has_lost_experts = False
        self._status: I64 = pinned_zeros(library, _STATUS_WORDS * 8).view(np.int64)
        params = service.open_params(fd, timeout_s)
        runner = library.made("open_experts", ctypes.byref(params), self._status.ctypes.data)
        service.run_on(runner, self)

    def verify(self) -> None:
        """Look whether the passes so far, which were waited for, have had their experts.

        Raises ValueError: they have not; the text names the rank. What is started from now on waits again.
        """
        failure, missing, is_aborted = self._status.tolist()
        self.has_lost_experts = failure != 0 or is_aborted != 0
        if not self.has_lost_experts:
            return
        self._library.call("clear_experts", ctypes.c_int32(self._service), self._stream)
        self._status[0] = 0
        if is_aborted:
            raise ValueError("the expert service was aborted")
        raise ValueError(f"rank {missing} {_FAILURES[failure]}")

    def abort(self) -> None:
        """Make what the GPU waits for fail, at once and for ever; from any thread."""
        self._status[2] = 1

    def close(self) -> None:
        """Give the GPU's memory back, after the service is closed. No op may run on it, then or later."""
        self._library.discard("stream_synchronize", self._stream)
        self._library.functions.fdsd_cuda_close_experts(ctypes.c_int32(self._service))
