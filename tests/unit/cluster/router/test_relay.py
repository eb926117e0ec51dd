"""One request over scripted instances: what is relayed, what is asked of the next one, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import h11
import pytest
from starlette.requests import Request as HttpRequest

from fastdeploy_sd.cluster.messages import Clock
from fastdeploy_sd.cluster.route import ROUTE_HEADER, ChoiceProgress, Progress, RouteReader, read_content
from fastdeploy_sd.cluster.router.choice import Chooser
from fastdeploy_sd.cluster.router.delivery import Delivery
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import RoutingConfig
from fastdeploy_sd.cluster.router.relay import Relay, UpstreamClient
from fastdeploy_sd.cluster.stream_metadata import ENDED_NOTE, FAILED_NOTE, begun_note, shown_note, together_note
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.metrics import RouterStats
from fastdeploy_sd.wire.http_client import Ask, HttpClient
from tests.unit.cluster.router.registrations import LOCAL, NOW, SAID, said

KEY, BODY = b"r" * 32, b'{"prompt": "a", "stream": true}'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-own: 1\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = "data: [DONE]\n\n"


def chunk(text: str) -> bytes:
    content = text.encode()
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def whole(status: int, body: bytes, cut: int = 0) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head.encode() + body)[: -cut or None]


BEGUN = begun_note("cmpl-1", 7, [3], 1)
FIRST = STREAM_HEAD + chunk(BEGUN + shown_note(0, [5], False, 16) + "data: one\n\n")
REST = chunk(shown_note(0, [6], True, 0) + "data: two\n\n") + chunk(DONE) + b"0\r\n\r\n"
LOST = chunk(shown_note(0, [9], False, 0) + "data: lost\n")
RESUMED = STREAM_HEAD + chunk(BEGUN) + REST


@dataclass
class Scripted:
    """An instance that gives each of these answers once and then closes; the last one again and again.

    Attributes:
        reader: of the routes to it.
        asked: what it was asked, as (client's body, progress).
    """

    answers: list[bytes]
    instance: Instance
    reader: RouteReader
    asked: list[tuple[bytes, Progress | None]] = field(default_factory=list)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = h11.Connection(h11.SERVER)
        head, body = None, b""
        while not isinstance(event := protocol.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                protocol.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                raise AssertionError(event)
        assert head is not None
        header = dict(head.headers)[ROUTE_HEADER.lower().encode()].decode()
        route = self.reader.read(header)
        assert route.client == "address ::9"
        self.asked.append(read_content(route, body))
        writer.write(self.answers[0] if len(self.answers) == 1 else self.answers.pop(0))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


class World:
    """Scripted instances and a router's parts before them."""

    def __init__(self, **routing: Any) -> None:
        self.scripted: list[Scripted] = []
        self.stats = RouterStats()
        self.http = HttpClient(5.0)
        chooser = Chooser(
            lambda: [s.instance for s in self.scripted if s.instance.may_take(1e9)],
            lambda: [s.instance for s in self.scripted],
        )
        options = {"resume_s": 5.0, **routing}
        self.upstream = UpstreamClient(RoutingConfig(**options), chooser, self.http, KEY, self.stats)
        self.sent: list[dict[str, Any]] = []

    async def relay(self, path: str = "/v1/completions") -> None:
        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [],
            "query_string": b"",
            "client": ("::9", 1),
        }
        ask = Ask("POST", path, (), BODY)
        try:
            await Relay(self.upstream, ask, True, Delivery(HttpRequest(scope), send)).run()
        finally:
            self.http.close()
            await asyncio.sleep(0.01)  # the sockets' own end

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> str:
        assert [message["type"] for message in self.sent[:2]] == ["http.response.start", "http.response.body"]
        assert [message.get("more_body") for message in self.sent[1:]] == [True] * (len(self.sent) - 2) + [False]
        return b"".join(message["body"] for message in self.sent[1:]).decode()


Add = Callable[..., Awaitable[Scripted]]


