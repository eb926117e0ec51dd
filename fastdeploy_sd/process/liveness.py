"""Detects a process that makes no progress.

Silence alone is no proof: a step over a long prompt may take minutes in which no request is answered. But then
the process computes, or waits for memory from a disk; one that is stopped or deadlocked does neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastdeploy_sd.errors import Unavailable

_BEAT_S = 1.0
_BEATS_PER_TIMEOUT = 4
# Of the time since the last probe, a process that works has spent at least this share on a processor. Answering pings
# and threads that wait take far less.
_WORKING_SHARE = 0.05
_CPU_CLOCK = 2  # Linux: the number of a process's CPU clock is made of its complemented id and this kind


class CpuClock:
    """The time a process has spent computing, in all its threads."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | _CPU_CLOCK

    def read(self) -> float:
        """Return it in seconds; 0 when the process has ended."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0


class WorkClock:
    """Whether processes have worked, and how much time has passed, since the last probe.

    Time counts only while this process itself runs, so that one that was suspended as a whole loses nothing.

    Args:
        share: processes that work spend at least this share of the time on a processor.
        pause_s: about how often `probe` is called.
    """

    def __init__(self, read_cpu_s: Callable[[], float], share: float, pause_s: float) -> None:
        self._read_cpu_s, self._share, self.pause_s = read_cpu_s, share, pause_s
        self._probed, self._cpu_s = time.monotonic(), read_cpu_s()

    def probe(self) -> tuple[float, bool]:
        """Return the seconds since the last probe, two pauses at most, and whether the processes have worked."""
        now, cpu_s = time.monotonic(), self._read_cpu_s()
        elapsed_s = now - self._probed
        has_worked = cpu_s - self._cpu_s > self._share * elapsed_s
        self._probed, self._cpu_s = now, cpu_s
        return min(elapsed_s, 2 * self.pause_s), has_worked


class LivenessClock:
    """How long (`age_s`) a process has given no sign of life: something it said, or work that it did."""

    def __init__(self, pid: int, pause_s: float) -> None:
        self._pid, self._clock = pid, WorkClock(CpuClock(pid).read, _WORKING_SHARE, pause_s)
        self._num_faults = _major_faults(pid)
        self.age_s = 0.0

    def note(self) -> None:
        self.age_s = 0.0

    def probe(self) -> None:
        """See whether it has worked since the last probe: it computed, or read memory from a disk."""
        num_faults = _major_faults(self._pid)
        elapsed_s, has_computed = self._clock.probe()
        has_worked = has_computed or num_faults > self._num_faults
        self.age_s = 0.0 if has_worked else self.age_s + elapsed_s
        self._num_faults = num_faults


class LivenessProbe:
    """Keeps asking a process, one question at a time, and notices when it falls silent.

    Args:
        ask: asks it anything and waits for the answer; raises Unavailable when there will be none.
        on_silence: called once after `timeout_s` without a sign of life, with the seconds; nothing is asked any more.
        may_wait: whether it may rightly wait for another process, which is no silence.
    """

    def __init__(
        self,
        pid: int,
        ask: Callable[[], Awaitable[object]],
        timeout_s: float,
        on_silence: Callable[[float], None],
        may_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pause_s = min(_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)
        self._pid, self.signs = pid, LivenessClock(pid, self._pause_s)
        self._ask = ask
        self._timeout_s = timeout_s
        self._on_silence, self._may_wait = on_silence, may_wait
        self._tasks = [asyncio.create_task(self._question()), asyncio.create_task(self._watch())]

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        return is_stopped(self._pid)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _question(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await self._ask()
            await asyncio.sleep(self._pause_s)

    async def _watch(self) -> None:
        while self.signs.age_s <= self._timeout_s:
            await asyncio.sleep(self._pause_s)
            self.signs.probe()
            if self._may_wait():
                self.signs.note()
        self._on_silence(self.signs.age_s)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    return stat_field(pid, 0) in ("T", "t")


def stat_field(pid: int, number: int) -> str:
    """Return a field of a process in /proc, 0 = its state; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[number]
    except (OSError, IndexError):
        return ""


def _major_faults(pid: int) -> int:
    """Return how often a process has waited for memory that was on a disk; 0 when it has ended."""
    return int(stat_field(pid, 9) or 0)
