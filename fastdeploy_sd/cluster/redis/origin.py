"""Origin: this process's requests at other instances, from their submission to their last output."""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from fastdeploy_sd.cluster.redis.deployment import LeaseConfig
from fastdeploy_sd.cluster.redis.frames import Answers, Ending, Item, Orders, Submission, requests_of, results_of
from fastdeploy_sd.cluster.redis.store import Store, StoreDown, end_tasks
from fastdeploy_sd.errors import FdsdError, InternalError, Overloaded, Unavailable
from fastdeploy_sd.types import FinishReason, Request, RequestOutput
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.protocol import SignedCodec

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


class LostError(Unavailable):
    """A request is not at its instance any more, and may go on elsewhere; `is_gone`: the instance is silent."""

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message, code="instance_lost")
        self.is_gone = is_gone


class RemoteRequest:
    """A request at another instance; `sent_in_beat`: the origin's beat when Redis took it, None = it has not yet."""

    def __init__(self, handle: int, instance: str, request: Request) -> None:
        self.handle, self.instance, self._request_id = handle, instance, request.request_id
        self.num_tokens = 0
        self.heard_at = time.monotonic()
        self.sent_in_beat: int | None = None
        self._outputs: asyncio.Queue[RequestOutput | FdsdError] = asyncio.Queue()

    async def next(self, timeout_s: float) -> RequestOutput:
        """Wait for the next output; raises LostError, Unavailable where it is late, or what ended the request."""
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._outputs.get()
        except TimeoutError:
            text = f"the request got no token for {timeout_s:g} s (scheduler_ttl)"
            raise Unavailable(text, code="scheduler_ttl") from None
        if isinstance(item, FdsdError):
            raise item
        return item

    def take(self, item: Item) -> None:
        """Note an output. One that came before is passed over; one that does not follow on the last is a loss."""
        if item.position > self.num_tokens:
            self.fail(LostError("an output was lost on its way"))
        elif item.position == self.num_tokens:
            self.num_tokens += len(item.output.token_ids)
            self._outputs.put_nowait(replace(item.output, request_id=self._request_id))

    def fail(self, error: FdsdError) -> None:
        self._outputs.put_nowait(copy.copy(error))  # each is raised, and so changed, on its own