@pytest.fixture
async def add() -> AsyncIterator[Add]:
    """Adds an instance to a world: (world, answers..., fingerprint=...); its clocks are `ahead_s` ahead of ours."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            world: World, *answers: bytes, fingerprint: str = "x", num_running: int = 0, ahead_s: float = 0.0
        ) -> Scripted:
            load = replace(SAID.load, num_running=num_running)
            name = f"instance {len(world.scripted)}"
            reader = RouteReader(KEY, [name], lambda: time.monotonic() + ahead_s)
            scripted = Scripted(list(answers), Instance(said(instance_id=name), "", LOCAL), reader)
            server = await stack.enter_async_context(await asyncio.start_server(scripted.talk, LOCAL, 0))
            port = server.sockets[0].getsockname()[1]
            clock = Clock(time.monotonic() + ahead_s, NOW.wall + ahead_s)
            registration = said(instance_id=name, port=port, fingerprint=fingerprint, load=load, clock=clock)
            scripted.instance.renew(registration, "", LOCAL)
            world.scripted.append(scripted)
            return scripted

        yield start


async def test_a_stream_is_relayed_without_its_notes(add: Add) -> None:
    world = World()
    scripted = await add(world, FIRST + REST)
    await world.relay()
    assert world.body == "data: one\n\ndata: two\n\n" + DONE
    assert (b"x-own", b"1") in world.sent[0]["headers"]
    assert all(name != b"transfer-encoding" for name, _ in world.sent[0]["headers"])
    assert scripted.asked == [(BODY, None)]
    assert scripted.instance.candidate().load.num_waiting == 0
    assert not scripted.instance.exchanges


@pytest.mark.parametrize("broken", [FIRST, FIRST + LOST, FIRST + REST[:40]])
async def test_a_stream_goes_on_behind_its_last_whole_event(add: Add, broken: bytes) -> None:
    world = World()
    await add(world, broken)
    second = await add(world, RESUMED, num_running=5)
    await world.relay()
    assert world.body == "data: one\n\ndata: two\n\n" + DONE
    assert second.asked == [(BODY, Progress("cmpl-1", 7, (3,), (ChoiceProgress((5,), False, 16),), num_events=1))]
    assert (world.stats.num_resumed, world.stats.num_retries) == (1, 0)


async def test_an_error_that_is_the_instances_own_is_no_event(add: Add) -> None:
    world = World()
    await add(world, FIRST + chunk(FAILED_NOTE + 'data: {"error":{}}\n\n') + chunk(DONE) + b"0\r\n\r\n")
    await add(world, RESUMED, num_running=5)
    await world.relay()
    assert world.body == "data: one\n\ndata: two\n\n" + DONE


async def test_a_stream_without_done_ends_where_it_says_so_or_in_an_event_of_its_own(add: Add) -> None:
    begun = begun_note("resp_1", 7, [3], 1) + shown_note(0, [5], False, 0)
    opening = STREAM_HEAD + chunk(begun + together_note(2) + "event: a\ndata: {}\n\nevent: b\ndata: {}\n\n")
    half = chunk(shown_note(0, [6], True, 0) + together_note(2) + ENDED_NOTE + "event: c\ndata: {}\n\n")
    world = World()
    await add(world, opening + half + chunk("event: d\ndata: {}\n\n") + b"0\r\n\r\n")
    await world.relay("/v1/responses")
    assert world.body == "".join(f"event: {name}\ndata: {{}}\n\n" for name in "abcd")
    world = World(resume_s=0.0, max_attempts=1)
    await add(world, opening + half)
    await world.relay("/v1/responses")
    *relayed, error, end = world.body.split("\n\n")
    assert (relayed, end) == (["event: a\ndata: {}", "event: b\ndata: {}"], "")
    told = json.loads(error.removeprefix("event: error\ndata: "))
    assert (told["type"], told["code"], told["sequence_number"]) == ("error", "broken_connection", 2)


async def test_an_error_that_is_the_requests_is_relayed(add: Add) -> None:
    world = World()
    await add(world, FIRST + chunk('data: {"error":{}}\n\n') + chunk(DONE) + b"0\r\n\r\n")
    other = await add(world, RESUMED, num_running=5)
    await world.relay()
    assert world.body == 'data: one\n\ndata: {"error":{}}\n\n' + DONE
    assert other.asked == []


@pytest.mark.parametrize("broken", [b"", STREAM_HEAD, whole(200, b"{}", cut=1), whole(503, b"no"), whole(429, b"no")])
async def test_before_its_first_event_a_request_begins_anew(add: Add, broken: bytes) -> None:
    world = World()
    await add(world, broken)
    second = await add(world, FIRST + REST, num_running=5)
    await world.relay()
    assert world.body == "data: one\n\ndata: two\n\n" + DONE
    assert second.asked == [(BODY, None)]
    assert (world.stats.num_resumed, world.stats.num_retries) == (0, 1)


@pytest.mark.parametrize("ahead_s", [-400.0, 400.0, 1e7, -1e7])
async def test_a_route_is_of_now_by_the_instances_own_clock(add: Add, ahead_s: float) -> None:
    world = World()
    scripted = await add(world, FIRST + REST, ahead_s=ahead_s)
    await world.relay()
    assert world.body == "data: one\n\ndata: two\n\n" + DONE
    assert scripted.asked == [(BODY, None)]


@pytest.mark.parametrize("code", ["route_not_authentic", "host_not_allowed"])
async def test_an_instance_that_refuses_its_router_fails(add: Add, caplog: pytest.LogCaptureFixture, code: str) -> None:
    """Others answer in its place; after three times it gets nothing more, and what is left is a 503."""
    error = {"error": {"code": code, "message": "expected another"}}
    world = World()
    refusing = await add(world, whole(403, json.dumps(error).encode()), ahead_s=100.0)
    other = await add(world, FIRST + REST, num_running=5)
    for _ in range(5):
        world.sent.clear()
        await world.relay()
        assert world.body == "data: one\n\ndata: two\n\n" + DONE
    assert (len(refusing.asked), len(other.asked)) == (3, 5)
    assert refusing.instance.circuit.is_open
    assert world.stats.failures == {(str(refusing.instance.target), code): 3}
    clocks = r"instance 0 .*expected another \(wall clocks: \d+\.\d s there, \d+\.\d s here; monotonic: .*"
    assert len([line for line in caplog.messages if re.search(clocks, line)]) == 3
    world = World()
    await add(world, whole(403, json.dumps(error).encode()))
    with pytest.raises(FdsdError) as caught:
        await world.relay()
    assert (caught.value.status, caught.value.code) == (503, code)


async def test_a_stream_goes_on_past_an_instance_that_refuses_its_router(add: Add) -> None:
    world = World()
    await add(world, FIRST)
    world.scripted[0].answers = [FIRST, b""]
    await add(world, whole(403, b'{"error":{"code":"route_not_authentic","message":""}}'), num_running=5)
    await add(world, RESUMED, num_running=6)
    await world.relay()
    assert world.body == "data: one\n\ndata: two\n\n" + DONE


@pytest.mark.parametrize("status", [200, 400, 403, 404, 413, 500])
async def test_an_answer_about_the_request_is_the_answer(add: Add, status: int) -> None:
    world = World()
    await add(world, whole(status, b'{"a": 1}'))
    other = await add(world, RESUMED, num_running=5)
    await world.relay()
    assert (world.status, world.body) == (status, '{"a": 1}')
    assert other.asked == []


async def test_when_all_refuse_the_last_refusal_is_the_answer(add: Add) -> None:
    world = World()
    await add(world, whole(503, b"first"))
    await add(world, whole(429, b"second"), num_running=5)
    await world.relay()
    assert (world.status, world.body) == (429, "second")
    assert world.stats.num_unplaced == 1


async def test_a_stream_asks_one_that_refused_it_again(add: Add) -> None:
    world = World()
    await add(world, FIRST)
    second = await add(world, whole(429, b"full"), whole(503, b"no"), RESUMED, num_running=5)
    world.scripted[0].answers = [FIRST, b""]
    await world.relay()
    assert world.body == "data: one\n\ndata: two\n\n" + DONE
    assert len(second.asked) == 3


async def test_a_stream_goes_on_only_where_bytes_are_the_same(add: Add) -> None:
    world = World(resume_s=0.3)
    await add(world, FIRST)
    world.scripted[0].answers = [FIRST, b""]
    other = await add(world, RESUMED, fingerprint="y", num_running=5)
    await world.relay()
    assert other.asked == []
    assert world.body.startswith('data: one\n\ndata: {"error":')
    assert world.body.endswith(DONE)


async def test_a_request_that_breaks_instances_breaks_only_so_many(add: Add) -> None:
    world = World(max_attempts=3)
    for _ in range(5):
        await add(world, b"")
    with pytest.raises(FdsdError) as caught:
        await world.relay()
    assert sum(len(s.asked) for s in world.scripted) == 3
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    world = World(max_attempts=3, resume_s=0.3)
    for i in range(5):
        await add(world, FIRST if i == 0 else STREAM_HEAD, num_running=i)
    world.scripted[0].answers = [FIRST, b""]
    await world.relay()
    assert sum(len(s.asked) for s in world.scripted) == 3


async def test_a_large_answer_comes_whole_and_ends_with_its_instance(add: Add) -> None:
    large = b"x" * (9 << 20)
    world = World()
    await add(world, whole(200, large))
    await world.relay()
    assert world.body.encode() == large
    world = World()
    await add(world, whole(200, large, cut=1000))
    with pytest.raises(ConnectionResetError):
        await world.relay()
    assert world.sent[-1]["more_body"]


async def test_a_note_that_makes_no_sense_ends_the_stream_with_an_error(add: Add) -> None:
    world = World()
    await add(world, FIRST + chunk(": fdsd shown [9]\ndata: x\n\n") + b"0\r\n\r\n")
    await world.relay()
    assert '"type":"internal_error"' in world.body
    assert world.body.endswith(DONE)
