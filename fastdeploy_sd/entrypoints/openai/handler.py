"""Answers the generation routes: body -> job -> engine -> JSON or a stream of events; and those of the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.boundary import CLIENT_CLOSED_REQUEST
from fastdeploy_sd.entrypoints.openai.choice_format import ChatFormat, ChoiceFormat, CompletionFormat
from fastdeploy_sd.entrypoints.openai.error_format import JsonResponse, error_json, to_fdsd_error, to_json
from fastdeploy_sd.entrypoints.openai.generation import ChoiceDelta, Client, run_job
from fastdeploy_sd.entrypoints.openai.job import Job, JobBuilder, UsageCounter
from fastdeploy_sd.entrypoints.openai.merging import QueueShare
from fastdeploy_sd.entrypoints.openai.model_names import resolve_model
from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, CompletionBody, GenerationBody, parse_body
from fastdeploy_sd.entrypoints.openai.request_body import read_body
from fastdeploy_sd.entrypoints.openai.request_record import record_of
from fastdeploy_sd.entrypoints.openai.stream import DONE, ClientGoneError, EventStream, until_disconnected
from fastdeploy_sd.entrypoints.openai.tokenization import Tokenization
from fastdeploy_sd.entrypoints.text.completion import CompletionCollector
from fastdeploy_sd.entrypoints.text.prompt import PromptEncoder
from fastdeploy_sd.entrypoints.text.tokenizer import Tokenizer

LOSSY_HEADER = "X-Speculation-Lossy"


class GenerationHandler:
    """Serves one model through one engine client.

    Raises:
        CheckpointError: the checkpoint's chat template is not valid.
    """

    def __init__(self, client: Client, config: Config, tokenizer: Tokenizer) -> None:
        self._client = client
        self._config = config
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self._share = QueueShare.of(config.scheduler)

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions.

        Raises:
            FdsdError: of the status that tells the client what happened.
        """
        body = parse_body(ChatCompletionBody, await self._read(request))
        job = await asyncio.to_thread(self._builder(body).build_chat, body)
        return await self._answer(request, job, ChatFormat(job, self._tokenizer))

    async def completion(self, request: HttpRequest) -> Response:
        """POST /v1/completions.

        Raises:
            FdsdError: of the status that tells the client what happened.
        """
        body = parse_body(CompletionBody, await self._read(request))
        job = await asyncio.to_thread(self._builder(body).build_completion, body)
        return await self._answer(request, job, CompletionFormat(job, self._tokenizer))

    async def tokenize(self, request: HttpRequest) -> Response:
        """POST /tokenize.

        Raises:
            FdsdError: of the status that tells the client what happened.
        """
        return JsonResponse(await asyncio.to_thread(self._tokenization().tokenize, await self._read(request)))

    async def detokenize(self, request: HttpRequest) -> Response:
        """POST /detokenize.

        Raises:
            FdsdError: of the status that tells the client what happened.
        """
        return JsonResponse(await asyncio.to_thread(self._tokenization().detokenize, await self._read(request)))

    def _tokenization(self) -> Tokenization:
        names = self._config.model.served_names
        return Tokenization(self._encoder, self._tokenizer, self._client.model_info, names)

    async def _read(self, request: HttpRequest) -> bytes:
        return await read_body(request, self._config.server.max_body_bytes)

    def _builder(self, body: GenerationBody) -> JobBuilder:
        resolve_model(body.model, self._config.model.served_names)
        self._client.verify_takes_requests()
        return JobBuilder(self._encoder, self._client.model_info, self._config)

    async def _answer(self, request: HttpRequest, job: Job, form: ChoiceFormat) -> Response:
        """Answer; where verification may change tokens the header says so, before and beside every choice."""
        record_of(request.scope).request_id = job.job_id
        deltas = run_job(self._client, self._tokenizer, job, self._share)
        headers = {LOSSY_HEADER: "true"} if job.is_lossy else {}
        try:
            if job.answer.stream:
                # The first delta is awaited before the status line is sent: a full queue is a 429, not a broken stream.
                first = await until_disconnected(request.receive, anext(deltas))
                return EventStream(_events(request, job, form, _chain(first, deltas)), deltas, headers)
            whole = await until_disconnected(request.receive, _whole(request, job, form, deltas))
            return JsonResponse(whole, headers=headers)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            await deltas.aclose()
            raise


async def _whole(
    request: HttpRequest, job: Job, form: ChoiceFormat, deltas: AsyncGenerator[ChoiceDelta, None]
) -> dict[str, Any]:
    collectors = [CompletionCollector(i) for i in range(len(job.requests))]
    usage = _usage(request, job)
    async with contextlib.aclosing(deltas):
        async for choice, delta in deltas:
            collectors[choice].add(delta)
            usage.add(choice, delta)
    choices = [form.whole(collector.build()) for collector in collectors]
    return _envelope(job, form.response_object, choices) | {"usage": usage.to_json()}


async def _events(
    request: HttpRequest,
    job: Job,
    form: ChoiceFormat,
    deltas: AsyncGenerator[ChoiceDelta, None],
) -> AsyncGenerator[str, None]:
    """Yield server-sent events: chunks, an error if one comes up, and always [DONE]."""
    usage = _usage(request, job)
    begun: set[int] = set()
    try:
        async with contextlib.aclosing(deltas):
            async for choice, delta in deltas:
                usage.add(choice, delta)
                entry = form.chunk(choice, delta, is_first=choice not in begun)
                if entry is None:
                    continue
                begun.add(choice)
                yield _event(_chunk(job, form, [entry], usage))
        if job.answer.includes_usage:
            yield _event(_envelope(job, form.chunk_object, []) | {"usage": usage.to_json()})
    except Exception as error:
        yield _event(error_json(to_fdsd_error(error, request)))
    yield DONE


def _usage(request: HttpRequest, job: Job) -> UsageCounter:
    """A counter that the request's log line reads at the end, however that comes about."""
    usage = UsageCounter(job.requests)
    record_of(request.scope).usage = usage.to_json
    return usage


def _chunk(job: Job, form: ChoiceFormat, choices: list[dict[str, Any]], usage: UsageCounter) -> dict[str, Any]:
    chunk = _envelope(job, form.chunk_object, choices)
    if job.answer.includes_continuous_usage:
        chunk["usage"] = usage.to_json()
    elif job.answer.includes_usage:
        chunk["usage"] = None  # OpenAI: present and null until the last chunk
    return chunk


def _envelope(job: Job, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": job.job_id, "object": kind, "created": job.created, "model": job.model, "choices": choices}


def _event(value: object) -> str:
    return f"data: {to_json(value)}\n\n"


async def _chain(first: ChoiceDelta, rest: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[ChoiceDelta, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for delta in rest:
            yield delta
