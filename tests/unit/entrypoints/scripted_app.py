"""The HTTP application over an engine client that delivers given tokens in given steps; no sockets, no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from fastdeploy_sd.config import Config, ModelConfig, ParallelConfig, SpeculativeConfig
from fastdeploy_sd.entrypoints.openai.app import create_app
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel
from fastdeploy_sd.types import (
    F32,
    Adapter,
    AdapterSource,
    DraftCounts,
    DraftLogprob,
    FinishReason,
    ModelInfo,
    Pooling,
    Request,
    RequestId,
    RequestMetrics,
    RequestOutput,
    SpeculationInfo,
    TokenLogprob,
)
from fastdeploy_sd.types.experts import ExpertReport
from fastdeploy_sd.types.stats import EngineState, EngineStats
from tests.doubles.preparer import LocalPreparer
from tests.unit.text.vocabularies import GOLDEN

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EOS = 2
SPECULATION = SpeculationInfo("mtp", ("naive", "ngram", "mtp"), 8, 1, has_draft_logprobs=True)
# Has the routes of FastDeploy about experts.
BALANCED = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True, enable_eplb=True)
INFO = ModelInfo(
    "m", vocab_size=4096, max_model_len=512, eos_token_ids=(EOS,), block_size=16, num_blocks=64, hidden_size=4
)
METRICS = RequestMetrics(1.0, 2.0, 3.0, 4.0, drafts=DraftCounts(4, 10, (4, 4, 2), (4, 3, 2), (3, 2, 1)))


@dataclass(frozen=True)
class Script:
    """What the engine does for one request.

    Attributes:
        steps: output tokens of each step; its drafts were all of them but the last, and two rejected ones.
        reason: how the engine ends it with the last step.
    """

    steps: Sequence[Sequence[int]]
    reason: FinishReason = FinishReason.LENGTH

    def outputs(self, request: Request) -> Iterator[RequestOutput]:
        """The outputs of one request."""
        num_logprobs = request.sampling.logprobs
        for i, step in enumerate(self.steps):
            is_last = i == len(self.steps) - 1
            yield RequestOutput(
                request.request_id,
                tuple(step),
                None if num_logprobs is None else tuple(logprob(t, num_logprobs) for t in step),
                self.reason if is_last else None,
                metrics=METRICS if is_last else None,
                draft_logprobs=_drafts(request, step),
            )


def logprob(token_id: int, num_alternatives: int) -> TokenLogprob:
    """Made-up values that depend on the token only."""
    top = tuple(range(token_id, token_id + num_alternatives))
    return TokenLogprob(token_id, -1.0 - token_id % 7, 1, top, tuple(-1.0 - t % 7 for t in top))


def hidden_row(request: Request) -> F32:
    """A made-up embedding f32[4] that depends on the prompt and the pooling."""
    ids = request.prompt_token_ids.astype(np.float32)
    value = ids.mean() if request.pooling is Pooling.MEAN else ids[-1]
    return np.array([value, 1.0, len(ids), 2.0], np.float32)


def _drafts(request: Request, step: Sequence[int]) -> tuple[DraftLogprob, ...] | None:
    num_alternatives = request.speculation.num_draft_logprobs
    if num_alternatives is None or not request.speculation.enabled:
        return None
    drafts = [*step[:-1], 5, 6]
    return tuple(
        DraftLogprob(logprob(t, num_alternatives), position, position < len(step) - 1)
        for position, t in enumerate(drafts)
    )


@dataclass
class ScriptedClient:
    """An engine client that plays scripts[i] for choice i of whatever is asked.

    Attributes:
        error: raised instead of the last output of an aborted request.
        submitted: requests in the order they came.
        aborted: ids whose end was asked for, and the reason given. awaited: those whose end was then read.
        asked: rearranges and clears of each question about experts. experts_found: the answer to it.
    """

    model_info: ModelInfo
    scripts: Sequence[Script] = ()
    error: Exception | None = None
    submitted: list[Request] = field(default_factory=list)
    aborted: dict[RequestId, FinishReason] = field(default_factory=dict)
    awaited: set[RequestId] = field(default_factory=set)
    state: EngineState = field(default_factory=lambda: EngineState("ready"))
    asked: list[tuple[bool, bool]] = field(default_factory=list)
    experts_found: ExpertReport | Exception = field(default_factory=lambda: ExpertReport(False, (), (), ()))

    async def generate(self, request: Request, engine: int | None = None) -> AsyncGenerator[RequestOutput, None]:
        if request.pooling is not None:
            self.submitted.append(request)
            row, reason = hidden_row(request), FinishReason.LENGTH
            yield RequestOutput(request.request_id, (), finish_reason=reason, metrics=METRICS, embedding=row)
            return
        script = self.scripts[len(self.submitted)]
        self.submitted.append(request)
        for output in script.outputs(request):
            if request.request_id in self.aborted:
                if self.error is not None:
                    raise self.error
                self.awaited.add(request.request_id)
                reason = self.aborted[request.request_id]
                yield RequestOutput(request.request_id, (), finish_reason=reason, metrics=METRICS)
                return
            yield output
            await asyncio.sleep(0)

    async def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted |= dict.fromkeys(request_ids, reason)

    @property
    def states(self) -> tuple[EngineState, ...]:
        return (self.state,)

    async def stats(self) -> dict[int, EngineStats]:
        return {0: EngineStats()}

    async def change_adapter(self, name: str, folder: str | None) -> AdapterSource:
        source = AdapterSource(Adapter(name, "ab" * 16), folder or "")
        kept = [one for one in self.model_info.adapters if one.adapter.name != name]
        self.model_info = replace(self.model_info, adapters=(*kept, *([] if folder is None else [source])))
        return source

    async def set_paused(self, engine: int, *, is_paused: bool) -> None:
        self.state = EngineState("paused" if is_paused else "ready")

    async def experts(self, *, rearranges: bool = False, clears: bool = False) -> ExpertReport:
        self.asked.append((rearranges, clears))
        if isinstance(self.experts_found, Exception):
            raise self.experts_found
        return self.experts_found

    def verify_takes_requests(self) -> None:
        pass

    async def verify_healthy(self) -> None:
        pass


class ScriptedApp:
    """Sends requests to the application and returns what came back."""

    def __init__(
        self,
        speculation: SpeculationInfo = SPECULATION,
        config: SpeculativeConfig | None = None,
        reasoning_parser: str = "auto",
        tool_call_parser: str | None = "auto",
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.client = ScriptedClient(replace(INFO, speculation=speculation))
        model = ModelConfig(
            model=str(GOLDEN),
            served_model_name=("m",),
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
        )
        whole = Config(model=model, speculative=config or SpeculativeConfig(), parallel=parallel or ParallelConfig())
        self._app = create_app([ServedModel(whole, self.client, LocalPreparer(whole, lambda: self.client.model_info))])

    def post(self, path: str, body: dict[str, Any], scripts: Sequence[Script] = ()) -> httpx.Response:
        """The whole answer, read to its end."""
        self.client.scripts = scripts
        self.client.submitted.clear()
        self.client.aborted.clear()
        return asyncio.run(self._send("POST", path, body))

    def get(self, path: str) -> Any:
        """The JSON of a route."""
        return asyncio.run(self._send("GET", path, None)).json()

    def chunks(self, path: str, body: dict[str, Any], scripts: Sequence[Script]) -> list[dict[str, Any]]:
        """The chunks of a stream that ends well."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        lines = self.post(path, body | options, scripts).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://localhost") as http:
            return await http.request(method, path, json=body)
