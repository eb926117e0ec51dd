"""How far ahead of their loads matrix products ask for weights: measured once per machine and weight format, and kept.

What is best differs between processors, and no name tells it: some read one row's weights fastest when left to their
own prefetcher, others when asked. No bit of any result depends on it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.files import read_json, replacing
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import PackedLinear, packed_bytes
from fastdeploy_sd.runtime.library import library
from fastdeploy_sd.runtime.memory import huge_pages
from fastdeploy_sd.spec_decode.auto_profile import Key
from fastdeploy_sd.worker.kept_measurements import keep

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
# Another distance must be better than the kernel's own by so much, or it may have been chance.
_GAIN = 1.03
# A machine on which the same takes so much longer at the median does something else besides.
_DISTURBED = 1.5
_VERSION = 1
_log = logging.getLogger(__name__)

# Number of rows -> bytes ahead, or UNMEASURED.
Distances = Mapping[int, int]


def tune_prefetch(
    formats: Collection[LinearFormat], machine: Key, folder: Path | None, num_bytes: int = MEASURED_BYTES
) -> None:
    """Set the distances of weight formats, as kept in a folder; measured now, and kept, where none fit.

    Args:
        machine: what they depend on.
        folder: None = there is none, and they are measured at every start.
        num_bytes: of the weights that are multiplied.
    """
    for fmt in formats:
        path = None if folder is None else folder / _name(fmt, machine)
        kept = None if path is None else _load(path, machine)
        if kept is None:
            begin = time.perf_counter()
            kept, is_steady = measure(fmt, num_bytes)
            place = keep(path, is_steady, partial(_save, machine, kept))
            _log.info("prefetch of %s weights: measured in %.1f s, %s", fmt, time.perf_counter() - begin, place)
        set_distances(fmt, kept)


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


def measure(fmt: LinearFormat, num_bytes: int) -> tuple[Distances, bool]:
    """Return the best distance of every number of rows, and whether the machine was quiet meanwhile."""
    column_bytes = packed_bytes(_IN_FEATURES, _ALIGNED_OUT_FEATURES, fmt) // _ALIGNED_OUT_FEATURES
    out_features = max(num_bytes // column_bytes // _ALIGNED_OUT_FEATURES, 1) * _ALIGNED_OUT_FEATURES
    data = huge_pages(packed_bytes(_IN_FEATURES, out_features, fmt))
    data[:] = 0  # pages of its own
    weight = PackedLinear(data, _IN_FEATURES, out_features, fmt)
    distances, is_steady = {}, True
    for num_rows in ROWS:
        x: np.ndarray = np.ones((num_rows, _IN_FEATURES), np.float32)
        times: dict[int, list[float]] = {distance: [] for distance in (UNMEASURED, *DISTANCES)}
        for _ in range(_NUM_ROUNDS):
            for distance, seconds in times.items():
                set_distances(fmt, {num_rows: distance})
                begin = time.perf_counter()
                linear(x, weight)
                seconds.append(time.perf_counter() - begin)
        distances[num_rows] = best_distance(times)
        own = times[UNMEASURED]
        is_steady &= sorted(own)[len(own) // 2] < _DISTURBED * min(own)
        set_distances(fmt, {num_rows: UNMEASURED})
    return distances, is_steady


def best_distance(times: Mapping[int, Sequence[float]]) -> int:
    """Return the distance with the least time; UNMEASURED where none is clearly better than that, both in the even and
    in the odd rounds.

    Args:
        times: distance -> seconds of each round, at least two; UNMEASURED among them.
    """
    best = min(times, key=lambda distance: min(times[distance]))
    halves = (slice(0, None, 2), slice(1, None, 2))
    is_clear = all(min(times[best][half]) * _GAIN < min(times[UNMEASURED][half]) for half in halves)
    return best if is_clear else UNMEASURED


def _name(fmt: LinearFormat, machine: Key) -> str:
    text = json.dumps(dict(machine), sort_keys=True)
    return f"prefetch-{fmt}-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def _load(path: Path, machine: Key) -> Distances | None:
    """Return what a file says; None = there is none that fits this version and machine."""
    try:
        values = read_json(path, missing_ok=True)
    except CheckpointError as error:
        _log.warning("prefetch: measured again: %s", error)
        return None
    distances = values.get("bytes_ahead")
    known = {str(num_rows) for num_rows in ROWS}
    if (values.get("version"), values.get("machine")) != (_VERSION, dict(machine)):
        return None
    if (
        not isinstance(distances, dict)
        or distances.keys() != known
        or not all(type(d) is int and d in (UNMEASURED, *DISTANCES) for d in distances.values())
    ):
        _log.warning("prefetch: measured again: %s: expected bytes_ahead of %s rows", path, ", ".join(sorted(known)))
        return None
    return {int(num_rows): distance for num_rows, distance in distances.items()}


def _save(machine: Key, distances: Distances, path: Path) -> None:
    values = {"version": _VERSION, "machine": dict(machine), "bytes_ahead": distances}
    with replacing(path) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())
