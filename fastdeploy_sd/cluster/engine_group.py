"""EngineGroup: a client of all engines of a model, whose requests go on at another engine when theirs is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fastdeploy_sd.cluster.adapter_changes import change_adapter, restore_adapters
from fastdeploy_sd.cluster.grouped_engine import GroupedEngine
from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.cluster.moving import MovingRequests
from fastdeploy_sd.cluster.placement import PrefixTable
from fastdeploy_sd.cluster.readiness import Readiness
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.errors import FdsdError, Overloaded, Unavailable
from fastdeploy_sd.types import AdapterSource, FinishReason, ModelInfo, Request, RequestId, RequestOutput
from fastdeploy_sd.types.experts import ExpertReport
from fastdeploy_sd.types.stats import EngineState, EngineStats

logger = logging.getLogger(__name__)

_MAX_LOSSES = 4
_LOOK_S = 0.05
_AGAIN_S = 1.0  # a full engine is asked again after so long by a request that was accepted before


class EngineGroup:
    """Submits each request to the engine with the least to do, or one that has seen the beginning of its prompt where
    that is hardly fuller.

    Belongs to one event loop. One that is lost is connected again as soon as it has been started again; its requests go
    on at the others meanwhile, or wait for it. An only engine that is not started again ends the group with its
    process, as `EngineClient` says.

    Args:
        addresses: of the engines.
        timeout_s: as of EngineClient, and how long requests wait for an engine (Readiness).
        shares_experts: engines need one another's; one that waits for another, which is stopped or being started
            again, is not silent.
        is_replaced: an engine that is lost is started again, also if it is the only one.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float | None = None,
        *,
        shares_experts: bool = False,
        is_replaced: bool = False,
    ) -> None:
        self._timeout_s, self._shares_experts = timeout_s, shares_experts
        self._is_replaced = is_replaced or len(addresses) > 1
        self._engines = [GroupedEngine(address) for address in addresses]
        self._keepers: list[asyncio.Task[None]] = []
        self._drain = asyncio.Event()
        self._readiness = Readiness(self._engines, self._drain, timeout_s if self._is_replaced else None)
        self._seen = PrefixTable()
        self._moving = MovingRequests(self._place_here, self._run_here, self._note_loss, _MAX_LOSSES)
        self.on_silence: Callable[[int], None] = lambda pid: None
        self.restores_pauses = False  # of a server's processes one does

    async def connect(self, *, to_all: bool = False) -> None:
        """Wait until one engine, or all of them, has loaded its model; Unavailable: none will."""
        self._keepers = [asyncio.create_task(self._keep(engine)) for engine in self._engines]
        waits = [asyncio.create_task(engine.is_known.wait()) for engine in self._engines]
        ended = asyncio.create_task(self.wait_ended())
        ready = asyncio.create_task(
            asyncio.wait(waits, return_when=asyncio.ALL_COMPLETED if to_all else asyncio.FIRST_COMPLETED)
        )
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*waits, ready, ended):
                task.cancel()
        if not ready.done():
            raise Unavailable("the engine ended before it was ready", code="engine_down")

    async def close(self) -> None:
        """Abort what is left, end the conversations and free the sockets. May be called twice."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for engine in self._engines:
            if engine.client is not None:
                await engine.client.close()

    async def wait_ended(self) -> None:
        """Wait until no engine is left, and none will be started again."""
        await asyncio.wait(self._keepers)

    async def wait_answered(self) -> None:
        """Wait until no request is left that can be answered after the engines' end; here none can."""

    def begin_drain(self) -> None:
        """Take no new requests from now on, also before the engines have announced their drain."""
        self._drain.set()
        for engine in self._engines:
            if engine.client is not None:
                engine.client.begin_drain()

    @property
    def model_infos(self) -> tuple[ModelInfo | None, ...]:
        """What each engine has loaded, of a lost one the last time; None = not loaded yet."""
        return tuple(engine.model_info for engine in self._engines)

    @property
    def model_info(self) -> ModelInfo:
        """The loaded model, as the engine with the smallest cache has it; Unavailable before `connect` has returned."""
        known = [info for info in self.model_infos if info is not None]
        if not known:
            raise Unavailable("the engine is not ready")
        info, adapters = min(known, key=lambda info: info.max_request_tokens), self.adapters
        return info if info.adapters == adapters else replace(info, adapters=adapters)

    @property
    def states(self) -> tuple[EngineState, ...]:
        """How each engine is doing."""
        return tuple(engine.state for engine in self._engines)

    @property
    def loads(self) -> tuple[InstanceLoad, ...]:
        """What each engine has to do, as it said last."""
        return tuple(engine.said_load for engine in self._engines)

    @property
    def load(self) -> InstanceLoad:
        """What all engines have to do."""
        return InstanceLoad.total(self.loads)

    async def stats(self) -> dict[int, EngineStats]:
        """Return the statistics of the engines that answer within seconds, by number; Unavailable: none does."""
        clients = {number: engine.client for number, engine in enumerate(self._engines)}
        asked = {number: client.stats() for number, client in clients.items() if client is not None}
        answers = dict(zip(asked, await asyncio.gather(*asked.values(), return_exceptions=True), strict=True))
        found = {number: answer for number, answer in answers.items() if isinstance(answer, EngineStats)}
        if not found:
            raise next(
                (answer for answer in answers.values() if isinstance(answer, BaseException)),
                Unavailable("the engine is down", code="engine_down"),
            )
        return found

    async def stats_of(self, engine: int) -> EngineStats:
        """Return the statistics of one engine, as `EngineClient.stats`; Unavailable also while it is down."""
        return await self._client_of(engine).stats()

    async def experts(self, *, rearranges: bool = False, clears: bool = False) -> ExpertReport:
        """Return where experts are, as `EngineClient.experts` of the first engine, which places them."""
        return await self._client_of(0).experts(rearranges=rearranges, clears=clears)

    @property
    def adapters(self) -> tuple[AdapterSource, ...]:
        """The adapters that requests may name: those that some engine has, each name once."""
        found: dict[str, AdapterSource] = {}
        for info in self.model_infos:
            for source in () if info is None else info.adapters:
                found.setdefault(source.adapter.name, source)
        return tuple(found.values())

    async def change_adapter(self, name: str, folder: str | None) -> AdapterSource:
        """Have all engines load an adapter from a folder, or unload it if that is None, or none of them.

        Raises BadRequest, NotFound: as AdapterRegistry; Unavailable: an engine is down.
        """
        return await change_adapter([self._client_of(number) for number in range(len(self._engines))], name, folder)

    async def set_paused(self, engine: int, *, is_paused: bool) -> None:
        """Have new requests refused for an engine, or taken again, by all who take them in; raises as `stats_of`."""
        await self._client_of(engine).set_paused(is_paused=is_paused)

    def verify_takes_requests(self) -> None:
        """Raise Unavailable, as `Readiness.verify_takes_requests`."""
        self._readiness.verify_takes_requests()

    async def verify_healthy(self) -> None:
        """Raise Unavailable unless an engine takes new requests now."""
        self._readiness.verify_healthy()

    def generate(self, request: Request, engine: int | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, as `EngineClient.generate`; at this engine only, or at any."""
        if engine is None and not self._is_replaced:
            engine = 0
        return self._moving.generate(request) if engine is None else self._run_here(engine, request)

    async def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests now, as `EngineClient.abort`."""
        wanted = tuple(request_ids)
        self._moving.note_ending(wanted)
        for engine in self._engines:
            if engine.client is not None:
                await engine.client.abort(wanted, reason)

    async def _place_here(self, request: Request, avoided: set[str], error: FdsdError | None) -> int:
        """Choose an engine. When there is none a new request waits for one a while, one that has lost its own longer.

        `error`: of the engine that it has lost; an Overloaded is raised when no other engine has a place.
        """
        keys = self._seen.keys_of(request.prompt_token_ids.tobytes(), request.adapter_digest + request.cache_salt)
        began = time.monotonic()
        while (chosen := self._seen.choose(self._able(avoided, request.adapter_digest), keys)) is None:
            self._readiness.verify_may_wait(request, error, began)
            await self._readiness.pause(_LOOK_S, is_new=error is None)
            if time.monotonic() >= began + _AGAIN_S:
                avoided.clear()
        return int(chosen)

    def _able(self, avoided: set[str], adapter_digest: str) -> dict[str, InstanceLoad]:
        engines = {str(number): engine for number, engine in enumerate(self._engines)}
        fit = {n: e for n, e in engines.items() if n not in avoided and e.has_adapter(adapter_digest)}
        able = {name: engine for name, engine in fit.items() if engine.load.takes_requests}
        # What is placed now was taken in before all were paused.
        able = able or {name: engine for name, engine in fit.items() if engine.state.is_paused}
        # One that has just been started has not said yet what it can do; they are all alike.
        max_num_seqs = max(engine.load.max_num_seqs for engine in self._engines)
        return {name: replace(engine.load, max_num_seqs=max_num_seqs) for name, engine in able.items()}

    def _run_here(self, number: int, request: Request) -> AsyncGenerator[RequestOutput, None]:
        return self._client_of(number).generate(request)

    def _client_of(self, number: int) -> EngineClient:
        client = self._engines[number].client
        if client is None:
            raise Unavailable("the engine is down", code="engine_down")
        return client

    def _note_loss(self, request: Request, number: int, error: FdsdError, avoided: set[str]) -> None:
        if isinstance(error, Overloaded):
            avoided.add(str(number))
        else:
            logger.warning("request %s leaves engine %d: %s", request.request_id, number, error.message)

    async def _keep(self, engine: GroupedEngine) -> None:
        """Connect an engine, and each of its successors."""
        while True:
            client = EngineClient(engine.address, self._timeout_s)
            client.on_silence = self.on_silence
            client.may_wait = partial(self._may_wait, client)
            if await self._connect(client):
                await restore_adapters(client, engine.model_info, self.adapters)
                with suppress(Unavailable):
                    if self.restores_pauses and engine.is_paused:
                        await client.set_paused(is_paused=True)
                engine.enter(client)
                if self._drain.is_set():
                    client.begin_drain()
                await client.wait_ended()
                engine.is_paused = client.is_paused
            if self._drain.is_set() or not self._is_replaced:
                return
            engine.leave()
            await client.close()

    def _may_wait(self, client: EngineClient) -> bool:
        """Whether an engine may wait inside a step for the experts of another one."""
        if not self._shares_experts or _is_stopped(client):
            return False
        others = (engine.client for engine in self._engines if engine.client is not client)
        return any(other is None or _is_stopped(other) for other in others)

    async def _connect(self, client: EngineClient) -> bool:
        """Connect a client unless a drain begins before the engine is there, or the engine ends at once."""
        connecting = asyncio.create_task(client.connect())
        draining = asyncio.create_task(self._drain.wait())
        try:
            await asyncio.wait({connecting, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            is_connected = connecting.done() and connecting.exception() is None
            if not is_connected:
                await client.close()
                with suppress(Unavailable):
                    await connecting
        return is_connected


def _is_stopped(client: EngineClient) -> bool:
    """Whether a signal has stopped an engine's process."""
    return client.heart is not None and client.heart.is_stopped
