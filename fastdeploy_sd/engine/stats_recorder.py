"""The counters that planning and committing feed. Knows when to count what, not how the numbers are shown."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import chain

from fastdeploy_sd.types import ChoiceReport, DraftCounts, DraftSource, FinishReason, RequestMetrics
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.types.stats import HISTOGRAM_BOUNDS, EngineStats, Histogram, SourceCounts


class DraftCounter:
    """Counts verifications by their outcome, from which every statistic of drafts follows.

    An outcome is (sources of the drafts that count, how many of them were accepted, output tokens, tree, path). A
    verification costs one addition whatever its length; the counts per position are worked out on request. With 4
    drafts verified and 2 accepted:

        position    0         1         2         3
        drafted     1         1         1         1
        reached     1         1         1         .      position 2 was verified after accepted drafts only
        accepted    1         1         .         .

    Where drafts branch, the tree has a byte per draft: 1 + the draft that it follows, 0 = none. The path has those
    that were accepted, 1 + each. A draft's position is then the number of drafts before it on its path.
    """

    __slots__ = ("_num_of_outcome",)

    def __init__(self) -> None:
        self._num_of_outcome: dict[tuple[bytes, int, int, bytes, bytes], int] = {}

    def add(self, sources: bytes, num_accepted: int, num_emitted: int, tree: bytes = b"", path: bytes = b"") -> None:
        """Count a verification of at least one draft; `sources` leaves out drafts after the end of the request."""
        outcome = sources, num_accepted, num_emitted, tree, path
        self._num_of_outcome[outcome] = self._num_of_outcome.get(outcome, 0) + 1

    def merge(self, other: DraftCounter) -> None:
        for outcome, count in other._num_of_outcome.items():
            self._num_of_outcome[outcome] = self._num_of_outcome.get(outcome, 0) + count

    def counts(self) -> DraftCounts:
        """What was counted so far, as long as the longest row of drafts."""
        drafted, reached, accepted = _trimmed(self._by_position(None))
        predicted = self._by_position(DraftSource.PREDICTION)
        return DraftCounts(
            sum(self._num_of_outcome.values()),
            sum(num_emitted * count for (_, _, num_emitted, _, _), count in self._num_of_outcome.items()),
            drafted,
            reached,
            accepted,
            num_predicted=sum(count for count, _, _ in predicted),
            num_predicted_accepted=sum(count for _, _, count in predicted),
        )

    def accepted_by_source(self) -> dict[str, int]:
        """How many drafts of each source were accepted, by lower-case name; only sources with some."""
        num_accepted_of = dict[int, int]()
        for (sources, num_accepted, _, _, path), count in self._num_of_outcome.items():
            for i in path or range(1, num_accepted + 1):
                num_accepted_of[sources[i - 1]] = num_accepted_of.get(sources[i - 1], 0) + count
        return {DraftSource(source).name.lower(): count for source, count in sorted(num_accepted_of.items())}

    def by_source(self) -> dict[str, SourceCounts]:
        """The same of the sources that drafted, by lower-case name, as long as the latest position of each."""
        found = {source.name.lower(): _trimmed(self._by_position(source)) for source in DraftSource}
        return {name: SourceCounts(*columns) for name, columns in found.items() if columns[0]}

    def _by_position(self, source: DraftSource | None) -> list[tuple[int, int, int]]:
        """Drafted, reached and accepted at every position, of one source or of all."""
        longest = max((len(sources) for sources, *_ in self._num_of_outcome), default=0)
        drafted, reached, accepted = ([0] * longest for _ in range(3))
        for (sources, num_accepted, _, tree, path), count in self._num_of_outcome.items():
            on_path, depths = {0, *(path or range(1, num_accepted + 1))}, [0]
            for i, (found, parent) in enumerate(zip(sources, tree or range(len(sources)), strict=True)):
                position = depths[parent]
                depths.append(position + 1)
                if source is None or found == source:
                    drafted[position] += count
                    reached[position] += count * (parent in on_path)
                    accepted[position] += count * (i + 1 in on_path)
        return list(zip(drafted, reached, accepted, strict=True))


def _trimmed(positions: list[tuple[int, int, int]]) -> tuple[tuple[int, ...], ...]:
    while positions and not positions[-1][0]:
        positions.pop()
    return tuple(zip(*positions, strict=True)) if positions else ((), (), ())


class _HistogramRecorder:
    """Accumulates one histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.sum)


