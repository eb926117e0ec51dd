"""A GPU's memory from Paddle's allocator, which a program uses too: an emulation of it, on the emulated GPU."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from custom_ops import cuda_build
from fastdeploy_sd.cli.inspection import environment
from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.device.cuda import paddle_memory
from fastdeploy_sd.device.cuda.device import CudaDevice, cuda_device
from fastdeploy_sd.device.cuda.library import load
from fastdeploy_sd.device.device import choose
from fastdeploy_sd.worker.loading.device_choice import choose_device
from tests.doubles.paddle_gpu import PaddleGpu
from tests.ops.test_cuda_graphs import PADDING, Step

pytestmark = pytest.mark.slow

SIZE = 3 << 20
CAPACITY = 64 << 20


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaddleGpu]:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    cuda_device.cache_clear()
    yield PaddleGpu(load(cuda_build.build_emulated()), monkeypatch, CAPACITY)
    choose(None)
    cuda_device.cache_clear()


@pytest.fixture
def gpu(program: PaddleGpu) -> CudaDevice:
    return cuda_device(program.library)


def test_memory_is_a_part_of_paddles_until_nothing_over_it_is_left(program: PaddleGpu, gpu: CudaDevice) -> None:
    before, kept = program.allocated, program.empty(SIZE)
    tensor = gpu.wrap(np.arange(SIZE, dtype=np.uint8))
    assert program.allocated == before + 2 * SIZE
    view = tensor[5:]
    del tensor
    assert program.allocated == before + 2 * SIZE
    place = view.address - 5
    del view
    gc.collect()
    assert program.allocated == before + SIZE
    other = program.empty(SIZE)
    assert other.data_ptr() == place, "the program gets what we had"
    del kept


def test_what_the_program_has_started_on_memory_that_we_get_is_over(program: PaddleGpu, gpu: CudaDevice) -> None:
    theirs = program.empty(SIZE)
    place = theirs.data_ptr()
    program.fill(theirs, 7)
    del theirs
    ours = gpu.wrap(np.full(SIZE, 1, np.uint8))
    assert ours.address == place
    program.synchronize()
    assert set(gpu.read(ours).tolist()) == {1}


def test_what_we_have_started_on_memory_that_the_program_gets_is_over(program: PaddleGpu, gpu: CudaDevice) -> None:
    ours = gpu.zeros((SIZE,), np.uint8)
    place = ours.address
    del ours
    theirs = program.empty(SIZE)
    assert theirs.data_ptr() == place
    program.fill(theirs, 7)
    program.synchronize()
    gpu.wait()
    assert program.read(theirs) == {7}


def test_what_paddle_keeps_for_tensors_to_come_is_free_for_us(program: PaddleGpu, gpu: CudaDevice) -> None:
    tensors = [program.empty(CAPACITY // 4) for _ in range(3)]
    _, free = gpu.memory.allocator.total_and_free()
    assert free < CAPACITY // 4
    tensors.pop()
    assert program.library.memory_bytes()[1] == free, "the driver knows of none yet"
    assert gpu.memory.allocator.total_and_free() == (CAPACITY, free + CAPACITY // 4)
    kept = gpu.empty((free + CAPACITY // 4,), np.uint8)
    with pytest.raises(MemoryError, match=rf"{SIZE} bytes of the GPU's memory, of which 0 are free: .*Out of memory"):
        gpu.empty((SIZE,), np.uint8)
    del kept


def test_a_graph_reads_and_writes_the_same_memory_whatever_the_program_does(
    program: PaddleGpu, gpu: CudaDevice
) -> None:
    plain, step = Step(gpu, None), Step(gpu, PADDING)
    wanted = plain.run(5, 2)
    for _ in range(3):
        for got, want in zip(step.run(5, 2), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
        gc.collect()
        program.empty_cache()
        for size in (SIZE, 1 << 10, 1 << 16):
            theirs = program.empty(size)
            program.fill(theirs, 0xEE)
            del theirs
    assert len(step.program._graphs) == 1


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        (
            "allocator_strategy",
            "naive_best_fit",
            "FLAGS_allocator_strategy is naive_best_fit, .*auto_growth alone",
        ),
        ("use_virtual_memory_auto_growth", True, "FLAGS_use_virtual_memory_auto_growth is True"),
    ],
)
def test_memory_that_paddle_may_move_is_not_shared(
    program: PaddleGpu, monkeypatch: pytest.MonkeyPatch, flag: str, value: object, text: str
) -> None:
    read = paddle.get_flags
    monkeypatch.setitem(paddle_memory._FLAGS, "FLAGS_of_another_version", True)
    assert paddle_memory.refusal() is None
    monkeypatch.setattr(paddle, "get_flags", lambda name: {name: value} if name == f"FLAGS_{flag}" else read(name))
    assert re.search(text, str(paddle_memory.refusal()))
    assert re.fullmatch(f"taken from the driver: {text}.*", paddle_memory.memory_text(program.library))


def test_memory_is_the_drivers_where_a_variable_or_a_static_program_says_so(
    program: PaddleGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paddle_memory.refusal() is None
    with monkeypatch.context() as patch:
        patch.setattr(paddle, "in_dynamic_mode", lambda: False)
        assert paddle_memory.refusal() == "the program has called paddle.enable_static()"
    monkeypatch.setenv("FDSD_PADDLE_MEMORY", "0")
    assert paddle_memory.refusal() == "FDSD_PADDLE_MEMORY is 0"
    gpu = cuda_device(program.library)
    assert gpu.zeros((4,), np.uint8).address
    assert program.reserved == 0


def test_the_log_and_collect_env_say_whose_memory_is_taken(
    program: PaddleGpu, caplog: pytest.LogCaptureFixture
) -> None:
    kept = program.empty(SIZE)
    with caplog.at_level(logging.INFO):
        assert choose_device(Config(ModelConfig(model="m"), device="gpu")).kind == "gpu"
    text = "shared with Paddle, whose allocator has 0.01 GiB, 0.01 of them in tensors"
    assert f"GPU memory: {text}" in caplog.text
    assert environment()["gpu memory"] == text
    del kept


def test_without_a_gpu_build_of_paddle_memory_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    assert environment()["gpu memory"] == f"taken from the driver: Paddle {paddle.__version__} is a build without GPUs"
