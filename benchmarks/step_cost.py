"""Times whole engine steps that verify M rows of one request, for several M interleaved. Knows no files and no tables.

A machine's speed changes from one second to the next, so every round measures all of them once, and what is quoted are
ratios within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.engines import greedy_request
from benchmarks.hardware import MemorySpeed, measure_memory
from benchmarks.offline_run import phase_ms
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.proposer import ProposeInput, Proposer
from fastdeploy_sd.types import DraftTokens, RequestOutput, offsets
from fastdeploy_sd.types.stats import EngineStats

# Steps per round and M: the first carries the drafts that the M before it left, so it is not counted.
_TIMED_STEPS = 3
_DRAFT_TOKEN_ID = 0


class FixedDrafts(Proposer):
    """Drafts the same token `num_drafts` times: never what greedy decoding of a random model goes on with, so that
    the context grows by one token per step whatever the number of rows."""

    def __init__(self) -> None:
        self.num_drafts = 0

    def propose(self, x: ProposeInput) -> DraftTokens:
        """`num_drafts` drafts for every row that may have them."""
        counts = np.minimum(x.max_draft_len, self.num_drafts)
        return DraftTokens(np.full(counts.sum(), _DRAFT_TOKEN_ID, np.int32), offsets(counts))


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of all numbers of rows.

    Attributes:
        step_ms: per number of rows, the fastest of the steps.
        forward_ms: the same steps' time inside the model, output head included.
        memory: measured before the round.
    """

    step_ms: dict[int, float]
    forward_ms: dict[int, float]
    memory: MemorySpeed

    def ratio(self, num_rows: int) -> float:
        """A step over `num_rows` rows against a step over one."""
        return self.step_ms[num_rows] / self.step_ms[1]

    def bandwidth_share(self, num_bytes: int) -> float:
        """Bytes a step must read over the time of the one-row step, as a share of the measured read bandwidth."""
        return num_bytes / (self.step_ms[1] * 1e-3) / (self.memory.read_gb_per_s * 1e9)


class RowSteps:
    """One request with a context of random tokens in an engine of its own.

    Args:
        drafts: what the engine's executor drafts with.
        context_len: tokens of the prompt.
    """

    def __init__(self, engine: Engine, drafts: FixedDrafts, context_len: int, max_tokens: int) -> None:
        self._engine, self._drafts = engine, drafts
        rng = np.random.default_rng(context_len)
        self._request_id = f"context-{context_len}"
        engine.submit(
            greedy_request(
                self._request_id, rng.integers(1, engine.model_info.vocab_size, context_len, np.int32), max_tokens
            )
        )
        while not engine.step():
            pass

    def run(self, rows: Sequence[int], num_rounds: int, on_round: Callable[[Round], object]) -> list[Round]:
        """Measure `num_rounds` rounds after one that is not counted; rows must contain 1.

        Raises:
            InternalError: a step was not one over as many rows as it should have been; see `verify_rows`.
        """
        self._round(rows)
        rounds = []
        for i in range(num_rounds):
            # No number of rows always follows the same other one.
            shift = i % len(rows)
            rounds.append(self._round([*rows[shift:], *rows[:shift]]))
            on_round(rounds[-1])
        return rounds

    def close(self) -> None:
        """End the request."""
        self._engine.abort([self._request_id])

    def _round(self, rows: Sequence[int]) -> Round:
        memory = measure_memory()
        step_ms, forward_ms = {}, {}
        for num_rows in rows:
            self._drafts.num_drafts = num_rows - 1
            self._engine.step()
            steps = [self._step(num_rows) for _ in range(_TIMED_STEPS)]
            step_ms[num_rows], forward_ms[num_rows] = min(steps)
        return Round(step_ms, forward_ms, memory)

    def _step(self, num_rows: int) -> tuple[float, float]:
        before = self._engine.stats()
        begin = time.perf_counter()
        outputs = self._engine.step()
        taken = (time.perf_counter() - begin) * 1e3
        window = before, self._engine.stats()
        verify_rows(num_rows, window, outputs)
        return taken, phase_ms(window)["forward_ms"]


def verify_rows(num_rows: int, window: tuple[EngineStats, EngineStats], outputs: Sequence[RequestOutput]) -> None:
    """Refuse the time of a step over another number of rows, e.g. where the engine had no room for every draft.

    Args:
        num_rows: of the only request: its newest token and the drafts behind it.
        window: snapshots before and after the step.
        outputs: of the step.

    Raises:
        InternalError: the step did not verify num_rows - 1 drafts, or gave the request other than one token.
    """
    begin, end = window
    num_drafts = end.num_draft_tokens - begin.num_draft_tokens
    num_tokens = sum(len(output.token_ids) for output in outputs)
    if (num_drafts, num_tokens) != (num_rows - 1, 1):
        raise InternalError(
            f"step: expected {num_rows - 1} drafts verified and 1 token, got {num_drafts} and {num_tokens}"
        )


def median_ratio(rounds: Sequence[Round], num_rows: int) -> float:
    """Median over the rounds of T(num_rows) / T(1)."""
    return median(r.ratio(num_rows) for r in rounds)