class StatsRecorder:
    """Mutable counters of one engine: a public attribute is that of EngineStats, kept up to date as things happen."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_token_steps = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_prefix_swap_hit_tokens = 0
        self.num_prefix_lost_tokens = 0
        self.num_kv_arrivals = 0
        self.num_kv_cancels = 0
        self.choice: ChoiceReport | None = None
        self._num_supplied_tokens: dict[str, int] = {}
        self._num_kv_failures: dict[str, int] = {}
        self._num_finished = {reason.value: 0 for reason in FinishReason}
        self._drafts: dict[str, DraftCounter] = {}  # by method, of requests that ended
        self._timings_ms: dict[str, float] = {}
        self._histograms = {name: _HistogramRecorder(bounds) for name, bounds in HISTOGRAM_BOUNDS.items()}

    def record_step(self, timings_ms: Mapping[str, float]) -> None:
        self.num_steps += 1
        for phase, milliseconds in timings_ms.items():
            self._timings_ms[phase] = self._timings_ms.get(phase, 0.0) + milliseconds

    def record_prefix_lookup(self, num_prompt_tokens: int, num_cached_tokens: int, num_lost_tokens: int = 0) -> None:
        """Count the first look-up of a request in the prefix cache; lost: see EngineStats."""
        self.num_prefix_queries += 1
        self.num_prefix_hits += num_cached_tokens > 0
        self.num_prefix_query_tokens += num_prompt_tokens
        self.num_prefix_hit_tokens += num_cached_tokens
        self.num_prefix_lost_tokens += num_lost_tokens

    def record_swap_hit(self, num_tokens: int, *, is_first: bool) -> None:
        """Count tokens of a request's first look-up that came from the second level; `is_first`: none did before."""
        self.num_prefix_hits += is_first
        self.num_prefix_swap_hit_tokens += num_tokens

    def record_arrival(self, origins: Mapping[str, int], failure: str) -> None:
        """Count a request that waited for KV; see KvArrival."""
        self.num_kv_arrivals += 1
        if failure:
            self._num_kv_failures[failure] = self._num_kv_failures.get(failure, 0) + 1
        for origin, num_tokens in origins.items():
            self._num_supplied_tokens[origin] = self._num_supplied_tokens.get(origin, 0) + num_tokens

    def gain_of(self, method: str) -> float:
        """See RequestMetrics."""
        return self.choice.gain if self.choice is not None and METHODS[method].chooses else 0.0

    def record_drafts(self, method: str, drafts: DraftCounter) -> None:
        self._drafts.setdefault(method, DraftCounter()).merge(drafts)

    def record_finish(
        self, reason: FinishReason, metrics: RequestMetrics, num_prompt: int, num_generated: int, max_tokens: int
    ) -> None:
        """Count a request that ended and observe its times, those that exist."""
        self._num_finished[reason.value] += 1
        observe = self._observe
        observe("prompt_tokens", num_prompt)
        observe("generated_tokens", num_generated)
        observe("max_tokens", max_tokens)
        observe("e2e_s", metrics.finished_time - metrics.arrival_time)
        if metrics.first_scheduled_time:
            observe("queue_s", metrics.first_scheduled_time - metrics.arrival_time)
            observe("inference_s", metrics.finished_time - metrics.first_scheduled_time)
        if metrics.first_token_time:
            decode_s = metrics.finished_time - metrics.first_token_time
            observe("ttft_s", metrics.first_token_time - metrics.arrival_time)
            observe("prefill_s", metrics.first_token_time - metrics.first_scheduled_time)
            observe("decode_s", decode_s)
            if num_generated > 1:
                observe("tpot_s", decode_s / (num_generated - 1))

    def snapshot(self, running: Iterable[tuple[str, DraftCounter]] = ()) -> EngineStats:
        """The counters and histograms so far, with the drafts of `running` requests by method; gauges are 0."""
        by_method, total = dict[str, DraftCounter](), DraftCounter()
        for method, drafts in chain(self._drafts.items(), running):
            by_method.setdefault(method, DraftCounter()).merge(drafts)
            total.merge(drafts)
        counts = {method: drafts.counts() for method, drafts in by_method.items()}
        return EngineStats(
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
            num_finished=dict(self._num_finished),
            num_supplied_tokens=dict(self._num_supplied_tokens),
            num_kv_failures=dict(self._num_kv_failures),
            drafts=total.by_source(),
            verifications={method: c for method, c in counts.items() if c.num_verifications},
            timings_ms=dict(self._timings_ms),
            histograms={name: recorder.snapshot() for name, recorder in self._histograms.items()},
        )

    def _observe(self, name: str, value: float) -> None:
        # The frontend's clock stamps the arrival; a clock set back between the two must not make a time negative.
        self._histograms[name].observe(max(value, 0.0))
