"""The routes by which an operator has new requests refused, and taken again. Knows no engine and no instance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.wire.http.error_format import JsonResponse
from fastdeploy_sd.wire.http.event_stream import until_disconnected

_MODE, _WAIT = "mode", "wait"
_POLL_S = 0.05


class Pausable(Protocol):
    """What takes requests, in parts that are chosen by name.

    Attributes:
        selectors: names of the fields that choose a part; without any it is the whole.

    Raises (from every method):
        NotFound, BadRequest: no part is chosen so. Unavailable: a part is down.
    """

    selectors: tuple[str, ...]

    async def set_paused(self, part: Mapping[str, str], *, is_paused: bool) -> None:
        """Refuse new requests from now on, or take them again; those that run go on."""

    async def num_requests(self, part: Mapping[str, str]) -> int:
        """Return how many requests have not ended."""

    def is_paused(self, part: Mapping[str, str]) -> bool:
        """Return whether all of the part refuses new requests."""


class PauseRoutes:
    """Answers them; vLLM has them at the top, FastDeploy below /v1."""

    def __init__(self, target: Pausable) -> None:
        self._target = target

    def add_to(self, app: FastAPI) -> None:
        for prefix in ("", "/v1"):
            app.add_api_route(f"{prefix}/pause", self.pause, methods=["POST"])
            app.add_api_route(f"{prefix}/resume", self.resume, methods=["POST"])
            app.add_api_route(f"{prefix}/is_paused", self.is_paused, methods=["GET"])

    async def pause(self, request: HttpRequest) -> Response:
        """Take no new requests from now on; answered when those that run have ended. Leaving early resumes nothing."""
        part = self._part(request, _MODE)
        if (mode := request.query_params.get(_MODE, _WAIT)) != _WAIT:
            text = f"mode: expected {_WAIT}, as requests that run are neither ended nor stopped, got {shown(mode)}"
            raise BadRequest(text, param=_MODE)
        await self._target.set_paused(part, is_paused=True)
        await until_disconnected(request.receive, self._idle(part))
        return await self._state(part)

    async def resume(self, request: HttpRequest) -> Response:
        """Take new requests again."""
        part = self._part(request)
        await self._target.set_paused(part, is_paused=False)
        return await self._state(part)

    async def is_paused(self, request: HttpRequest) -> Response:
        """Whether new requests are refused, and how many run or wait."""
        return await self._state(self._part(request))

    async def _state(self, part: Mapping[str, str]) -> Response:
        num_requests = await self._target.num_requests(part)
        return JsonResponse({"is_paused": self._target.is_paused(part), "num_requests": num_requests})

    async def _idle(self, part: Mapping[str, str]) -> None:
        """Wait until nothing runs, or new requests are taken again."""
        while self._target.is_paused(part) and await self._target.num_requests(part):
            await asyncio.sleep(_POLL_S)

    def _part(self, request: HttpRequest, *others: str) -> dict[str, str]:
        given = dict(request.query_params)
        for name in given:
            if name not in (*self._target.selectors, *others):
                known = ", ".join((*self._target.selectors, *others))
                raise BadRequest(f"query: expected only {known}, got {shown(name)}", param=name)
        return {name: value for name, value in given.items() if name in self._target.selectors}
