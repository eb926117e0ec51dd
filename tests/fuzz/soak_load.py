"""The soak's requests: a fixed set whose answers depend on their bodies alone, and clients that send them.

A client knows what its request must be answered with, however it was disturbed: the whole answer, or a beginning of it
and an error that says why there is no more. Everything else is a finding.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.server.answers import Answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Longer than any fault and the time to begin again elsewhere; who waits so long has been forgotten.
ANSWER_S = 240.0
PAUSE_S = 0.3
LEAVERS = 0.15
MAX_FINDINGS = 50
_WORDS = (
    "def",
    "return",
    "class",
    "import",
    "self",
    "value",
    "list",
    "if",
    "else",
    "for",
    "while",
    "not",
    "print",
    "open",
)
_REFUSALS = frozenset({429, 503})
_TYPES = frozenset({"service_unavailable_error", "rate_limit_error", "overloaded_error"})


@dataclass(frozen=True)
class Ask:
    """A request. number: its place in the set."""

    number: int
    path: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def make_asks(seed: int, count: int) -> list[Ask]:
    """Requests of all kinds: long and short, with common beginnings, greedy and seeded, whole and as streams."""
    rng = random.Random(f"asks {seed}")
    beginnings = [_text(rng, 150) for _ in range(3)]
    return [_ask(rng, number, beginnings) for number in range(count)]


def _text(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def _ask(rng: random.Random, number: int, beginnings: Sequence[str]) -> Ask:
    text = _text(rng, rng.choice([1, 8, 40, 150, 300]))
    if rng.random() < 0.4:
        text = f"{rng.choice(beginnings)} {text}"
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": rng.choice([4, 20, 60, 150, 400]),
        "seed": rng.randrange(1 << 30),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "ignore_eos": True,
    }
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.3:
        body |= {"repetition_penalty": 1.1, "top_p": 0.9, "top_k": 50}
    if rng.random() < 0.2:
        body |= {"n": 2, "max_tokens": 60}
    if rng.random() < 0.4:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 2}
        return Ask(number, CHAT, body)
    prompt: Any = text if rng.random() < 0.7 else [rng.randrange(10, 500) for _ in range(rng.choice([3, 90, 500]))]
    return Ask(number, COMPLETIONS, body | {"prompt": prompt, "logprobs": 2, "return_token_ids": True})


async def put(client: httpx.AsyncClient, url: str, ask: Ask, leave_after: int | None = None) -> Answer:
    """Send a request; return what came. leave_after: of events, the client hangs up then."""
    answer, num_events = Answer(), 0
    try:
        async with asyncio.timeout(ANSWER_S), client.stream("POST", f"{url}{ask.path}", json=ask.body) as response:
            answer.status = response.status_code
            if not (ask.is_stream and response.status_code == httpx.codes.OK):
                await response.aread()
                answer.take(response.json())
                answer.is_done = True
                return answer
            async for line in response.aiter_lines():
                answer.take_line(line)
                num_events += bool(line)
                if leave_after is not None and num_events >= leave_after:
                    answer.broken = "left"
                    return answer
    except TimeoutError:
        answer.broken = "no end"
    except (httpx.HTTPError, ValueError) as error:
        answer.broken = repr(error)
    if not answer.is_done and not answer.broken:
        answer.broken = "cut off"
    return answer


class Door(Protocol):
    """Where requests are sent. name: for findings; url: None while no server listens."""

    name: str

    @property
    def url(self) -> str | None: ...

    def was_disturbed(self, begin: float, end: float) -> bool:
        """Whether anything was done to it between two points of time."""
        ...


@dataclass
class Load:
    """Clients, and what they saw.

    Attributes:
        expected: what an undisturbed server answers, per request.
        outcomes: how many requests ended how. findings: what must not happen.
        is_over: clients send nothing more.
    """

    asks: Sequence[Ask]
    doors: Sequence[Door]
    seed: int
    expected: dict[int, Answer] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    is_over: bool = False

    def add_finding(self, text: str) -> None:
        """Keep the first few."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(text)
            print(f"FINDING {text}", file=sys.stderr, flush=True)

    async def learn(self, url: str) -> None:
        """Ask an undisturbed server, one request at a time."""
        async with _client() as client:
            for ask in self.asks:
                self.expected[ask.number] = answer = await put(client, url, ask)
                assert answer.is_right, (ask, answer)

    async def run(self, num_clients: int) -> None:
        """Send requests over several connections until `is_over`, and see the last ones end."""
        await asyncio.gather(*(self._visit(number) for number in range(num_clients)))

    async def ask_all(self, door: Door) -> None:
        """Each request once; all must be right."""
        async with _client() as client:
            for ask in self.asks:
                assert door.url is not None
                answer = await put(client, door.url, ask)
                if not (answer.is_right and self._is_same(ask, answer)):
                    self.add_finding(f"afterwards, through {door.name}: {_shown(ask, answer)}")

    async def _visit(self, number: int) -> None:
        rng = random.Random(f"client {self.seed} {number}")
        async with _client() as client:
            while not self.is_over:
                door, ask = rng.choice(self.doors), rng.choice(self.asks)
                leave_after = rng.randint(1, 12) if ask.is_stream and rng.random() < LEAVERS else None
                url = door.url
                if url is None:
                    await asyncio.sleep(PAUSE_S)
                    continue
                begin = time.monotonic()
                answer = await put(client, url, ask, leave_after)
                self.judge(ask, answer, door, begin)
                await asyncio.sleep(rng.random() * PAUSE_S)

    def _is_same(self, ask: Ask, answer: Answer) -> bool:
        whole = self.expected[ask.number]
        return answer.choices == whole.choices and answer.usage == whole.usage

    def judge(self, ask: Ask, answer: Answer, door: Door, begin: float) -> None:
        """Count how a request ended that was sent at `begin`, and keep what must not happen."""
        is_disturbed = door.was_disturbed(begin, time.monotonic())
        if not answer.begins(self.expected[ask.number]):
            outcome = "WRONG"
        elif answer.is_right:
            outcome = "right" if self._is_same(ask, answer) else "WRONG"
        elif answer.error is not None:
            is_typed = answer.status in _REFUSALS or answer.error["type"] in _TYPES
            name = f"error {answer.error['type']} {answer.error['code']}"
            outcome = name if is_typed or is_disturbed else f"UNEXPECTED {name}"
        elif answer.broken == "left":
            outcome = "left"
        elif answer.broken == "no end":
            outcome = "LOST"
        else:
            outcome = "cut off with its door" if is_disturbed else "CUT OFF"
        self.outcomes[outcome] += 1
        if outcome.split(maxsplit=1)[0].isupper():
            self.add_finding(f"{outcome}, through {door.name}: {_shown(ask, answer)}")


def _client() -> httpx.AsyncClient:
    # A connection per request: one that is kept may be closed by the server in the moment it is used again.
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


def _shown(ask: Ask, answer: Answer) -> str:
    sizes = {i: (len(choice.text), choice.ends) for i, choice in answer.choices.items()}
    return f"request {ask.number}: {answer.status} {answer.error} {answer.broken!r} {sizes} {answer.usage}"
