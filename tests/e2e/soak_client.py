"""The soak test's clients: streaming completions over real sockets, some of which hang up half-way."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_EVENT = "data: "
_DONE = "[DONE]"
ABANDONED_MAX_TOKENS = 900
MAX_EVENTS_READ = 12


@dataclass(frozen=True)
class Prompt:
    """A request whose tokens are decided by its fields alone."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    @staticmethod
    def draw(rng: random.Random, vocab_size: int) -> Prompt:
        """Return a random prompt: short or over several KV blocks, greedy or sampled."""
        length = rng.choice([1, 5, 16, 33, 90])
        token_ids = tuple(rng.randrange(4, vocab_size) for _ in range(length))
        return Prompt(token_ids, rng.randint(1, 48), rng.choice([0.0, 1.0]), rng.randrange(1 << 30))

    def body(self) -> dict[str, Any]:
        return {
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


@dataclass
class Answer:
    """What a client received.

    Attributes:
        usage_tokens: the usage chunk's count, None until it came.
        is_done: the stream ended as it should, with [DONE].
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage_tokens: int | None = None
    is_done: bool = False


@dataclass(frozen=True)
class Visit:
    """One client: its prompt, and after how many events it hangs up (None = never; 0 = before reading any).

    Who hangs up has asked for many more tokens than it will read, so that the request is far from its end then. Half of
    them allow no drafts, which could end it before a slow client has left.
    """

    prompt: Prompt
    hang_up_after: int | None = None

    def body(self) -> dict[str, Any]:
        body = self.prompt.body()
        if self.hang_up_after is not None:
            body["max_tokens"] = ABANDONED_MAX_TOKENS
            body["speculation"] = {"enabled": self.hang_up_after % 2 == 1}
        return body


def draw_visits(prompts: Sequence[Prompt], num_clients: int, rng: random.Random) -> list[Visit]:
    """Return clients for prompts taken in turn; about a third of the clients hang up at a random point."""
    visits = []
    for i in range(num_clients):
        prompt = prompts[i % len(prompts)]
        aborts = rng.random() < 1 / 3
        visits.append(Visit(prompt, rng.randrange(MAX_EVENTS_READ) if aborts else None))
    return visits


async def visit(client: httpx.AsyncClient, plan: Visit) -> Answer:
    """Send one request and read its events until the end or the point of hanging up.

    Raises:
        AssertionError: the server answered with an error.
    """
    answer = Answer()
    num_events = 0
    async with client.stream("POST", "/v1/completions", json=plan.body()) as response:
        assert response.status_code == httpx.codes.OK, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if plan.hang_up_after is not None and num_events >= plan.hang_up_after:
                return answer  # leaving the stream unread closes the connection
            if line.startswith(_EVENT):
                num_events += 1
                _take(answer, line.removeprefix(_EVENT))
    return answer


async def visit_all(url: str, plans: Sequence[Visit]) -> list[Answer]:
    """Run all clients at the same time, each on a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        return list(await asyncio.gather(*(visit(client, plan) for plan in plans)))


def _take(answer: Answer, data: str) -> None:
    assert not answer.is_done, "an event after [DONE]"
    if data == _DONE:
        answer.is_done = True
        return
    event = json.loads(data)
    assert "error" not in event, event
    if event.get("usage"):
        answer.usage_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        assert answer.finish_reason is None, "an event after the last token"
        answer.token_ids += choice["completion_token_ids"]
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"]
