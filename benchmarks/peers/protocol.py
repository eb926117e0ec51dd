"""What the driver and a worker say to each other: one JSON object per line on the worker's stdin and stdout.

The driver sends {"command": NAME, ...arguments}; the worker answers {"result": {...}} or {"error": text}. Workers run
in the peers' environments, so this module needs the standard library only.

A worker holds one model and runs one thing at a time. Times are in seconds, measured around the peer's own call, the
choice of the greedy token included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO, TypedDict, TypeVar

TokenIds = list[int]
T = TypeVar("T")


class Settings(TypedDict):
    """How every peer is loaded.

    Attributes:
        threads: of computation.
        max_seqs: sequences that decode together.
        max_len: tokens of the longest of them.
        kv_cache_dtype: of our own server; the peers keep what they do by themselves.
    """

    threads: int
    max_seqs: int
    max_len: int
    kv_cache_dtype: str


class CannotError(Exception):
    """The peer has no way to do this; the text says why and appears in the record."""


class Peer(Protocol):
    """One model in one peer's library. What a peer cannot do raises CannotError."""

    def load(self, model: str, fmt: str, settings: Settings) -> dict[str, Any]:
        """Load a model in the peer's weight format `fmt`.

        Returns:
            "versions": name -> version, "kv_type": element type of the KV cache, "notes": what a reader should know.
        """

    def prefill(self, prompt: TokenIds) -> dict[str, Any]:
        """Compute a prompt that nothing is cached of and choose its first token; {"seconds", "tokens": [id]}."""

    def start(self, prompts: list[TokenIds]) -> dict[str, Any]:
        """Compute prompts of equal length, which then decode together; {"tokens": first id per sequence}."""

    def decode(self, steps: int) -> dict[str, Any]:
        """Give every started sequence `steps` tokens; {"seconds": per step, "tokens": ids per step and sequence}."""

    def stop(self) -> dict[str, Any]:
        """Drop the started sequences; {}."""

    def context(self, prompt: TokenIds) -> dict[str, Any]:
        """Compute a prompt that `forward` follows; {}."""

    def forward(self, rows: int, repeats: int) -> dict[str, Any]:
        """Run the model `repeats` times over `rows` tokens after the context, with logits for each; {"seconds"}."""

    def generate(self, prompt: TokenIds, max_tokens: int, option: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt from start to end with the peer's own drafting: {"tokens", "seconds"}; `option` {} = none."""
        raise CannotError("its drafting is a part of its server, which is measured over HTTP")


COMMANDS = ("load", "prefill", "start", "decode", "stop", "context", "forward", "generate")


class TimedCalls:
    """Collects how long calls take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def run(self, call: Callable[[], T]) -> T:
        """Call, remember the seconds, return what it returned."""
        begin = time.perf_counter()
        value = call()
        self.seconds.append(time.perf_counter() - begin)
        return value


def serve(peer: Peer) -> None:
    """Answer commands until stdin ends.

    What libraries print on standard output goes to standard error, so that it cannot be taken for an answer.
    """
    with _private_stdout() as answers:
        for line in sys.stdin:
            print(json.dumps(_answer(peer, json.loads(line))), file=answers, flush=True)


def _answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    command = request.pop("command")
    if command not in COMMANDS:
        return {"error": f"command: expected one of {', '.join(COMMANDS)}, got {command!r}"}
    try:
        return {"result": getattr(peer, command)(**request)}
    except Exception as error:  # a worker reports and lives: the driver shows the reason in the cell
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _private_stdout() -> Iterator[TextIO]:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        yield answers
