"""Engine statistics as they leave the process: plain numbers. Knows no metric names of any monitoring system."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdeploy_sd.types import ChoiceReport, DraftCounts, FinishReason, SpeculationInfo
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.types.experts import ExpertStats


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """What has been compiled for guided outputs since the start.

    Attributes:
        num_reused: requests whose grammar was there, or under way, when they came.
        num_kept: compiled grammars now.
        num_masks, mask_s: masks that steps computed, one per token or draft; their processor seconds.
        num_late_masks, late_mask_s: the same off the steps.
        num_over_budget: requests that ended as their grammar took too long.
    """

    num_compiled: int = 0
    num_failed: int = 0
    compile_s: float = 0.0
    num_reused: int = 0
    num_kept: int = 0
    num_masks: int = 0
    mask_s: float = 0.0
    num_late_masks: int = 0
    late_mask_s: float = 0.0
    num_over_budget: int = 0


@dataclass(slots=True)
class SwapStats:
    """Counters of the second level of the prefix cache since the engine started, and gauges of now.

    Attributes:
        num_slots: blocks that fit in. num_used_slots: of these, with content or about to get some.
        block_bytes: of a block over all layers.
        num_restored: slots whose content came from an earlier process.
        num_lookups: times a request had blocks that the first level lacked. num_hits: the first of these was in a slot.
        num_queried_blocks: blocks that the first level lacked, of requests that got blocks.
        num_begun_stores, num_begun_loads: copies that were ordered; each is one of those below in the end.
        num_lost: blocks that were given away before they were copied.
        num_withdrawn: blocks that were no longer wanted before they were loaded.
        num_damaged: slots that did not hold what had been written.
        num_failed: copies that the system refused.
        num_late: requests that stopped waiting for blocks.
    """

    num_slots: int = 0
    num_used_slots: int = 0
    block_bytes: int = 0
    num_restored: int = 0
    num_lookups: int = 0
    num_hits: int = 0
    num_queried_blocks: int = 0
    num_loaded: int = 0
    num_begun_stores: int = 0
    num_begun_loads: int = 0
    num_stored: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    num_evicted: int = 0
    num_lost: int = 0
    num_withdrawn: int = 0
    num_damaged: int = 0
    num_failed: int = 0
    num_late: int = 0


@dataclass(slots=True)
class WayStats:
    """What went in one direction by one protocol; a page is a block in a layer.

    `seconds` are of complete transfers, from the order to the end; the prompt was computed meanwhile.
    """

    num_pages: int = 0
    num_bytes: int = 0
    num_transfers: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Totals since the engine started; an instance that exchanges no KV has none.

    Attributes:
        received, sent: protocol -> what went that way.
        num_unsent: transfers from here that were given up, on either side.
        num_refused: why -> pages that were not written, and messages that were not obeyed.
    """

    received: dict[str, WayStats] = field(default_factory=dict)
    sent: dict[str, WayStats] = field(default_factory=dict)
    num_unsent: int = 0
    num_refused: dict[str, int] = field(default_factory=dict)


# A drafter that is read as it was trained has more than a tenth of such drafts right. With 20 % right, one in 100,000
# has none of 50 right; with 12 % one in 5,000 has fewer than 5 % of 200.
_NONE_RIGHT_OF, _FEW_RIGHT_OF, _FEW = 50, 200, 0.05

LATENCY_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_TIME_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
TOKEN_COUNT_BOUNDS = tuple(float(1 << i) for i in range(18))

HISTOGRAM_BOUNDS: dict[str, tuple[float, ...]] = {
    "ttft_s": LATENCY_BOUNDS_S,
    "tpot_s": TOKEN_TIME_BOUNDS_S,
    "e2e_s": LATENCY_BOUNDS_S,
    "queue_s": LATENCY_BOUNDS_S,
    "inference_s": LATENCY_BOUNDS_S,
    "prefill_s": LATENCY_BOUNDS_S,
    "decode_s": LATENCY_BOUNDS_S,
    "prompt_tokens": TOKEN_COUNT_BOUNDS,
    "generated_tokens": TOKEN_COUNT_BOUNDS,
    "max_tokens": TOKEN_COUNT_BOUNDS,
}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counted observations.

    Attributes:
        bounds: upper bounds of the buckets, increasing and included.
        counts: per bucket, not cumulative, len(bounds) + 1 of them: the last one has no upper bound.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @staticmethod
    def empty(bounds: tuple[float, ...]) -> Histogram:
        """No observations yet."""
        return Histogram(bounds, (0,) * (len(bounds) + 1), 0.0)


