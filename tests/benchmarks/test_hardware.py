"""Measuring the machine: arguments that make no sense are answered, not crashed on."""

from __future__ import annotations

import ctypes

import pytest

from benchmarks import hardware
from benchmarks.hardware import describe_hardware, dot_peak, measure_memory, memory_json
from benchmarks.kernels import FORMATS
from fastdeploy_sd.device import library
from tests.ops.backends import isa


def test_one_thread_has_no_other_to_talk_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "STREAM_BYTES", 8 << 20)
    before = library.num_threads()
    library.set_num_threads(1)
    try:
        speed = measure_memory()
    finally:
        library.set_num_threads(before)
    assert speed.core_latency_ns == 0 < speed.read_gb_per_s
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


@pytest.mark.parametrize("level", library.available_isas())
def test_the_scalar_level_has_no_instruction_whose_peak_there_is(level: str) -> None:
    with isa(level):
        assert [dot_peak(fmt) > 0 for fmt in FORMATS] == [level != "scalar"] * len(FORMATS)
