"""A thread that computes the masks which are too slow for a step, the cheapest first. Knows no grammar."""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
from typing import Protocol

from fastdeploy_sd.text.guidance.compiler import NICE, start_thread

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
        with contextlib.suppress(OSError):  # a lower priority is optional
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
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
