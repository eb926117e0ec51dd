"""A bar on the terminal while an LLM works: tokens, their rate, and what drafts are worth. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Self

from tqdm import tqdm

from fastdeploy_sd.types import Request, RequestId
from fastdeploy_sd.types.stats import EngineStats

_REFRESH_S = 0.5


class TokenProgress:
    """Counts tokens of sequences that run side by side. Tokens that a sequence ends without are taken off the total.

    Args:
        requests: one per sequence.
        stats: the engine's counters; asked now and then.
        is_wanted: False = nothing is shown; else it is if standard error is a terminal.
    """

    def __init__(self, requests: Iterable[Request], stats: Callable[[], EngineStats], *, is_wanted: bool) -> None:
        self._left = {request.request_id: request.max_tokens for request in requests}
        self._num_sequences, self._total = len(self._left), sum(self._left.values())
        self._stats = stats
        # disable=None: no bar unless standard error is a terminal.
        disable = None if is_wanted else True
        self._bar = tqdm(total=self._total, desc="generating", unit="tok", disable=disable)
        self._before = EngineStats() if self._bar.disable else stats()
        self._next_look = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:
            self._describe()
        self._bar.close()

    def add(self, request_id: RequestId, num_tokens: int, *, is_last: bool) -> None:
        """Count what a step gave a sequence."""
        self._left[request_id] -= num_tokens
        if is_last:
            self._total -= self._left.pop(request_id)
            self._bar.total = self._total
        if self._bar.disable:
            return
        if time.monotonic() >= self._next_look:
            self._describe()
            self._next_look = time.monotonic() + _REFRESH_S
        self._bar.update(num_tokens)

    def _describe(self) -> None:
        parts = [f"{self._num_sequences - len(self._left)}/{self._num_sequences} done"]
        now, before = self._stats(), self._before
        num_verified = now.num_draft_tokens - before.num_draft_tokens
        if num_verified:
            num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
            parts.append(f"{num_accepted / num_verified:.0%} of drafts accepted")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
