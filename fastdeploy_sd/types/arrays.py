"""Arrays that values are made of, and the offsets of ragged ones. Knows NumPy only."""

from __future__ import annotations

from collections.abc import Sequence

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


def take_rows(cu: I32, rows: Rows) -> tuple[Rows, I32]:
    """Return which values the rows intp[n] of a ragged array with offsets i32[R+1] have, and their offsets i32[n+1]."""
    counts = np.diff(cu)[rows]
    taken = offsets(counts)
    shift = np.repeat(cu[:-1][rows] - taken[:-1], counts)
    return shift + np.arange(len(shift)), taken


def merge_rows(num_rows: int, parts: Sequence[tuple[Rows, I32]]) -> tuple[Rows, I32]:
    """Return the order of the parts' values, one part after the other, in which row r has every part's, and offsets.

    Args:
        num_rows: R.
        parts: (rows intp[n], offsets i32[n+1]) each: row i of the part belongs to row rows[i].
    """
    row_of = np.concatenate([np.repeat(rows, np.diff(cu)) for rows, cu in parts])
    return np.argsort(row_of, kind="stable"), offsets(np.bincount(row_of, minlength=num_rows))
