"""Readiness: whether the engines of a group take requests, and how long requests wait for one that is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastdeploy_sd.cluster.grouped_engine import GroupedEngine
from fastdeploy_sd.errors import FdsdError, NotFound, Overloaded, Unavailable, paused
from fastdeploy_sd.types import Request

# Longer than an engine that was lost takes to load its model again.
_RESTART_S = 600.0
_MAX_HELD = 1024  # in each HTTP process


class Readiness:
    """See the module.

    When no engine is up a new request waits for one until `timeout_s` after the last was lost, at most _MAX_HELD of
    them. One that was accepted before waits until _RESTART_S after that.

    Args:
        drain: set when the server stops.
        timeout_s: None = engines are not started again, or nothing waits for them.
    """

    def __init__(self, engines: Sequence[GroupedEngine], drain: asyncio.Event, timeout_s: float | None) -> None:
        self._engines, self._drain, self._timeout_s = engines, drain, timeout_s
        self._num_held = 0

    def verify_takes_requests(self) -> None:
        """Raise Unavailable, with `code` "engine_down", "draining" or "paused", unless an engine takes new requests, or
        one will soon that is being started again.
        """
        refusal = self._refusal()
        if refusal is None or (self.is_holding and self._num_held < _MAX_HELD):
            return
        if self.is_holding:
            text = f"engines are being started again, and {_MAX_HELD} requests wait for one: try again"
            raise Unavailable(text, code="engine_down")
        raise refusal

    def verify_healthy(self) -> None:
        """Raise Unavailable, as `verify_takes_requests`, unless an engine takes new requests now."""
        if (refusal := self._refusal()) is not None:
            raise refusal

    @property
    def is_holding(self) -> bool:
        """Whether new requests wait while no engine takes them."""
        is_refusing = self._drain.is_set() or any(engine.state.is_paused for engine in self._engines)
        return not is_refusing and self._left_s(self._timeout_s) > 0

    def verify_may_wait(self, request: Request, error: FdsdError | None, began: float) -> None:
        """Raise what ends a request that has been waiting for an engine since `began`, if it shall not wait on.

        `error`: of the engine that it has lost, or was refused by; None = it is new.
        """
        if error is None:
            self.verify_takes_requests()
        if not any(engine.has_adapter(request.adapter_digest) for engine in self._engines):
            text = "model: expected an adapter that is loaded, got another"
            raise NotFound(text, param="model", code="adapter_not_loaded")
        left_s = self._left_s(self._timeout_s)
        if error is not None and self._timeout_s is not None:  # engines may be up, and full
            left_s = max(self._left_s(_RESTART_S), began + self._timeout_s - time.monotonic())
        if self._drain.is_set() or isinstance(error, Overloaded) or left_s <= 0:
            raise error or Unavailable("the engine is down", code="engine_down")

    async def pause(self, seconds: float, *, is_new: bool) -> None:
        """Let a request wait for an engine; new ones are counted."""
        self._num_held += is_new
        try:
            await asyncio.sleep(seconds)
        finally:
            self._num_held -= is_new

    def _refusal(self) -> Unavailable | None:
        """Why no engine takes new requests now; None = one does."""
        names = {engine.state.name for engine in self._engines}
        if "ready" in names and not self._drain.is_set():
            return None
        if "draining" in names:
            return Unavailable("the server is draining", code="draining")
        if "paused" in names and not self._drain.is_set():
            return paused("the server")
        return Unavailable("the engine is down", code="engine_down")

    def _left_s(self, limit_s: float | None) -> float:
        """Seconds until so long after the last loss of an engine; 0 = no request waits."""
        return 0.0 if limit_s is None else max(engine.lost_at for engine in self._engines) + limit_s - time.monotonic()
