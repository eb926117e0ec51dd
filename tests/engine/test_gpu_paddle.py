"""An engine inside a program whose Paddle is a build for GPUs: one allocator serves both.

On the emulated GPU Paddle's memory is emulated too (tests/doubles/paddle_gpu.py). On a real one these tests need the
package paddlepaddle-gpu.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import paddle
import pytest

from fastdeploy_sd.cli.verify import run_alone, run_cell
from fastdeploy_sd.device.cuda import paddle_memory
from fastdeploy_sd.device.cuda.device import cuda_device
from fastdeploy_sd.device.cuda.library import CudaLibrary, usable_library
from fastdeploy_sd.device.device import choose
from tests.doubles.paddle_gpu import PaddleGpu
from tests.engine.gpu import BATCH, short_requests, tiny_config
from tests.engine.test_gpu import method_named
from tests.ops.cuda_device import EMULATED

pytestmark = pytest.mark.slow

# What an op's kernels have for scratch stays with the GPU.
_SCRATCH_BYTES = 64 << 10


@pytest.fixture
def library() -> Iterator[CudaLibrary]:
    """Of a GPU whose memory is chosen anew, here and afterwards."""
    found = usable_library()
    assert isinstance(found, CudaLibrary), found
    cuda_device.cache_clear()
    yield found
    choose(None)
    cuda_device.cache_clear()


def test_an_engine_answers_the_same_from_paddles_memory_and_gives_it_back(
    kind: str, library: CudaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = short_requests()[1:5]
    with monkeypatch.context() as patch:
        patch.setenv("FDSD_PADDLE_MEMORY", "0")
        expected = run_alone(tiny_config(), requests)
    cuda_device.cache_clear()
    if kind == EMULATED:
        PaddleGpu(library, monkeypatch)
    elif (reason := paddle_memory.refusal()) is not None:
        pytest.skip(f"no shared memory: {reason}")
    cuda: Any = paddle.device.cuda
    number = library.current_device()
    tensor = paddle._C_ops.empty([1 << 20], paddle.uint8, paddle.CUDAPlace(number))
    assert cuda_device(library).memory.allocator.text.startswith("shared with Paddle")  # staging memory stays with it
    before = cuda.memory_allocated(number)
    cell = run_cell(tiny_config(), BATCH, method_named("ngram", kind), requests, expected)
    assert (cell.difference, cell.missing) == (None, None)
    gc.collect()
    assert cuda.max_memory_allocated(number) > before + 8 * _SCRATCH_BYTES, "weights and KV"
    assert 0 <= cuda.memory_allocated(number) - before <= _SCRATCH_BYTES
    del tensor
