"""In what blocks matrix products take many rows, measured per weight format: so many to a tile, so many bytes of packed
rows per pass over the weights.

What is best follows from a processor's registers and caches, and no name tells it. No bit of any result depends on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_sd.device.library import library
from fastdeploy_sd.device.memory import huge_pages
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import PackedLinear, packed_bytes
from fastdeploy_sd.worker.autotune.timed_choice import quiet_best, take_turns

# 0 = as the kernel thinks best. A tile never has more rows than its level's registers hold.
TILE_ROWS = (0, 3, 4, 6, 8, 10, 16)
BLOCK_BYTES = (0, 256 << 10, 1 << 20, 2 << 20)
# Several tiles of every level, and several blocks of most sizes.
_TILE_TEST_ROWS, _BLOCK_TEST_ROWS = 96, 512
_IN_FEATURES, _OUT_FEATURES = 2048, 512
_NUM_ROUNDS = 6
_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class Blocking:
    """How rows that need more than one tile are taken; 0 = as the kernel thinks best.

    Attributes:
        tile_rows: of a tile at most. block_bytes: of packed rows, per pass over the weights.
    """

    tile_rows: int = 0
    block_bytes: int = 0


def set_blocking(fmt: LinearFormat, blocking: Blocking) -> None:
    """Make products of a format take rows so.

    Raises:
        ConfigError: tile_rows is not in 0..64, or block_bytes not in 0..2^30.
    """
    function = library().fdsd_set_row_blocking
    function.restype = ctypes.c_char_p
    error = function(format_code(fmt), blocking.tile_rows, blocking.block_bytes)
    if error:
        raise ConfigError(f"row blocks: {error.decode()}: {blocking}")


def measure_blocking(fmt: LinearFormat, out_features: int = _OUT_FEATURES) -> tuple[Blocking, bool]:
    """Return the best blocking, and whether the machine was quiet throughout.

    What it was not quiet for is as the kernel thinks best.

    Args:
        out_features: of the weights that are multiplied.
    """
    data = huge_pages(packed_bytes(_IN_FEATURES, out_features, fmt))
    data[:] = 0  # pages of its own
    weight = PackedLinear(data, _IN_FEATURES, out_features, fmt)

    def best(num_rows: int, choices: tuple[int, ...], blocking: Callable[[int], Blocking]) -> tuple[int, bool]:
        x: np.ndarray = np.ones((num_rows, _IN_FEATURES), np.float32)

        def run(choice: int) -> None:
            set_blocking(fmt, blocking(choice))
            linear(x, weight)

        times = take_turns(choices, _NUM_ROUNDS, run)
        return quiet_best(times, 0, _GAIN)

    try:
        tile_rows, were_quiet = best(_TILE_TEST_ROWS, TILE_ROWS, Blocking)
        tiles = Blocking(tile_rows)
        block_bytes, was_too = best(_BLOCK_TEST_ROWS, BLOCK_BYTES, lambda size: replace(tiles, block_bytes=size))
    finally:
        set_blocking(fmt, Blocking())
    return replace(tiles, block_bytes=block_bytes), were_quiet and was_too
