"""Answers the generation routes: body -> job -> engine -> JSON or a stream of events; and those of the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd.cluster.membership import DECODE
from fastdeploy_sd.cluster.route import Route, read_content
from fastdeploy_sd.cluster.stream_metadata import COUNTED_NOTE, ENDED_NOTE, FAILED_NOTE
from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat
from fastdeploy_sd.entrypoints.openai.choice_format import ChatFormat, CompletionFormat
from fastdeploy_sd.entrypoints.openai.embedding_format import (
    EmbeddingFormat,
    OllamaEmbeddingsFormat,
    OllamaEmbedFormat,
)
from fastdeploy_sd.entrypoints.openai.generation import ChoiceDelta, run_job
from fastdeploy_sd.entrypoints.openai.infill_format import InfillFormat
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.merging import QueueShare
from fastdeploy_sd.entrypoints.openai.message_format import MessageFormat
from fastdeploy_sd.entrypoints.openai.ollama_format import GenerateFormat, OllamaFormat
from fastdeploy_sd.entrypoints.openai.preparation import (
    CHAT,
    COMPLETION,
    COUNT,
    DETOKENIZE,
    EMBED,
    INFILL,
    MESSAGE,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    RESPONSE,
    SHOW,
    TOKENIZE,
)
from fastdeploy_sd.entrypoints.openai.response_format import ResponseFormat
from fastdeploy_sd.entrypoints.openai.routed import RouteGate, StreamMetadata
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel, ServedModels
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter
from fastdeploy_sd.errors import Overloaded, Unavailable
from fastdeploy_sd.text.output_processor import CompletionCollector
from fastdeploy_sd.wire.http.auth import client_of
from fastdeploy_sd.wire.http.error_format import JsonResponse, json_pieces, to_fdsd_error
from fastdeploy_sd.wire.http.event_stream import EventStream, until_disconnected
from fastdeploy_sd.wire.http.middleware import LOSSY_HEADER, REQUEST_ID_HEADER
from fastdeploy_sd.wire.http.request_body import BodyReader
from fastdeploy_sd.wire.http.request_record import record_of
from fastdeploy_sd.wire.http.tracing import trace_context

_MAX_INLINE_ENTRIES = 2048  # of tokens and alternatives: some milliseconds


class GenerationHandler:
    """Serves the models of a server.

    Raises (from every method):
        FdsdError: of the status that tells the client what happened.
        ClientDisconnect: it left.
    """

    def __init__(self, models: ServedModels, server: ServerConfig, gate: RouteGate) -> None:
        self._models = models
        self._gate = gate
        self._bodies = BodyReader(server.max_body_bytes)

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._respond(request, CHAT, ChatFormat)

    async def completion(self, request: HttpRequest) -> Response:
        """POST /v1/completions."""
        return await self._respond(request, COMPLETION, CompletionFormat)

    async def response(self, request: HttpRequest) -> Response:
        """POST /v1/responses."""
        return await self._respond(request, RESPONSE, ResponseFormat)

    async def message(self, request: HttpRequest) -> Response:
        """POST /v1/messages."""
        return await self._respond(request, MESSAGE, MessageFormat)

    async def ollama_chat(self, request: HttpRequest) -> Response:
        """POST /api/chat."""
        return await self._respond(request, OLLAMA_CHAT, OllamaFormat)

    async def ollama_generate(self, request: HttpRequest) -> Response:
        """POST /api/generate."""
        return await self._respond(request, OLLAMA_GENERATE, GenerateFormat)

    async def infill(self, request: HttpRequest) -> Response:
        """POST /infill."""
        return await self._respond(request, INFILL, InfillFormat)

    async def embed(self, request: HttpRequest) -> Response:
        """POST /v1/embeddings."""
        return await self._respond(request, EMBED, EmbeddingFormat)

    async def ollama_embed(self, request: HttpRequest) -> Response:
        """POST /api/embed."""
        return await self._respond(request, OLLAMA_EMBED, OllamaEmbedFormat)

    async def ollama_embeddings(self, request: HttpRequest) -> Response:
        """POST /api/embeddings."""
        return await self._respond(request, OLLAMA_EMBEDDINGS, OllamaEmbeddingsFormat)

    async def show(self, request: HttpRequest) -> Response:
        """POST /api/show."""
        return await self._compute(request, SHOW)

    async def count_tokens(self, request: HttpRequest) -> Response:
        """POST /v1/messages/count_tokens."""
        return await self._compute(request, COUNT)

    async def tokenize(self, request: HttpRequest) -> Response:
        """POST /tokenize."""
        return await self._compute(request, TOKENIZE)

    async def detokenize(self, request: HttpRequest) -> Response:
        """POST /detokenize."""
        return await self._compute(request, DETOKENIZE)

    async def _compute(self, request: HttpRequest, task: str) -> Response:
        async with self._bodies.read(request) as content:
            preparer = (await self._models.wanted_by(content)).preparer
            answer = await until_disconnected(request.receive, preparer.compute(task, content))
        return Response(answer, media_type=JsonResponse.media_type)

    async def _respond(self, request: HttpRequest, task: str, form: type[AnswerFormat]) -> Response:
        route = self._gate.route_of(request.headers)
        model, job = await self._prepare(request, task, route)  # a function of its own, which lets go of the body
        if isinstance(job, str):
            return Response(job, media_type=JsonResponse.media_type)
        job = job.of_client(client_of(request.scope) if route is None else route.client)
        if model.config.splitwise.splitwise_role == DECODE:
            job = job.traced(trace_context(request.headers))
        notes = None if route is None else StreamMetadata(job)
        return await self._answer(request, model, job, form(job, model.preparer.tokenizer), notes)

    async def _prepare(
        self, request: HttpRequest, task: str, route: Route | None
    ) -> tuple[ServedModel, GenerationJob | str]:
        num_added = 0 if route is None else route.num_bytes - route.num_body_bytes
        async with self._bodies.read(request, num_added) as content:
            body, progress = (content, None) if route is None else read_content(route, content)
            model, engine = await self._place(body, route)
            model.client.verify_takes_requests()
            job = await until_disconnected(request.receive, model.preparer.prepare(task, body))
            if route is not None and isinstance(job, GenerationJob):
                job = job.routed(route.kv_source, progress, engine)
            return model, job

    async def _place(self, body: bytes, route: Route | None) -> tuple[ServedModel, int | None]:
        """Return the model that answers, and the engine of it that a router has chosen; None = any."""
        engine = None if route is None else self._gate.engine_of(route)
        return (await self._models.wanted_by(body), None) if engine is None else self._models.of_engine(engine)

    async def _answer(
        self,
        request: HttpRequest,
        model: ServedModel,
        job: GenerationJob,
        form: AnswerFormat,
        notes: StreamMetadata | None,
    ) -> Response:
        """Answer; where verification may change tokens the header says so, for every choice."""
        record = record_of(request.scope)
        record.request_id, record.model = job.job_id, job.model
        share = QueueShare.of(model.config.scheduler)
        deltas = run_job(model.client, model.preparer.tokenizer, job, share)
        headers = {REQUEST_ID_HEADER: job.job_id} | ({LOSSY_HEADER: "true"} if job.is_lossy else {})
        try:
            if job.answer.stream:
                # The first delta is awaited before the status line is sent: a full queue is a 429, not a broken stream.
                first = await until_disconnected(request.receive, anext(deltas, None))
                events = _events(request, job, form, _Deltas(first, deltas), notes)
                return EventStream(events, deltas, headers, form.media_type)
            whole = await until_disconnected(request.receive, _whole(request, job, form, deltas))
            return Response(whole, headers=headers, media_type=JsonResponse.media_type)
        except BaseException:
            await deltas.aclose()
            raise


async def _whole(
    request: HttpRequest, job: GenerationJob, form: AnswerFormat, deltas: AsyncGenerator[ChoiceDelta, None]
) -> bytes:
    """Return the JSON of the answer; a large one is written in a thread, so that others do not wait for it."""
    collectors = [CompletionCollector(i) for i in range(len(job.requests))]
    usage = _usage(request, form)
    async with contextlib.aclosing(deltas):
        async for choice, delta in deltas:
            collectors[choice].add(delta)
            usage.add(choice, delta)

    def render() -> bytes:
        answer = form.whole([collector.build() for collector in collectors], usage)
        return "".join(json_pieces(answer, form.split_depth)).encode("utf-8")

    return await asyncio.to_thread(render) if _is_large(job, usage) else render()


def _is_large(job: GenerationJob, usage: UsageCounter) -> bool:
    """Whether writing all of an answer takes so long that others should not wait for it."""
    num_entries = job.requests.num_entries(usage.num_completion_tokens)
    if job.answer.returns_token_sources:
        num_entries += usage.num_completion_tokens
    return job.answer.embedding is not None or num_entries > _MAX_INLINE_ENTRIES


@dataclass(frozen=True, slots=True)
class _Deltas:
    """The first delta, which was awaited apart, and the others; None = every choice had ended before."""

    first: ChoiceDelta | None
    rest: AsyncGenerator[ChoiceDelta, None]


async def _events(
    request: HttpRequest, job: GenerationJob, form: AnswerFormat, deltas: _Deltas, notes: StreamMetadata | None
) -> AsyncGenerator[str, None]:
    """Yield server-sent events, an error if one comes up, and always what ends the stream; for a router, with notes."""
    usage = _usage(request, form)
    opening = "" if notes is None else notes.opening()
    item = deltas.first
    try:
        while item is not None:
            choice, delta = item
            usage.add(choice, delta)
            if notes is not None:
                notes.add(choice, delta)
            is_whole = form.repeats_all and delta.finish_reason is not None
            if (is_whole or delta.prompt_logprobs is not None) and _is_large(job, usage):
                part = await asyncio.to_thread(form.part, choice, delta, usage)
            else:
                part = form.part(choice, delta, usage)
            if part is not None:
                note = "" if notes is None else notes.of_part(choice, delta, part)
                yield opening + note + part.text
                opening = ""
            item = await anext(deltas.rest, None)
        ending = form.ending(usage)
        if ending:
            yield ("" if notes is None else COUNTED_NOTE) + ending
    except Exception as failure:
        error = to_fdsd_error(failure, request)
        part = form.error(error)
        note = ""
        if notes is not None:
            is_ours = isinstance(error, Unavailable | Overloaded)
            note = FAILED_NOTE if is_ours else ENDED_NOTE if part.is_last else ""
        yield note + part.text
    if form.stream_end:
        yield form.stream_end


def _usage(request: HttpRequest, form: AnswerFormat) -> UsageCounter:
    """A counter that the request's log line and span read at the end, however that comes about."""
    usage = form.usage_counter()
    record = record_of(request.scope)
    record.usage, record.metrics = usage.to_json, usage.metrics
    return usage
