"""Whether another process still gets anywhere. Knows no message and no engine.

Silence alone does not tell: a step over a long prompt may rightly take minutes without an answer. But then
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


class LivenessClock:
    """How long a process has given no sign of life: something it said, or work that it did.

    Time counts only while this process itself runs, so that one that was suspended as a whole goes on as if nothing
    had been.

    Args:
        pause_s: about how often `probe` is called.
    """

    def __init__(self, pid: int, pause_s: float) -> None:
        self._pid, self._pause_s, self._clock = pid, pause_s, CpuClock(pid)
        self._probed = time.monotonic()
        self._cpu_s, self._num_faults = self._clock.read(), _major_faults(pid)
        self._age_s = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the last sign, as of the last probe."""
        return self._age_s

    def note(self) -> None:
        """It has said something."""
        self._age_s = 0.0

    def probe(self) -> None:
        """See whether it has worked since the last probe: it computed, or read memory from a disk."""
        now, cpu_s, num_faults = time.monotonic(), self._clock.read(), _major_faults(self._pid)
        elapsed_s = now - self._probed
        has_worked = cpu_s - self._cpu_s > _WORKING_SHARE * elapsed_s or num_faults > self._num_faults
        self._age_s = 0.0 if has_worked else self._age_s + min(elapsed_s, 2 * self._pause_s)
        self._probed, self._cpu_s, self._num_faults = now, cpu_s, num_faults


class LivenessProbe:
    """Keeps asking a process, one question at a time, and notices when it falls silent.

    Args:
        pid: of the process.
        ask: asks it anything and waits for the answer; raises Unavailable when there will be none.
        timeout_s: a process without a sign of life for longer is silent.
        on_silence: called then, once, with the seconds without a sign; nothing is asked any more.
    """

    def __init__(
        self, pid: int, ask: Callable[[], Awaitable[object]], timeout_s: float, on_silence: Callable[[float], None]
    ) -> None:
        self._pause_s = min(_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)
        self.signs = LivenessClock(pid, self._pause_s)
        self._ask = ask
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._tasks = [asyncio.create_task(self._question()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """Ask nothing any more."""
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
        self._on_silence(self.signs.age_s)


def _major_faults(pid: int) -> int:
    """Return how often a process has waited for memory that was on a disk; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[9])
    except (OSError, IndexError):
        return 0
