"""ClusterClient: an EngineClient whose requests may run at other instances, and go on elsewhere when those are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_sd.cluster.placement import Load, PrefixTable
from fastdeploy_sd.cluster.redis.cluster import ClusterView
from fastdeploy_sd.cluster.redis.deployment import Terms, digest_of, sealer_of
from fastdeploy_sd.cluster.redis.frames import Record
from fastdeploy_sd.cluster.redis.origin import LostError, Origin, RemoteRequest
from fastdeploy_sd.cluster.redis.store import Store, StoreDown
from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.errors import BadRequest, FdsdError, Overloaded, Unavailable
from fastdeploy_sd.metrics import RedisStats
from fastdeploy_sd.types import (
    FinishReason,
    KvDescription,
    KvSource,
    Request,
    RequestId,
    RequestOutput,
    Speculation,
)
from fastdeploy_sd.types.kv_description import mismatch
from fastdeploy_sd.wire.codec import ProtocolError

logger = logging.getLogger(__name__)

# This server's own engine, among the instances.
_HERE = ""
_MAX_MOVES = 8
_MAX_MENTIONED = 1000
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a request runs.

    Attributes:
        instance: its name; _HERE = the own engine.
        max_queued: messages that may wait for it.
        kv_source: who computes the prompt's KV; None = the instance itself.
    """

    instance: str
    max_queued: int = 0
    kv_source: KvSource | None = None


