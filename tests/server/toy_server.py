"""The real HTTP application on a real socket, over a real Engine with the toy executor, in the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import uvicorn

from fastdeploy_sd.config import Config, ModelConfig, ServerConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.entrypoints.openai.app import create_app
from fastdeploy_sd.entrypoints.openai.routed import RouteGate
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import AdapterSource, FinishReason, ModelInfo, Request, RequestId, RequestOutput
from fastdeploy_sd.types.experts import ExpertReport
from fastdeploy_sd.types.stats import EngineState, EngineStats
from tests.doubles.engines import toy_config
from tests.doubles.preparer import LocalPreparer
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel
from tests.unit.text.vocabularies import golden_tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "qwen3-tiny"
INFO = ModelInfo("toy", vocab_size=4096, max_model_len=512, eos_token_ids=(2,), block_size=16, num_blocks=256)
MODEL = "toy-model"
TOKENIZER = golden_tokenizer()
DEADLINE_S = 120.0


def server_config(server: ServerConfig | None = None, max_num_queued_requests: int = 1000) -> Config:
    """A configuration that serves the golden tokenizer under a name of its own."""
    config = toy_config(max_num_seqs=8, max_num_batched_tokens=64, max_num_queued_requests=max_num_queued_requests)
    model = ModelConfig(model=str(GOLDEN), served_model_name=(MODEL,))
    return replace(config, model=model, server=server or ServerConfig())


def toy_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The first greedy output tokens of the toy model after a prompt."""
    request = Request("x", np.array(prompt, np.int32), SamplingParams(temperature=0.0), 512, 0, eos_token_ids=(2,))
    return list(islice(ToyModel(INFO.vocab_size).endless(request), count))


def text_of(token_ids: Sequence[int]) -> str:
    """What those tokens read like."""
    return TOKENIZER.decode(token_ids, skip_hidden=True)


class LocalClient:
    """The engine client's interface over an engine in the same event loop, which a test can hold between steps.

    Attributes:
        running: cleared = the engine takes no step until it is set again.
        aborted: ids whose reader left before the engine had ended them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model_info = engine.model_info
        self.is_alive = True
        self.last_stats: EngineStats | None = None
        self.running = asyncio.Event()
        self.running.set()
        self.aborted: list[RequestId] = []
        self.submitted: list[Request] = []
        self._queues: dict[RequestId, asyncio.Queue[RequestOutput | Exception]] = {}
        self._changed = asyncio.Condition()

    async def generate(self, request: Request, engine: int | None = None) -> AsyncGenerator[RequestOutput, None]:
        if not self.is_alive:
            raise Unavailable("the engine is down")
        self.engine.submit(request)
        self.submitted.append(request)
        queue = self._queues[request.request_id] = asyncio.Queue()
        await self._notify()
        is_ended = False
        try:
            while not is_ended:
                output = await queue.get()
                if isinstance(output, Exception):
                    is_ended = True
                    raise output
                is_ended = output.finish_reason is not None
                yield output
        finally:
            del self._queues[request.request_id]
            if not is_ended:
                self.aborted.append(request.request_id)
                self.engine.abort([request.request_id])
            self.engine.check_integrity()
            await self._notify()

    async def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> None:
        self._deliver(self.engine.abort(request_ids, reason))

    @property
    def states(self) -> tuple[EngineState, ...]:
        return (EngineState("ready" if self.is_alive else "down", 0.0, self.last_stats),)

    async def stats(self) -> dict[int, EngineStats]:
        if not self.is_alive:
            raise Unavailable("the engine is down")
        self.last_stats = self.engine.stats()
        return {0: self.last_stats}

    async def change_adapter(self, name: str, folder: str | None) -> AdapterSource:
        raise AssertionError("it has no adapters")

    async def set_paused(self, engine: int, *, is_paused: bool) -> None:
        raise AssertionError("no test pauses it")

    async def experts(self, *, rearranges: bool = False, clears: bool = False) -> ExpertReport:
        raise AssertionError("a toy has no experts")

    def verify_takes_requests(self) -> None:
        if not self.is_alive:
            raise Unavailable("the engine is down", code="engine_down")

    async def verify_healthy(self) -> None:
        self.verify_takes_requests()

    async def until(self, condition: str) -> None:
        """Wait until "started" (something runs or waits) or "idle" (nothing does) is true of the engine."""
        wanted = condition == "started"
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: self.engine.has_work() is wanted)

    async def die(self, error: Exception) -> None:
        """End every request with an error, as when the engine's process is gone."""
        self.is_alive = False
        for queue in self._queues.values():
            queue.put_nowait(error)

    async def drive(self) -> None:
        """Step whenever there is work; runs until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self.engine.has_work)
            await self.running.wait()
            if self.is_alive:
                self._deliver(self.engine.step())
            await asyncio.sleep(0)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._queues:
                self._queues[output.request_id].put_nowait(output)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        http: a client of the whole server. api: the openai package's, of /v1.
    """

    url: str
    client: LocalClient
    http: httpx.AsyncClient
    api: openai.AsyncOpenAI


class _Server(uvicorn.Server):
    """uvicorn that leaves the test runner's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve(
    config: Config | None = None, executor: ToyExecutor | None = None, gate: RouteGate | None = None
) -> AsyncIterator[Served]:
    """Serve on a free port for the duration of the block."""
    config = config or server_config()
    client = LocalClient(Engine(config, executor or ToyExecutor(INFO)))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    model = ServedModel(config, client, LocalPreparer(config, lambda: client.model_info))
    app = create_app([model], gate=gate or RouteGate())
    server = _Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    tasks = [asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(client.drive())]
    key = config.server.api_key[0] if config.server.api_key else "none"
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S) as api,
        ):
            yield Served(url, client, http, api)
    finally:
        server.should_exit = True
        await tasks[0]
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()


async def post(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a successful answer."""
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def read_events(response: httpx.Response) -> list[str]:
    """The payloads of a whole event stream."""
    lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines), lines
    return [line.removeprefix("data: ") for line in lines]
