"""The embedding of a prompt, summed up as its parts are computed."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.types import F32, F64, Pooling


class PooledPrompt:
    """Hidden rows of one prompt so far; the result does not depend on how many came at a time."""

    def __init__(self, pooling: Pooling) -> None:
        self._is_mean = pooling is Pooling.MEAN
        self._begin = self._end = 0  # positions of the latest rows
        self._before: F64 | None = None  # the sum of those before them
        self._sum: F64 | None = None

    def add(self, begin: int, rows: F64) -> None:
        """Take the rows f64[n, H] from position `begin` on: the next ones, the latest again, or all anew."""
        if not self._is_mean:
            self._sum = rows[-1]
            return
        before = self._sum if begin == self._end else self._before
        assert begin in (0, self._begin, self._end), "the rows of a prompt come in their order"
        before = np.zeros(rows.shape[1]) if begin == 0 or before is None else before
        # Row by row, whatever their number.
        self._begin, self._end, self._before = begin, begin + len(rows), before
        self._sum = np.add.reduce(np.concatenate([before[None], rows]), axis=0)

    def result(self) -> F32:
        """Return the embedding f32[H] of the rows so far."""
        assert self._sum is not None, "a prompt has a token"
        return (self._sum / self._end if self._is_mean else self._sum).astype(np.float32)
