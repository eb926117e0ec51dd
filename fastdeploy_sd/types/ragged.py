"""Rows of tokens of different lengths, and their log-probabilities. Knows neither drafts nor output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.types.arrays import I32, Rows, offsets


def take_rows(cu: I32, rows: Rows) -> tuple[Rows, I32]:
    """Return which values the rows intp[n] of a ragged array have, in this order, and their offsets i32[n+1].

    Args:
        cu: i32[R+1], row r owns values [cu[r], cu[r+1]).
    """
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
