"""Spans of requests: parents, what is given on, stages and what drafting did."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.metrics import HttpStats
from fastdeploy_sd.types import RequestMetrics
from fastdeploy_sd.wire.http.request_middleware import RequestMiddleware
from fastdeploy_sd.wire.http.request_record import record_of
from fastdeploy_sd.wire.http.tracing import RequestTracer, trace_context

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
METRICS = RequestMetrics(
    100.0, 100.5, 101.0, 103.0, num_token_steps=2, num_step_tokens=6, accepted_by_source={"ngram": 4}, gain=1.5
)


class _Answers:
    """An application that has generated something."""

    def __init__(self, status: int = 200) -> None:
        self._status = status
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = scope["headers"]
        record = record_of(scope)
        record.request_id, record.reason = "cmpl-1", "" if self._status < 500 else "engine_down"
        usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 6}
        record.usage = lambda: usage | {"prompt_tokens_details": {"cached_tokens": 3}}
        record.metrics = [METRICS]
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def _spans(app: _Answers, target: str = "POST /v1/completions", **headers: str) -> dict[str, ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    served = RequestMiddleware(app, HttpStats(), has_log=False, tracer=RequestTracer(provider))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=served), base_url="http://server") as client:
        await client.request(*target.split(), headers=headers)
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_and_its_stages_are_spans_of_the_clients_trace() -> None:
    app = _Answers()
    spans = await _spans(app, traceparent=PARENT)
    whole = spans.pop("POST other")
    assert list(spans) == ["queue", "prompt", "generation"]
    assert whole.context is not None
    assert whole.parent is not None
    assert f"{whole.context.trace_id:032x}-{whole.parent.span_id:016x}" == PARENT[3:52]
    assert all(span.parent is not None and span.parent.span_id == whole.context.span_id for span in spans.values())
    assert (spans["prompt"].start_time, spans["prompt"].end_time) == (100_500_000_000, 101_000_000_000)
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.output_tokens"] == 6
    assert whole.attributes["fastdeploy_sd.cached_tokens"] == 3
    generation = spans["generation"].attributes
    assert generation is not None
    assert generation["fastdeploy_sd.tokens_per_step"] == 3
    assert generation["fastdeploy_sd.accepted.ngram"] == 4
    assert generation["fastdeploy_sd.gain"] == 1.5


async def test_who_gets_the_request_on_gets_the_span_as_its_parent() -> None:
    app = _Answers()
    spans = await _spans(app, traceparent=PARENT, tracestate="vendor=1")
    context = spans["POST other"].context
    assert context is not None
    headers = dict(app.headers)
    assert headers[b"traceparent"].decode() == f"{PARENT[:36]}{context.span_id:016x}-01"
    assert headers[b"tracestate"] == b"vendor=1"
    assert [name for name, _ in app.headers].count(b"traceparent") == 1


async def test_a_trace_that_the_client_does_not_want_has_no_spans() -> None:
    assert not await _spans(_Answers(), traceparent=PARENT[:-1] + "0")


@pytest.mark.parametrize("target", ["GET /v1/models", "GET /health", "POST /heartbeat"])
async def test_what_generates_nothing_is_no_span(target: str) -> None:
    assert not await _spans(_Answers(), target)


def test_a_prompt_for_another_instance_is_below_the_span_of_its_request() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    RequestTracer(provider).add_prompt(PARENT, METRICS, 136, 8)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == ["queue", "prompt", "prefill"]
    whole = spans["prefill"]
    assert whole.parent is not None
    assert f"{whole.parent.trace_id:032x}-{whole.parent.span_id:016x}" == PARENT[3:-3]
    assert (whole.start_time, whole.end_time) == (100_000_000_000, 101_000_000_000)
    assert whole.attributes == {"gen_ai.usage.input_tokens": 136, "fastdeploy_sd.cached_tokens": 8}
    assert all(spans[name].parent == whole.context for name in ("queue", "prompt"))


@pytest.mark.parametrize(
    ("given", "expected"), [(PARENT, PARENT), ("", ""), (PARENT.upper(), ""), (PARENT + "-00", ""), ("x" * 99, "")]
)
def test_a_context_is_passed_on_as_it_is_or_not_at_all(given: str, expected: str) -> None:
    assert trace_context(Headers({"traceparent": given} if given else {})) == expected


async def test_a_failure_of_the_server_is_one_of_the_span() -> None:
    spans = await _spans(_Answers(503))
    assert not spans["POST other"].status.is_ok
    assert spans["POST other"].status.description == "engine_down"


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "http://user@host:4318"])
def test_a_collector_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint: expected a URL"):
        ServerConfig(otlp_traces_endpoint=url)
