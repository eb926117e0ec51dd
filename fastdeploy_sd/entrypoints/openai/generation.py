"""Runs a job on the engine: its sequences side by side, their outputs merged as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Protocol

from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.merging import QueueShare, merge
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.text.output_processor import OutputProcessor, TextDelta
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import (
    AdapterSource,
    FinishReason,
    ModelInfo,
    Request,
    RequestId,
    RequestMetrics,
    RequestOutput,
)
from fastdeploy_sd.types.experts import ExpertReport
from fastdeploy_sd.types.stats import EngineState, EngineStats

ChoiceDelta = tuple[int, TextDelta]


class Client(Protocol):
    """What this package uses of `fastdeploy_sd.cluster.engine_group.EngineGroup`; see there."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def states(self) -> tuple[EngineState, ...]: ...

    def verify_takes_requests(self) -> None: ...

    async def verify_healthy(self) -> None: ...

    def generate(self, request: Request, engine: int | None = None) -> AsyncGenerator[RequestOutput, None]: ...

    async def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> None: ...

    async def stats(self) -> dict[int, EngineStats]: ...

    async def set_paused(self, engine: int, *, is_paused: bool) -> None: ...

    async def experts(self, *, rearranges: bool = False, clears: bool = False) -> ExpertReport: ...

    async def change_adapter(self, name: str, folder: str | None) -> AdapterSource: ...


def run_job(
    client: Client, tokenizer: Tokenizer, job: GenerationJob, share: QueueShare
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield (choice, delta) until each unfinished choice has its last delta; closing it early aborts what still runs.

    Raises FdsdError: a request was refused or failed; the others are aborted.
    """
    choices = job.unfinished_choices
    if len(choices) == 1:
        return _run_choice(client, tokenizer, job, choices[0])
    sizes = [len(job.requests.prompt_of(choice)) for choice in choices]
    return merge(lambda index: _run_choice(client, tokenizer, job, choices[index]), sizes, share)


async def _run_choice(
    client: Client, tokenizer: Tokenizer, job: GenerationJob, choice: int
) -> AsyncGenerator[ChoiceDelta, None]:
    request = job.requests[choice]
    answer = job.answer
    processor = OutputProcessor(request, tokenizer, answer.shown_ids, answer.ending_parser(), answer.line_limits)
    async with aclosing(client.generate(request, job.engine)) as outputs:
        async for output in outputs:
            delta = processor.process(output)
            if delta.needs_abort:
                measured = await _end(client, request.request_id, outputs if job.reports_metrics else None)
                delta = replace(delta, metrics=measured or delta.metrics)
            yield choice, delta
            if delta.finish_reason is not None:
                return  # closing `outputs` aborts the request if its text ended it before the engine did


async def _end(
    client: Client, request_id: RequestId, outputs: AsyncGenerator[RequestOutput, None] | None
) -> RequestMetrics | None:
    """End a request that its text has completed, and return what the engine measured of it.

    That takes up to one step of the engine; without `outputs` nothing is waited for. None, too, when the engine fails
    meanwhile: the answer is complete and must not become an error.
    """
    with suppress(FdsdError):
        await client.abort([request_id], FinishReason.STOP)
        if outputs is not None:
            async for output in outputs:
                if output.finish_reason is not None:
                    return output.metrics
    return None
