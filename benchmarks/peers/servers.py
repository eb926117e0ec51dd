"""Measures the peers' servers over HTTP with the load client of `bench http`, one server at a time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from benchmarks.load_client import Load, LoadClient, Timing
from benchmarks.peers.counting import answer, copy_prompt, random_prompt
from benchmarks.peers.launch import Launch
from benchmarks.peers.paths import CHECKPOINT
from benchmarks.peers.process import PeerError, Process
from benchmarks.peers.protocol import TokenIds

_START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 300.0
_POLL_S = 0.1
_CHECKED_TOKENS = 16
_QUOTED_LEN = 200


@dataclass(frozen=True, slots=True)
class Texts(Load):
    """A closed loop over prompts of the counting checkpoint.

    Attributes:
        is_copy: prompts to be copied with edits instead of random ones; `prompt_len` is theirs then.
    """

    is_copy: bool = False

    def prompts(self) -> list[TokenIds]:
        """Different ones for every seed, so that nothing is found in a server's prefix cache."""
        seeds = range(self.seed * self.num_requests, (self.seed + 1) * self.num_requests)
        return [copy_prompt(seed) if self.is_copy else random_prompt(self.prompt_len, seed) for seed in seeds]


class Server(Process):
    """A peer's server; running when made, and ready once `wait` has returned."""

    def __init__(self, launch: Callable[[int], Launch], log: Path) -> None:
        """Start it on a free port, which `launch` is called with."""
        port = _free_port()
        super().__init__(launch(port), log)
        self._url = f"http://127.0.0.1:{port}"
        self._model = ""

    def wait(self) -> None:
        """Wait until it answers, and look whether its answer is right.

        Raises:
            PeerError: it has ended, takes too long, or answers with an error, the wrong text or none.
        """
        end = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            if not self.is_alive() or time.monotonic() > end:
                raise PeerError(f"server: expected it to start, got: {self.last_line()}")
            time.sleep(_POLL_S)
        for prompt in (random_prompt(_CHECKED_TOKENS, -1), copy_prompt(-1)):
            self._verify_answer(prompt)

    def run(self, load: Load) -> float:
        """Send a load and return the seconds from its first request to its last token.

        Raises:
            PeerError: a request failed, or got another number of tokens, or the load was not done in time.
        """
        client = LoadClient(self._url, self._model, None, load)
        try:
            timings = asyncio.run(asyncio.wait_for(client.run(lambda: None), ANSWER_TIMEOUT_S))
        except TimeoutError:
            raise PeerError(f"load: expected its end within {ANSWER_TIMEOUT_S:.0f} s, got none") from None
        for timing in timings:
            if timing.error is not None or timing.num_tokens != load.output_len:
                reason = timing.error or f"expected {load.output_len} tokens, got {timing.num_tokens}"
                raise PeerError(f"request: {reason}")
        return _span_s(timings)

    def _is_ready(self) -> bool:
        """Servers answer other routes, or this one with an error, while they load."""
        try:
            answer = httpx.get(f"{self._url}/v1/models", timeout=1.0)
            if answer.is_error or httpx.get(f"{self._url}/health", timeout=1.0).is_error:
                return False
        except httpx.HTTPError:
            return False
        self._model = _field(answer, "data", "id")
        return True

    def _verify_answer(self, prompt: TokenIds) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": _CHECKED_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        try:
            response = httpx.post(f"{self._url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
            raise PeerError(f"request: expected an answer, got {reason}; {self.last_line()}") from None
        if response.is_error:
            raise PeerError(f"request: HTTP {response.status_code}: {response.text[:_QUOTED_LEN]}")
        got, expected = _field(response, "choices", "text"), _text(answer(prompt, _CHECKED_TOKENS))
        # How a text begins depends on the tokenizer's idea of what came before.
        if got.strip() != expected.strip():
            raise PeerError(f"text: expected {expected!r}, got {got!r}")


def _field(response: httpx.Response, items: str, name: str) -> str:
    """The text `name` of the first of an answer's `items`.

    Raises:
        PeerError: there is none.
    """
    try:
        value = response.json()[items][0][name]
    except (ValueError, LookupError, TypeError):
        value = None
    if not isinstance(value, str):
        raise PeerError(f"answer: expected a text at {items}[0].{name}, got {response.text[:_QUOTED_LEN]!r}")
    return value


def _span_s(timings: list[Timing]) -> float:
    return max(timing.end_s for timing in timings) - min(timing.due_s for timing in timings)


def _text(token_ids: TokenIds) -> str:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text: str = tokenizer.decode(token_ids)
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
