"""Keeps a number of processes of one kind running and replaces one that dies. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable

from fastdeploy_sd.process.child import EXIT_FAILED, EXIT_OK, ChildProcess, describe_exit

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
_STABLE_S = 30.0
_MAX_QUICK_DEATHS = 5


class WorkerPool:
    """Keeps processes running until each has ended by itself, with status 0.

    The others and their connections are untouched when one dies. It is replaced after a pause that doubles while its
    successors die young; after too many such deaths in a row there will be none.

    Args:
        start: starts a process, given its number, 0 to count - 1; a successor has the same.
        give_up: called when one is not replaced any more; the others go on until they end.
        kind: names the processes in the log; {} stands for the number.
        ends_only_in_drain: whether one is replaced, too, that ends with status 0 before a drain.

    Attributes:
        replaces: whether those that die are replaced at all.
        stable_s: a process that has run for so long did not die because it could not start.
        statuses: number -> exit status of those that ended and are not replaced, in the order of their ends.
        given_up: numbers of those that died too often.
    """

    def __init__(
        self,
        start: Callable[[int], ChildProcess],
        count: int,
        give_up: Callable[[], None],
        kind: str = "HTTP",
        *,
        ends_only_in_drain: bool = False,
    ) -> None:
        self._kind = kind
        self._start = start
        self._count = count
        self._give_up = give_up
        self._ends_only_in_drain = ends_only_in_drain
        self._running: set[ChildProcess] = set()
        self._drain = asyncio.Event()
        self._sent: set[int] = set()
        self.replaces = True
        self.stable_s = _STABLE_S
        self.statuses: dict[int, int] = {}
        self.given_up: set[int] = set()

    def begin_drain(self) -> None:
        """Tell every process that the server takes no new requests; replace none any more."""
        self._drain.set()
        for worker in self._running:
            worker.tell()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process. That one ends of it is then no failure to log."""
        self._sent.add(number)
        for worker in self._running:
            worker.signal(number)

    def kill(self, pid: int) -> None:
        """Kill the process with this id, if it is one of these and still runs."""
        for worker in self._running:
            if worker.pid == pid:
                worker.signal(signal.SIGKILL)

    async def run(self) -> int:
        """Run until all have ended; those that still run when this is cancelled are killed.

        Returns:
            0 when every process ended by itself, 1 when one died and was not replaced.
        """
        tasks = [asyncio.create_task(self._keep_one(number)) for number in range(self._count)]
        try:
            await asyncio.gather(*tasks)
            return EXIT_FAILED if any(self.statuses.values()) else EXIT_OK
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def alongside(self, end_s: float) -> AsyncIterator[WorkerPool]:
        """Run within the context; then they are told of a drain, and those that still run after `end_s` are killed."""
        running = asyncio.create_task(self.run())
        try:
            yield self
            self.begin_drain()
            await asyncio.wait({running}, timeout=end_s)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _keep_one(self, number: int) -> None:
        num_quick_deaths = 0
        kind = self._kind.format(number)
        while True:
            began = time.monotonic()
            status = await self._run_one(number, kind)
            num_quick_deaths = 1 if time.monotonic() - began >= self.stable_s else num_quick_deaths + 1
            has_ended = status == EXIT_OK and not self._ends_only_in_drain
            if has_ended or self._drain.is_set() or not self.replaces or num_quick_deaths > _MAX_QUICK_DEATHS:
                break
            pause_s = _FIRST_PAUSE_S * 2 ** (num_quick_deaths - 1)
            logger.info("another %s process starts in %g s", kind, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drain.wait(), pause_s)
                status = EXIT_OK  # it would have been replaced
                break
        self.statuses[number] = status
        if has_ended or self._drain.is_set():
            return
        if self.replaces:
            logger.error("no %s process is started any more: %d died in a row", kind, num_quick_deaths)
            self.given_up.add(number)
        self._give_up()

    async def _run_one(self, number: int, kind: str) -> int:
        with contextlib.closing(self._start(number)) as worker:
            self._running.add(worker)
            try:
                status = await worker.wait()
            finally:
                self._running.discard(worker)
            if status != EXIT_OK and self.replaces and -status not in self._sent:
                logger.error("%s process %d failed (%s)", kind, worker.pid, describe_exit(status))
            return status
