"""OriginRequests: one origin's requests at this instance, and the way of their outputs back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.redis.deployment import LeaseConfig
from fastdeploy_sd.cluster.redis.frames import Answers, Item, Orders, RequestFailure, Submission, results_of
from fastdeploy_sd.cluster.redis.store import Store, StoreDown, end_tasks
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.errors import FdsdError, InternalError
from fastdeploy_sd.types import FinishReason
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.protocol import SignedCodec

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Host:
    """What the links of an instance share: its name, its engine's number, and how many outputs go in one message."""

    name: str
    engine: int
    client: EngineGroup
    store: Store
    codec: SignedCodec
    lease: LeaseConfig
    batch_size: int


class _Reply(NamedTuple):
    """To a question of an origin: the fields of Answers."""

    beat: int
    unknown: tuple[int, ...]


_Message = Item | RequestFailure | _Reply


class OriginRequests:
    """One origin's requests here, and what it is to be told. A reader of its own sends that, so that a slow way to one
    origin delays no other; what piles up meanwhile goes in one message.
    """

    def __init__(self, host: Host, origin: str) -> None:
        self._host, self._origin = host, origin
        self.heard_at = time.monotonic()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ended: dict[int, float] = {}
        self._outbox: deque[_Message] = deque()
        self._has_more, self._is_empty = asyncio.Event(), asyncio.Event()
        self._is_empty.set()
        self._sender = asyncio.create_task(self._send())

    def take(self, orders: Orders) -> list[str]:
        """Do what the origin wants; return the engine's ids of requests that are to end as if by a stop string."""
        self.heard_at = time.monotonic()
        for submission in orders.submissions:
            self._begin(submission)
        stopped = [e.handle for e in orders.endings if e.reason is FinishReason.STOP and e.handle in self._running]
        self._end(e.handle for e in orders.endings if e.reason is FinishReason.ABORT)
        if orders.beat:
            waiting = set(orders.waiting)
            self._end(handle for handle in self._running if handle <= orders.newest and handle not in waiting)
            self._say(_Reply(orders.beat, tuple(waiting - self._running.keys())))
        self._forget_ended()
        return [self._engine_id(handle) for handle in stopped]

    async def flushed(self) -> None:
        await self._is_empty.wait()

    async def close(self) -> None:
        """End the requests that still run, and send nothing more."""
        await end_tasks([*self._running.values(), self._sender])

    def _begin(self, submission: Submission) -> None:
        handle = submission.handle
        if handle not in self._running and handle not in self._ended:
            self._host.store.stats.requests["taken"] += 1
            task = self._running[handle] = asyncio.create_task(self._run(submission))
            task.add_done_callback(lambda _: self._note_end(handle))

    def _end(self, handles: Iterable[int]) -> None:
        for handle in list(handles):
            if handle in self._running:
                self._running[handle].cancel()

    def _note_end(self, handle: int) -> None:
        del self._running[handle]
        self._ended[handle] = time.monotonic()

    def _forget_ended(self) -> None:
        """A submission that comes twice comes twice within the time that a list lasts."""
        oldest = time.monotonic() - self._host.lease.list_ttl_s
        while self._ended and (first := next(iter(self._ended.items())))[1] < oldest:
            del self._ended[first[0]]

    def _engine_id(self, handle: int) -> str:
        return f"{self._origin}.{handle}"

    async def _run(self, submission: Submission) -> None:
        handle, position = submission.handle, 0
        request = replace(submission.request, request_id=self._engine_id(handle))
        try:
            async with aclosing(self._host.client.generate(request, self._host.engine)) as outputs:
                async for output in outputs:
                    self._say(Item(handle, position, replace(output, request_id="")))
                    position += len(output.token_ids)
        except FdsdError as error:
            self._say(RequestFailure(handle, WireError.of(error)))
        except Exception:
            logger.exception("request %s failed", submission.request.request_id)
            self._say(RequestFailure(handle, WireError.of(InternalError("the request could not be run"))))

    def _say(self, message: _Message) -> None:
        self._outbox.append(message)
        self._has_more.set()
        self._is_empty.clear()

    async def _send(self) -> None:
        while True:
            await self._has_more.wait()
            await asyncio.sleep(0)  # what the same step has for other requests goes along
            count = min(len(self._outbox), self._host.batch_size)
            for frame in self._frames([self._outbox.popleft() for _ in range(count)]):
                await self._push(frame)
            if not self._outbox:
                self._has_more.clear()
                self._is_empty.set()

    def _frames(self, messages: list[_Message]) -> list[bytes]:
        """Everything in one frame, or in as many as their greatest length asks for."""
        replies = [message for message in messages if isinstance(message, _Reply)]
        answers = Answers(
            self._host.name,
            tuple(message for message in messages if isinstance(message, Item)),
            tuple(message for message in messages if isinstance(message, RequestFailure)),
            *(replies[-1] if replies else ()),
        )
        try:
            return [self._host.codec.encode(results_of(self._origin), answers)]
        except ProtocolError as error:
            if len(messages) > 1:
                half = len(messages) // 2
                return self._frames(messages[:half]) + self._frames(messages[half:])
            if isinstance(messages[0], Item):
                return self._frames([RequestFailure(messages[0].handle, WireError.of(error))])
            raise

    async def _push(self, frame: bytes) -> None:
        while True:
            try:
                await self._host.store.push(results_of(self._origin), frame, self._host.lease.list_ttl_s)
                return
            except StoreDown:
                await asyncio.sleep(_RETRY_S)
