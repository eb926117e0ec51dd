"""How verifications came out, for one request or for all requests of a method. Knows no sources and no schedule."""

from __future__ import annotations

import math

import numpy as np

from fastdeploy_sd.types import I32, DraftCounts


class DraftTally:
    """Counts verifications by their outcome, which is all that `DraftCounts` depends on.

    An outcome is (drafts judged, drafts accepted). A verification costs one addition whatever its length; the counts
    per position are worked out when somebody asks. With 4 drafts judged and 2 accepted:

        position    0         1         2         3
        drafted     1         1         1         1
        reached     1         1         1         .      position 2 was judged after accepted drafts only
        accepted    1         1         .         .
    """

    __slots__ = ("_num_emitted", "_num_of_outcome")

    def __init__(self) -> None:
        self._num_emitted = 0
        self._num_of_outcome: dict[tuple[int, int], int] = {}

    @staticmethod
    def of(outcomes: I32, num_emitted: int) -> DraftTally:
        """A tally of verifications that were counted in a row of `RequestColumns.outcomes`, i32[(k + 1) ** 2]."""
        tally, num_columns = DraftTally(), math.isqrt(len(outcomes))
        tally._num_emitted = num_emitted
        tally._num_of_outcome = {divmod(i, num_columns): int(outcomes[i]) for i in np.flatnonzero(outcomes).tolist()}
        return tally

    def add(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verification of at least one draft, as far as `DraftCounts` counts it.

        Args:
            num_drafts: those behind the end of the request left out; >= 1.
            num_accepted: of these.
            num_emitted: output tokens.
        """
        outcome = num_drafts, num_accepted
        self._num_of_outcome[outcome] = self._num_of_outcome.get(outcome, 0) + 1
        self._num_emitted += num_emitted

    def merge(self, other: DraftTally) -> None:
        """Count what another tally has counted."""
        for outcome, count in other._num_of_outcome.items():
            self._num_of_outcome[outcome] = self._num_of_outcome.get(outcome, 0) + count
        self._num_emitted += other._num_emitted

    def counts(self) -> DraftCounts:
        """What was counted so far, as long as the longest row of drafts."""
        if not self._num_of_outcome:
            return DraftCounts()
        longest = max(num_drafts for num_drafts, _ in self._num_of_outcome)
        drafted, reached, accepted = ([0] * longest for _ in range(3))
        for (num_drafts, num_accepted), count in self._num_of_outcome.items():
            for position in range(num_drafts):
                drafted[position] += count
                reached[position] += count * (position <= num_accepted)
                accepted[position] += count * (position < num_accepted)
        return DraftCounts(
            sum(self._num_of_outcome.values()), self._num_emitted, tuple(drafted), tuple(reached), tuple(accepted)
        )
