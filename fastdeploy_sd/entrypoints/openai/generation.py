"""Runs a job on the engine: its sequences side by side, their outputs merged as they come.

Owns the lifetime of the engine's requests: when the reader of `run_job` leaves, for whatever reason, all of them are
aborted. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.entrypoints.openai.job import Job
from fastdeploy_sd.entrypoints.text.output_processor import OutputProcessor, TextDelta
from fastdeploy_sd.entrypoints.text.tokenizer import Tokenizer
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.types import ModelInfo, Request, RequestId, RequestMetrics, RequestOutput

T = TypeVar("T")
ChoiceDelta = tuple[int, TextDelta]


class Client(Protocol):
    """What this package uses of `fastdeploy_sd.ipc.client.EngineClient`; see there."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_draining(self) -> bool: ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]: ...

    async def abort(self, request_ids: Iterable[RequestId]) -> None: ...

    async def stats(self) -> EngineStats: ...


def run_job(client: Client, tokenizer: Tokenizer, job: Job) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield (choice, delta) until every choice has its last delta. Closing it early aborts what still runs.

    Raises:
        FdsdError: a request was refused or failed; the others are aborted.
    """
    return merge([_run_choice(client, tokenizer, job, i) for i in range(len(job.requests))])


async def _run_choice(client: Client, tokenizer: Tokenizer, job: Job, choice: int) -> AsyncGenerator[ChoiceDelta, None]:
    request = job.requests[choice]
    processor = OutputProcessor(request, tokenizer)
    async with aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            delta = processor.process(output)
            if delta.needs_abort and job.reports_metrics:
                measured = await _end(client, request.request_id, outputs)
                delta = replace(delta, metrics=measured or delta.metrics)
            yield choice, delta
            if delta.finish_reason is not None:
                return  # closing `outputs` aborts the request if a stop string ended it before the engine did


async def _end(
    client: Client, request_id: RequestId, outputs: AsyncGenerator[RequestOutput, None]
) -> RequestMetrics | None:
    """End a request that a stop string has completed, and return what the engine measured of it.

    Takes up to one step of the engine. None when the engine fails in this very moment: the answer is complete, and
    nothing may turn it into an error any more.
    """
    with suppress(FdsdError):
        await client.abort([request_id])
        async for output in outputs:
            if output.finish_reason is not None:
                return output.metrics
    return None


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they come; all are closed when it ends, is closed or one of them raises."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    queue: asyncio.Queue[T | _Ended] = asyncio.Queue(maxsize=2 * len(sources))
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        num_running = len(tasks)
        while num_running:
            entry = await queue.get()
            if not isinstance(entry, _Ended):
                yield entry
                continue
            num_running -= 1
            if entry.error is not None:
                raise entry.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Ended:
    """A source is through."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | _Ended]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as failure:
        error = failure
    await queue.put(_Ended(error))
