"""Memory of a GPU that Paddle's caching allocator gives, where Paddle is a build for GPUs.

A program that uses Paddle on the same GPU then shares one cache of memory with us: what its tensors had is free for
ours, and the other way round. Paddle may give memory on while its streams or ours still use it, so both are waited for
when a piece changes hands, at loading and closing. Streams are our own: nothing else of Paddle's is read or written.

Source: Paddle's allocator (AutoGrowthBestFitAllocator), which keeps one cache for each of its streams.
"""

from __future__ import annotations

import functools
import os

import paddle

from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import Allocator
from fastdeploy_sd.device.memory import DeviceMemory
from fastdeploy_sd.errors import DeviceLost

_GIB = 1 << 30
_VARIABLE = "FDSD_PADDLE_MEMORY"
# With these an allocation stays where it is until it is freed; with others Paddle may move it (virtual memory), or has
# taken most of the GPU at once (naive_best_fit), or pages go to the host and back.
_FLAGS = {
    "FLAGS_allocator_strategy": "auto_growth",
    "FLAGS_use_virtual_memory_auto_growth": False,
    "FLAGS_use_cuda_malloc_async_allocator": False,
    "FLAGS_use_cuda_managed_memory": False,
}


class PaddleAllocator(Allocator):
    """Paddle's allocator of the calling thread's GPU. Every allocation is a tensor, and lives as long as that."""

    def __init__(self, library: CudaLibrary) -> None:
        super().__init__(library)
        self._gpu = library.current_device()

    @property
    def text(self) -> str:
        reserved = paddle.device.cuda.memory_reserved(self._gpu) / _GIB
        allocated = paddle.device.cuda.memory_allocated(self._gpu) / _GIB
        return f"shared with Paddle, whose allocator has {reserved:.2f} GiB, {allocated:.2f} of them in tensors"

    def allocate(self, num_bytes: int) -> DeviceMemory:
        cuda = paddle.device.cuda
        try:
            tensor = paddle._C_ops.empty([max(num_bytes, 1)], paddle.uint8, paddle.CUDAPlace(self._gpu))
            # What had it before may still be read or written by what Paddle has started on this stream.
            cuda.current_stream(self._gpu).synchronize()
        except MemoryError as error:
            raise self.shortage(num_bytes, error) from None
        except OSError as error:  # of CUDA
            raise DeviceLost(f"Paddle's memory of the GPU: {error}") from error

        return DeviceMemory(tensor.data_ptr(), num_bytes, functools.partial(_give_back, self.library, [tensor]))

    def total_and_free(self) -> tuple[int, int]:
        """See Allocator. Paddle first returns to the driver what it keeps for tensors to come."""
        paddle.device.cuda.empty_cache()
        return self.library.memory_bytes()


def _give_back(library: CudaLibrary, kept: list[paddle.Tensor], _: int) -> None:
    library.discard("synchronize")  # Paddle gives the tensor's memory to others at once
    kept.clear()


def refusal() -> str | None:
    """Return why a GPU's memory is not shared with Paddle; None if it is."""
    if paddle.__version__ == "none":
        return "Paddle is not installed"
    if not paddle.is_compiled_with_cuda():
        return f"Paddle {paddle.__version__} is a build without GPUs"
    if os.environ.get(_VARIABLE) == "0":
        return f"{_VARIABLE} is 0"
    if not paddle.in_dynamic_mode():
        return "the program has called paddle.enable_static()"
    for name, expected in _FLAGS.items():
        value = _flag(name, expected)
        if value != expected:
            return f"{name} is {value}, and Paddle's memory is shared with {expected} alone"
    return None


def allocator_of(library: CudaLibrary) -> Allocator:
    """Return where the memory of the calling thread's GPU comes from."""
    return Allocator(library) if refusal() is not None else PaddleAllocator(library)


def memory_text(library: CudaLibrary) -> str:
    """Return where that is, and why, for people."""
    reason, text = refusal(), allocator_of(library).text
    return text if reason is None else f"{text}: {reason}"


def _flag(name: str, default: object) -> object:
    try:
        return paddle.get_flags(name)[name]
    except ValueError:  # this version has no such flag
        return default
