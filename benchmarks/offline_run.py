"""Times one batch of requests through the engine in this process, step by step. Knows no files and no tables.

The engine is driven directly, as LLM drives it, because its steps are what is measured; text handling is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import numpy as np

from benchmarks.engines import greedy_request
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ERROR_TYPES, InternalError
from fastdeploy_sd.types import FinishReason, Request, RequestId, RequestOutput
from fastdeploy_sd.types.stats import EngineStats

PHASES = ("batch", "forward", "verify", "draft", "idle")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that start together, of equal length and without a common prefix.

    Attributes:
        output_len: tokens per request, >= 2; they go on after an EOS.
        seed: of the prompts; every repeat has prompts of its own, so that none is found in the prefix cache.
    """

    batch: int
    prompt_len: int
    output_len: int
    seed: int = 0

    def requests(self, repeat: int, vocab_size: int) -> list[Request]:
        """Return the greedy requests of a repeat: random token ids of the whole vocabulary."""
        rng = np.random.default_rng((self.seed, repeat))
        return [
            greedy_request(
                f"bench-{repeat}-{row}",
                rng.integers(0, vocab_size, self.prompt_len, np.int32),
                self.output_len,
                seed=self.seed + row,
            )
            for row in range(self.batch)
        ]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one repeat took, in seconds.

    The decode window is the steps in which every request of the batch was past its first token and none had ended
    before: the steady state.

    Attributes:
        ttft_s, e2e_s: per request, from the common start.
        gaps_s: between consecutive outputs of a request, all requests together.
        prefill_s: from the start to the last request's first token.
        total_s: from the start to the last end.
        window_steps_s: durations of the steps of the decode window.
        window_tokens: tokens they produced.
        window_stats: engine counters at the beginning and the end of the window.
        token_ids: what each request got.
    """

    ttft_s: list[float]
    e2e_s: list[float]
    gaps_s: list[float]
    prefill_s: float
    total_s: float
    window_steps_s: list[float]
    window_tokens: int
    window_stats: tuple[EngineStats, EngineStats]
    token_ids: dict[RequestId, list[int]]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all requests in the decode window."""
        return self.window_tokens / sum(self.window_steps_s)


class Timeline:
    """Runs requests, of at least two output tokens each, on an idle engine with room for all of them, and times them.

    Args:
        engine: gets the requests at once; only `run` may drive it until they have ended.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._num_requests = len(requests)
        self._start = time.perf_counter()
        self._outputs: dict[RequestId, list[float]] = {}
        self._ends: dict[RequestId, float] = {}
        self._token_ids: dict[RequestId, list[int]] = {}
        self._window_steps: list[float] = []
        self._window_tokens = 0
        self._window_begin: EngineStats | None = None
        self._window_end: EngineStats | None = None
        for request in requests:
            engine.submit(request)

    def run(self) -> Sample:
        """Step until every request has ended; what it returns is about all steps.

        Raises:
            InternalError: a request failed.
        """
        while self._engine.has_work():
            begin = time.perf_counter()
            outputs = self._engine.step()
            end = time.perf_counter()
            self._take(outputs, end - self._start)
            self._update_window(outputs, end - begin)
        assert self._window_begin is not None, "every request produces a token"
        assert self._window_end is not None, "no request ends before all have started"
        times = list(self._outputs.values())
        return Sample(
            ttft_s=[t[0] for t in times],
            e2e_s=list(self._ends.values()),
            gaps_s=[b - a for t in times for a, b in pairwise(t)],
            prefill_s=max(t[0] for t in times),
            total_s=max(self._ends.values()),
            window_steps_s=self._window_steps,
            window_tokens=self._window_tokens,
            window_stats=(self._window_begin, self._window_end),
            token_ids=self._token_ids,
        )

    def _take(self, outputs: list[RequestOutput], now: float) -> None:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                name, message = output.error or ("InternalError", "no reason given")
                raise ERROR_TYPES.get(name, InternalError)(message)
            if output.token_ids:
                self._outputs.setdefault(output.request_id, []).append(now)
                self._token_ids.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self._ends[output.request_id] = now

    def _update_window(self, outputs: list[RequestOutput], step_s: float) -> None:
        if self._window_end is not None:
            return
        if self._window_begin is None:
            if len(self._outputs) == self._num_requests:
                self._window_begin = self._engine.stats()
            return
        self._window_steps.append(step_s)
        self._window_tokens += sum(len(output.token_ids) for output in outputs)
        if self._ends:
            self._window_end = self._engine.stats()


def run_once(engine: Engine, workload: Workload, repeat: int) -> Sample:
    """Run a workload on an idle engine that has room for all of it at once.

    Raises:
        InternalError: a request failed.
    """
    return run_requests(engine, workload.requests(repeat, engine.model_info.vocab_size))


def run_requests(engine: Engine, requests: Sequence[Request]) -> Sample:
    """Run requests, of at least two output tokens each, on an idle engine that has room for all of them at once.

    Raises:
        InternalError: a request failed.
    """
    return Timeline(engine, requests).run()


def phase_ms(window: tuple[EngineStats, EngineStats]) -> dict[str, float]:
    """Return {"forward_ms": ..} and so on: mean milliseconds of each phase in a step between two snapshots."""
    begin, end = window
    num_steps = end.num_steps - begin.num_steps
    spent = {phase: end.timings_ms.get(phase, 0.0) - begin.timings_ms.get(phase, 0.0) for phase in PHASES}
    return {f"{phase}_ms": total / num_steps for phase, total in spent.items()}


def acceptance(window: tuple[EngineStats, EngineStats]) -> tuple[float | None, float]:
    """Return (drafts accepted over drafts verified, mean tokens per request and step); (None, 1.0) without drafts."""
    begin, end = window
    num_rows = end.num_verified_rows - begin.num_verified_rows
    num_drafts = end.num_draft_tokens - begin.num_draft_tokens
    if num_rows == 0:
        return None, 1.0
    accepted = end.num_accepted_tokens - begin.num_accepted_tokens
    return accepted / num_drafts, (end.num_emitted_tokens - begin.num_emitted_tokens) / num_rows


def mean_window(samples: Sequence[Sample], length_name: str) -> dict[str, float | None]:
    """Return the means over the samples of `acceptance`, its length under a name of its own, and of `phase_ms`."""
    pairs = [acceptance(s.window_stats) for s in samples]
    rates = [rate for rate, _ in pairs if rate is not None]
    phases = [phase_ms(s.window_stats) for s in samples]
    return {
        "acceptance_rate": mean(rates) if rates else None,
        length_name: mean(length for _, length in pairs),
        **{name: mean(p[name] for p in phases) for name in phases[0]},
    }
