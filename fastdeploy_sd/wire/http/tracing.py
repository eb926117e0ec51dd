"""Reports requests to a collector of OpenTelemetry. Knows no route and no engine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import RequestMetrics
from fastdeploy_sd.wire.http.error_format import INFILL_PATH
from fastdeploy_sd.wire.http.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SERVICE = "fastdeploy_sd"
_API = ("/v1/", "/api/", INFILL_PATH)
_CONTEXT = (b"traceparent", b"tracestate")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SERVER_ERROR = 500
_NS = 1_000_000_000


class RequestSpan:
    """The span of a request that is being answered."""

    def __init__(self, tracer: RequestTracer, span: Span) -> None:
        self._tracer, self._span = tracer, span

    def end(self, record: RequestRecord, route: str) -> None:
        """The request has been answered."""
        self._tracer.end(self._span, record, route)


class RequestTracer:
    """Makes a span of each POST request of the API, with a child for each stage of its generation.

    The client's `traceparent` is the parent. A request that is given on names the span in turn, so that a router and an
    instance are in one trace.

    Args:
        provider: where spans go; it makes only those that its sampler wants.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = provider.get_tracer(SERVICE)
        self._context = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> RequestSpan | None:
        """Begin a request's span, and have the headers name it; None: it gets none."""
        if scope["method"] != "POST" or not scope["path"].startswith(_API):
            return None
        headers = scope["headers"]
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in _CONTEXT}
        span = self._tracer.start_span(scope["method"], self._context.extract(given), self._trace.SpanKind.SERVER)
        own: dict[str, str] = {}
        self._context.inject(own, self._trace.set_span_in_context(span))
        named = [(name.encode("ascii"), value.encode("latin-1")) for name, value in own.items()]
        scope["headers"] = [*(header for header in headers if header[0] not in _CONTEXT), *named]
        return RequestSpan(self, span)

    def end(self, span: Span, record: RequestRecord, route: str) -> None:
        """End the span of a request that has been answered."""
        if span.is_recording():
            span.update_name(f"POST {route}")
            span.set_attributes(_attributes(record, route))
            if record.status >= _SERVER_ERROR:
                span.set_status(self._trace.StatusCode.ERROR, record.reason)
            for choice, metrics in enumerate(record.metrics):
                self._add_stages(span, choice, metrics)
        span.end()

    def add_prompt(self, context: str, metrics: RequestMetrics, num_tokens: int, num_cached: int) -> None:
        """Make a span of a prompt that was computed for another instance; `context`: of the request's span there."""
        counts = {"gen_ai.usage.input_tokens": num_tokens, f"{SERVICE}.cached_tokens": num_cached}
        parent, begin = self._context.extract({"traceparent": context}), int(metrics.arrival_time * _NS)
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span("prefill", parent, kind, attributes=counts, start_time=begin)
        if span.is_recording():
            self._add_stages(span, 0, replace(metrics, finished_time=0.0))
        span.end(int(metrics.first_token_time * _NS))

    def _add_stages(self, parent: Span, choice: int, metrics: RequestMetrics) -> None:
        stages: tuple[tuple[str, float, float, Mapping[str, Any]], ...] = (
            ("queue", metrics.arrival_time, metrics.first_scheduled_time, {}),
            ("prompt", metrics.first_scheduled_time, metrics.first_token_time, {}),
            ("generation", metrics.first_token_time, metrics.finished_time, _speculation(metrics)),
        )
        for name, begin, end, attributes in stages:
            if 0 < begin <= end:
                context = self._trace.set_span_in_context(parent)
                own = {f"{SERVICE}.choice": choice} | dict(attributes)
                span = self._tracer.start_span(name, context, attributes=own, start_time=int(begin * _NS))
                span.end(int(end * _NS))


def trace_context(headers: Headers) -> str:
    """Return the `traceparent` of a request, "" = it has none, or one of another form."""
    context = headers.get("traceparent", "")
    return context if _TRACEPARENT.fullmatch(context) else ""


def make_tracer(endpoint: str) -> RequestTracer:
    """Return a tracer whose spans go to a collector, by OTLP over HTTP.

    The variables `OTEL_*` say what they say elsewhere: name of the service, sampler, headers and timeout of the export.

    Args:
        endpoint: its URL; without a path it is the one of the protocol.

    Raises ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        text = f"otlp_traces_endpoint: expected OpenTelemetry (pip install 'fastdeploy_sd[otel]'), got: {error}"
        raise ConfigError(text, param="otlp_traces_endpoint") from None
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": SERVICE}
    provider = TracerProvider(resource=Resource.create(named))
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return RequestTracer(provider)


def _attributes(record: RequestRecord, route: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": record.status,
    }
    if record.reason:
        attributes["error.type"] = record.reason
    if record.request_id:
        attributes["gen_ai.response.id"] = record.request_id
    if record.usage is not None:
        usage = record.usage()
        attributes["gen_ai.usage.input_tokens"] = usage["prompt_tokens"]
        attributes["gen_ai.usage.output_tokens"] = usage["completion_tokens"]
        attributes[f"{SERVICE}.cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
    return attributes


def _speculation(metrics: RequestMetrics) -> dict[str, Any]:
    """What drafting did for a choice; with a gain where one is known."""
    drafts = {f"{SERVICE}.accepted.{source}": count for source, count in metrics.accepted_by_source.items()}
    return {
        f"{SERVICE}.steps": metrics.num_token_steps,
        f"{SERVICE}.tokens_per_step": metrics.tokens_per_step,
        f"{SERVICE}.drafted": sum(metrics.drafts.drafted),
        f"{SERVICE}.preemptions": metrics.num_preemptions,
        **drafts,
        **({f"{SERVICE}.gain": metrics.gain} if metrics.gain else {}),
    }
