"""A GPU as a device: its memory, its stream, and what runs on it. Knows no op."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array, address
from fastdeploy_sd.device.cuda.buffer import CudaBuffer, CudaTransfers
from fastdeploy_sd.device.cuda.call import DeviceCall, Workspace
from fastdeploy_sd.device.cuda.handles import CudaEvent, new_stream
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import Allocator, CudaMemory
from fastdeploy_sd.device.cuda.paddle_memory import allocator_of
from fastdeploy_sd.device.cuda.program import CudaProgram
from fastdeploy_sd.device.cuda.uploads import CudaOverwriter, CudaUploads
from fastdeploy_sd.device.device import Device
from fastdeploy_sd.device.device_tensor import DeviceTensor, element_of
from fastdeploy_sd.device.program.declaration import ELEMENT_BYTES
from fastdeploy_sd.device.program.host_op import HostOp, array_dtype
from fastdeploy_sd.device.program.program import Inputs, Recording
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import Bytes


class CudaDevice(Device):
    """One GPU of the process, the calling thread's.

    What is started runs in order, on one stream, and nothing is waited for but where that is said.
    """

    kind = "gpu"

    def __init__(self, library: CudaLibrary, allocator: Allocator | None = None) -> None:
        self.library, self.text = library, library.device_name
        self._own_stream = new_stream(library)
        self.stream = self._own_stream.address
        self.memory = CudaMemory(allocator or Allocator(library))
        self.transfers = CudaTransfers(library, self.memory, self.stream)
        self.workspace = Workspace(self.memory)
        self._uploads: CudaUploads | None = None
        self._overwriter: CudaOverwriter | None = None

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        tensor = self.empty(shape, dtype)
        self.library.call("zero", tensor.address, ctypes.c_int64(tensor.num_bytes), self.stream)
        return tensor

    def wrap(self, array: Array) -> Any:
        if not array.flags.c_contiguous:
            raise ValueError(f"array: expected a contiguous one, got {array.dtype}{list(array.shape)}")
        tensor = self.empty(array.shape, array.dtype)
        if self._uploads is None:
            self._copy_up(tensor, array)  # nothing that was started knows this memory
            return tensor
        uploads, flat = self._uploads, array.reshape(-1).view(np.uint8)
        uploads.send(tensor.address, flat.nbytes, 1, lambda rows, out: uploads.fill(out, flat[rows]))
        return tensor

    def filled(self, shape: tuple[int, ...], dtype: npt.DTypeLike, write: Callable[[slice, Array], object]) -> Any:
        tensor = self.empty(shape, dtype)

        def write_bytes(rows: slice, out: Bytes) -> None:
            write(rows, out.view(dtype).reshape(-1, *shape[1:]))

        with self.loading(tensor.num_bytes) as uploads:
            uploads.send(tensor.address, len(tensor), tensor.row_bytes, write_bytes)
        return tensor

    @contextlib.contextmanager
    def loading(self, num_bytes: int) -> Iterator[CudaUploads]:
        """See Device; gives the uploads. Within another one they are the same."""
        if self._uploads is not None:
            yield self._uploads
            return
        self._uploads = uploads = CudaUploads(self.library, self.memory, self.stream, num_bytes)
        try:
            yield uploads
        finally:
            self._uploads = None
            uploads.close()

    def read(self, tensor: Any) -> npt.NDArray[Any]:
        self.wait()
        array = np.empty(tensor.shape, array_dtype(tensor.element))
        self.library.call("copy", address(array), tensor.address, ctypes.c_int64(array.nbytes))
        return array

    def num_bytes(self, tensor: Any) -> int:
        return int(tensor.num_bytes)

    def write(self, tensor: Any, array: Array, begin: int = 0) -> None:
        rows = tensor[begin : begin + len(array)]
        if rows.shape != list(array.shape) or rows.element != element_of(array.dtype) or not array.flags.c_contiguous:
            raise ValueError(f"array: expected rows of {tensor}, got {array.dtype}{list(array.shape)}")
        self.wait()  # what was started may still read what is there
        self._copy_up(rows, array)

    def prepare_overwrites(self, num_bytes: int) -> None:
        if self._overwriter is None or self._overwriter.num_bytes < num_bytes:
            self._overwriter = CudaOverwriter(self.library, num_bytes)

    def overwrite(self, address: int, num_bytes: int, write: Callable[[Bytes], object]) -> None:
        assert self._overwriter is not None, "prepare_overwrites comes first"
        self._overwriter.write(address, num_bytes, write)

    def copy(self, to: Any, source: Any) -> None:
        if to.num_bytes != source.num_bytes:
            raise ValueError(f"source: expected as many bytes as {to} has, got {source}")
        size = ctypes.c_int64(to.num_bytes)
        self.library.call("start_copy", to.address, source.address, size, self.stream)

    def arena(self, num_bytes: int) -> Any:
        try:
            return self.zeros((max(num_bytes, 1),), np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"max_num_batched_tokens, max_num_seqs: expected steps that the GPU has memory for, got {error}"
            ) from None

    def program(self, recording: Recording, inputs: Inputs, arena: Any = None) -> CudaProgram:
        return CudaProgram(self, recording, inputs, self.arena(recording.num_bytes) if arena is None else arena)

    def buffer(self, array: Array) -> CudaBuffer:
        return CudaBuffer(self.transfers, array, self.wrap(array))

    def bind(self, op: HostOp, **arguments: Any) -> DeviceCall:
        name = op.declaration.name
        self.library.verify(name, op.declaration.struct)

        def look(argument: str, array: Any) -> tuple[str, tuple[int, ...]]:
            if not isinstance(array, DeviceTensor):
                raise op.declaration.error(argument, "memory of the GPU", type(array).__name__)
            return array.element, tuple(array.shape)

        params = op.params_of(arguments, look, DeviceTensor.data_ptr)
        return DeviceCall(self, name, params, arguments)

    def event(self) -> CudaEvent:
        return CudaEvent(self.library, self.stream)

    def wait(self) -> None:
        self.transfers.finish()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceTensor:
        """Return a tensor with anything in it; raises as `zeros`."""
        element = element_of(dtype)
        memory, begin = self.memory.take(math.prod(shape) * ELEMENT_BYTES[element])
        return DeviceTensor(memory, begin, element, shape)

    def _copy_up(self, tensor: DeviceTensor, array: Array) -> None:
        self.library.call("copy", tensor.address, array.ctypes.data, ctypes.c_int64(array.nbytes))


@functools.cache
def cuda_device(library: CudaLibrary) -> CudaDevice:
    """Return the device of the GPU that a library's functions use; its memory is Paddle's where that may be shared."""
    return CudaDevice(library, allocator_of(library))
