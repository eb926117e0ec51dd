"""Keeps a number of processes of one kind running and replaces one that dies. Knows no route and no engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from fastdeploy_sd.process.child import EXIT_FAILED, EXIT_OK, ChildProcess, describe_exit

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
# A process that has run for so long did not die because it could not start.
_STABLE_S = 30.0
_MAX_QUICK_DEATHS = 5


class WorkerPool:
    """Keeps processes running until each has ended by itself, with status 0.

    The others and their connections are untouched when one dies. It is replaced after a pause that doubles while its
    successors die young; after too many such deaths in a row there will be none.

    Args:
        start: starts a process, given its number, 0 to count - 1; a successor has the same.
        give_up: called when one is not replaced any more; the others go on until they end.
    """

    def __init__(
        self, start: Callable[[int], ChildProcess], count: int, give_up: Callable[[], None], kind: str = "HTTP"
    ) -> None:
        self._kind = kind
        self._start = start
        self._count = count
        self._give_up = give_up
        self._running: set[ChildProcess] = set()
        self._is_draining = False

    def begin_drain(self) -> None:
        """Tell every process that the server takes no new requests; replace none any more."""
        self._is_draining = True
        for worker in self._running:
            worker.tell()

    async def run(self) -> int:
        """Run until all have ended; those that still run when this is cancelled are killed.

        Returns:
            0 when every process ended by itself, 1 when one died and was not replaced.
        """
        tasks = [asyncio.create_task(self._keep_one(number)) for number in range(self._count)]
        try:
            return max(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_one(self, number: int) -> int:
        num_quick_deaths = 0
        while True:
            began = time.monotonic()
            status = await self._run_one(number)
            if status == EXIT_OK:
                return EXIT_OK
            num_quick_deaths = 1 if time.monotonic() - began >= _STABLE_S else num_quick_deaths + 1
            if self._is_draining:
                return EXIT_FAILED
            if num_quick_deaths > _MAX_QUICK_DEATHS:
                logger.error("no %s process is started any more: %d died in a row", self._kind, num_quick_deaths)
                self._give_up()
                return EXIT_FAILED
            pause_s = _FIRST_PAUSE_S * 2 ** (num_quick_deaths - 1)
            logger.info("another %s process starts in %g s", self._kind, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_one(self, number: int) -> int:
        with contextlib.closing(self._start(number)) as worker:
            self._running.add(worker)
            try:
                status = await worker.wait()
            finally:
                self._running.discard(worker)
            if status != EXIT_OK:
                logger.error("%s process %d failed (%s)", self._kind, worker.pid, describe_exit(status))
            return status
