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
import pytest

from custom_ops import cuda_build
from fastdeploy_sd.device.cuda import library as cuda_library
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.layout import layout
from fastdeploy_sd.device.library import CParams
from fastdeploy_sd.device.program import host_op
from tests.ops.cuda_layouts import LAYOUTS

EMULATED, GPU = "cuda-emulated", "cuda"
# An environment variable: a GPU, too, runs those cases alone that the emulated one has time for.
SMALL_CASES = "FDSD_SMALL_CASES"


# The devices on which ops run now: the last one.
_running: list[OpRunner] = []


def running_device() -> CudaDevice | None:
    """The device on which declared ops run that are called on NumPy arrays, None = the host."""
    return _running[-1].device if _running else None


class OpRunner:
    """Runs declared ops that are called on NumPy arrays on a device.

    Attributes:
        bytes_read: field of the params of the newest op -> bytes of that array which its kernels read, every thread's
            counted; empty on a GPU, which does not count.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.device = CudaDevice(cuda_library.load(path))
        self.bytes_read: dict[str, int] = {}

    def has(self, op: str) -> bool:
        """Whether there is a kernel for the op."""
        return self.device.library.has(op)

    def num_launches(self) -> int:
        """How many kernels ran so far; the emulated device only."""
        return self.device.library.number("num_launches")

    @contextlib.contextmanager
    def emulates(self, architecture: int) -> Iterator[None]:
        """Let the emulated device be a chip of 80, 86, 89, 100 or 120, in place of 90."""
        set_architecture = self.device.library.functions.fdsd_cuda_set_architecture
        set_architecture(architecture)
        try:
            yield
        finally:
            set_architecture(90)

    @contextlib.contextmanager
    def runs_ops(self) -> Iterator[None]:
        """Let declared ops that are called on NumPy arrays run here."""
        with mock.patch.object(host_op, "BoundCall", functools.partial(DeviceCall, self)):
            _running.append(self)
            try:
                yield
            finally:
                _running.pop()

    def count_reads(self, arrays: Mapping[str, int]) -> None:
        """Set `bytes_read` for arrays by their addresses, before they are freed."""
        library = self.device.library
        if hasattr(library.functions, "fdsd_cuda_bytes_read"):
            self.bytes_read = {name: library.number("bytes_read", address) for name, address in arrays.items()}


class DeviceCall:
    """One op and its params over NumPy arrays, as BoundCall, on a device: what it changes comes back after a run.

    Arrays that a device lays out otherwise are converted on the way (cuda_layouts.py).
    """

    def __init__(self, runner: OpRunner, op: str, params: CParams, arrays: Sequence[np.ndarray | None]) -> None:
        self._runner, self._device, self._op, self.params = runner, runner.device, op, params
        self._arrays = {array.ctypes.data: array for array in arrays if array is not None}

    def run(self) -> None:
        """Run the op there, to its end.

        Raises:
            ValueError: it refused its sizes, or a kernel failed.
        """
        on_device = type(self.params)()
        ctypes.memmove(ctypes.byref(on_device), ctypes.byref(self.params), ctypes.sizeof(on_device))
        fields = layout(type(self.params).__name__).fields
        pointers = {name: getattr(self.params, name) for name, field in fields.items() if field.is_pointer}
        converted = LAYOUTS.get(self._op, {})
        placed: dict[int, Any] = {}
        for name, address in pointers.items():
            if address is None:
                continue
            if address not in placed:
                array = self._arrays[address]
                to_device: Callable[[Any, Any], np.ndarray] | None = converted.get(name, (None, None))[0]
                moved = array if to_device is None else to_device(array, on_device)
                placed[address] = self._device.wrap(np.ascontiguousarray(moved).reshape(-1).view(np.uint8))
            setattr(on_device, name, placed[address].address)
        self._launch(on_device)
        self._runner.count_reads({name: placed[address].address for name, address in pointers.items() if address})
        for name, field in fields.items():
            address = pointers.get(name)
            if address is not None and not field.type.startswith("const"):
                self._fetch(self._arrays[address], placed[address], converted.get(name, (None, None))[1])

    def _launch(self, params: CParams) -> None:
        """With a workspace that is no larger than the op asks for."""
        library, stream = self._device.library, self._device.stream
        num_bytes = library.number(f"{self._op}_workspace_bytes", ctypes.byref(params))
        kept, workspace = self._device.memory.take(num_bytes)
        library.launch(self._op, params, workspace, stream)
        self._device.wait()
        del kept

    def _fetch(self, array: np.ndarray, tensor: Any, from_device: Callable[[Any, Any], np.ndarray] | None) -> None:
        fetched = self._device.read(tensor).view(array.dtype).reshape(array.shape)
        array[...] = fetched if from_device is None else from_device(fetched, self.params)


@functools.cache
def emulated() -> OpRunner:
    """The emulated device, built when it is out of date."""
    return OpRunner(cuda_build.build_emulated())


@functools.cache
def planted_kernels() -> pathlib.Path:
    """The emulated library of tests alone: kernels with a fault each, and the plans of tiles."""
    here = pathlib.Path(__file__).parent
    sources = [here / "cuda_faults.cu", here / "cuda_plans.cu"]
    return cuda_build.build_emulated(cuda_build.BUILD / "cuda-planted", sources)


@functools.cache
def _gpu_library() -> cuda_library.CudaLibrary | str:
    """The kernels of the first GPU, built where they are missing, or why there are none."""
    return cuda_library.found_library(may_build=True)


def gpu_refusal() -> str | None:
    """Why ops cannot run on a GPU here, None if they can."""
    found = _gpu_library()
    return found if isinstance(found, str) else None


def library_path(kind: str) -> pathlib.Path:
    """The library of kernels for a device of this name, which there is."""
    found = _gpu_library() if kind == GPU else cuda_build.build_emulated()
    assert not isinstance(found, str), found
    return found if isinstance(found, pathlib.Path) else found.path


@contextlib.contextmanager
def loses_the_device() -> Iterator[None]:
    """Give the emulated device a fresh context after the body, in which a kernel goes wrong on it."""
    reset = cuda_library.load(cuda_build.build_emulated()).functions.fdsd_cuda_reset
    try:
        yield
    finally:
        reset()


@contextlib.contextmanager
def emulated_chip(kind: str, chip: int) -> Iterator[None]:
    """Let the emulated device be this chip in the body; nothing on a GPU."""
    with emulated().emulates(chip) if kind == EMULATED else contextlib.nullcontext():
        yield


def require(kind: str) -> None:
    """Skip the test where it is to run on a GPU and there is none."""
    if kind == GPU and (reason := gpu_refusal()) is not None:
        pytest.skip(f"no GPU: {reason}")


def runner(kind: str) -> OpRunner:
    """The device of a name; without a GPU, a test that needs one is skipped."""
    require(kind)
    return emulated() if kind == EMULATED else gpu()


@functools.cache
def gpu() -> OpRunner:
    """The first GPU."""
    return OpRunner(library_path(GPU))
