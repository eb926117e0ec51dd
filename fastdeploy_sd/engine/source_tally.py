"""What became of drafts, by who made them and where they stood. Knows no requests and no methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.engine.stats import SourceCounts
from fastdeploy_sd.types import I8, I32, DraftSource, DraftTokens

# What may become of a draft, from worst to best.
_UNREACHED, _REJECTED, _ACCEPTED = range(3)


_MAX_PENDING = 64


class SourceTally:
    """Counts drafts in i64[sources, positions, fates]; the positions grow with the longest row of drafts seen.

    The steps wait until there are some of them, or somebody asks: counted together they cost little more than one.
    """

    def __init__(self) -> None:
        self._num_drafts = np.zeros((len(DraftSource), 0, 3), np.int64)
        # Sources of the drafts of a step, None if all are the first one's; cu_num_draft; num_counted; num_accepted.
        self._pending: list[tuple[I8 | None, I32, Sequence[int], Sequence[int]]] = []

    def add(self, drafts: DraftTokens, num_counted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Count the drafts of a step.

        Args:
            drafts: at least one, of all rows. Sources and lengths are kept, as are the lists: nobody may write to them.
            num_counted: per row, how many of its drafts count: 0 if its computation failed, and none behind the end of
                the request.
            num_accepted: per row, at most num_counted[r].
        """
        self._pending.append((drafts.sources, drafts.cu_num_draft, num_counted, num_accepted))
        if len(self._pending) == _MAX_PENDING:
            self._count_pending()

    def _count_pending(self) -> None:
        """Count the steps that wait, as if they were one with the rows of all."""
        if not self._pending:
            return
        steps = self._pending
        num_drafts = np.concatenate([ends[1:] - ends[:-1] for _, ends, _, _ in steps])
        num_counted = np.array([n for _, _, counted, _ in steps for n in counted])
        num_accepted = np.array([n for _, _, _, accepted in steps for n in accepted])
        sources = np.concatenate(
            [np.zeros(ends[-1], np.int8) if found is None else found for found, ends, _, _ in steps]
        )
        self._pending.clear()
        begins = np.add.accumulate(num_drafts) - num_drafts
        index = np.arange(len(sources))
        position = index - begins.repeat(num_drafts)
        # Drafts before the first rejected one were accepted, those behind it not reached.
        fate = _REJECTED - np.sign(index - (begins + num_accepted).repeat(num_drafts))
        longest = int(np.maximum.reduce(num_drafts))
        key = (sources.astype(np.int64) * longest + position) * 3 + fate
        key = key[position < num_counted.repeat(num_drafts)]
        shape = (len(DraftSource), longest, 3)
        counted = np.bincount(key, minlength=len(DraftSource) * longest * 3).reshape(shape)
        missing = longest - self._num_drafts.shape[1]
        if missing > 0:
            self._num_drafts = np.pad(self._num_drafts, ((0, 0), (0, missing), (0, 0)))
        self._num_drafts[:, :longest] += counted

    def counts(self) -> dict[str, SourceCounts]:
        """The sources that drafted, by lower-case name."""
        self._count_pending()
        found = {}
        for source in DraftSource:
            fates = self._num_drafts[source]
            drafted = fates.sum(axis=1)
            if drafted.any():
                length = int(drafted.nonzero()[0][-1]) + 1
                reached = drafted - fates[:, _UNREACHED]
                found[source.name.lower()] = SourceCounts(
                    *(tuple(column[:length].tolist()) for column in (drafted, reached, fates[:, _ACCEPTED]))
                )
        return found
