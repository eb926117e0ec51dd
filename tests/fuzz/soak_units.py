"""The processes of a soak that faults happen to, and these faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from tests.doubles.redis_server import RedisServer
from tests.server.router_process import Router
from tests.server.split_deployment import START_S, ModelServer, family, power_off, resume, suspend

MAX_STOP_S = 12.0
MAX_PAUSE_S = 3.0
_NO_REDIS_S = 5.0
_LOOK_S = 0.2
_SLICE_S = 0.05

Fault = Callable[[random.Random], Awaitable[str]]


class Unit:
    """Something that is disturbed and comes back.

    Attributes:
        name: with its number. is_faulty: a fault is under way. is_partly_faulty: one that leaves a part of it at work.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_faulty = self.is_partly_faulty = False
        self._times: list[tuple[float, float]] = []

    def faults(self) -> list[Fault]:
        """What may happen to it; each returns what it was, when all is as before."""
        raise NotImplementedError

    def partial_faults(self) -> list[Fault]:
        """Those that leave a part of it at work."""
        return []

    def was_disturbed(self, begin: float, end: float) -> bool:
        """Whether a fault was under way at any time between two points of time."""
        return any(at < end and until > begin for at, until in self._times)

    async def disturb(self, rng: random.Random, faults: list[Fault]) -> str:
        """Have one of its faults happen; return what it was, when it is over."""
        fault = rng.choice(faults)
        self.is_faulty, self.is_partly_faulty = True, fault in self.partial_faults()
        self._times.append((time.monotonic(), float("inf")))
        try:
            return f"{self.name}: {await fault(rng)}"
        finally:
            self._times[-1] = (self._times[-1][0], time.monotonic())
            self.is_faulty = self.is_partly_faulty = False


