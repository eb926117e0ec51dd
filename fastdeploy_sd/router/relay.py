"""One request through the router: to an instance, its answer to the client byte for byte, and elsewhere on a failure.

Until the client has got anything, a request that fails at an instance begins anew at another. A stream of which it has
got something goes on at another instance behind the last event that was relayed: what it showed is known from the
notes in the stream. A whole answer is held until it is complete, up to some size. Knows no registration.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.types import Send

from fastdeploy_sd.entrypoints.openai.error_format import error_json, to_fdsd_error, to_json
from fastdeploy_sd.entrypoints.openai.event_stream import DONE
from fastdeploy_sd.errors import FdsdError, NoInstance, Unavailable
from fastdeploy_sd.fleet.http_client import Ask, BrokenError, Exchange, Headers, HttpClient
from fastdeploy_sd.fleet.notes import EventSplitter, ProgressRecord
from fastdeploy_sd.fleet.route import ROUTE_HEADER, make_route
from fastdeploy_sd.metrics import RouterStats
from fastdeploy_sd.router.choice import Chooser, Placement, Wish
from fastdeploy_sd.router.options import RoutingConfig

# Answers that say that the instance cannot, not that the request is wrong.
_INSTANCE_STATUSES = frozenset({429, 502, 503, 504})
_MAX_REFUSAL_BYTES = 1 << 20
_MAX_HELD_BYTES = 4 << 20
_POLL_S = 0.1
_DONE = DONE.encode("ascii")
_OWN_HEADERS = frozenset({b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Courier:
    """What all requests through a router have in common.

    Attributes:
        key: of routes.
    """

    routing: RoutingConfig
    chooser: Chooser
    http: HttpClient
    key: bytes
    stats: RouterStats


@dataclass(frozen=True, slots=True)
class _Failure:
    """A request failed at an instance, and may go on elsewhere.

    Attributes:
        error: what a client is told when it cannot.
        is_refusal: the instance answered, and said that it cannot.
    """

    error: FdsdError
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An instance's answer that it cannot."""

    status: int
    headers: Headers
    body: bytes


