"""Loads the library of CUDA kernels (libfdsd_cuda.so) and calls its functions over memory, streams and programs.

Where it is, $FDSD_CUDA_LIBRARY says, else kernels.py. The emulated library, of which no user needs to know, is taken
only where a variable names it. Knows no tensors and no framework.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

from fastdeploy_sd.device.cuda import kernels
from fastdeploy_sd.device.layout import layout, read_layout
from fastdeploy_sd.device.library import CParams, other_source
from fastdeploy_sd.errors import ConfigError, DeviceLost

_BUILD = "`python custom_ops/cuda_build.py --nvcc`"


def cuda_refusal() -> str | None:
    """Return why no GPU can be used here, None if one can."""
    found = usable_library()
    return found if isinstance(found, str) else None


def usable_library(number: int = 0, *, may_build: bool = False) -> CudaLibrary | str:
    """Return the library of kernels that the GPU of this number can run, or why there is none.

    It is the calling thread's from now on. A library of other kernels than these sources, or than this version where
    there are no sources, is refused. Where there is none for this GPU, it is built if it may be, which takes minutes.
    """
    named = os.environ.get("FDSD_CUDA_LIBRARY")
    if named is not None:
        path = pathlib.Path(named)
        return _usable(path, number) if path.exists() else f"no CUDA kernels at {path}"
    return found_library(number, may_build=may_build)


def found_library(number: int = 0, *, may_build: bool = False) -> CudaLibrary | str:
    """Return what usable_library does where no variable names a library."""
    try:
        gpu = kernels.capability(number)
        refusals = []
        for path in kernels.installed():
            found = _usable(path, number)
            if isinstance(found, CudaLibrary):
                return found
            refusals.append(found)
        built = kernels.kept(gpu, may_build=may_build)
    except ConfigError as error:
        return error.message
    if built is None:
        reasons = "; ".join(["the start of a server with `--device gpu` builds them", *refusals])
        return f"no CUDA kernels for this GPU of {gpu}: {reasons}"
    return _usable(built, number)


def _usable(path: pathlib.Path, number: int) -> CudaLibrary | str:
    try:
        library = load(path)
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    if (other := _other_source(library)) is not None:
        return f"{path} is of {other}; {_BUILD} makes it anew"
    refusal: bytes | None = library.functions.fdsd_cuda_refusal()
    if refusal is None and number > 0:
        try:
            library.call("use_device", ctypes.c_int32(number))
        except ValueError as error:
            return f"GPU {number}: {error}"
        refusal = library.functions.fdsd_cuda_refusal()
    return library if refusal is None else refusal.decode()


def _other_source(library: CudaLibrary) -> str | None:
    """What the library was compiled from that is not what is here: the first source, or without sources the version."""
    if not hasattr(library.functions, "fdsd_cuda_sources"):
        return "an older version"
    return other_source(library.functions.fdsd_cuda_sources().decode())


@functools.cache
def load(path: pathlib.Path) -> CudaLibrary:
    """Return the library in a file. Raises OSError: it cannot be loaded."""
    return CudaLibrary(path)


class CudaLibrary:
    """The functions of one library."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.functions = path, ctypes.CDLL(str(path))
        for name in ("fdsd_cuda_refusal", "fdsd_cuda_name", "fdsd_cuda_sources", "fdsd_cuda_architectures"):
            if hasattr(self.functions, name):  # not in a library of an older version
                getattr(self.functions, name).restype = ctypes.c_char_p
        self._is_same: set[str] = set()

    @property
    def architectures(self) -> str:
        """What it was compiled for: "sm_80, sm_90a"."""
        names: bytes = self.functions.fdsd_cuda_architectures()
        return names.decode()

    @property
    def device_name(self) -> str:
        """What the GPU is called."""
        name: bytes = self.functions.fdsd_cuda_name()
        return name.decode()

    def current_device(self) -> int:
        """Return the number of the calling thread's GPU."""
        number = ctypes.c_int64()
        self.call("current_device", ctypes.byref(number))
        return number.value

    def memory_bytes(self) -> tuple[int, int]:
        """Return the bytes of the GPU's memory, and how many of them are free. Raises ValueError: it does not say."""
        free, total = ctypes.c_int64(), ctypes.c_int64()
        self.call("memory_bytes", ctypes.byref(free), ctypes.byref(total))
        return total.value, free.value

    @property
    def text(self) -> str:
        """The GPU's name and memory."""
        total, free = (num_bytes / (1 << 30) for num_bytes in self.memory_bytes())
        return f"{self.device_name}, {total:.2f} GiB, {free:.2f} of them free"

    @functools.cached_property
    def piece_bytes(self) -> int:
        """Size of the pieces that small allocations are cut out of; 0 = every one is its own."""
        return self.number("piece_bytes")

    def has(self, op: str) -> bool:
        """Whether there is a kernel for the op."""
        return hasattr(self.functions, f"fdsd_cuda_{op}_workspace_bytes")

    def call(self, name: str, *arguments: Any) -> None:
        """Call `fdsd_cuda_<name>`. Python integers are addresses; other numbers come as ctypes objects.

        Raises ValueError: it failed; the text says why; DeviceLost: nor can anything else succeed from now on.
        """
        error = self._error_of(name, arguments)
        if error:
            raise self._failure(error.decode(errors="replace"))

    def number(self, name: str, *arguments: Any) -> int:
        """Call `fdsd_cuda_<name>` that returns an int64."""
        function = getattr(self.functions, f"fdsd_cuda_{name}")
        function.restype = ctypes.c_int64
        return int(function(*map(_argument, arguments)))

    def made(self, name: str, *arguments: Any) -> int:
        """Call `fdsd_cuda_<name>` whose last argument receives an address, and return that; raises as `call`."""
        address = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(address))
        return address.value or 0

    def launch(self, op: str, params: CParams, workspace: int, stream: int) -> None:
        """Put an op on a stream; raises as `call`. The text names op and argument."""
        error = self._error_of(op, (ctypes.byref(params), workspace, stream))
        if error:
            raise self._failure(f"{op}: {error.decode(errors='replace')}")

    def discard(self, name: str, *addresses: int) -> None:
        """Call `fdsd_cuda_<name>` that gives something back; its error is that of work before, which a wait reports."""
        self._error_of(name, addresses)

    def verify(self, op: str, struct: str) -> None:
        """Raise ConfigError unless the op is here and takes the params that the kernel library's takes."""
        if not self.has(op):
            raise ConfigError(f"op {op}: expected a CUDA kernel, there is none")
        if struct in self._is_same:
            return
        if read_layout(self.functions, struct) != layout(struct):
            raise ConfigError(
                f"op {op}: expected {struct} in the CUDA library as in the kernel library, got another; build both anew"
            )
        self._is_same.add(struct)

    def _failure(self, text: str) -> ValueError | DeviceLost:
        """Tell a call that was refused from one that met what a kernel did wrong: that, every later wait meets too."""
        return DeviceLost(f"the GPU has failed: {text}") if self._error_of("synchronize", ()) else ValueError(text)

    def _error_of(self, name: str, arguments: tuple[Any, ...]) -> bytes | None:
        function = getattr(self.functions, f"fdsd_cuda_{name}")
        function.restype = ctypes.c_char_p
        error: bytes | None = function(*map(_argument, arguments))
        return error


def _argument(value: Any) -> Any:
    return ctypes.c_void_p(value) if isinstance(value, int) else value
