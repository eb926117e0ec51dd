"""Measures the peers' servers over HTTP with the load client of `bench http`, and their drafting methods."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.load_client import Load, LoadClient, Timing
from benchmarks.peers.catalogue import CHECKPOINT, Plan
from benchmarks.peers.counting import COPY_LEN, answer, copy_prompt, random_prompt
from benchmarks.peers.in_process import CALL_TIMEOUT_S
from benchmarks.peers.launch import Launch
from benchmarks.peers.process import PeerError, Process, Turns, Worker, verify_tokens
from benchmarks.peers.protocol import TokenIds
from benchmarks.peers.results import Case

# Rounds count from 0, so the warm-up has texts of its own.
_WARM_UP_SEED = 99


def measure_http(servers: Mapping[str, Server], plan: Plan, on_round: Callable[[], None]) -> list[Case]:
    """Random prompts; a case is how many are in flight, its work all their output tokens."""
    cases: list[Case] = []
    for concurrency in plan.concurrency:
        num_requests = plan.num_requests(concurrency)
        by_peer = {peer: Case(str(concurrency), peer, num_requests * plan.output_len) for peer in servers}
        cases += by_peer.values()

        def run(peer: str, case_of: dict[str, Case] = by_peer, concurrency: int = concurrency) -> None:
            seconds = case_of[peer].seconds
            # Another prompt in every round and case: nothing is found in a prefix cache.
            seed = concurrency * plan.server_rounds + len(seconds)
            load = Texts(
                num_requests=plan.num_requests(concurrency),
                prompt_len=plan.prompt_len,
                output_len=plan.output_len,
                concurrency=concurrency,
                seed=seed,
            )
            seconds.append([servers[peer].run(load)])

        turns = Turns(servers, {peer: [case] for peer, case in by_peer.items()}, on_round)
        turns.rounds(plan.server_rounds, run)
    return cases


@dataclass(frozen=True, slots=True)
class Drafter:
    """One way of drafting of one peer: a server that does nothing else, or a worker and an option of its call."""

    peer: str
    name: str
    process: Server | Worker
    option: dict[str, Any]

    def run(self, texts: Texts) -> float:
        """Answer the texts one after the other; the seconds they took.

        Raises:
            PeerError: a request failed or an answer is wrong.
        """
        if isinstance(self.process, Server):
            return self.process.run(texts)
        seconds = 0.0
        for prompt in texts.prompts():
            arguments = {"prompt": prompt, "max_tokens": texts.output_len, "option": self.option}
            result = self.process.call("generate", CALL_TIMEOUT_S, **arguments)
            verify_tokens(result["tokens"], answer(prompt, texts.output_len))
            seconds += result["seconds"]
        return seconds


def measure_speculation(drafters: list[Drafter], plan: Plan, on_round: Callable[[], None]) -> list[Case]:
    """Texts to be copied with edits, one at a time, from the request to its last token; a case is a way of drafting."""
    keys = {f"{drafter.peer}, {drafter.name}": drafter for drafter in drafters}
    work = plan.copy_prompts * plan.copy_output_len
    cases = {key: Case(drafter.name, drafter.peer, work) for key, drafter in keys.items()}
    turns = Turns(
        {key: drafter.process for key, drafter in keys.items()}, {key: [case] for key, case in cases.items()}, on_round
    )
    turns.once(lambda key: keys[key].run(_texts(plan, _WARM_UP_SEED)))
    turns.rounds(
        plan.server_rounds,
        lambda key: cases[key].seconds.append([keys[key].run(_texts(plan, len(cases[key].seconds)))]),
    )
    return list(cases.values())


def _texts(plan: Plan, seed: int) -> Texts:
    return Texts(
        num_requests=plan.copy_prompts,
        prompt_len=COPY_LEN,
        output_len=plan.copy_output_len,
        concurrency=1,
        seed=seed,
        is_copy=True,
    )


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
        """Wait until it answers, and check that its answer is right.

        Raises:
            PeerError: it has ended, takes too long, or answers with an error, the wrong text or none.
        """
        self.wait_ready()
        for prompt in (random_prompt(_CHECKED_TOKENS, -1), copy_prompt(-1)):
            self._verify_answer(prompt)

    def wait_ready(self) -> None:
        """Wait until it answers; raises PeerError where it has ended or takes too long."""
        end = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            if not self.is_alive() or time.monotonic() > end:
                raise PeerError(f"server: expected it to start, got: {self.last_line()}")
            time.sleep(_POLL_S)

    def tokenize(self, text: str) -> TokenIds:
        """Return the token ids of a chat whose only message is the text; this server has a route for it.

        A model without a chat template gets the text itself.
        """
        answer = httpx.post(f"{self._url}/tokenize", json={"messages": [{"role": "user", "content": text}]})
        if answer.status_code == httpx.codes.BAD_REQUEST:
            answer = httpx.post(f"{self._url}/tokenize", json={"prompt": text})
        tokens: TokenIds = answer.raise_for_status().json()["tokens"]
        return tokens

    def run(self, load: Load, extra: Mapping[str, Any] = MappingProxyType({})) -> float:
        """Send a load and return the seconds from its first request to its last token; `extra` is added to bodies.

        Raises:
            PeerError: a request failed, or got another number of tokens, or the load was not done in time.
        """
        client = LoadClient(self._url, self._model, None, load, extra)
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
