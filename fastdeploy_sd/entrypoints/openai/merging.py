"""Reads many sources side by side, as many at a time as a share of the engine's queue allows. Knows no HTTP.

A job of many sequences must neither fill the queue at once, so that others are refused, nor be refused itself on an
idle server because it has more of them than the queue has places. So the next is begun when an earlier one ends.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from fastdeploy_sd.config import SchedulerConfig
from fastdeploy_sd.errors import Overloaded

T = TypeVar("T")

# Between two attempts of a job that waits for others to leave the queue: it is not told when they do.
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class QueueShare:
    """What one job may have in the engine at once, running and waiting.

    Attributes:
        max_sequences: twice what one step takes, so that another one waits wherever one ends.
        max_tokens: in all their prompts; a longer one goes alone.
    """

    max_sequences: int
    max_tokens: int

    @classmethod
    def of(cls, scheduler: SchedulerConfig) -> Self:
        """Return a share that an idle engine never refuses."""
        return cls(min(2 * scheduler.max_num_seqs, scheduler.max_num_queued_requests), scheduler.max_num_queued_tokens)


async def merge(
    begin: Callable[[int], AsyncGenerator[T, None]], sizes: Sequence[int], share: QueueShare
) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they come; all are closed when it ends, is closed or one of them raises.

    A source that is refused with Overloaded before its first item is begun again later. The error is raised only when
    nothing of the job has begun. `sizes`: of source i, in prompt tokens.
    """
    feed = _Feed(begin, sizes, share)
    try:
        while feed.is_unfinished:
            for item in await feed.next():
                yield item
    finally:
        await feed.close()


@dataclass(frozen=True, slots=True)
class _Ended:
    """Source `index` is through."""

    index: int
    error: Exception | None
    has_begun: bool


class _Feed(Generic[T]):
    """The sources of one job: those that wait, and a task for each that runs."""

    def __init__(
        self, begin: Callable[[int], AsyncGenerator[T, None]], sizes: Sequence[int], share: QueueShare
    ) -> None:
        self._begin = begin
        self._sizes = sizes
        self._share = share
        self._limit = share.max_sequences
        self._waiting = list(range(len(sizes)))  # a heap: first in order, first begun
        self._running: dict[int, asyncio.Task[None]] = {}
        self._num_tokens = 0
        self._has_begun = False
        self._queue: asyncio.Queue[T | _Ended] = asyncio.Queue(maxsize=2 * share.max_sequences)

    @property
    def is_unfinished(self) -> bool:
        """Whether `next` has more to tell."""
        return bool(self._waiting or self._running)

    async def next(self) -> list[T]:
        """Return the next item, or nothing when a source has ended."""
        if self._has_begun and not self._running:
            await asyncio.sleep(_RETRY_S)
        self._begin_more()
        entry = await self._queue.get()
        if not isinstance(entry, _Ended):
            self._has_begun = True
            return [entry]
        self._end(entry)
        return []

    async def close(self) -> None:
        """Close the sources that run."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _begin_more(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            size = self._sizes[self._waiting[0]]
            if self._running and self._num_tokens + size > self._share.max_tokens:
                return
            index = heapq.heappop(self._waiting)
            self._num_tokens += size
            self._running[index] = asyncio.create_task(self._pump(index))

    def _end(self, ended: _Ended) -> None:
        del self._running[ended.index]
        self._num_tokens -= self._sizes[ended.index]
        if ended.error is None:
            self._limit = min(self._limit + 1, self._share.max_sequences)
            return
        is_refused = isinstance(ended.error, Overloaded) and not ended.has_begun
        if not is_refused or not (self._running or self._has_begun):
            raise ended.error
        heapq.heappush(self._waiting, ended.index)
        self._limit = max(1, len(self._running))

    async def _pump(self, index: int) -> None:
        error: Exception | None = None
        has_begun = False
        try:
            async with aclosing(self._begin(index)) as source:
                async for item in source:
                    has_begun = True
                    await self._queue.put(item)
        except Exception as failure:
            error = failure
        await self._queue.put(_Ended(index, error, has_begun))
