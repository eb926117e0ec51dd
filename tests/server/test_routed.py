"""A server behind a router: what it tells besides its events, and how it goes on with what another one has begun."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fastdeploy_sd.cluster.route import ROUTE_HEADER, ChoiceProgress, Progress, Recipient, RouteReader, make_route
from fastdeploy_sd.cluster.stream_metadata import EventSplitter, ResumeState
from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.entrypoints.openai.routed import RouteGate
from fastdeploy_sd.types import KvSource
from tests.server.toy_server import MODEL, Served, serve, server_config, text_of, toy_tokens

pytestmark = pytest.mark.slow

KEY, INSTANCE = b"r" * 32, "this one"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
USAGE = {"stream_options": {"include_usage": True}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
# Text of several tokens is held back for it, and comes after all.
NEARLY = text_of(toy_tokens([5, 6], 12)[2:9]) + "but not quite"
# Events that are about an item or a block of what was told before.
WITHOUT_ID = (b"event: response.output_", b"event: content_block", b"event: message_", b'{"model"')
DURATION = re.compile(rb'"\w+_duration":\d+,')
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [5, 6], "temperature": 0, "logprobs": 2, **USAGE}),
    (COMPLETIONS, {"prompt": [5, 6], "echo": True, "stop": ["zzz", " t\n"], "return_token_ids": True}),
    (COMPLETIONS, {"prompt": [5, 6], "temperature": 0, "stop": [NEARLY]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream_options": {"continuous_usage_stats": True}}),
    (RESPONSES, {"input": "hi", "stop": ["zzz", " t\n"], "max_tokens": None, "max_output_tokens": 12}),
    (RESPONSES, {"input": "hi", "max_tokens": None, "max_output_tokens": 12, "stop": ["zzz", NEARLY], **LOGPROBS}),
    (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["zzz", NEARLY]}),
    (OLLAMA, {"messages": [{"role": "user", "content": "hi"}], "options": {"stop": ["zzz", NEARLY]}}),
]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve(gate=RouteGate(RouteReader(KEY, [INSTANCE]))) as served:
        yield served


async def post(
    served: Served,
    path: str,
    body: dict[str, Any],
    progress: Progress | None = None,
    source: KvSource | None = None,
) -> httpx.Response:
    """What a router sends."""
    body = {"model": MODEL, "max_tokens": 12, "stream": True, **body}
    header, content = make_route(
        KEY, Recipient(INSTANCE, time.monotonic()), json.dumps(body).encode(), progress, source, "key 7"
    )
    return await served.http.post(path, content=content, headers={ROUTE_HEADER: header})


async def test_the_routers_client_is_whose_the_request_is(served: Served) -> None:
    await post(served, COMPLETIONS, {"prompt": [5], "user": "ada"})
    assert [request.client for request in served.client.submitted] == ["key 7"]


async def test_a_client_that_is_no_router_gets_no_notes(served: Served) -> None:
    answer = await served.http.post(COMPLETIONS, json={"model": MODEL, "prompt": [5], "max_tokens": 3, "stream": True})
    assert ": fdsd" not in answer.text


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_goes_on_behind_any_of_its_events(served: Served, path: str, body: dict[str, Any]) -> None:
    """Sampled without a seed of the client's own: the seed is among what is told."""
    end = b"\n" if path == OLLAMA else b"\n\n"
    stream = (await post(served, path, body)).content
    events = list(EventSplitter(end).feed(stream))
    record = ResumeState()
    for i, event in enumerate(events[:-1]):
        record.take(event)
        progress = record.progress
        assert progress is not None
        assert progress.job_id in event.data.decode() or event.data.startswith(WITHOUT_ID)
        rest = list(EventSplitter(end).feed((await post(served, path, body, progress)).content))
        assert [DURATION.sub(b"", e.data) for e in rest] == [DURATION.sub(b"", e.data) for e in events[i + 1 :]]
    record.take(events[-1])
    progress = record.progress
    assert progress is not None
    assert [len(choice.token_ids) for choice in progress.choices] == [12]


