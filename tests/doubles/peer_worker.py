"""A peer's worker whose model counts: it answers the driver's commands without computing anything.

peer_worker.py [FAULT]    FAULT: the command it goes wrong in, as WRONG, SILENT or DEAD, e.g. "decode=WRONG"
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.peers.counting import next_token
from benchmarks.peers.protocol import CannotError, Peer, Settings, TokenIds, serve


class Counting(Peer):
    """Every step takes a thousandth of a second per row, it says."""

    def __init__(self, fault: str) -> None:
        self._command, _, self._kind = fault.partition("=")
        self._last: TokenIds = []

    def load(self, model: str, fmt: str, settings: Settings) -> dict[str, Any]:
        """Tells what it was given, on standard output too, as libraries do."""
        print("a library says hello")
        return {"versions": {"counting": "1"}, "kv_type": fmt, "notes": f"{model} {settings['threads']}"}

    def prefill(self, prompt: TokenIds) -> dict[str, Any]:
        return {"seconds": 0.5, "tokens": self._answer("prefill", [next_token(prompt[-1])])}

    def start(self, prompts: list[TokenIds]) -> dict[str, Any]:
        self._last = [next_token(prompt[-1]) for prompt in prompts]
        return {"tokens": self._answer("start", self._last)}

    def decode(self, steps: int) -> dict[str, Any]:
        tokens = []
        for _ in range(steps):
            self._last = [next_token(token) for token in self._last]
            tokens.append(self._answer("decode", self._last))
        return {"seconds": [9.0] + [1e-3 * len(self._last)] * (steps - 1), "tokens": tokens}

    def stop(self) -> dict[str, Any]:
        return {}

    def context(self, prompt: TokenIds) -> dict[str, Any]:
        return {}

    def forward(self, rows: int, repeats: int) -> dict[str, Any]:
        self._answer("forward", [])
        return {"seconds": [9.0] + [1e-3 * rows] * (repeats - 1)}

    def generate(self, prompt: TokenIds, max_tokens: int, option: dict[str, Any]) -> dict[str, Any]:
        """The option says how many tokens a second."""
        if not option:
            raise CannotError("this peer only drafts")
        tokens = []
        token = prompt[-1]
        for _ in range(max_tokens):
            token = next_token(token)
            tokens.append(token)
        return {"tokens": self._answer("generate", tokens), "seconds": max_tokens / option["speed"]}

    def _answer(self, command: str, tokens: TokenIds) -> TokenIds:
        if command != self._command:
            return tokens
        if self._kind == "SILENT":
            time.sleep(60)
        if self._kind == "DEAD":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        return [0 for _ in tokens]


if __name__ == "__main__":
    serve(Counting(*sys.argv[1:] or [""]))
