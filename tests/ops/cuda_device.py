"""Ops on an accelerator, as tests run them: arrays go to the device's memory, the op runs there, they come back.

`cuda-emulated` is the kernels' own source on the CPU, with every access checked (custom_ops/cuda/emulation); `cuda` is
a GPU. Both have the same C functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from custom_ops import build, cuda_build
from fastdeploy_sd.runtime import host_op
from fastdeploy_sd.runtime.layout import layout
from fastdeploy_sd.runtime.library import CParams
from tests.ops.cuda_layouts import LAYOUTS

EMULATED, GPU = "cuda-emulated", "cuda"


class CudaDevice:
    """A library of CUDA kernels and the device they run on.

    Attributes:
        bytes_read: field of the params of the newest op -> bytes of that array which its kernels read, every thread's
            counted; empty on a GPU, which does not count.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self.bytes_read: dict[str, int] = {}
        for name in ("allocate", "free", "copy", "synchronize"):
            getattr(self._lib, f"fdsd_cuda_{name}").restype = ctypes.c_char_p

    def has(self, op: str) -> bool:
        """Whether there is a kernel for the op."""
        return hasattr(self._lib, f"fdsd_cuda_{op}")

    def num_launches(self) -> int:
        """How many kernels ran so far; the emulated device only."""
        self._lib.fdsd_cuda_num_launches.restype = ctypes.c_int64
        return int(self._lib.fdsd_cuda_num_launches())

    @contextlib.contextmanager
    def runs_ops(self) -> Iterator[None]:
        """Let declared ops that are called on NumPy arrays run here."""
        with mock.patch.object(host_op, "BoundCall", functools.partial(DeviceCall, self)):
            yield

    def allocate(self, array: np.ndarray) -> int:
        """Return the address of new memory with the array's bytes."""
        memory = ctypes.c_void_p()
        self._check(self._lib.fdsd_cuda_allocate(ctypes.c_int64(array.nbytes), ctypes.byref(memory)))
        self._copy(memory.value or 0, array.ctypes.data, array.nbytes)
        return memory.value or 0

    def fetch(self, address: int, array: np.ndarray) -> None:
        """Copy the device's memory to an array."""
        self._copy(array.ctypes.data, address, array.nbytes)

    def free(self, address: int) -> None:
        """Give memory back."""
        self._check(self._lib.fdsd_cuda_free(ctypes.c_void_p(address)))

    def launch(self, op: str, params: CParams) -> None:
        """Run an op to its end.

        Raises:
            ValueError: it refused its sizes, or a kernel failed.
        """
        function = getattr(self._lib, f"fdsd_cuda_{op}")
        function.restype = ctypes.c_char_p
        num_bytes = getattr(self._lib, f"fdsd_cuda_{op}_workspace_bytes")
        num_bytes.restype = ctypes.c_int64
        workspace = self.allocate(np.zeros(num_bytes(ctypes.byref(params)), np.uint8))
        try:
            self._check(function(ctypes.byref(params), ctypes.c_void_p(workspace), None), op)
            self._check(self._lib.fdsd_cuda_synchronize(), op)
        finally:
            self.free(workspace)

    def count_reads(self, arrays: Mapping[str, int]) -> None:
        """Set `bytes_read` for arrays by their addresses, before they are freed."""
        if hasattr(self._lib, "fdsd_cuda_bytes_read"):
            self._lib.fdsd_cuda_bytes_read.restype = ctypes.c_int64
            self.bytes_read = {
                name: int(self._lib.fdsd_cuda_bytes_read(ctypes.c_void_p(address))) for name, address in arrays.items()
            }

    def _copy(self, to: int, source: int, num_bytes: int) -> None:
        arguments = (ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_int64(num_bytes))
        self._check(self._lib.fdsd_cuda_copy(*arguments))

    @staticmethod
    def _check(error: bytes | None, op: str = "device") -> None:
        if error:
            raise ValueError(f"{op}: {error.decode(errors='replace')}")


class DeviceCall:
    """One op and its params over NumPy arrays, as BoundCall, on a device: what it changes comes back after a run.

    Arrays that a device lays out otherwise are converted on the way (cuda_layouts.py).
    """

    def __init__(self, device: CudaDevice, op: str, params: CParams, arrays: Sequence[np.ndarray | None]) -> None:
        self._device, self._op, self.params = device, op, params
        self._arrays = {array.ctypes.data: array for array in arrays if array is not None}

    def run(self) -> None:
        """Run the op there.

        Raises:
            ValueError: it refused its sizes, or a kernel failed.
        """
        on_device = type(self.params)()
        ctypes.memmove(ctypes.byref(on_device), ctypes.byref(self.params), ctypes.sizeof(on_device))
        fields = layout(type(self.params).__name__).fields
        pointers = {name: getattr(self.params, name) for name, field in fields.items() if field.is_pointer}
        converted = LAYOUTS.get(self._op, {})
        with contextlib.ExitStack() as stack:
            placed: dict[int, int] = {}
            for name, address in pointers.items():
                if address is None:
                    continue
                if address not in placed:
                    array = self._arrays[address]
                    to_device: Callable[[Any, Any], np.ndarray] | None = converted.get(name, (None, None))[0]
                    placed[address] = self._device.allocate(array if to_device is None else to_device(array, on_device))
                    stack.callback(self._device.free, placed[address])
                setattr(on_device, name, placed[address])
            self._device.launch(self._op, on_device)
            self._device.count_reads({name: placed[address] for name, address in pointers.items() if address})
            for name, field in fields.items():
                address = pointers.get(name)
                if address is not None and not field.type.startswith("const"):
                    self._fetch(self._arrays[address], placed[address], converted.get(name, (None, None))[1])

    def _fetch(self, array: np.ndarray, address: int, from_device: Callable[[Any, Any], np.ndarray] | None) -> None:
        fetched = np.empty_like(array)
        self._device.fetch(address, fetched)
        array[...] = fetched if from_device is None else from_device(fetched, self.params)


@functools.cache
def emulated() -> CudaDevice:
    """The emulated device, built when it is out of date."""
    return CudaDevice(cuda_build.build_emulated())


@functools.cache
def gpu_refusal() -> str | None:
    """Why ops cannot run on a GPU here, None if they can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 not found"
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver knows no GPU"
    try:
        cuda_build.find_nvcc()
    except build.BuildError as error:
        return str(error)
    return None


@functools.cache
def gpu() -> CudaDevice:
    """The first GPU, with the kernels that nvcc compiles when they are out of date."""
    return CudaDevice(cuda_build.build_cuda())
