"""A recorded pass on a GPU: the same calls as the CPU's program, launched on a stream over the GPU's memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from fastdeploy_sd.runtime.arrays import address
from fastdeploy_sd.runtime.cuda_call import Launcher, Workspace
from fastdeploy_sd.runtime.device_tensor import DeviceTensor
from fastdeploy_sd.runtime.native_program import Patch, create_params
from fastdeploy_sd.runtime.program import Counts, Inputs, Recording, verify_sizes
from fastdeploy_sd.types import I64


class CudaProgram:
    """A recording that can be run; see Program.

    A count that a call computes for those behind it is not looked at, as the host does not wait: they run on as many
    rows as the run was given.

    Args:
        device: where the recording's constants are.
        inputs: a DeviceTensor for every declared input, as large as it can be.
        arena: u8[recording.num_bytes] or more.

    Raises:
        ValueError: an input is missing, unknown, of another dtype or shape, or the host's; or a constant is the host's.
        ConfigError: there is no kernel for an op.
        MemoryError: the GPU has none for the ops' workspace.
    """

    def __init__(self, device: Any, recording: Recording, inputs: Inputs, arena: DeviceTensor) -> None:
        self._device: Launcher = device
        self._recording, self._inputs, self._arena = recording, inputs, arena
        library, recorder = device.library, recording.recorder
        for constant in recorder.constants:
            if not isinstance(constant, DeviceTensor):
                raise ValueError(f"constants: expected tensors of the GPU, got {constant.dtype}{constant.shape}")
        if inputs.keys() != recorder.inputs.keys():
            raise ValueError(f"inputs: expected {', '.join(recorder.inputs)}, got {', '.join(inputs)}")
        addresses = {index: arena.address + offset for index, offset in recording.offsets.items()}
        for name, tensor in recorder.inputs.items():
            addresses[tensor.index] = _address(name, inputs[name], tensor.dtype, recording.shape_of(tensor))
        patches = []
        for c, call in enumerate(recorder.calls):
            library.verify(call.op, type(call.params).__name__)
            patches += [Patch(c, offset, 4, recording.symbols.index(size)) for offset, size in call.sizes]
            for offset, tensor in call.pointers:
                call.set_pointer(offset, addresses[tensor.index])
        create = create_params([(call.op, call.params) for call in recorder.calls], patches, len(recording.symbols))
        self._native = library.made("program_create", ctypes.byref(create))
        weakref.finalize(self, library.functions.fdsd_cuda_program_destroy, ctypes.c_void_p(self._native))
        self._symbols: I64 = np.zeros(len(recording.symbols), np.int64)
        self._workspace = Workspace(device.memory)
        self.outputs: tuple[Any, ...] = tuple(
            arena.at(recording.offsets[output.index], _element(output.dtype), recording.shape_of(output))
            for output in recording.outputs
        )
        self._set(recording.bounds)
        self._workspace_address()

    def run(self, sizes: Counts) -> None:
        """Start the pass, behind what was started, on what was uploaded.

        Args:
            sizes: every named size of the recording.

        Raises:
            ValueError: a size is unknown or beyond its bound, or an op refused its arguments; the text names call and
                op. What a kernel does wrong, a wait raises.
        """
        self._set(sizes)
        self._device.transfers.send()
        self._device.library.call("program_launch", self._native, self._workspace_address(), self._device.stream)

    def timed_run(self, sizes: Counts) -> tuple[tuple[str, ...], I64]:
        """Run to the end and return the name and the nanoseconds of every call."""
        self._set(sizes)
        self._device.transfers.send()
        calls = self._recording.recorder.calls
        nanoseconds = np.zeros(max(len(calls), 1), np.int64)
        where = (self._native, self._workspace_address(), self._device.stream)
        self._device.library.call("program_timed_launch", *where, address(nanoseconds))
        return tuple(call.op for call in calls), nanoseconds[: len(calls)]

    def _set(self, sizes: Counts) -> None:
        verify_sizes(sizes, self._recording.bounds)
        for i, size in enumerate(self._recording.symbols):
            self._symbols[i] = sizes[size.name] + size.extra
        count = len(self._symbols)
        self._device.library.call("program_set", self._native, self._symbols.ctypes.data, ctypes.c_int32(count))

    def _workspace_address(self) -> int:
        return self._workspace.address(self._device.library.number("program_workspace_bytes", self._native))


def _address(name: str, given: Any, dtype: paddle.dtype, shape: Sequence[int]) -> int:
    """Return where an input is; raises ValueError when it is not as declared."""
    if not isinstance(given, DeviceTensor):
        raise ValueError(f"{name}: expected memory of the GPU, got {type(given).__name__}")
    if given.dtype != dtype or given.shape != list(shape):
        raise ValueError(f"{name}: expected {dtype}{list(shape)}, got {given}")
    return given.address


def _element(dtype: paddle.dtype) -> str:
    return str(dtype).removeprefix("paddle.")
