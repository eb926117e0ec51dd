"""Which device a configuration means on a machine."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import pytest

from custom_ops import cuda_build
from fastdeploy_sd.cli.inspection import environment
from fastdeploy_sd.config import Config, ModelConfig, ParallelConfig
from fastdeploy_sd.device.cuda.library import CudaLibrary, cuda_refusal, load
from fastdeploy_sd.device.device import choose, device
from fastdeploy_sd.errors import ConfigError, DeviceLost
from fastdeploy_sd.worker.loading.device_choice import choose_device
from fastdeploy_sd.worker.loading.forecast import forecast

NAMES = ", ".join(f"sm_{name}" for name in cuda_build.ARCHITECTURES)
GPU, AUTO = (Config(ModelConfig(model="demo"), device=name) for name in ("gpu", "auto"))


@pytest.fixture(autouse=True)
def cpu_afterwards() -> Iterator[None]:
    yield
    choose(None)


def test_without_a_gpu_one_that_is_asked_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(ConfigError, match="device: expected cpu or auto on this machine, got gpu: no CUDA kernels at"):
        choose_device(GPU)
    with caplog.at_level(logging.INFO):
        assert choose_device(AUTO).kind == device().kind == "cpu"
    assert "device auto: the CPU is used: device: expected cpu" in caplog.text


def test_auto_takes_a_gpu_unless_an_option_needs_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    assert choose_device(AUTO).kind == "gpu"
    eager = replace(AUTO, model=replace(AUTO.model, enforce_eager=True))
    with caplog.at_level(logging.INFO):
        assert choose_device(eager).kind == "cpu"
    assert "device auto: the CPU is used: enforce_eager: expected false" in caplog.text
    with pytest.raises(ConfigError, match="enforce_eager: expected false with device gpu"):
        choose_device(replace(eager, device="gpu"))


def test_a_gpu_without_room_for_a_context_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(library: CudaLibrary) -> NoReturn:
        raise DeviceLost("the GPU has failed: out of memory")

    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    monkeypatch.setattr("fastdeploy_sd.worker.loading.device_choice.cuda_device", fail)
    wanted = "device: expected a GPU with room for a context, got emulated GPU: .*out of memory"
    with pytest.raises(ConfigError, match=wanted):
        choose_device(GPU)
    with caplog.at_level(logging.INFO):
        choose_device(AUTO)
    assert "device auto: the CPU is used: device: expected a GPU with room" in caplog.text


@pytest.mark.parametrize("error", [DeviceLost("the GPU has failed: out of memory"), ValueError("out of memory")])
def test_what_describes_a_gpu_says_that_it_has_no_room_for_a_context(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(library: CudaLibrary) -> NoReturn:
        raise error

    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    monkeypatch.setattr(CudaLibrary, "memory_bytes", fail)
    assert environment()["gpu"] == f"not used: emulated GPU: {error}"
    wanted = f"with main memory, as of device cpu: emulated GPU: {error}"
    assert forecast(GPU)["forecast"] == wanted


@pytest.mark.parametrize(
    ("architecture", "refusal"),
    [
        (75, f"the GPU is of sm_75, the kernels are for {NAMES}"),
        *((architecture, None) for architecture in (80, 86, 89, 90, 100, 120)),
        (110, f"the GPU is of sm_110, the kernels are for {NAMES}"),
    ],
)
def test_a_gpu_that_kernels_do_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, architecture: int, refusal: str | None
) -> None:
    path = cuda_build.build_emulated()
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(path))
    set_architecture = load(path).functions.fdsd_cuda_set_architecture
    set_architecture(architecture)
    try:
        assert cuda_refusal() == refusal
        assert choose_device(AUTO).kind == ("gpu" if refusal is None else "cpu")
    finally:
        set_architecture(90)


def test_every_rank_of_every_engine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(number: int, *, may_build: bool) -> str:
        assert may_build
        asked.append(number)
        return "none here"

    monkeypatch.setattr("fastdeploy_sd.worker.loading.device_choice.usable_library", ask)
    for engine in range(3):
        parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=3, local_data_parallel_id=engine)
        for rank in range(2):
            choose_device(replace(AUTO, parallel=parallel), rank)
    assert asked == list(range(6))


def test_too_few_gpus_for_all_engines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    engines = replace(GPU, parallel=ParallelConfig(data_parallel_size=2, local_data_parallel_id=0))
    with pytest.raises(ConfigError, match=r"data_parallel_size: expected at most 1, as every rank has a GPU .*, got 2"):
        choose_device(engines)
