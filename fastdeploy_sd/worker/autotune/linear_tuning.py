"""Tunes matrix products on this machine: prefetch and blocks of rows, measured once per weight format, and kept.

The best values follow from a processor's prefetcher, registers and caches; its name does not tell them. Rank 0 of a
group measures while the others wait: ranks that measured at the same time would share the bandwidth.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fastdeploy_sd.device.library import library
from fastdeploy_sd.device.memory import huge_pages
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import PackedLinear, packed_bytes
from fastdeploy_sd.spec_decode.control.profile import Key
from fastdeploy_sd.worker.autotune.kept_measurements import keep, load_json, save_json
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

_NUM_ROUNDS = 6
# A machine is busy if its median round takes this multiple of the fastest one.
_DISTURBED = 1.25


@dataclass(frozen=True, slots=True)
class Tunable:
    """A number of a kernel. No bit of any result depends on it.

    Attributes:
        key: its name in files.
        values: the allowed ones; the first leaves the choice to the kernel.
        gain: the factor by which another value must be faster than the first, > 1.
        num_rows: of the products that it is measured with.
        alike: keys of other numbers that have the same value during its measurement.
        after: keys of other numbers that were measured before, and keep their values during its measurement.
    """

    key: str
    values: tuple[int, ...]
    gain: float
    num_rows: int
    alike: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def measured(tunable: Tunable, use: Callable[[int], object], run: Callable[[], object]) -> tuple[int, bool]:
    """Return the value that is clearly the fastest, and whether the machine was quiet.

    On a busy machine it is the first value: the best one then depends on the other programs.
    """
    times = take_turns(tunable.values, use, run)
    if not was_quiet(times[tunable.values[0]]):
        return tunable.values[0], False
    return clearly_best(times, tunable.values[0], tunable.gain), True


def take_turns(
    values: Sequence[int], use: Callable[[int], object], run: Callable[[], object]
) -> dict[int, list[float]]:
    """Return value -> seconds of each round."""
    times: dict[int, list[float]] = {value: [] for value in values}
    for _ in range(_NUM_ROUNDS):
        for value, seconds in times.items():
            use(value)
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return times


def clearly_best(times: Mapping[int, Sequence[float]], default: int, gain: float) -> int:
    """Return the value with the least time.

    The default where that may be chance: the other must be faster at the median, in the even and in the odd rounds.
    """
    best = min(times, key=lambda value: min(times[value]))
    halves = (slice(0, None, 2), slice(1, None, 2))
    is_better = all(min(times[best][half]) * gain < min(times[default][half]) for half in halves)
    return best if is_better and median(times[best]) < median(times[default]) else default


def was_quiet(seconds: Sequence[float]) -> bool:
    """Whether the machine did nothing else during these rounds of one value."""
    return median(seconds) < _DISTURBED * min(seconds)


# Key of a Tunable -> value.
Tuning = Mapping[str, int]

UNMEASURED = -1  # the kernel's own distance
# Measured numbers of rows. Others use the distance of the next larger one.
ROWS = (1, 2, 3, 4, 5, 6, 8, 12)
_DISTANCE_KEYS = {num_rows: f"prefetch_bytes_{num_rows}" for num_rows in ROWS}
TUNABLES = (
    # Bytes ahead of the loads, 0 = no prefetch. The rows may run as several tiles of fewer, so these prefetch alike.
    *(
        Tunable(key, (UNMEASURED, 0, 2048, 8192, 16384), 1.03, num_rows, alike=tuple(_DISTANCE_KEYS.values())[:i])
        for i, (num_rows, key) in enumerate(_DISTANCE_KEYS.items())
    ),
    # At most; 0 = the kernel's own. Measured with several tiles of every level.
    Tunable("tile_rows", (0, 3, 4, 6, 8, 10, 16), 1.02, num_rows=96),
    # Of packed rows that a pass over the weights multiplies. Measured with several blocks of most sizes.
    Tunable("block_bytes", (0, 256 << 10, 1 << 20, 2 << 20), 1.02, num_rows=512, after=("tile_rows",)),
)
DEFAULT: Tuning = {tunable.key: tunable.values[0] for tunable in TUNABLES}
# Weights for the prefetch are larger than last-level caches: cached weights need none.
MEASURED_BYTES = 128 << 20
_WIDE, _NARROW, _OUT_FEATURES = 4096, 2048, 512

_VERSION = 4
# An incomplete measurement is repeated only after this time: else a busy machine would measure at every start.
_RETRY_S = 24 * 3600.0
_log = logging.getLogger(__name__)


def tune_linear(
    formats: Collection[LinearFormat], machine: Key, folder: Path | None, group: RankGroup, *, is_worth: bool
) -> None:
    """Tune products of weight formats by the values kept in a folder; measures and keeps them where none fit.

    All ranks of a group call it, with the same formats. Values measured on a busy machine are not used: the kernels'
    own stay, and the measurement is repeated a day later.

    Args:
        machine: the key of the values.
        folder: None = every start measures.
        is_worth: on rank 0: whether the model is large enough to gain from it.
    """
    for fmt in formats:
        apply(fmt, of_code(group.of_first(partial(_own_code, fmt, machine, folder, is_worth))))


def apply(fmt: LinearFormat, tuning: Tuning) -> None:
    """Tune products of a format."""
    set_distances(fmt, {num_rows: tuning[key] for num_rows, key in _DISTANCE_KEYS.items()})
    set_blocking(fmt, tuning["tile_rows"], tuning["block_bytes"])


def set_distances(fmt: LinearFormat, distances: Mapping[int, int]) -> None:
    """Set how many bytes ahead of their loads products of so many rows ask for weights.

    Raises ConfigError: a number of rows is not in 1..32, or a distance not in -1..65536.
    """
    low = 1
    for high, distance in sorted(distances.items()):
        for num_rows in range(low, high + 1):
            _set("prefetch_bytes", fmt, num_rows, distance, f"{distance} bytes for {num_rows} rows")
        low = high + 1


def set_blocking(fmt: LinearFormat, tile_rows: int = 0, block_bytes: int = 0) -> None:
    """Set how many rows a tile has at most, and how many bytes of packed rows a block.

    Raises ConfigError: tile_rows is not in 0..64, or block_bytes not in 0..2^30.
    """
    _set("row_blocking", fmt, tile_rows, block_bytes, f"{tile_rows} rows, {block_bytes} bytes")


def _set(name: str, fmt: LinearFormat, first: int, second: int, shown: str) -> None:
    function = getattr(library(), f"fdsd_set_{name}")
    function.restype = ctypes.c_char_p
    error = function(format_code(fmt), first, second)
    if error:
        raise ConfigError(f"{name}: {error.decode()}: {shown}")


def measure(fmt: LinearFormat, num_bytes: int = MEASURED_BYTES) -> tuple[Tuning, bool]:
    """Return the best tuning, and whether the machine was quiet all the time; the kernels' own stays set.

    `num_bytes`: of the weights that the prefetch is measured with.
    """
    wide, narrow = zeros(fmt, _WIDE, num_bytes), zeros(fmt, _NARROW, packed_bytes(_NARROW, _OUT_FEATURES, fmt))
    tuning, was_quiet = dict(DEFAULT), True
    try:
        for tunable in TUNABLES:
            weight = wide if tunable.key in _DISTANCE_KEYS.values() else narrow
            x: np.ndarray = np.ones((tunable.num_rows, weight.in_features), np.float32)
            others = dict(DEFAULT) | {key: tuning[key] for key in tunable.after}
            value, is_quiet = measured(tunable, partial(_use, fmt, others, tunable), partial(linear, x, weight))
            tuning[tunable.key] = value
            was_quiet &= is_quiet
    finally:
        apply(fmt, DEFAULT)
    return tuning, was_quiet


def zeros(fmt: LinearFormat, in_features: int, num_bytes: int) -> PackedLinear[np.ndarray]:
    """Return a packed matrix of zeros of about so many bytes."""
    least_outputs = 64
    panel_bytes = packed_bytes(in_features, least_outputs, fmt)
    out_features = max(num_bytes // panel_bytes, 1) * least_outputs
    data = huge_pages(packed_bytes(in_features, out_features, fmt))
    data[:] = 0  # pages that were never written are one page, which is always in the cache
    return PackedLinear(data, in_features, out_features, fmt)


def _use(fmt: LinearFormat, others: Tuning, tunable: Tunable, value: int) -> None:
    apply(fmt, {**others, **dict.fromkeys((*tunable.alike, tunable.key), value)})


def code_of(tuning: Tuning) -> int:
    """Return a number >= 0 that holds a tuning, for the other ranks."""
    code = 0
    for tunable in TUNABLES:
        code = code * len(tunable.values) + tunable.values.index(tuning[tunable.key])
    return code


def of_code(code: int) -> Tuning:
    """Return the tuning that a number holds."""
    tuning = {}
    for tunable in reversed(TUNABLES):
        code, index = divmod(code, len(tunable.values))
        tuning[tunable.key] = tunable.values[index]
    return tuning


def _own_code(fmt: LinearFormat, machine: Key, folder: Path | None, is_worth: bool) -> int:
    return code_of(_own(fmt, machine, folder) if is_worth else DEFAULT)


def _own(fmt: LinearFormat, machine: Key, folder: Path | None) -> Tuning:
    about = {"version": _VERSION, "machine": dict(machine)}
    digest = hashlib.blake2b(json.dumps(about["machine"], sort_keys=True).encode(), digest_size=12).hexdigest()
    path = None if folder is None else folder / f"linear-{fmt}-{digest}.json"
    kept = None if path is None else _load(path, about)
    if kept is not None:
        return kept
    begin = time.perf_counter()
    tuning, is_quiet = measure(fmt)
    values = {**about, "was_quiet": is_quiet, "measured_at": int(time.time()), "values": tuning}
    place = keep(path, True, partial(save_json, values))
    tuned = "tuned" if is_quiet else "tuned in part, as something else runs on this machine,"
    _log.info("products of %s weights: %s in %.1f s, %s", fmt, tuned, time.perf_counter() - begin, place)
    return tuning


def _load(path: Path, about: Mapping[str, Any]) -> Tuning | None:
    """Return the tuning of a file; None = none fits this version and machine, or a new measurement is due."""
    again = "products of weights: tuned again"
    values = load_json(path, about, again)
    if values is None:
        return None
    tuning, was_quiet, begin = values.get("values"), values.get("was_quiet"), values.get("measured_at")
    if not _is_tuning(tuning) or type(was_quiet) is not bool or type(begin) is not int:
        _log.warning("%s: %s: expected values, was_quiet and measured_at of a tuning, got others", again, path)
        return None
    return tuning if was_quiet or 0 <= time.time() - begin < _RETRY_S else None


def _is_tuning(values: Any) -> bool:
    """Whether a JSON value has an allowed value for every Tunable."""
    return (
        isinstance(values, dict)
        and values.keys() == DEFAULT.keys()
        and all(type(values[t.key]) is int and values[t.key] in t.values for t in TUNABLES)
    )
