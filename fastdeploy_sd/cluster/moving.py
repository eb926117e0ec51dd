"""MovingRequests: requests that go on elsewhere when what runs them is lost. Knows no network and no engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from fastdeploy_sd.errors import FdsdError, Overloaded, Unavailable
from fastdeploy_sd.types import Request, RequestId, RequestOutput

Target = TypeVar("Target")


@dataclass(eq=False, slots=True)
class _Running:
    request_id: RequestId
    is_ending: bool = False  # by its reader's wish


class MovingRequests(Generic[Target]):
    """Runs each request at a target and, when that refuses or loses it, at another one after the tokens that have come.

    The reader of `generate` sees the same outputs as if nothing had failed.

    Args:
        place: (request, avoided targets, last failure or None) -> a target; raises FdsdError: there is none.
        run: runs a request at a target, to its end or a failure.
        note_failure: (request, target, failure, avoided targets): adds to those what the request must not be given to
            again; raises the failure if the request is not to go on.
        max_placements: of one request.
    """

    def __init__(
        self,
        place: Callable[[Request, set[str], FdsdError | None], Awaitable[Target]],
        run: Callable[[Target, Request], AsyncGenerator[RequestOutput, None]],
        note_failure: Callable[[Request, Target, FdsdError, set[str]], None],
        max_placements: int,
    ) -> None:
        self._place, self._run, self._note_failure = place, run, note_failure
        self._max_placements = max_placements
        self._running: set[_Running] = set()

    def note_ending(self, request_ids: Iterable[RequestId]) -> None:
        """Requests are being ended by their readers: none of them goes on elsewhere."""
        wanted = frozenset(request_ids)
        for running in self._running:
            running.is_ending = running.is_ending or running.request_id in wanted

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request, as `EngineClient.generate`; Unavailable also when no target is left."""
        avoided: set[str] = set()
        tokens: list[int] = []
        error: FdsdError | None = None
        running = _Running(request.request_id)
        self._running.add(running)
        try:
            for _ in range(self._max_placements):
                target = await self._place(request, avoided, error)
                try:
                    async with aclosing(self._run(target, _resumed(request, tokens))) as outputs:
                        async for output in outputs:
                            tokens += output.token_ids
                            yield output
                    return
                except (Overloaded, Unavailable) as failure:
                    error = failure
                    if running.is_ending:
                        raise
                    self._note_failure(request, target, failure, avoided)
            assert error is not None, "a round that does not fail returns"
            raise error
        finally:
            self._running.remove(running)


def _resumed(request: Request, tokens: list[int]) -> Request:
    if not tokens:
        return request
    given = np.array(tokens, dtype=request.output_token_ids.dtype)
    return replace(request, output_token_ids=np.concatenate([request.output_token_ids, given]))
