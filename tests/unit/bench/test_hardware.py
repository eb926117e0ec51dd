"""Measuring the machine: numbers that make sense, and arguments that do not are answered, not crashed on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from fastdeploy_sd.bench import hardware
from fastdeploy_sd.bench.hardware import describe_hardware, measure_memory, memory_json
from fastdeploy_sd.ops import library


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = library.num_threads()
    yield
    library.set_num_threads(before)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_measures_something_plausible(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "STREAM_BYTES", 8 << 20)
    library.set_num_threads(num_threads)
    speed = measure_memory()
    # From one slow core on a busy machine to a small buffer that stays in the cache of a fast one.
    assert 0.1 < speed.read_gb_per_s < 10_000
    if num_threads == 1:
        assert speed.core_latency_ns == 0
    else:
        # 0: the threads never ran at the same time.
        assert speed.core_latency_ns == 0 or 1 < speed.core_latency_ns < 1e6
    assert set(memory_json(speed)) == {"read_gb_per_s", "core_latency_ns"}


@pytest.mark.parametrize(("num_bytes", "num_passes"), [(0, 1), (-1, 1), (1000, 1), (8 << 20, 0), (1 << 60, 1)])
def test_impossible_measurement_is_zero(num_bytes: int, num_passes: int) -> None:
    function = library.library().fdsd_read_bandwidth
    function.restype = ctypes.c_double
    assert function(ctypes.c_int64(num_bytes), num_passes) == 0.0


def test_hardware_says_what_kernels_run() -> None:
    described = describe_hardware()
    assert described["isa"] == library.isa()
    assert described["num_threads"] == library.num_threads()
    assert described["cpu"]
