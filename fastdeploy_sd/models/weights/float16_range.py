"""Refuses weights that float16 cannot hold: an infinite one would end every request that reads it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.weight_matrix import FloatPart

_LARGEST = 65504
# From here on numbers are rounded to infinity: half a step above the largest number, where a tie is rounded up.
_FIRST_INFINITE = 65520.0
# Rows are read in pieces that a cache holds until the second pass.
_PIECE_BYTES = 1 << 20


def verify_float16(part: FloatPart) -> None:
    """Raise CheckpointError where a number of a part becomes infinite in float16. NaNs pass.

    A part stored in float16 is not read.
    """
    data = part.data
    if data.dtype == np.float16 or not data.size:
        return
    rows = max(1, _PIECE_BYTES // (data.itemsize * max(data.shape[1], 1)))
    largest = max(_largest(data[begin : begin + rows]) for begin in range(0, len(data), rows))
    if largest >= _FIRST_INFINITE:
        raise CheckpointError(
            f"tensor {part.name!r}: expected numbers that float16 can hold, up to {_LARGEST}, got one of magnitude "
            f"{largest:g}; start with --dtype bfloat16"
        )


def _largest(data: npt.NDArray[np.generic]) -> float:
    """Return the largest magnitude of numbers f32 or bf16 (u16 bits) that are not NaN.

    Without the sign, bits are in the order of the magnitudes. The largest unsigned bits are of a negative number, the
    largest signed ones of a positive number: two reductions, and no array.
    """
    bits = data.view(np.dtype(f"u{data.itemsize}"))
    sign = 1 << (8 * data.itemsize - 1)
    magnitude = max(int(bits.max()) & (sign - 1), int(bits.view(np.dtype(f"i{data.itemsize}")).max()))
    largest = float(widen(np.array([magnitude], bits.dtype).view(data.dtype))[0])
    if not np.isnan(largest):
        return largest
    magnitudes = np.abs(widen(data))
    return float(np.max(magnitudes, initial=0.0, where=~np.isnan(magnitudes)))
