"""Drives an OpenAI-compatible server with streaming completions and times them. Knows no engine and no tables.

Requests come either `concurrency` at a time (closed loop) or at a rate, as a Poisson process (open loop). In the open
loop times count from when a request was due, not from when it was sent: a stalled client must not hide a slow server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np

_EVENT = "data: "
_DONE = "[DONE]"
_CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Attributes:
        concurrency: requests in flight, in a closed loop; None = open loop.
        rate: mean requests per second of the open loop; None = closed loop.
        vocab_size: prompts are random token ids below it.
    """

    num_requests: int
    prompt_len: int
    output_len: int
    concurrency: int | None = None
    rate: float | None = None
    vocab_size: int = 1000
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """Return the prompts; requests share no prefix on purpose."""
        rng = np.random.default_rng((self.seed, 0))
        ids: list[list[int]] = rng.integers(0, self.vocab_size, (self.num_requests, self.prompt_len)).tolist()
        return ids

    def due_times_s(self) -> list[float]:
        """Return when each request of the open loop is due, in seconds from the start."""
        assert self.rate is not None, "only an open loop has due times"
        gaps = np.random.default_rng((self.seed, 1)).exponential(1 / self.rate, self.num_requests)
        times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
        return times


@dataclass(slots=True)
class Timing:
    """What happened to one request.

    Attributes:
        due_s: when it was due (open loop) or sent, in seconds from the start.
        event_times_s: arrival of every chunk that held tokens.
        num_tokens: as the server's usage says.
        error: why it failed, None when it is complete.
    """

    due_s: float
    event_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    error: str | None = None


class LoadClient:
    """Sends one load to one server.

    Args:
        url: of the server, without path.
        model: name for the `model` field.
        extra: further fields of every body.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None,
        load: Load,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No read timeout: how long the first token takes is what is measured.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)
        self._model = model
        self._load = load
        self._extra = extra
        self._start_s = 0.0
        self._on_event: Callable[[], object] = lambda: None

    async def run(self, on_done: Callable[[], object], on_event: Callable[[], object] = lambda: None) -> list[Timing]:
        """Send everything, once, and return one timing per request, in the order of the prompts.

        Args:
            on_done: called whenever a request has ended.
            on_event: called at the arrival of every chunk that held tokens.
        """
        prompts = self._load.prompts()
        async with self._http:
            self._on_event = on_event
            self._start_s = time.perf_counter()
            if self._load.rate is None:
                gate = asyncio.Semaphore(self._load.concurrency or 1)
                ends = [self._when_free(gate, prompt) for prompt in prompts]
            else:
                ends = [self._when_due(due, p) for due, p in zip(self._load.due_times_s(), prompts, strict=True)]
            return list(await asyncio.gather(*(_notified(end, on_done) for end in ends)))

    async def _when_free(self, gate: asyncio.Semaphore, prompt: list[int]) -> Timing:
        async with gate:
            return await self._complete(Timing(self._now()), prompt)

    async def _when_due(self, due_s: float, prompt: list[int]) -> Timing:
        await asyncio.sleep(due_s - self._now())
        return await self._complete(Timing(due_s), prompt)

    async def _complete(self, timing: Timing, prompt: list[int]) -> Timing:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._load.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Chunks then show tokens whose text is still held back, e.g. half of a multi-byte character.
            "return_token_ids": True,
            **self._extra,
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                    timing.error = f"HTTP {response.status_code}: {response.text[:200]}"
                else:
                    await self._read(timing, response.aiter_lines())
        except httpx.HTTPError as error:
            timing.error = f"{type(error).__name__}: {error}"
        timing.end_s = self._now()
        return timing

    async def _read(self, timing: Timing, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            if not line.startswith(_EVENT):
                continue
            data = line.removeprefix(_EVENT)
            if data == _DONE:
                return
            event = json.loads(data)
            if "error" in event:
                timing.error = str(event["error"]["message"])
                return
            if any(choice.get("completion_token_ids") or choice["text"] for choice in event["choices"]):
                timing.event_times_s.append(self._now())
                self._on_event()
            usage = event.get("usage")
            if usage:
                timing.num_tokens = usage["completion_tokens"]
        timing.error = "the stream ended without [DONE]"

    def _now(self) -> float:
        return time.perf_counter() - self._start_s


async def _notified(end: Awaitable[Timing], on_done: Callable[[], object]) -> Timing:
    timing = await end
    on_done()
    return timing