class Origin:
    """Sends requests to instances and hands out what comes back. Belongs to one event loop; `close` it at the end.

    `is_idle` is set while no request is elsewhere.
    """

    def __init__(self, store: Store, codec: SignedCodec, lease: LeaseConfig, batch_size: int) -> None:
        self.name = secrets.token_hex(16)
        self._store, self._codec, self._lease, self._batch_size = store, codec, lease, batch_size
        self._requests: dict[int, RemoteRequest] = {}
        self._newest = 0
        self._beat = 0
        self._heard: dict[str, float] = {}
        self._endings: dict[str, list[Ending]] = defaultdict(list)
        self._has_requests, self._has_endings, self.is_idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_idle.set()
        self._tasks: list[asyncio.Task[None]] = []

    async def submit(self, instance: str, request: Request, max_queued: int) -> RemoteRequest:
        """Send a request to an instance for which at most `max_queued` messages may wait; `leave` it in the end."""
        self._newest += 1
        remote = RemoteRequest(self._newest, instance, request)
        frame = self._seal(instance, Orders(self.name, (Submission(remote.handle, request),)))
        self._enter(remote)
        try:
            length = await self._store.push(requests_of(instance), frame, self._lease.list_ttl_s)
            if length > max_queued and await self._store.withdraw(requests_of(instance), frame):
                raise Overloaded(f"{length} messages wait for the instance, at most {max_queued} may")
        except BaseException:
            self.leave(remote)
            raise
        remote.sent_in_beat = self._beat
        return remote

    def end(self, remote: RemoteRequest, reason: FinishReason) -> None:
        """Have a request end with a reason that its last output tells."""
        self._endings[remote.instance].append(Ending(remote.handle, reason))
        self._has_endings.set()

    def leave(self, remote: RemoteRequest, *, is_ended: bool = False) -> None:
        """Wait for a request no more; unless it has ended, the instance is told so."""
        self._requests.pop(remote.handle, None)
        if not is_ended:
            self.end(remote, FinishReason.ABORT)
        if not self._requests:
            self._has_requests.clear()
            self.is_idle.set()

    async def close(self) -> None:
        """Wait for nothing any more, and leave nothing in Redis as far as it can be reached."""
        error = Unavailable("the server shut down before the request finished", code="draining")
        for remote in list(self._requests.values()):
            remote.fail(error)
            self.leave(remote)
        await end_tasks(self._tasks)
        if self._tasks:
            await self._attempt(self._send_endings())
            await self._attempt(self._store.remove(results_of(self.name)))

    def _enter(self, remote: RemoteRequest) -> None:
        self._requests[remote.handle] = remote
        self._has_requests.set()
        self.is_idle.clear()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep(run)) for run in (self._read, self._ask, self._end)]

    def _seal(self, instance: str, orders: Orders) -> bytes:
        return self._codec.encode(requests_of(instance), orders)

    async def _keep(self, run: Callable[[], Awaitable[None]]) -> None:
        """An accident ends what waits, which might wait for ever, and nothing else."""
        while True:
            try:
                await run()
            except Exception:
                logger.exception("requests at other instances fail")
                self._fail(self._requests.values(), InternalError("the way to other instances failed"))
                await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        while True:
            await self._has_requests.wait()
            try:
                frames = await self._store.take(results_of(self.name), self._batch_size)
            except StoreDown:
                await asyncio.sleep(_RETRY_S)
                continue
            for frame in frames:
                self._take(frame)

    async def _ask(self) -> None:
        while True:
            await self._has_requests.wait()
            await asyncio.sleep(self._lease.beat_s)
            self._give_up_silent()
            self._beat += 1
            by_instance: dict[str, list[int]] = defaultdict(list)
            for remote in self._requests.values():
                by_instance[remote.instance].append(remote.handle)
            question = Orders(self.name, beat=self._beat, newest=self._newest)
            await self._attempt(*(self._push(i, replace(question, waiting=tuple(w))) for i, w in by_instance.items()))
            self._heard = {i: when for i, when in self._heard.items() if i in by_instance}

    async def _end(self) -> None:
        """Endings may be lost: an instance also ends what this origin does not ask for any more."""
        while True:
            await self._has_endings.wait()
            await self._attempt(self._send_endings())

    async def _send_endings(self) -> None:
        endings, self._endings = self._endings, defaultdict(list)
        self._has_endings.clear()
        await self._attempt(*(self._push(i, Orders(self.name, endings=tuple(e))) for i, e in endings.items()))

    async def _push(self, instance: str, orders: Orders) -> None:
        await self._store.push(requests_of(instance), self._seal(instance, orders), self._lease.list_ttl_s)

    async def _attempt(self, *sending: Coroutine[Any, Any, None]) -> None:
        for result in await asyncio.gather(*sending, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, StoreDown):
                raise result

    def _take(self, frame: bytes) -> None:
        try:
            answers = self._codec.decode(results_of(self.name), Answers, frame)
        except ProtocolError as error:
            errors = self._store.stats.errors
            errors["unreadable"] += 1
            if errors["unreadable"] == 1:
                logger.error("an unreadable message in Redis is passed over, and any further one: %s", error.message)
            return
        instance = answers.instance
        self._heard[instance] = time.monotonic()
        for item in answers.items:
            remote = self._find(item.handle, instance)
            if remote is not None:
                remote.take(item)
            elif item.output.finish_reason is None:  # its reader has left
                self._endings[instance].append(Ending(item.handle, FinishReason.ABORT))
                self._has_endings.set()
        for failure in answers.failures:
            self._fail([self._find(failure.handle, instance)], failure.error.to_exception())
        asked = [self._find(handle, instance) for handle in answers.unknown]
        missing = [r for r in asked if r is not None and r.sent_in_beat is not None and answers.beat > r.sent_in_beat]
        self._fail(missing, LostError(f"instance {instance} does not have the request"))

    def _find(self, handle: int, instance: str) -> RemoteRequest | None:
        remote = self._requests.get(handle)
        return remote if remote is not None and remote.instance == instance else None

    def _give_up_silent(self) -> None:
        oldest = time.monotonic() - self._lease.timeout_s
        for remote in self._requests.values():
            if max(remote.heard_at, self._heard.get(remote.instance, 0.0)) < oldest:
                text = f"instance {remote.instance} has said nothing for {self._lease.timeout_s:g} s"
                remote.fail(LostError(text, is_gone=True))

    def _fail(self, remotes: Iterable[RemoteRequest | None], error: FdsdError) -> None:
        for remote in remotes:
            if remote is not None:
                remote.fail(error)
