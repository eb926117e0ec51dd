"""Arrays that values are made of, and the offsets of ragged ones. Knows NumPy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
I8 = npt.NDArray[np.int8]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
Bytes = U8  # of elements of any type

EMPTY_I32: I32 = np.zeros(0, np.int32)


def offsets(counts: npt.ArrayLike) -> I32:
    """Return i32[n+1]: where each of n consecutive parts of `counts` entries begins, and where the last one ends."""
    lengths = np.asarray(counts)
    cu = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu[1:])
    return cu
