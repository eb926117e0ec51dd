"""Single ops on a GPU, in order with programs: bound to arrays of its memory once, launched with other counts."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import CudaMemory
from fastdeploy_sd.device.library import BoundCall, CParams
from fastdeploy_sd.device.memory import DeviceMemory
from fastdeploy_sd.device.program.native_program import create_params

if TYPE_CHECKING:
    from fastdeploy_sd.device.cuda.device import CudaDevice


class Workspace:
    """Scratch memory of an op's kernels. Ops on one stream run one after the other, so they share it."""

    def __init__(self, memory: CudaMemory) -> None:
        self._source = memory
        self.memory: DeviceMemory | None = None
        self._address, self._size = 0, 0

    def address(self, num_bytes: int) -> int:
        """Return where there are so many bytes, until more are asked for; 0 where none are wanted.

        Raises MemoryError: the GPU has not that much.
        """
        if num_bytes > self._size:
            # What was there may still be in use: giving it back waits for that.
            self.memory, self._address = self._source.take(num_bytes)
            self._size = num_bytes
        return self._address if num_bytes else 0


def dry_run(library: CudaLibrary, program: int, workspace: int, stream: int) -> None:
    """Capture a program's calls without running them: kernels are loaded; raises ValueError where an op refuses."""
    graph = library.made("program_capture", program, workspace, stream)
    library.functions.fdsd_cuda_graph_destroy(ctypes.c_void_p(graph))


class DeviceCall(BoundCall):
    """One op and its params over a GPU's memory: of whole arrays, usually the most there will be.

    Raises ValueError: the op refuses its arguments; MemoryError: the GPU has none for its workspace.
    """

    def __init__(self, device: CudaDevice, op: str, params: CParams, arrays: Mapping[str, Any]) -> None:
        self._device, self._op, self._arrays = device, op, arrays
        self.params: Any = params
        self._dry_run()

    def run(self) -> None:
        """Start the op after the calls so far, on what was uploaded; what a kernel does wrong, a wait raises."""
        self._device.transfers.send()
        workspace = self._workspace_bytes()
        self._device.library.launch(self._op, self.params, workspace, self._device.stream)

    def _dry_run(self) -> None:
        """Have the op say now what it refuses, and load its kernels."""
        library, create = self._device.library, create_params([(self._op, self.params)], [], 0)
        program = library.made("program_create", ctypes.byref(create))
        try:
            dry_run(library, program, self._workspace_bytes(), self._device.stream)
        finally:
            library.functions.fdsd_cuda_program_destroy(ctypes.c_void_p(program))

    def _workspace_bytes(self) -> int:
        num_bytes = self._device.library.number(f"{self._op}_workspace_bytes", ctypes.byref(self.params))
        return self._device.workspace.address(num_bytes)
