"""What a step of several requests takes against one of as many rows of one request, and what contexts add: a profile's.

Between numbers of requests that were measured, what is known is interpolated over factors of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.spec_decode.control.profile import StepSample
from fastdeploy_sd.types import I32

F64 = npt.NDArray[np.float64]
_SHORTEST_MS = 1e-6
# A draft does not read a context more often than its request's own token does; what was measured so was noise.
_LARGEST_SHARE = 1.0


class ContextCost:
    """What reading contexts takes: slope * tokens, of it for each draft its share again, out of nearer caches.

    Both depend on how many requests there are: rows of several share the arithmetic of nothing but weights.

    Args:
        steps: of the profile.
        short: the context beyond which tokens count.

    Attributes:
        slopes: ms of a token of context more.
        shares: what a draft takes to read its request's context, over what the request's own token does: 0 .. 1.
    """

    def __init__(self, steps: Sequence[StepSample], short: int) -> None:
        self._short = short
        found = {(s.requests, s.rows, s.context): s.ms for s in steps if s.requests > 0}
        slopes: dict[int, float] = {}
        shares: dict[int, float] = {}
        for (n, rows, context), ms in sorted(found.items()):
            if context <= short or (n, rows, short) not in found:
                continue
            per_token = (ms - found[n, rows, short]) / (n * (context - short))
            if rows == n:
                slopes[n] = max(per_token, 0.0)
            elif slopes.get(n, 0.0) > 0:
                share = (per_token / slopes[n] - 1.0) / (rows / n - 1.0)
                shares[n] = min(max(share, 0.0), _LARGEST_SHARE)
        self.slopes, self.shares = ByRequests(slopes), ByRequests(shares)

    def ms(self, num_requests: int, num_kv_tokens: int) -> float:
        """Return what the requests' own tokens take to read so many tokens of context, of all requests together."""
        return self.slopes.at(num_requests) * max(0, num_kv_tokens - num_requests * self._short)


class BatchScaling:
    """The time of a step of so many requests over that of one request, by rows.

    Args:
        steps: of the profile.
        curve: f64[N], > 0: the time of one request's step by its rows, at the shortest context.
        contexts: what longer contexts take.

    Attributes:
        numbers: i32[C], numbers of requests, rising from 1.
        ratios: f64[C, N], of each by rows.
    """

    def __init__(self, steps: Sequence[StepSample], curve: F64, contexts: ContextCost) -> None:
        points: dict[int, dict[int, float]] = {}
        for s in sorted(steps, key=lambda s: -s.context):
            if s.requests > 1 and s.rows < len(curve):
                ms = s.ms - contexts.ms(s.requests, s.requests * s.context)
                points.setdefault(s.requests, {})[s.rows] = max(ms, _SHORTEST_MS) / curve.item(s.rows)
        rows = np.arange(len(curve))
        ratios: list[F64] = [np.ones(len(curve))]
        for n in sorted(points):
            known = sorted(points[n])
            ratios.append(np.interp(rows, known, [points[n][row] for row in known]))
        self.numbers: I32 = np.array([1, *sorted(points)], np.int32)
        self.ratios: F64 = np.array(ratios)


class ByRequests:
    """A number by how many requests there are; 0 where none was measured.

    Attributes:
        numbers: i32[n], of requests, rising.
        values: f64[n], of each.
    """

    def __init__(self, found: dict[int, float]) -> None:
        known = sorted(found)
        self.numbers: I32 = np.array(known, np.int32)
        self.values: F64 = np.array([found[n] for n in known], np.float64)

    def at(self, num_requests: int) -> float:
        """Return that of so many requests."""
        if not len(self.values):
            return 0.0
        return float(np.interp(math.log2(max(num_requests, 1)), np.log2(self.numbers), self.values))