class ClusterClient(EngineClient):
    """Submits each request to the instance with the least to do, or one that has seen the beginning of its prompt where
    that is hardly fuller; the own one, which needs no Redis, comes before others that are alike.

    A request whose instance is lost, refuses it or ends goes on at another one behind the tokens that have come: the
    reader of `generate` sees the same outputs. While Redis is down everything runs here, if this instance decodes. What
    a router has sent here with a source of its KV begins here.

    Args:
        address, engine_pid: as EngineClient.
        config: of this server.
        server: its name, which is in the record of its own instance.
        stats: where this process counts.
    """

    def __init__(self, address: str, engine_pid: int, config: Config, server: str, stats: RedisStats) -> None:
        super().__init__(address, engine_pid, config.engine_timeout_s)
        self._config, self._server = config, server
        self._terms = Terms.of(config)
        self._store = Store(config.redis, stats)
        self._view: ClusterView | None = None
        self._seen = PrefixTable()
        self._origin: Origin | None = None
        self._remotes: dict[RequestId, RemoteRequest] = {}
        self._mentioned: set[tuple[str, ...]] = set()
        self._decodes = config.splitwise.splitwise_role != "prefill"

    async def connect(self) -> None:
        """As EngineClient; Redis is not waited for.

        Raises:
            ConfigError: the deployment's secret cannot be had.
        """
        await super().connect()
        sealer = sealer_of(self._config, self.model_info)
        redis, serves = self._config.redis, digest_of(self.model_info)
        self._view = ClusterView(self._store, sealer, serves, redis.sync_period_ms / 1000, self._terms.expire_s)
        self._origin = Origin(self._store, sealer, self._terms, redis.reader_batch_size)

    async def close(self) -> None:
        """Abort what is left, here and elsewhere, and free everything. May be called twice."""
        if self._origin is not None:
            await self._origin.close()
        if self._view is not None:
            await self._view.close()
        self._origin = self._view = None
        await self._store.close()
        await super().close()

    async def wait_answered(self) -> None:
        """Wait until no request runs elsewhere, no longer than a drain may take."""
        if self._origin is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.server.shutdown_timeout_s):
                    await self._origin.wait_idle()

    async def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> None:
        """As EngineClient, wherever the requests run."""
        wanted = tuple(request_ids)
        if self._origin is not None:
            for remote in filter(None, map(self._remotes.get, wanted)):
                self._origin.end(remote, reason)
        await super().abort(wanted, reason)

    async def verify_healthy(self) -> None:
        """As EngineClient; a prefill instance needs another instance, which generates.

        Raises:
            Unavailable: as there; `code` is "no_instance" where that is missing.
        """
        await super().verify_healthy()
        if not self._decodes and self._view is not None:
            await self._view.refresh()
            if not any(record.role != "prefill" for record in self._view.records()):
                text = "expected a decode instance in Redis that a prefill instance gives its requests to, got none"
                raise Unavailable(text, code="no_instance")

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """As EngineClient.

        Raises:
            FdsdError: as there; Unavailable also when no instance is left that could run it.
        """
        self.verify_takes_requests()
        avoided: set[str] = set()
        tokens: list[int] = []
        error: FdsdError | None = None
        for _ in range(_MAX_MOVES):
            target = await self._place(request, avoided, error)
            self._store.stats.requests["kept" if target.instance == _HERE else "pushed"] += 1
            try:
                async with aclosing(self._run(target, _resumed(request, tokens))) as outputs:
                    async for output in outputs:
                        tokens += output.token_ids
                        yield output
                return
            except (Overloaded, Unavailable) as failure:
                error = failure
                self._note_failure(request, target, failure, avoided)
        assert error is not None, "a round that does not fail returns"
        raise error

    def _note_failure(self, request: Request, target: _Target, error: FdsdError, avoided: set[str]) -> None:
        """Leave the instance out from now on, unless only something it was sent has been lost."""
        if error.code == "scheduler_ttl":
            raise error
        self._store.stats.moves[error.code or error.type] += 1
        if isinstance(error, StoreDown):  # until Redis tells of the instance again
            assert self._view is not None, "as _choose"
            self._view.forget(target.instance)
        elif not isinstance(error, LostError) or error.is_gone:
            avoided.add(target.instance)
        if not isinstance(error, Overloaded):
            logger.warning("request %s goes on elsewhere: %s", request.request_id, error.message)

    # ---- where ------------------------------------------------------------------------------------------------------

    async def _place(self, request: Request, avoided: set[str], error: FdsdError | None) -> _Target:
        """Choose an instance. A request that has begun somewhere waits for one as long as for a sign of life."""
        if request.kv_source is not None and _HERE not in avoided:
            return _Target(_HERE, kv_source=request.kv_source)
        waits_s = self._terms.timeout_s if isinstance(error, Unavailable) else 0.0
        loop = asyncio.get_running_loop()
        deadline = loop.time() + waits_s
        while True:
            target = await self._choose(request, avoided)
            if target is not None:
                return target
            if loop.time() >= deadline:
                raise error or Unavailable("no instance is there that could run the request", code="no_instance")
            await asyncio.sleep(_LOOK_S)

    async def _choose(self, request: Request, avoided: set[str]) -> _Target | None:
        assert self._view is not None, "called before it is connected, or after it is closed"
        await self._view.refresh()
        records = {record.instance: record for record in self._view.records()}
        able = {name: r for name, r in records.items() if name not in avoided and self._can_run(r, request)}
        loads = {name: self._view.load_of(record) for name, record in able.items()}
        if self._decodes and _HERE not in avoided:
            loads[_HERE] = self._own_load(records.values())
        keys = self._seen.keys_of(request.prompt_token_ids.tobytes(), request.cache_salt or "")
        name = self._seen.choose(loads, keys, home=_HERE)
        if name is None:
            return None
        record = self._own_record(records.values()) if name == _HERE else able[name]
        role = self._config.splitwise.splitwise_role if name == _HERE else able[name].role
        if record is not None:
            self._view.note_assigned(record.instance)
        kv = self.model_info.kv if name == _HERE else able[name].kv
        source = self._source(records.values(), name, kv, keys) if role == "decode" and kv is not None else None
        return _Target(name, 0 if name == _HERE else able[name].max_num_queued, source)

    def _can_run(self, record: Record, request: Request) -> bool:
        asks_for = request.speculation != Speculation()
        return (
            record.server != self._server
            and record.role != "prefill"
            and record.num_waiting < record.max_num_queued
            and len(request.prompt_token_ids) + request.max_tokens <= record.max_request_tokens
            and (not asks_for or record.speculation == self.model_info.speculation)
        )

    def _own_record(self, records: Iterable[Record]) -> Record | None:
        return next((record for record in records if record.server == self._server), None)

    def _own_load(self, records: Iterable[Record]) -> Load:
        assert self._view is not None, "as _choose"
        record = self._own_record(records)
        if record is not None:
            return self._view.load_of(record)
        stats = self.last_stats
        running, waiting = (0, 0) if stats is None else (stats.num_running, stats.num_waiting)
        return Load(running, waiting, self._config.scheduler.max_num_seqs)

    def _source(
        self, records: Iterable[Record], instance: str, kv: KvDescription, keys: Sequence[bytes]
    ) -> KvSource | None:
        """Choose who computes a prompt's KV for an instance whose KV is like this; None = nobody there can."""
        assert self._view is not None, "as _choose"
        sources: dict[str, Record] = {}
        for record in records:
            if record.role == "prefill" and record.kv_address and record.kv is not None:
                reason = mismatch(kv, record.kv)
                if reason is None:
                    sources[record.instance] = record
                else:
                    self._mention(instance or "(this one)", record.instance, reason)
        name = self._seen.choose({name: self._view.load_of(record) for name, record in sources.items()}, keys)
        if name is None:
            return None
        self._view.note_assigned(name)
        return KvSource(name, sources[name].kv_address)

    def _mention(self, *what: str) -> None:
        """Log once that two instances exchange no KV."""
        if what not in self._mentioned and len(self._mentioned) < _MAX_MENTIONED:
            self._mentioned.add(what)
            logger.warning("decode instance %s takes no KV of prefill instance %s: %s", *what)

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run(self, target: _Target, request: Request) -> AsyncGenerator[RequestOutput, None]:
        request = replace(request, kv_source=target.kv_source)
        return super().generate(request) if target.instance == _HERE else self._run_elsewhere(target, request)

    async def _run_elsewhere(self, target: _Target, request: Request) -> AsyncGenerator[RequestOutput, None]:
        origin = self._origin
        if origin is None:
            raise Unavailable("the client is closed", code="draining")
        try:
            remote = await origin.submit(target.instance, request, target.max_queued)
        except ProtocolError as error:
            raise BadRequest(f"request: expected at most what its limits allow: {error.message}") from None
        self._remotes[request.request_id] = remote
        is_ended = False
        try:
            while not is_ended:
                output = await remote.next(self._terms.ttl_s)
                is_ended = output.finish_reason is not None
                yield output
        except LostError:
            raise
        except FdsdError:
            is_ended = True
            raise
        finally:
            del self._remotes[request.request_id]
            origin.leave(remote, is_ended=is_ended)


def _resumed(request: Request, tokens: list[int]) -> Request:
    """The request as it goes on behind the tokens that have come."""
    if not tokens:
        return request
    given = np.array(tokens, dtype=request.output_token_ids.dtype)
    return replace(request, output_token_ids=np.concatenate([request.output_token_ids, given]))
