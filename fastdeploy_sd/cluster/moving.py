"""MovingRequests: requests that go on elsewhere when what runs them is lost. Knows no network and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from fastdeploy_sd.cluster.suspects import Losses, Suspects
from fastdeploy_sd.errors import ENGINE_FAILED, FdsdError, InternalError, Overloaded, Unavailable
from fastdeploy_sd.types import Request, RequestId, RequestOutput

_LOOK_S = 0.05
Target = TypeVar("Target", bound=Hashable)


@dataclass(eq=False, slots=True)
class _Running:
    request_id: RequestId
    is_ending: bool = False  # by its reader's wish
    losses: Losses = field(default_factory=Losses)


class MovingRequests(Generic[Target]):
    """Runs each request at a target and, when that refuses or loses it, at another one after the tokens that have come.

    The reader of `generate` sees the same outputs as if nothing had failed.

    Args:
        place: (request, avoided targets, last failure or None) -> a target; raises FdsdError: there is none.
        run: runs a request at a target, to its end or a failure.
        note_failure: (request, target, failure, avoided targets): adds to those what the request must not be given to
            again; raises the failure if the request is not to go on.
        max_losses: in a row that a request may have caused, as Suspects counts them; it ends with the last of them.
    """

    def __init__(
        self,
        place: Callable[[Request, set[str], FdsdError | None], Awaitable[Target]],
        run: Callable[[Target, Request], AsyncGenerator[RequestOutput, None]],
        note_failure: Callable[[Request, Target, FdsdError, set[str]], None],
        max_losses: int,
    ) -> None:
        self._place, self._run, self._note_failure = place, run, note_failure
        self._max_losses = max_losses
        self._running: set[_Running] = set()
        self._suspects = Suspects()

    def note_ending(self, request_ids: Iterable[RequestId]) -> None:
        """Requests are being ended by their readers: none of them goes on elsewhere."""
        wanted = frozenset(request_ids)
        for running in self._running:
            running.is_ending = running.is_ending or running.request_id in wanted

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request, as `EngineClient.generate`; Unavailable also when no target is left.

        Raises InternalError, with `code` "ends_engines": the request is likely to be what ended several engines.
        """
        avoided: set[str] = set()
        tokens: list[int] = []
        error: FdsdError | None = None
        running = _Running(request.request_id)
        self._running.add(running)
        try:
            while True:
                await self._suspects.wait_turn(running.losses)
                target = await self._place(request, avoided, error)
                if not self._suspects.may_begin(running.losses, target):
                    await asyncio.sleep(_LOOK_S)
                    continue
                self._suspects.begin(running.losses, target)
                try:
                    async with aclosing(self._run(target, _resumed(request, tokens))) as outputs:
                        async for output in outputs:
                            tokens += output.token_ids
                            self._suspects.note_tokens(running.losses, len(output.token_ids))
                            yield output
                    return
                except Overloaded as refusal:
                    error = error or refusal  # one that was accepted once waits
                    failure: FdsdError = refusal
                except Unavailable as loss:
                    error = failure = loss
                except InternalError as end:
                    if end.code != ENGINE_FAILED:
                        raise
                    error = failure = end
                if running.is_ending:
                    raise failure
                self._note_end(running.losses, failure)
                self._note_failure(request, target, failure, avoided)
        finally:
            self._running.remove(running)
            self._suspects.end(running.losses)

    def _note_end(self, losses: Losses, failure: FdsdError) -> None:
        """Count a loss; raise what ends the request if it was one too many."""
        if isinstance(failure, Overloaded):
            self._suspects.leave(losses)
            return
        self._suspects.note_loss(losses)
        if losses.count >= self._max_losses:
            if failure.code not in (ENGINE_FAILED, "engine_down"):
                raise failure
            text = f"{losses.count} engines ended when they had begun this request, which is likely to be the reason"
            raise InternalError(text, code="ends_engines")


def _resumed(request: Request, tokens: list[int]) -> Request:
    if not tokens:
        return request
    given = np.array(tokens, dtype=request.output_token_ids.dtype)
    return replace(request, output_token_ids=np.concatenate([request.output_token_ids, given]))
