"""What became of drafts, for one request or for all of a method. Knows no requests and no methods."""

from __future__ import annotations

from fastdeploy_sd.types import DraftCounts, DraftSource
from fastdeploy_sd.types.stats import SourceCounts


class DraftCounter:
    """Counts verifications by their outcome, from which every statistic of drafts follows.

    An outcome is (sources of the drafts that count, how many of them were accepted, output tokens). A verification
    costs one addition whatever its length; the counts per position are worked out on request. With 4 drafts
    verified and 2 accepted:

        position    0         1         2         3
        drafted     1         1         1         1
        reached     1         1         1         .      position 2 was verified after accepted drafts only
        accepted    1         1         .         .
    """

    __slots__ = ("_num_of_outcome",)

    def __init__(self) -> None:
        self._num_of_outcome: dict[tuple[bytes, int, int], int] = {}

    def add(self, sources: bytes, num_accepted: int, num_emitted: int) -> None:
        """Count a verification of at least one draft; `sources` leaves out drafts after the end of the request."""
        outcome = sources, num_accepted, num_emitted
        self._num_of_outcome[outcome] = self._num_of_outcome.get(outcome, 0) + 1

    def merge(self, other: DraftCounter) -> None:
        """Count what another one has counted."""
        for outcome, count in other._num_of_outcome.items():
            self._num_of_outcome[outcome] = self._num_of_outcome.get(outcome, 0) + count

    def counts(self) -> DraftCounts:
        """What was counted so far, as long as the longest row of drafts."""
        drafted, reached, accepted = _trimmed(self._by_position(None))
        predicted = self._by_position(DraftSource.PREDICTION)
        return DraftCounts(
            sum(self._num_of_outcome.values()),
            sum(num_emitted * count for (_, _, num_emitted), count in self._num_of_outcome.items()),
            drafted,
            reached,
            accepted,
            num_predicted=sum(count for count, _, _ in predicted),
            num_predicted_accepted=sum(count for _, _, count in predicted),
        )

    def by_source(self) -> dict[str, SourceCounts]:
        """The same of the sources that drafted, by lower-case name, as long as the latest position of each."""
        found = {source.name.lower(): _trimmed(self._by_position(source)) for source in DraftSource}
        return {name: SourceCounts(*columns) for name, columns in found.items() if columns[0]}

    def _by_position(self, source: DraftSource | None) -> list[tuple[int, int, int]]:
        """Drafted, reached and accepted at every position, of one source or of all."""
        longest = max((len(sources) for sources, _, _ in self._num_of_outcome), default=0)
        drafted, reached, accepted = ([0] * longest for _ in range(3))
        for (sources, num_accepted, _), count in self._num_of_outcome.items():
            for position, found in enumerate(sources):
                if source is None or found == source:
                    drafted[position] += count
                    reached[position] += count * (position <= num_accepted)
                    accepted[position] += count * (position < num_accepted)
        return list(zip(drafted, reached, accepted, strict=True))


def _trimmed(positions: list[tuple[int, int, int]]) -> tuple[tuple[int, ...], ...]:
    """Three columns up to the last position with drafts."""
    while positions and not positions[-1][0]:
        positions.pop()
    return tuple(zip(*positions, strict=True)) if positions else ((), (), ())
