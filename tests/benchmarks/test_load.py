"""The load client against a server of a few lines: what it sends, what it measures, what it reports as failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.load import load_metrics, metrics_table
from benchmarks.load_client import Load, LoadClient, Timing

Answer = Callable[[dict[str, Any]], list[str]]


def chunk(token_ids: list[int], text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "completion_token_ids": token_ids}]})


def usage(num_tokens: int) -> str:
    return json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}})


class StreamServer:
    """Answers POSTs with given events, and remembers the bodies and how many were in flight at once."""

    def __init__(self, answer: Answer, status: str = "200 OK") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.max_in_flight = 0
        self._answer = answer
        self._status = status
        self._in_flight = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        for _ in range(10):  # lets every request that may be in flight arrive
            await asyncio.sleep(0)
        self._in_flight -= 1
        writer.write(f"HTTP/1.1 {self._status}\r\nConnection: close\r\n\r\n".encode())
        writer.writelines(f"data: {event}\n\n".encode() for event in self._answer(self.bodies[-1]))
        await writer.drain()
        writer.close()
        await writer.wait_closed()


def complete_answer(body: dict[str, Any]) -> list[str]:
    tokens = [chunk([i], "") for i in range(body["max_tokens"])]
    return [*tokens, usage(body["max_tokens"]), "[DONE]"]


async def run_load(server: StreamServer, load: Load) -> list[Timing]:
    async with server.serve() as url:
        return await LoadClient(url, "m", None, load).run(lambda: None)


async def test_closed_loop_keeps_to_its_concurrency() -> None:
    server = StreamServer(complete_answer)
    timings = await run_load(server, Load(num_requests=12, prompt_len=5, output_len=3, concurrency=4))
    assert server.max_in_flight <= 4
    assert [t.error for t in timings] == [None] * 12
    assert [t.num_tokens for t in timings] == [3] * 12
    assert all(len(t.event_times_s) == 3 for t in timings)
    assert all(t.due_s <= t.event_times_s[0] <= t.event_times_s[-1] <= t.end_s for t in timings)
    body = server.bodies[0]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)
    assert sorted(b["prompt"] for b in server.bodies) == sorted(Load(12, 5, 3).prompts())


async def test_open_loop_sends_at_random_times_that_the_seed_decides() -> None:
    load = Load(num_requests=5, prompt_len=2, output_len=1, rate=1000.0)
    assert load.due_times_s() == load.due_times_s()
    assert load.due_times_s()[0] == 0
    timings = await run_load(StreamServer(complete_answer), load)
    assert [t.due_s for t in timings] == load.due_times_s()
    assert all(t.event_times_s[0] >= t.due_s for t in timings)


@pytest.mark.parametrize(
    ("events", "status", "error"),
    [
        (['{"error": {"message": "queue full"}}'], "429 Too Many", "HTTP 429: "),
        ([chunk([1], "a"), '{"error": {"message": "engine died"}}', "[DONE]"], "200 OK", "engine died"),
        ([chunk([1], "a")], "200 OK", "the stream ended without [DONE]"),
    ],
)
async def test_failed_request_says_why(events: list[str], status: str, error: str) -> None:
    [timing] = await run_load(StreamServer(lambda _: events, status), Load(1, 2, 3, concurrency=1))
    assert timing.error is not None
    assert timing.error.startswith(error)
    metrics = load_metrics([timing])
    assert (metrics["num_complete"], metrics["num_failed"], metrics["ttft_ms"]) == (0, 1, None)


def test_metrics_are_of_complete_requests() -> None:
    timings = [
        Timing(due_s=0.0, event_times_s=[0.1, 0.2, 0.4], end_s=0.5, num_tokens=3),
        Timing(due_s=1.0, event_times_s=[1.3], end_s=2.0, num_tokens=1),
        Timing(due_s=1.0, event_times_s=[1.9], end_s=2.0, num_tokens=1, error="lost"),
    ]
    metrics = load_metrics(timings)
    assert metrics["ttft_ms"]["p50"] == pytest.approx(200)
    assert metrics["itl_ms"]["p50"] == pytest.approx(150)
    assert metrics["tpot_ms"]["p50"] == pytest.approx(150)
    assert metrics["e2e_ms"]["p50"] == pytest.approx(750)
    assert metrics["output_tokens_per_s"] == pytest.approx(4 / 2.0)
    assert (metrics["num_complete"], metrics["num_failed"]) == (2, 1)
    assert "| ttft_ms | 200.0 |" in metrics_table(metrics)
