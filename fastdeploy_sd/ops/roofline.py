"""How fast this machine reads memory and multiplies, measured now with the kernels' threads. No op may run meanwhile.

A step reads every weight once and multiplies it with each of its rows, so its time is at least the longer of two:
weights over the read bandwidth, operations over the instructions' peak.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (CACM 52(4), 2009).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from fastdeploy_sd.device.library import returned
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import packed_bytes

# A matrix of no model, large enough for scales and padding to count as they do in one.
_SAMPLE_FEATURES = 1024


@dataclass(frozen=True, slots=True)
class Roofline:
    """The limits of this machine; 0 = could not be measured, or the level has no such instruction.

    `peaks` are operations per second of the instruction that multiplies a weight format: a multiplication and an
    addition count as one each.
    """

    read_bytes_per_s: float
    peaks: Mapping[LinearFormat, float]

    def steps_per_s(self, num_bytes: int) -> float:
        """The most steps per second, when each reads so many bytes; 0 = unknown."""
        return self.read_bytes_per_s / num_bytes

    def free_rows(self, fmt: LinearFormat) -> int | None:
        """The most rows whose arithmetic takes no longer than reading the weights, at least 1; None = unknown.

        Up to that many rows, requests and drafts cost linear layers nothing; beyond, arithmetic is the limit.
        """
        if not self.read_bytes_per_s or not self.peaks.get(fmt):
            return None
        bytes_per_weight = packed_bytes(_SAMPLE_FEATURES, _SAMPLE_FEATURES, fmt) / _SAMPLE_FEATURES**2
        return max(1, int(self.peaks[fmt] * bytes_per_weight / self.read_bytes_per_s / 2))


def measure_roofline(formats: tuple[LinearFormat, ...], num_bytes: int, num_passes: int) -> Roofline:
    """Measure memory and the instructions of these formats; the other arguments are those of `read_bandwidth`."""
    return Roofline(read_bandwidth(num_bytes, num_passes), {fmt: dot_peak(fmt, num_passes) for fmt in formats})


def read_bandwidth(num_bytes: int, num_passes: int) -> float:
    """Return the bytes per second at which a buffer larger than all caches is read, the best of several passes.

    It is 0 where there is no such memory, or less than 1 MiB or no pass was asked for.
    """
    return float(returned("read_bandwidth", ctypes.c_double, ctypes.c_int64(num_bytes), num_passes))


def dot_peak(fmt: LinearFormat, num_passes: int) -> float:
    """Return the operations per second of the instruction that multiplies a weight format; see Roofline.peaks."""
    return float(returned("dot_peak", ctypes.c_double, format_code(fmt), num_passes))
