"""How far ahead of their loads matrix products ask for weights, measured per weight format and number of rows.

What is best differs between processors, and no name tells it: some read one row's weights fastest when left to their
own prefetcher, others when asked. No bit of any result depends on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial

import numpy as np

from fastdeploy_sd.device.library import library
from fastdeploy_sd.device.memory import huge_pages
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import PackedLinear, packed_bytes
from fastdeploy_sd.worker.autotune.timed_choice import quiet_best, take_turns

# What a kernel thinks best, and distances in bytes; 0 = it asks for nothing.
UNMEASURED = -1
DISTANCES = (0, 2048, 8192, 16384)
# Numbers of rows that are measured. Others have the distance of the next larger one.
ROWS = (1, 2, 3, 4, 5, 6, 8, 12)
# Larger than last-level caches: what those hold needs no prefetch.
MEASURED_BYTES = 128 << 20
_IN_FEATURES = 4096
_ALIGNED_OUT_FEATURES = 64
_NUM_ROUNDS = 6
_GAIN = 1.03

# Number of rows -> bytes ahead, or UNMEASURED.
Distances = Mapping[int, int]


def set_distances(fmt: LinearFormat, distances: Distances) -> None:
    """Make products of a format ask for weights at these distances.

    Raises:
        ConfigError: a number of rows is not in 1..32, or a distance not in -1..65536.
    """
    function = library().fdsd_set_prefetch_bytes
    function.restype = ctypes.c_char_p
    low = 1
    for high, distance in sorted(distances.items()):
        for num_rows in range(low, high + 1):
            error = function(format_code(fmt), num_rows, distance)
            if error:
                raise ConfigError(f"prefetch: {error.decode()}: {distance} bytes for {num_rows} rows")
        low = high + 1


def measure_distances(fmt: LinearFormat, num_bytes: int = MEASURED_BYTES) -> tuple[Distances, bool]:
    """Return the best distance of every number of rows, and whether the machine was quiet throughout.

    Numbers of rows that it was not quiet for keep UNMEASURED.

    Args:
        num_bytes: of the weights that are multiplied.
    """
    weight = _zeros(fmt, num_bytes)
    distances, is_quiet = {}, True
    for num_rows in ROWS:
        x: np.ndarray = np.ones((num_rows, _IN_FEATURES), np.float32)
        times = take_turns((UNMEASURED, *DISTANCES), _NUM_ROUNDS, partial(_multiply, x, weight))
        distances[num_rows], was_quiet = quiet_best(times, UNMEASURED, _GAIN)
        is_quiet &= was_quiet
        set_distances(fmt, {num_rows: UNMEASURED})
    return distances, is_quiet


def _multiply(x: np.ndarray, weight: PackedLinear[np.ndarray], distance: int) -> None:
    set_distances(weight.format, {len(x): distance})
    linear(x, weight)


def _zeros(fmt: LinearFormat, num_bytes: int) -> PackedLinear[np.ndarray]:
    column_bytes = packed_bytes(_IN_FEATURES, _ALIGNED_OUT_FEATURES, fmt) // _ALIGNED_OUT_FEATURES
    out_features = max(num_bytes // column_bytes // _ALIGNED_OUT_FEATURES, 1) * _ALIGNED_OUT_FEATURES
    data = huge_pages(packed_bytes(_IN_FEATURES, out_features, fmt))
    data[:] = 0  # pages of its own
    return PackedLinear(data, _IN_FEATURES, out_features, fmt)
