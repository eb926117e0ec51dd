"""A recorded pass on a GPU: the same calls as the CPU's program, launched on a stream over the GPU's memory."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from fastdeploy_sd.device.arrays import Array, address
from fastdeploy_sd.device.cuda.call import Workspace, dry_run
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.padding import OP, Columns, offset_of_num_rows
from fastdeploy_sd.device.cuda.sizes import rounded, sizes_up_to
from fastdeploy_sd.device.device_tensor import DeviceTensor, dtype_name
from fastdeploy_sd.device.memory import DeviceMemory
from fastdeploy_sd.device.program.native_program import Patch, create_params
from fastdeploy_sd.device.program.program import Counts, Inputs, Program, Recording, bind_calls, verify_sizes
from fastdeploy_sd.types import I64

if TYPE_CHECKING:
    from fastdeploy_sd.device.cuda.device import CudaDevice

_log = logging.getLogger(__name__)

# A graph of a model's pass has some hundred launches, and takes the driver some hundred KiB.
MAX_GRAPHS = 64
# A capture takes longer than launching its calls, and the sizes of prompts rarely come again: so a pass is captured
# when its sizes do, and these many are remembered.
MAX_SEEN = 1024


class CudaProgram(Program):
    """A recording that can be run on a GPU.

    Where the recording says how inputs are filled, sizes are rounded up, and a graph is made for those that come up
    again and launched from then on: one call for all. A count that a call computes for later calls is not looked
    at, as the host does not wait: they run on as many rows as the run was given.

    Raises as Program; or ConfigError: an op has no kernel; ValueError: an op refuses its arguments at some size;
    MemoryError: the GPU has none for the ops' workspace.
    """

    _place = "the GPU"

    def __init__(self, device: CudaDevice, recording: Recording, inputs: Inputs, arena: DeviceTensor) -> None:
        self._device = device
        self._workspace = Workspace(device.memory)
        self._graphs = Graphs(device.library)
        super().__init__(recording, inputs, arena)
        self._dry_run()

    def _build(self, addresses: Mapping[int, int]) -> None:
        device, recording, recorder = self._device, self._recording, self._recording.recorder
        columns = Columns(recording, self._inputs)
        num_own: Array = np.zeros(max(len(columns.sizes), 1), np.int32)
        self._num_own, self._padded = device.buffer(num_own), columns.sizes
        self._tables = [device.wrap(table) for table in columns.tables()]
        self._sizes = (*recording.symbols, *columns.sizes)
        calls = [
            (OP, columns.params(i, table.address, self._num_own.tensor.address + 4 * i))
            for i, table in enumerate(self._tables)
        ]
        patches = [Patch(i, offset_of_num_rows(), 4, len(recording.symbols) + i) for i in range(len(columns.sizes))]
        for call in recorder.calls:
            device.library.verify(call.op, type(call.params).__name__)
        patches += bind_calls(recording, addresses, self._sizes, len(calls))
        calls += [(call.op, call.params) for call in recorder.calls]
        self._names = tuple(op for op, _ in calls)
        create = create_params(calls, patches, len(self._sizes))
        self._program = device.library.made("program_create", ctypes.byref(create))
        weakref.finalize(self, device.library.functions.fdsd_cuda_program_destroy, ctypes.c_void_p(self._program))
        self._symbols: I64 = np.zeros(max(len(self._sizes), 1), np.int64)

    def run(self, sizes: Counts) -> None:
        """Start the pass after the calls so far, on what was uploaded; what a kernel does wrong, a wait raises.

        Raises MemoryError too: the GPU has none for the workspace at these sizes, which are none that were dry run.
        """
        self._set(sizes)
        self._send(sizes)
        library, stream = self._device.library, self._device.stream
        if not self._padded:
            workspace = self._workspace_address()
            library.call("program_launch", self._program, workspace, stream)
            return
        key = tuple(self._symbols.tolist())
        graph = self._graphs.get(key)
        if graph is None:
            workspace = self._workspace_address()
            if not (self._graphs.has_room and self._graphs.has_seen(key)):
                library.call("program_launch", self._program, workspace, stream)
                return
            try:
                made = library.made("program_capture", self._program, workspace, stream)
            except ValueError as error:  # the driver has no memory for one more, or an op refuses its arguments again
                self._graphs.has_room = False  # or every step would try, and say so
                _log.warning("no graph for sizes %s, nor for others from now on, as %s", key, error)
                library.call("program_launch", self._program, workspace, stream)
                return
            graph = self._graphs.add(key, made, self._workspace.memory)
        library.call("graph_launch", graph, stream)

    def timed_run(self, sizes: Counts) -> tuple[tuple[str, ...], I64]:
        self._set(sizes)
        self._send(sizes)
        workspace = self._workspace_address()
        nanoseconds = np.zeros(max(len(self._names), 1), np.int64)
        where = (self._program, workspace, self._device.stream)
        self._device.library.call("program_timed_launch", *where, address(nanoseconds))
        return self._names, nanoseconds[: len(self._names)]

    def _dry_run(self) -> None:
        """Capture the pass at all sizes from 1 to the bounds that have a graph, as `dry_run` does.

        What an op refuses shows now, and not in a step, and the workspace is as large as it gets.
        """
        bounds = self._recording.bounds
        most = max([1, *bounds.values()])
        for size in sizes_up_to(most) if self._padded else sorted({1, most}):
            self._set({name: min(size, bound) for name, bound in bounds.items()})
            dry_run(self._device.library, self._program, self._workspace_address(), self._device.stream)

    def _set(self, sizes: Counts) -> None:
        bounds = self._recording.bounds
        verify_sizes(sizes, bounds)
        taken = {name: rounded(sizes[name], bound) for name, bound in bounds.items()} if self._padded else sizes
        for i, size in enumerate(self._sizes):
            self._symbols[i] = taken[size.name] + size.extra
        count = ctypes.c_int32(len(self._sizes))
        self._device.library.call("program_set", self._program, self._symbols.ctypes.data, count)

    def _send(self, sizes: Counts) -> None:
        if self._padded:
            for i, size in enumerate(self._padded):
                self._num_own.array[i] = sizes[size.name]
            self._num_own.upload()
        self._device.transfers.send()

    def _address(self, name: str, given: Any, dtype: paddle.dtype, shape: Sequence[int]) -> int:
        if not isinstance(given, DeviceTensor):
            raise ValueError(f"{name}: expected memory of the GPU, got {type(given).__name__}")
        if given.dtype != dtype or given.shape != list(shape):
            raise ValueError(f"{name}: expected {dtype}{list(shape)}, got {given}")
        return given.address

    def _view(self, offset: int, dtype: paddle.dtype, shape: Sequence[int]) -> DeviceTensor:
        arena: DeviceTensor = self._arena
        return arena.at(offset, dtype_name(dtype), shape)

    def _workspace_address(self) -> int:
        return self._workspace.address(self._device.library.number("program_workspace_bytes", self._program))


class Graphs:
    """Captured passes by their sizes, and sizes that came up; of both, the ones that were used last are kept."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library, self.has_room = library, True
        self._kept: OrderedDict[tuple[int, ...], tuple[int, DeviceMemory | None]] = OrderedDict()
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        weakref.finalize(self, _destroy_all, library, self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, sizes: tuple[int, ...]) -> int | None:
        """Return the graph for these sizes, None where none is kept."""
        found = self._kept.get(sizes)
        if found is None:
            return None
        self._kept.move_to_end(sizes)
        return found[0]

    def has_seen(self, sizes: tuple[int, ...]) -> bool:
        """Return whether these sizes were asked for before, and remember that they were now."""
        is_known = sizes in self._seen
        self._seen[sizes] = None
        self._seen.move_to_end(sizes)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return is_known

    def add(self, sizes: tuple[int, ...], graph: int, workspace: DeviceMemory | None) -> int:
        """Keep a graph, and the workspace that its calls have, and return it.

        The one that was not used for longest is given up; CUDA destroys it when it has run.
        """
        self._kept[sizes] = graph, workspace
        if len(self._kept) > MAX_GRAPHS:
            _, (oldest, _) = self._kept.popitem(last=False)
            self._library.functions.fdsd_cuda_graph_destroy(ctypes.c_void_p(oldest))
        return graph


def _destroy_all(library: CudaLibrary, kept: Mapping[tuple[int, ...], tuple[int, DeviceMemory | None]]) -> None:
    for graph, _ in kept.values():
        library.functions.fdsd_cuda_graph_destroy(ctypes.c_void_p(graph))