@dataclass(slots=True)
class Relay:
    """One request. `run` answers it, once.

    Attributes:
        request: for its log line.
        ask: as the instance gets it, without a route.
        is_routed: the instance is told of KV sources and progress; it is for generation only.
        send: to the client (ASGI).
    """

    courier: Courier
    request: HttpRequest
    ask: Ask
    is_routed: bool
    send: Send
    _record: ProgressRecord = field(default_factory=ProgressRecord)
    _has_started: bool = False
    _is_stream: bool = False
    _refusal: _Refusal | None = None
    _num_failures: int = 0

    async def run(self) -> None:
        """Answer the request.

        Raises:
            FdsdError: nothing has been sent, and this is why.
            OSError: the client is gone, or a whole answer was cut off.
        """
        timeout_s = self.courier.routing.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._run()
        except TimeoutError:
            text = f"the request took more than {timeout_s:g} s (request_timeout_secs)"
            await self._fail(Unavailable(text, code="deadline_exceeded"))
        except FdsdError as error:
            await self._fail(error)

    async def _run(self) -> None:
        wish = self.courier.chooser.wish(self.ask.body)
        failure = None
        while True:
            placement = await self._place(wish, failure)
            if placement is None:
                return  # answered with a refusal
            failure = await self._attempt(placement)
            if failure is None:
                return
            instance = placement.instance
            self.courier.stats.failures[str(instance.target), failure.error.code or failure.error.type] += 1
            wish.tried.add(instance.instance_id)
            self._num_failures += 1
            if self._is_stream:
                wish.fingerprint = wish.fingerprint or instance.said.fingerprint

    # ---- where it goes ----------------------------------------------------------------------------------------------

    async def _place(self, wish: Wish, failure: _Failure | None) -> Placement | None:
        """Return where the request goes next; None = the client has been given what an instance refused it with.

        Raises:
            FdsdError: there is nowhere to go.
        """
        routing = self.courier.routing
        placement = self.courier.chooser.choose(wish)
        if failure is None:
            if placement is None:
                self.courier.stats.num_unplaced += 1
                raise NoInstance("expected an instance that takes requests, got none: try again", code="no_instance")
            return placement
        if self._num_failures < routing.max_attempts:
            placement = await self._wait_for_place(wish, placement)
        if self._num_failures >= routing.max_attempts or placement is None:
            self.courier.stats.num_unplaced += 1
            if self._refusal is not None and not self._has_started:
                await self._send_whole(self._refusal.status, self._refusal.headers, self._refusal.body)
                return None
            raise failure.error
        if self._has_started:
            self.courier.stats.num_resumed += 1
        else:
            self.courier.stats.num_retries += 1
        return placement

    async def _wait_for_place(self, wish: Wish, placement: Placement | None) -> Placement | None:
        """Return a place where the request has not failed; a stream waits for one, and takes another one at last.

        A request of which the client has got nothing does not wait: the client can try again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.courier.routing.resume_s if self._has_started else 0.0)
        while placement is None or placement.instance.instance_id in wish.tried:
            if loop.time() >= deadline:
                is_worth_it = self._has_started or self._refusal is None
                return placement if is_worth_it else None
            await asyncio.sleep(_POLL_S)
            placement = self.courier.chooser.choose(wish)
        return placement

    # ---- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self, placement: Placement) -> _Failure | None:
        instance, source = placement.instance, placement.source
        given = [instance] if source is None else [instance, source]
        for taker in given:
            taker.begin()
            self.courier.stats.given[str(taker.target), taker.said.role] += 1
        instance.circuit.begin()
        is_settled = False
        try:
            failure = await self._exchange(placement)
            instance.circuit.note(is_failure=failure is not None and not failure.is_refusal)
            is_settled = True
            return failure
        except BrokenError as error:
            instance.circuit.note(is_failure=True)
            is_settled = True
            return _Failure(error)
        finally:
            if not is_settled:
                instance.circuit.leave()
            for taker in given:
                taker.end()

    async def _exchange(self, placement: Placement) -> _Failure | None:
        instance, http = placement.instance, self.courier.http
        exchange = await http.ask(instance.target, self._routed(placement), instance.exchanges)
        try:
            return await self._relay(exchange)
        finally:
            http.finish(instance.target, exchange, instance.exchanges)

    def _routed(self, placement: Placement) -> Ask:
        if not self.is_routed:
            return self.ask
        source = None if placement.source is None else placement.source.kv_source
        progress = self._record.progress if self._has_started else None
        instance_id = placement.instance.instance_id
        header, body = make_route(self.courier.key, instance_id, self.ask.body, progress, source)
        headers = [*self.ask.headers, (ROUTE_HEADER.lower().encode("ascii"), header.encode("ascii"))]
        return Ask(self.ask.method, self.ask.path, headers, body)

    async def _relay(self, exchange: Exchange) -> _Failure | None:
        if exchange.status in _INSTANCE_STATUSES or self._has_started != self._continues(exchange):
            return await self._refused(exchange)
        if _is_stream(exchange.headers):
            self._is_stream = True
            return await self._relay_stream(exchange)
        await self._relay_whole(exchange)
        return None

    def _continues(self, exchange: Exchange) -> bool:
        """Whether an answer fits behind what the client has got: a stream does, and anything if it has got nothing."""
        return self._has_started and exchange.status == 200 and _is_stream(exchange.headers)  # noqa: PLR2004 (OK)

    async def _refused(self, exchange: Exchange) -> _Failure:
        body = await exchange.read_all(_MAX_REFUSAL_BYTES)
        self._refusal = _Refusal(exchange.status, exchange.headers, body)
        text = f"the instance answered {exchange.status}"
        return _Failure(Unavailable(text, code=f"answered_{exchange.status}"), is_refusal=True)

    # ---- to the client ----------------------------------------------------------------------------------------------

    async def _relay_stream(self, exchange: Exchange) -> _Failure | None:
        splitter = EventSplitter()
        while piece := await exchange.read():
            events: list[bytes] = []
            for event in splitter.feed(piece):
                if self._record.take(event):
                    await self._send_events(exchange, events)
                    return _Failure(Unavailable("the instance failed in the middle of the stream", code="failed"))
                events.append(event.data)
                if event.data == _DONE:
                    await self._send_events(exchange, events)
                    await self.send({"type": "http.response.body", "body": b"", "more_body": False})
                    await exchange.read()  # the end, so that the connection serves another request
                    return None
            await self._send_events(exchange, events)
        return _Failure(Unavailable("the stream ended before its end", code="failed"))

    async def _send_events(self, exchange: Exchange, events: list[bytes]) -> None:
        if not events:
            return
        if not self._has_started:
            await self._start(exchange.status, exchange.headers)
        self._num_failures = 0  # it goes on
        await self.send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

    async def _relay_whole(self, exchange: Exchange) -> None:
        held = await exchange.read_all(_MAX_HELD_BYTES)
        if len(held) <= _MAX_HELD_BYTES:
            await self._send_whole(exchange.status, exchange.headers, held)
            return
        await self._start(exchange.status, exchange.headers)
        try:
            while held:
                await self.send({"type": "http.response.body", "body": held, "more_body": True})
                held = await exchange.read()
        except BrokenError as error:
            raise ConnectionResetError(error.message) from None  # the client's connection ends as the instance's did
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int, headers: Headers) -> None:
        self._has_started = True
        kept = [(name, value) for name, value in headers if name not in _OWN_HEADERS]
        await self.send({"type": "http.response.start", "status": status, "headers": kept})

    async def _send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self._start(status, headers)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, error: FdsdError) -> None:
        """End a stream with an error; where nothing has been sent, raise it."""
        if not self._has_started:
            raise error
        if not self._is_stream:
            raise ConnectionResetError(error.message)
        event = f"data: {to_json(error_json(to_fdsd_error(error, self.request)))}\n\n"
        await self.send({"type": "http.response.body", "body": (event + DONE).encode("utf-8"), "more_body": False})


def _is_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
