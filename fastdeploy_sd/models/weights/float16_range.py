"""Refuses weights that float16 cannot hold, by name: an infinite one would end every request that reads it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.weight_matrix import FloatPart

_LARGEST = 65504
# What is nearer to the next step of float16, which is infinity, than to the largest number; a tie goes there too.
_FIRST_INFINITE = 65520.0
# Rows are looked at in pieces that stay in a cache until they are read again.
_PIECE_BYTES = 1 << 20


def verify_float16(part: FloatPart) -> None:
    """Raise CheckpointError where a finite or infinite number of a part becomes infinite in float16.

    What is stored in float16 costs nothing, other types one pass. NaNs are not looked for.
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
    """Return the largest magnitude of numbers f32 or bf16 (u16 bits); of NaNs, that of the others.

    Without their sign, bits of numbers are in the numbers' order. As unsigned numbers the negative ones are last, as
    signed ones the others: two reductions, and no array.
    """
    bits = data.view(np.dtype(f"u{data.itemsize}"))
    sign = 1 << (8 * data.itemsize - 1)
    magnitude = max(int(bits.max()) & (sign - 1), int(bits.view(np.dtype(f"i{data.itemsize}")).max()))
    largest = float(widen(np.array([magnitude], bits.dtype).view(data.dtype))[0])
    if not np.isnan(largest):
        return largest
    magnitudes = np.abs(widen(data))
    return float(np.max(magnitudes, initial=0.0, where=~np.isnan(magnitudes)))
