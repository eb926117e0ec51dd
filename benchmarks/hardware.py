"""What a benchmark ran on: processor, kernels, and the memory speed measured at that moment.

Virtual machines may move between cores that share a cache and cores that do not, which changes how fast memory is read
by half or more. So bandwidth is no constant of a machine: it is measured around every run, together with the latency
between two cores, which tells the placements apart.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import Any

from fastdeploy_sd.device import library
from fastdeploy_sd.device.processors import processor_name
from fastdeploy_sd.ops import roofline
from fastdeploy_sd.ops.linear_format import LinearFormat

# Larger than any last-level cache two threads share.
STREAM_BYTES = 512 << 20
NUM_PASSES = 8
NUM_PING_PONGS = 10


@dataclass(frozen=True, slots=True)
class MemorySpeed:
    """One measurement with all kernel threads.

    Attributes:
        read_gb_per_s: reading a buffer beyond the caches, 1e9 bytes per second, the best of several passes.
        core_latency_ns: one way between two threads, the best of several; 0 with a single thread.
    """

    read_gb_per_s: float
    core_latency_ns: float


def measure_memory() -> MemorySpeed:
    """Measure now; takes some tenths of a second and `STREAM_BYTES` of memory. No op may run meanwhile."""
    lib = library.library()
    lib.fdsd_core_latency.restype = ctypes.c_double
    bytes_per_s = roofline.read_bandwidth(STREAM_BYTES, NUM_PASSES)
    return MemorySpeed(bytes_per_s / 1e9, lib.fdsd_core_latency(NUM_PING_PONGS) * 1e9)


def dot_peak(fmt: LinearFormat) -> float:
    """Return `roofline.dot_peak`, the best of as many passes as bandwidth is measured with."""
    return roofline.dot_peak(fmt, NUM_PASSES)


def describe_hardware() -> dict[str, Any]:
    """Return the `hardware` part of a record, without the memory speeds (those belong to a repeat)."""
    kernels = {"isa": library.isa(), "num_threads": library.num_threads()}
    return {"cpu": processor_name(), **kernels, "gpu": None, "driver": None}


def memory_json(speed: MemorySpeed) -> dict[str, float]:
    """Return a measurement as it appears in a record."""
    return {name: round(value, 2) for name, value in asdict(speed).items()}
