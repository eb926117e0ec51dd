"""One request through the router: to an instance, its answer to the client byte for byte, and elsewhere on a failure.

Until the client has got anything, a request that fails at an instance begins anew at another. A stream of which it has
got something goes on at another instance after the last event that was relayed: what it showed is known from the
notes in the stream. A whole answer is held until it is complete, up to some size. Knows no registration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from fastdeploy_sd.cluster.membership import DECODE
from fastdeploy_sd.cluster.messages import Clock
from fastdeploy_sd.cluster.route import ROUTE_HEADER, Recipient, make_route
from fastdeploy_sd.cluster.router.choice import Chooser, Placement, RoutingHints
from fastdeploy_sd.cluster.router.delivery import (
    AGAINST_ROUTERS,
    INSTANCE_STATUSES,
    Delivery,
    Failure,
    Refusal,
    error_of,
    event_end,
)
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import RoutingConfig
from fastdeploy_sd.cluster.stream_metadata import EventSplitter, ResumeState, StreamEvent
from fastdeploy_sd.errors import FdsdError, Forbidden, NoInstance, Unavailable
from fastdeploy_sd.metrics import RouterStats
from fastdeploy_sd.wire.http.event_stream import DONE
from fastdeploy_sd.wire.http_client import Ask, BrokenError, Exchange, HttpClient

logger = logging.getLogger(__name__)

_MAX_REFUSAL_BYTES = 1 << 20
_MAX_HELD_BYTES = 4 << 20
_POLL_S = 0.1
_REFUSED_S = 0.5
# A stream that relays so many events has outlived what broke it before.
_MANY_EVENTS = 32
_DONE = DONE.encode("ascii")


@dataclass(frozen=True, slots=True)
class UpstreamClient:
    """What all requests through a router have in common; `key` is that of routes."""

    routing: RoutingConfig
    chooser: Chooser
    http: HttpClient
    key: bytes
    stats: RouterStats


@dataclass(slots=True)
class Relay:
    """One request, which `run` answers, once; `is_routed`: the instance is told of KV sources and progress."""

    upstream: UpstreamClient
    ask: Ask
    is_routed: bool
    delivery: Delivery
    _record: ResumeState = field(default_factory=ResumeState)
    _takers: list[Instance] = field(default_factory=list)  # who has it now: its instance, and who computes its prompt
    _refusal: Refusal | None = None
    _refused_by: set[str] = field(default_factory=set)
    _num_broken: int = 0  # instances that broke on it, one after the other
    _num_events: int = 0  # since then
    _failing_since: float | None = None

    async def run(self) -> None:
        """Answer the request; raises FdsdError where nothing has been sent, and OSError if the client is gone."""
        timeout_s = self.upstream.routing.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._run()
        except TimeoutError:
            text = f"the request took more than {timeout_s:g} s (request_timeout_secs)"
            await self.delivery.fail(Unavailable(text, code="deadline_exceeded"))
        except FdsdError as error:
            await self.delivery.fail(error)

    async def _run(self) -> None:
        hints = self.upstream.chooser.hints(self.ask.body)
        failure = None
        while True:
            placement = await self._place(hints, failure)
            if placement is None:
                return  # answered with a refusal
            failure = await self._attempt(placement)
            if failure is None:
                return
            self._note(failure, placement.instance, hints)

    def _note(self, failure: Failure, instance: Instance, hints: RoutingHints) -> None:
        self.upstream.stats.failures[instance.label, failure.error.code or failure.error.type] += 1
        if self._num_events >= _MANY_EVENTS:
            hints.forget_failures()
        hints.note_failure(instance.member, is_of_server=isinstance(failure.error, BrokenError))
        if failure.is_refusal:
            self._refused_by.add(instance.instance_id)
        else:
            self._num_broken += 1
        self._num_events = 0
        self._failing_since = self._failing_since or time.monotonic()
        if self.delivery.has_started:
            hints.fingerprint = hints.fingerprint or instance.member.fingerprint

    async def _place(self, hints: RoutingHints, failure: Failure | None) -> Placement | None:
        """Return where the request goes next; None = the client has been given what an instance refused it with."""
        if failure is None:
            placement = self.upstream.chooser.choose(hints)
            if placement is None:
                self.upstream.stats.num_unplaced += 1
                raise NoInstance("expected an instance that takes requests, got none: try again", code="no_instance")
            return placement
        placement = await self._next_place(hints)
        if placement is None:
            self.upstream.stats.num_unplaced += 1
            if self._refusal is not None and not self.delivery.has_started:
                await self.delivery.send_whole(self._refusal.status, self._refusal.headers, self._refusal.body)
                return None
            raise failure.error
        if self.delivery.has_started:
            self.upstream.stats.num_resumed += 1
        else:
            self.upstream.stats.num_retries += 1
        return placement

    async def _next_place(self, hints: RoutingHints) -> Placement | None:
        """Return a place where the request has not failed yet, or one where it may do better; None = there is none.

        A stream waits for one: its client cannot ask again for what is missing. An instance that refused it is asked
        again after a while, one that broke only when no other has come.
        """
        routing = self.upstream.routing
        begin = time.monotonic()
        deadline = (self._failing_since or begin) + (routing.resume_s if self.delivery.has_started else 0.0)
        while self._num_broken < routing.max_attempts:
            now = time.monotonic()
            if self.delivery.has_started and now - begin >= _REFUSED_S:
                hints.tried -= self._refused_by
            placement = self.upstream.chooser.choose(hints)
            if placement is not None and not hints.avoids(placement.instance.member):
                return placement
            if now >= deadline:
                return placement if placement is not None and not self._refused_by else None
            await asyncio.sleep(_POLL_S)
        return None

    async def _attempt(self, placement: Placement) -> Failure | None:
        instance, source = placement.instance, placement.source
        self._takers = [instance] if source is None else [instance, source]
        for taker in self._takers:
            taker.begin()
            self.upstream.stats.given[taker.label, taker.member.role] += 1
        self.upstream.stats.num_unpaired += instance.member.role == DECODE and source is None
        instance.circuit.begin()
        try:
            failure = await self._exchange(placement)
        except BrokenError as error:
            failure = Failure(error)
        except BaseException:
            instance.circuit.leave()
            raise
        finally:
            for taker in self._takers:
                taker.end()
        instance.circuit.note(is_failure=failure is not None and not failure.is_refusal)
        return failure

    async def _exchange(self, placement: Placement) -> Failure | None:
        instance, http = placement.instance, self.upstream.http
        exchange = await http.ask(instance.target, self._routed(placement), instance.exchanges)
        try:
            return await self._relay(exchange, instance)
        finally:
            http.finish(instance.target, exchange, instance.exchanges)

    def _routed(self, placement: Placement) -> Ask:
        if not self.is_routed:
            return self.ask
        source = None if placement.source is None else placement.source.kv_source
        progress = self._record.progress if self.delivery.has_started else None
        instance = placement.instance
        to = Recipient(instance.instance_id, instance.clock.monotonic)
        header, body = make_route(self.upstream.key, to, self.ask.body, progress, source, self.delivery.client)
        headers = [*self.ask.headers, (ROUTE_HEADER.lower().encode("ascii"), header.encode("ascii"))]
        return Ask(self.ask.method, self.ask.path, headers, body)

    async def _relay(self, exchange: Exchange, instance: Instance) -> Failure | None:
        if exchange.status == Forbidden.status:
            return await self._forbidden(exchange, instance)
        if exchange.status in INSTANCE_STATUSES or self.delivery.has_started != self._continues(exchange):
            return self._refused(exchange, await exchange.read_all(_MAX_REFUSAL_BYTES))
        if (end := event_end(exchange.headers)) is not None:
            return await self._relay_stream(exchange, end)
        await self._relay_whole(exchange)
        return None

    def _continues(self, exchange: Exchange) -> bool:
        """Whether an answer can follow what the client has got: a stream does, and anything if it has got nothing."""
        is_stream = event_end(exchange.headers) is not None
        return self.delivery.has_started and exchange.status == 200 and is_stream  # noqa: PLR2004 (OK)

    async def _forbidden(self, exchange: Exchange, instance: Instance) -> Failure | None:
        """Answer with what is the client's; what the instance has against this router is the instance's failure."""
        body = await exchange.read_all(_MAX_REFUSAL_BYTES)
        code, text = error_of(body)
        if code in AGAINST_ROUTERS:
            theirs, ours = instance.clock, Clock.now()
            logger.warning(
                "instance %s at %s refuses what comes from this router: %s (wall clocks: %.1f s there, %.1f s here;"
                " monotonic: %.1f s there, %.1f s here)",
                instance.instance_id, instance.target, text, theirs.wall, ours.wall, theirs.monotonic, ours.monotonic,
            )  # fmt: skip
            return Failure(Unavailable("an instance refuses what comes from this router; its log says why", code=code))
        if self.delivery.has_started:
            return self._refused(exchange, body)
        await self.delivery.send_whole(exchange.status, exchange.headers, body)
        return None

    def _refused(self, exchange: Exchange, body: bytes) -> Failure:
        self._refusal = Refusal(exchange.status, exchange.headers, body)
        text = f"the instance answered {exchange.status}"
        return Failure(Unavailable(text, code=f"answered_{exchange.status}"), is_refusal=True)

    async def _relay_stream(self, exchange: Exchange, end: bytes) -> Failure | None:
        splitter = EventSplitter(end)
        while piece := await exchange.read():
            events: list[StreamEvent] = []
            for event in splitter.feed(piece):
                if self._record.take(event):
                    await self._send_events(exchange, events)
                    return Failure(Unavailable("the instance failed in the middle of the stream", code="failed"))
                events.append(event)
                if event.data == _DONE or self._record.is_ended:
                    await self._send_events(exchange, events)
                    await self.delivery.end()
                    await exchange.read()  # the end, so that the connection serves another request
                    return None
            await self._send_events(exchange, events)
        return Failure(Unavailable("the stream ended before its end", code="failed"))

    async def _send_events(self, exchange: Exchange, events: list[StreamEvent]) -> None:
        if not events:
            return
        self._note_progress(len(events))
        await self.delivery.send_events(exchange.status, exchange.headers, events)

    def _note_progress(self, num_events: int) -> None:
        """The prompt has been computed, and the stream goes on; after some events its failures are forgotten."""
        for source in self._takers[1:]:
            source.end()
        del self._takers[1:]
        self._failing_since = None
        self._num_events += num_events
        if self._num_events >= _MANY_EVENTS:
            self._num_broken = 0

    async def _relay_whole(self, exchange: Exchange) -> None:
        held = await exchange.read_all(_MAX_HELD_BYTES)
        if len(held) <= _MAX_HELD_BYTES:
            await self.delivery.send_whole(exchange.status, exchange.headers, held)
            return
        await self.delivery.start(exchange.status, exchange.headers)
        try:
            while held:
                await self.delivery.send(held)
                held = await exchange.read()
        except BrokenError as error:
            raise ConnectionResetError(error.message) from None  # the client's connection ends as the instance's did
        await self.delivery.end()
