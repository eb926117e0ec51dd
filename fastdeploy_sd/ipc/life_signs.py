"""Whether another process still gets anywhere. Knows no message and no engine.

Silence alone does not tell: a step over a long prompt may rightly take minutes in which nobody is answered. But then
the process computes; one that is stopped, deadlocked or swapped out neither answers nor computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from fastdeploy_sd.errors import Unavailable

_BEAT_S = 1.0
_BEATS_PER_TIMEOUT = 4
# Of the time since the last look, a process that works has spent at least this share on a processor. Answering pings
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


class LifeSigns:
    """When a process last gave a sign of life: something it said, or time it spent computing."""

    def __init__(self, pid: int) -> None:
        self._clock = CpuClock(pid)
        self._last = self._looked = time.monotonic()
        self._cpu_s = self._clock.read()

    @property
    def age_s(self) -> float:
        """Seconds since the last sign."""
        return time.monotonic() - self._last

    def note(self) -> None:
        """It has said something."""
        self._last = time.monotonic()

    def look(self) -> None:
        """See whether it has computed since the last look; call this about every second."""
        now, cpu_s = time.monotonic(), self._clock.read()
        if cpu_s - self._cpu_s > _WORKING_SHARE * (now - self._looked):
            self._last = now
        self._looked, self._cpu_s = now, cpu_s


class Heartbeat:
    """Keeps asking a process, one question at a time, and notices when it falls silent and when it is back.

    Args:
        pid: of the process.
        ask: asks it anything and waits for the answer; raises Unavailable when there will be none.
        timeout_s: a process without a sign of life for longer is silent.
        on_change: called with what `verify` raises when it falls silent, and with None when it is back.
    """

    def __init__(
        self,
        pid: int,
        ask: Callable[[], Awaitable[object]],
        timeout_s: float,
        on_change: Callable[[Unavailable | None], None],
    ) -> None:
        self.signs = LifeSigns(pid)
        self._silence: Unavailable | None = None
        self._ask = ask
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._tasks = [asyncio.create_task(self._question()), asyncio.create_task(self._watch())]

    def verify(self) -> None:
        """Check that it is not silent.

        Raises:
            Unavailable: it is.
        """
        if self._silence is not None:
            raise self._describe()

    async def stop(self) -> None:
        """Ask nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _pause_s(self) -> float:
        return min(_BEAT_S, self._timeout_s / _BEATS_PER_TIMEOUT)

    async def _question(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await self._ask()
            await asyncio.sleep(self._pause_s)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self.signs.look()
            was_silent, is_silent = self._silence is not None, self.signs.age_s > self._timeout_s
            self._silence = self._describe() if is_silent else None
            if is_silent is not was_silent:
                self._on_change(self._silence)

    def _describe(self) -> Unavailable:
        text = f"the engine has given no sign of life for {self.signs.age_s:.0f} s"
        return Unavailable(text, code="engine_silent")