def _empty_histograms() -> dict[str, Histogram]:
    return {name: Histogram.empty(bounds) for name, bounds in HISTOGRAM_BOUNDS.items()}


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What became of the drafts of one source, by position in their step; the words are those of `DraftCounts`.

    A source that extends another's drafts starts after them: its first entries are 0.
    """

    drafted: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, gauges of now, and histograms over finished requests.

    Attributes:
        num_requests: submitted and taken.
        num_finished: finish reason -> requests that ended that way; every reason has a key.
        num_prompt_tokens: of requests whose first token has been produced.
        num_token_steps: the steps that gave a request tokens, over all requests; generated tokens over these are the
            tokens per step.
        num_prefix_queries, num_prefix_hits: requests looked up in the prefix cache / with at least one block found.
        num_prefix_query_tokens, num_prefix_hit_tokens, num_prefix_swap_hit_tokens: the same in tokens; found
            in the first and in the second level. Of first admissions only: a preempted request finds its own blocks.
        num_prefix_lost_tokens: further tokens of the first level that such a look-up could not use, as blocks with a
            drafter's KV and blocks without are not shared.
        drafts: DraftSource name in lower case -> what became of its drafts; only sources that drafted.
        verifications: method -> the sum of the DraftCounts of its requests; only methods that had drafts verified.
        timings_ms: phase of a step (batch, forward, verify, draft) -> total milliseconds.
        choice: of a drafting method that chooses by itself, as of the latest step.
        num_kv_arrivals, num_kv_cancels: requests that waited for KV from elsewhere and got what there was / were
            preempted or ended meanwhile.
        num_supplied_tokens: where from -> tokens whose KV came from elsewhere. num_kv_failures: why -> requests for
            which it did not.
        num_running: admitted, ready or not. num_waiting_for_kv: those of them whose KV is on its way.
        num_preempted_waiting, num_waiting_for_grammar: parts of num_waiting. num_running_by_adapter,
            num_waiting_by_adapter: parts of num_running and num_waiting, by name.
        num_waiting_tokens: prompt tokens of the waiting requests.
        num_blocks: total = free + cached + referenced by running requests.
        num_free_blocks: without content. num_cached_blocks: with reusable content.
        num_state_snapshots: places for snapshots of recurrent states. num_used_state_snapshots: of these, with a
            snapshot or about to get one. experts: where these are spread over ranks.
        histograms: by the names of `HISTOGRAM_BOUNDS`. ttft_s arrival to first token; tpot_s mean time per output
            token after the first; e2e_s arrival to end; queue_s arrival to first schedule; inference_s first schedule
            to end; prefill_s first schedule to first token; decode_s first token to end; the others are token counts.
    """

    num_requests: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_token_steps: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_prefix_swap_hit_tokens: int = 0
    num_prefix_lost_tokens: int = 0
    swap: SwapStats = field(default_factory=SwapStats)
    transfers: TransferStats = field(default_factory=TransferStats)
    num_kv_arrivals: int = 0
    num_kv_cancels: int = 0
    num_supplied_tokens: dict[str, int] = field(default_factory=dict)
    num_kv_failures: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, SourceCounts] = field(default_factory=dict)
    verifications: dict[str, DraftCounts] = field(default_factory=dict)
    timings_ms: dict[str, float] = field(default_factory=dict)
    choice: ChoiceReport | None = None
    grammars: GrammarStats = field(default_factory=GrammarStats)
    num_running: int = 0
    num_waiting_for_kv: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    num_preempted_waiting: int = 0
    num_waiting_tokens: int = 0
    num_running_by_adapter: dict[str, int] = field(default_factory=dict)
    num_waiting_by_adapter: dict[str, int] = field(default_factory=dict)
    max_num_seqs: int = 0
    block_size: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_state_snapshots: int = 0
    num_used_state_snapshots: int = 0
    speculation: SpeculationInfo = field(default_factory=SpeculationInfo)
    experts: ExpertStats | None = None
    histograms: dict[str, Histogram] = field(default_factory=_empty_histograms)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified."""
        return sum(sum(counts.drafted) for counts in self.verifications.values())

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted."""
        return sum(sum(counts.accepted) for counts in self.verifications.values())

    @property
    def num_emitted_tokens(self) -> int:
        """Output tokens of rows that had drafts to verify; see `DraftCounts.num_emitted`."""
        return sum(counts.num_emitted for counts in self.verifications.values())

    @property
    def num_verified_rows(self) -> int:
        """Rows that had drafts to verify; emitted tokens over these is the mean acceptance length."""
        return sum(counts.num_verifications for counts in self.verifications.values())

    @property
    def misread_drafter(self) -> str:
        """The method whose drafter's files seem to be read wrongly, as next to none of its drafts are right; "" = none.

        Of drafts after right ones, so mostly of first ones; a method that chooses scores those too that it drops.
        """
        for method in (METHODS[name] for name in self.speculation.methods):
            if method.has_own_folder and method.source is not None:
                counts = self.drafts.get(method.source.name.lower(), SourceCounts())
                scored, right = sum(counts.reached), sum(counts.accepted)
                judged = None if self.choice is None else self.choice.calibrations.get(method.source.name.lower())
                if judged is not None and judged.num_scored > scored:
                    scored, right = judged.num_scored, judged.observed
                if scored >= (_FEW_RIGHT_OF if right else _NONE_RIGHT_OF) and right < _FEW * scored:
                    return method.name
        return ""


@dataclass(frozen=True, slots=True)
class EngineState:
    """How an engine is doing, as one of its clients knows it.

    Attributes:
        name: ready (takes requests), paused (by an operator), draining, or down: not connected (yet).
        silence_s: how old its last sign of life is.
        last_stats: what it said last; None = nothing yet.
    """

    name: str
    silence_s: float = 0.0
    last_stats: EngineStats | None = None

    @property
    def is_paused(self) -> bool:
        """Whether an operator has new requests refused."""
        return self.name == "paused"
