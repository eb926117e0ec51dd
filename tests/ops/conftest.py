from __future__ import annotations

import gc
from collections.abc import Iterator

import paddle
import pytest

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.program import paddle_ops
from fastdeploy_sd.ops.operators import declared_ops
from tests.ops import cuda_device
from tests.ops.backends import LEVELS, isa


@pytest.fixture(scope="session", autouse=True)
def operators() -> None:
    """Paddle's side of the cases; nothing loads operators inside a call. A GPU needs none, nor Paddle."""
    if paddle.__version__ != "none":
        paddle_ops.load(declared_ops())


@pytest.fixture(params=[cuda_device.EMULATED, pytest.param(cuda_device.GPU, marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> cuda_device.OpRunner:
    """What runs ops by CUDA kernels: emulated, and on a GPU where there is one."""
    return cuda_device.runner(request.param)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction-set level, which kernels use meanwhile."""
    with isa(request.param):
        yield request.param


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Nothing is done but what a test asks for: memory that garbage of others gives back waits for a whole device."""
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


@pytest.fixture
def gpu(device: cuda_device.OpRunner) -> CudaDevice:
    """A device of its own over the same library."""
    return CudaDevice(device.device.library)
