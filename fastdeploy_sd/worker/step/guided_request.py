"""A request with a grammar: its matcher, the cost of its masks, and its mask that was computed off the steps."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import numpy as np
from llguidance import LLMatcher

from fastdeploy_sd.process.background import lower_priority
from fastdeploy_sd.text.guidance.compiler import start_thread
from fastdeploy_sd.text.guidance.limits import DEBT_S, STEP_S, MaskCost
from fastdeploy_sd.text.guidance.output_matcher import OutputMatcher, WornError
from fastdeploy_sd.types import I32, RequestId

_OVER_BUDGET = (
    f"expected one that takes at most {STEP_S * 1e3:.0f} ms of processor time a token, and {DEBT_S:.0f} s beyond that"
    " in all, got one that takes more"
)
# The library holds Python's lock while it follows a token; following pauses after so long.
_PIECE_S = 0.002
_NUM_AT_ONCE = 16


class Matchers(Protocol):
    """The source of matchers; see guidance.compiler.GrammarStore."""

    def matcher(self, grammar: str) -> LLMatcher:
        """Return one in the state before the first token."""
        ...

    def renewed(self, grammar: str) -> LLMatcher:
        """Return the same with its own automata."""
        ...

    def announce(self, request_id: RequestId) -> None:
        """Report that a request's mask has been computed off the steps."""
        ...

    def count(self, **more: float) -> None:
        """Add to attributes of GrammarStats."""
        ...


class GuidedRequest:
    """See the module. It belongs to the engine's thread, and while `is_pending` to the computing thread.

    Args:
        matcher: in the state before the first token.
        clock: seconds of processor time of the calling thread.
        done: called with its time when a mask was computed off the steps.

    Attributes:
        cost: of its masks.
        bits: i32[num_words], the tokens that may follow the output, if computed off the steps, else None.
        is_pending: whether a mask has been ordered off the steps and is not ready.
        is_gone: whether its masks are no longer needed.
        spent_s: time spent on it since `note`.
    """

    def __init__(
        self,
        request_id: RequestId,
        matcher: OutputMatcher,
        num_words: int,
        clock: Callable[[], float],
        done: Callable[[GuidedRequest, float], None],
    ) -> None:
        self.request_id, self.matcher, self.cost = request_id, matcher, MaskCost()
        self.bits: I32 | None = None
        self.is_pending = self.is_gone = False
        self.spent_s = 0.0
        self._num_words, self._clock, self._done = num_words, clock, done
        self._todo: deque[int] = deque()
        self._num_late, self._is_renewed = 0, False

    def add(self, token_ids: Iterable[int]) -> None:
        """Add output that has to be followed."""
        self.bits = None
        self._todo.extend(token_ids)

    def follow(self, seconds: float) -> bool:
        """Follow the output for at most `seconds`; returns whether it is complete. Else the mask must be ordered."""
        begin = self._clock()
        with contextlib.suppress(WornError):
            self._follow(begin + seconds)
        self.spent_s += self._clock() - begin
        return not self._todo

    def note(self, num_rows: int, num_tokens: int) -> None:
        """Count the spent time as the cost of so many rows, and tokens of output."""
        self.cost.note(num_rows, self.spent_s, num_tokens)
        self.spent_s = 0.0
        if self.cost.is_too_much:
            self.matcher.refuse(_OVER_BUDGET)

    def order(self) -> None:
        """Have calls of `compute` compute the mask that follows the output."""
        self.is_pending, self._is_renewed = True, False
        self._num_late = max(len(self._todo), 1)

    def compute(self) -> tuple[bool, float]:
        """Compute a piece of the ordered mask. For a thread of `compiler.start_thread`; raises nothing.

        Returns:
            Whether it is done, and how many seconds no other thread could run.
        """
        begin, is_done = self._clock(), True
        alone_s = 0.0
        try:
            self._follow(begin + _PIECE_S)
            alone_s = self._clock() - begin
            is_done = self.is_gone or not self._todo
            if is_done and not self.is_gone:
                self._write_bits()
        except WornError:
            alone_s = alone_s or self._clock() - begin
            is_done = self._is_renewed or not self._renew()
            if is_done:
                self.matcher.refuse("")
        except Exception as error:
            self.matcher.refuse(str(error))
        self.spent_s += self._clock() - begin
        if is_done:
            self._end()
        return is_done, alone_s

    def _follow(self, end: float) -> None:
        while self._todo:
            token_ids = list(islice(self._todo, _NUM_AT_ONCE if self.cost.row_s < _PIECE_S / _NUM_AT_ONCE else 1))
            self.matcher.consume(token_ids)
            for _ in token_ids:
                self._todo.popleft()
            if self._clock() > end:
                return

    def _write_bits(self) -> None:
        for _, state in self.matcher.states(()):
            assert state is not None, "no draft, so no state is refused"
            bits = np.zeros(self._num_words, np.int32)
            write_mask(state, bits)
            self.bits = bits

    def _renew(self) -> bool:
        """Restart with new automata; returns whether that was possible."""
        self._is_renewed = True
        try:
            self._todo.extendleft(reversed(self.matcher.renew()))
        except Exception as error:
            self.matcher.refuse(str(error))
            return False
        return True

    def _end(self) -> None:
        seconds = self.spent_s
        self.note(self._num_late, self._num_late)
        self.is_pending = False
        self._done(self, seconds)


def write_mask(state: LLMatcher, bits: I32) -> None:
    """Write the mask of tokens that may follow a state, i32[num_words]. Raises WornError: see OutputMatcher."""
    state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    if state.is_error():
        raise WornError


_CLOSE_TIMEOUT_S = 10.0
# After a job held Python's lock, the next slow job waits four times as long: others have four fifths of the time.
_BACKOFF_FACTOR = 4
_CHEAP_S = 0.001


class Job(Protocol):
    """A computation in pieces; it tells its owner when it is done."""

    def compute(self) -> tuple[bool, float]:
        """Compute a piece; return whether it was the last, and the seconds that it held the lock. Raises nothing."""
        ...


class MaskWorker:
    """Starts its thread with the first job. Close it at the end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: list[tuple[float, int, Job]] = []
        self._num_put = 0
        self._backoff_end = 0.0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, job: Job, cost_s: float) -> None:
        """Queue a job, before those that are expected to take longer."""
        with self._changed:
            self._num_put += 1
            heapq.heappush(self._jobs, (cost_s, self._num_put, job))
            if self._thread is None and not self._is_closed:
                self._thread = start_thread(self._run, "fdsd-late-masks")
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its current piece. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        lower_priority()
        while (taken := self._take()) is not None:
            cost_s, job = taken
            is_done, alone_s = job.compute()
            self._backoff_end = max(self._backoff_end, time.monotonic()) + _BACKOFF_FACTOR * alone_s
            if not is_done:
                self.put(job, max(cost_s, alone_s))

    def _take(self) -> tuple[float, Job] | None:
        """Wait for the next job; None = closed."""
        with self._changed:
            while not self._is_closed:
                backoff_s = self._backoff_end - time.monotonic()
                if self._jobs and (backoff_s <= 0 or self._jobs[0][0] <= _CHEAP_S):
                    cost_s, _, job = heapq.heappop(self._jobs)
                    return cost_s, job
                self._changed.wait(backoff_s if self._jobs else None)
        return None