async def test_finished_choices_do_not_run_again(served: Served) -> None:
    body = {"prompt": [[5], [6]], "n": 2, "temperature": 0, **USAGE}
    done, begun = ChoiceProgress((1, 2, 3), True, 0), ChoiceProgress((7,), False, 0)
    progress = Progress("cmpl-1", 7, (3, 4), (done, ChoiceProgress(), begun, done))
    events = (await post(served, COMPLETIONS, body, progress)).text.split("\n\n")
    lines = [line.removeprefix("data: ") for event in events for line in event.split("\n")]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {1, 2}
    assert chunks[-1]["usage"]["completion_tokens"] == 3 + 12 + 12 + 3
    assert [list(request.output_token_ids) for request in served.client.submitted] == [[], [7]]
    assert [(request.request_id, request.seed) for request in served.client.submitted] == [
        ("cmpl-1-0-1", 4),
        ("cmpl-1-1-0", 4),
    ]
    served.client.submitted.clear()
    progress = replace(progress, choices=(done,) * 4)
    events = (await post(served, COMPLETIONS, body, progress)).text.split("\n\n")
    assert served.client.submitted == []
    assert json.loads(events[0].partition("data: ")[2])["usage"]["completion_tokens"] == 12
    assert events[1:] == ["data: [DONE]", ""]


async def test_a_request_learns_who_computes_its_prompt(served: Served) -> None:
    source = KvSource("p1", "tcp://127.0.0.1:5000")
    assert (await post(served, COMPLETIONS, {"prompt": [5], "stream": False}, source=source)).status_code == 200
    assert (await post(served, COMPLETIONS, {"prompt": [5], "stream": False})).status_code == 200
    assert [request.kv_source for request in served.client.submitted] == [source, None]


@pytest.mark.parametrize(
    ("progress", "body"),
    [
        (Progress("a", 1, (1,), (ChoiceProgress(),) * 2), {}),
        (Progress("a", 1, (1, 2), (ChoiceProgress(),)), {}),
        (Progress("a", 1, (1,), (ChoiceProgress(),)), {"stream": False}),
        (Progress("a", 1, (1,), (ChoiceProgress(tuple(range(12))),)), {}),
        (Progress("a", 1, (1,), (ChoiceProgress((1 << 30,)),)), {}),
    ],
)
async def test_progress_of_another_request_is_refused(served: Served, progress: Progress, body: dict[str, Any]) -> None:
    answer = await post(served, COMPLETIONS, {"prompt": [5], **body}, progress)
    assert answer.status_code == 400
    assert "expected" in answer.json()["error"]["message"]


async def test_a_stream_with_another_adapter_goes_on_elsewhere(served: Served) -> None:
    progress = Progress("a", 1, (1,), (ChoiceProgress(),), adapter_digest="ab" * 16)
    answer = await post(served, COMPLETIONS, {"prompt": [5]}, progress)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_changed")


async def test_progress_may_be_longer_than_a_body_but_bodies_may_not() -> None:
    config = server_config(ServerConfig(max_body_bytes=500))
    async with serve(config, gate=RouteGate(RouteReader(KEY, [INSTANCE]))) as served:
        long = ChoiceProgress(tuple(range(300)), False, 0)
        body = {"prompt": [5], "max_tokens": 301, "temperature": 0, "ignore_eos": True}
        answer = await post(served, COMPLETIONS, body, Progress("a", 1, (1,), (long,)))
        assert answer.status_code == 200
        answer = await post(served, COMPLETIONS, {"prompt": "x" * 500})
        assert answer.status_code == 413


async def test_a_body_that_was_changed_on_its_way_is_refused(served: Served) -> None:
    header, content = make_route(KEY, Recipient(INSTANCE, time.monotonic()), b'{"prompt": "a"}', None, None, "")
    answer = await served.http.post(COMPLETIONS, content=content[:-1] + b" ", headers={ROUTE_HEADER: header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "route_not_authentic")