class ProcessUnit(Unit):
    """A server or a router.

    Args:
        start: makes another one; returns at once.
        num_engines: of a server; one of several is started again by its server.
    """

    def __init__(self, name: str, start: Callable[[], ModelServer | Router], num_engines: int = 1) -> None:
        super().__init__(name)
        self._start, self._num_engines = start, num_engines
        self.program = start()
        self._is_up = False

    @property
    def url(self) -> str | None:
        """See Door."""
        return self.program.url if self._is_up else None

    async def wait_up(self) -> None:
        """Wait until it serves."""
        program = self.program
        if isinstance(program, Router):
            await asyncio.to_thread(program.get, "/instances")
        else:
            await asyncio.to_thread(lambda: program.url)
        self._is_up = True

    def faults(self) -> list[Fault]:
        """See Unit."""
        faults: list[Fault] = [self._suspend, self._suspend, self._power_off, self._terminate]
        if not isinstance(self.program, ModelServer):
            return faults
        if self._num_engines == 1:
            return [*faults, self._kill_first, self._kill_engine]
        return [*faults, self._kill_first, *self.partial_faults() * 3]

    def partial_faults(self) -> list[Fault]:
        """See Unit."""
        return [self._kill_one, self._stop_one, self._slow_one] if self._num_engines > 1 else []

    async def _suspend(self, rng: random.Random) -> str:
        seconds = rng.uniform(0.2, MAX_STOP_S)
        suspend(self.program)
        await asyncio.sleep(seconds)
        resume(self.program)
        return f"suspended for {seconds:.1f} s"

    async def _power_off(self, rng: random.Random) -> str:
        self._is_up = False
        await asyncio.to_thread(power_off, self.program)
        await self._restart(rng)
        return "all its processes killed"

    async def _terminate(self, rng: random.Random) -> str:
        self._is_up = False
        self.program.process.terminate()
        status = await asyncio.to_thread(self.program.wait, START_S)
        assert status == 0, f"{self.name} ended with {status} after SIGTERM"
        await self._restart(rng)
        return "asked to stop"

    async def _kill_first(self, rng: random.Random) -> str:
        """Its first process only: the others must notice."""
        self._is_up = False
        pids = family(self.program.process.pid)
        self.program.process.kill()
        await asyncio.to_thread(self.program.wait, START_S)
        await _gone(pids)
        await self._restart(rng)
        return "its first process killed"

    async def _kill_engine(self, rng: random.Random) -> str:
        """The engine only: the first process must notice."""
        self._is_up = False
        pids = family(self.program.process.pid)
        for pid in self.program.children("engine_process"):
            os.kill(pid, signal.SIGKILL)
        status = await asyncio.to_thread(self.program.wait, START_S)
        assert status == 1, f"{self.name} ended with {status} without its engine"
        await _gone(pids)
        await self._restart(rng)
        return "its engine killed"

    async def _kill_one(self, rng: random.Random) -> str:
        """One of its engines, which it starts again."""
        pid = rng.choice(self.program.children("engine_process"))
        os.kill(pid, signal.SIGKILL)
        await _gone([pid])
        await self._wait_engines()
        return "an engine killed"

    async def _stop_one(self, rng: random.Random) -> str:
        """One of its engines, for less or more than timeout_engine: it is slow, or is killed and started again."""
        pid, seconds = rng.choice(self.program.children("engine_process")), rng.uniform(0.2, MAX_STOP_S)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        await self._wait_engines()
        return f"an engine stopped for {seconds:.1f} s"

    async def _slow_one(self, rng: random.Random) -> str:
        """One of its engines: it runs a fifth of the time."""
        pid, end = rng.choice(self.program.children("engine_process")), time.monotonic() + rng.uniform(1, MAX_STOP_S)
        while time.monotonic() < end:
            for number, seconds in ((signal.SIGSTOP, 4 * _SLICE_S), (signal.SIGCONT, _SLICE_S)):
                os.kill(pid, number)
                await asyncio.sleep(seconds)
        await self._wait_engines()
        return "an engine slow"

    async def _wait_engines(self) -> None:
        """Wait until all its engines take requests."""
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient(timeout=START_S, trust_env=False) as client:
            while True:
                health = await client.get(f"{self.program.url}/health")
                states = [engine["state"] for engine in health.json().get("engines", [])]
                if states == ["ready"] * self._num_engines:
                    return
                assert time.monotonic() < deadline, f"{self.name}: {health.text}"
                await asyncio.sleep(_LOOK_S)

    async def _restart(self, rng: random.Random) -> None:
        self.program.close()
        await asyncio.sleep(rng.uniform(0, MAX_PAUSE_S))
        self.program = self._start()
        await self.wait_up()


class RedisUnit(Unit):
    """A Redis."""

    def __init__(self, redis: RedisServer) -> None:
        super().__init__("redis")
        self._redis = redis

    def faults(self) -> list[Fault]:
        """See Unit."""
        return [self._restart, self._suspend, self._empty, self._fill]

    async def _restart(self, rng: random.Random) -> str:
        await asyncio.to_thread(self._redis.stop)
        await asyncio.sleep(rng.uniform(0, _NO_REDIS_S))
        await asyncio.to_thread(self._redis.start)
        return "killed, and started empty"

    async def _suspend(self, rng: random.Random) -> str:
        self._redis.signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.2, _NO_REDIS_S))
        self._redis.signal(signal.SIGCONT)
        return "suspended"

    async def _empty(self, rng: random.Random) -> str:
        for _ in range(5):
            await asyncio.to_thread(self._redis.do, "FLUSHALL")
            await asyncio.sleep(rng.uniform(0, 0.5))
        return "emptied five times"

    async def _fill(self, rng: random.Random) -> str:
        await asyncio.to_thread(self._redis.do, "CONFIG", "SET", "maxmemory", "1")
        await asyncio.sleep(rng.uniform(0.2, _NO_REDIS_S))
        await asyncio.to_thread(self._redis.do, "CONFIG", "SET", "maxmemory", "0")
        return "full"


async def _gone(pids: list[int]) -> None:
    deadline = time.monotonic() + START_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes outlive what started them: {left}"
        await asyncio.sleep(0.1)
