"""ClusterClient: an EngineGroup whose requests may run at other instances, and go on elsewhere when those are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.membership import DECODE, Member
from fastdeploy_sd.cluster.moving import MovingRequests
from fastdeploy_sd.cluster.placement import Candidate, PrefixTable
from fastdeploy_sd.cluster.redis.cluster import ClusterView
from fastdeploy_sd.cluster.redis.deployment import LeaseConfig, codec_for, digest_of
from fastdeploy_sd.cluster.redis.frames import Record
from fastdeploy_sd.cluster.redis.origin import LostError, Origin, RemoteRequest
from fastdeploy_sd.cluster.redis.store import Store, StoreDown
from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ENGINE_FAILED, BadRequest, FdsdError, Overloaded, Unavailable
from fastdeploy_sd.metrics import RedisStats
from fastdeploy_sd.types import FinishReason, KvSource, Request, RequestId, RequestOutput, Speculation
from fastdeploy_sd.wire.codec import ProtocolError

logger = logging.getLogger(__name__)

_MAX_LOSSES = 8
_MAX_MENTIONED = 1000
_LOOK_S = 0.1
# What failed a request is asked again after so long, if there is no other: an engine may have been started again.
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a request runs: at an engine of this server, None = at another instance; and who computes its prompt's KV,
    None = the instance itself.
    """

    instance: str
    engine: int | None = None
    max_queued: int = 0
    kv_source: KvSource | None = None


class ClusterClient(EngineGroup):
    """Submits each request to the instance with the least to do, or one that has seen the beginning of its prompt where
    that is hardly fuller; own engines, which need no Redis, come before others that are alike.

    A request whose instance is lost, refuses it or ends goes on at another one after the tokens that have come: the
    reader of `generate` sees the same outputs. While Redis is down everything runs here, if this server decodes. What
    a router has sent here with a source of its KV begins here, and what it has sent to one of several engines stays.
    """

    def __init__(
        self, addresses: Sequence[str], config: Config, server: str, stats: RedisStats, *, is_replaced: bool = False
    ) -> None:
        """Take part for the engines of a model; `server`: as `model_server`."""
        shares_experts = config.parallel.shares_experts
        super().__init__(addresses, config.engine_timeout_s, shares_experts=shares_experts, is_replaced=is_replaced)
        self._config, self._server = config, server
        self._lease = LeaseConfig.of(config)
        self._store = Store(config.redis, stats)
        self._view: ClusterView | None = None
        self._seen_by = PrefixTable()
        self._moves = MovingRequests(self._place, self._run, self._note_failure, _MAX_LOSSES)
        self._origin: Origin | None = None
        self._remotes: dict[RequestId, RemoteRequest] = {}
        self._mentioned: set[tuple[str, ...]] = set()
        self._decodes = config.splitwise.splitwise_role != "prefill"

    async def connect(self, *, to_all: bool = False) -> None:
        """As EngineGroup; Redis is not waited for."""
        await super().connect(to_all=to_all)
        codec = codec_for(self._config, self.model_info)
        redis, fingerprint = self._config.redis, digest_of(self.model_info)
        self._view = ClusterView(self._store, codec, fingerprint, redis.sync_period_ms / 1000, self._lease.expire_s)
        self._origin = Origin(self._store, codec, self._lease, redis.reader_batch_size)

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
                    await self._origin.is_idle.wait()

    async def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> None:
        """As EngineGroup, wherever the requests run."""
        wanted = tuple(request_ids)
        self._moves.note_ending(wanted)
        if self._origin is not None:
            for remote in filter(None, map(self._remotes.get, wanted)):
                self._origin.end(remote, reason)
        await super().abort(wanted, reason)

    async def verify_healthy(self) -> None:
        """As EngineGroup; a prefill instance needs another one, which generates, or it raises Unavailable."""
        await super().verify_healthy()
        if not self._decodes and self._view is not None:
            await self._view.refresh()
            if not any(record.member.generates for record in self._view.records()):
                text = "expected a decode instance in Redis that a prefill instance gives its requests to, got none"
                raise Unavailable(text, code="no_instance")

    def generate(self, request: Request, engine: int | None = None) -> AsyncGenerator[RequestOutput, None]:
        """As EngineGroup; Unavailable also when no instance is left that could run it."""
        self.verify_takes_requests()
        if engine is None:
            return self._moves.generate(request)
        self._store.stats.requests["kept"] += 1
        return self._run_here(engine, request)

    def _note_failure(self, request: Request, target: _Target, error: FdsdError, avoided: set[str]) -> None:
        """Leave the instance out from now on, unless only something it was sent has been lost. An own engine that was
        lost takes requests again when it has been started again, and says so.
        """
        is_restarting = target.engine is not None and error.code in ("engine_down", ENGINE_FAILED)
        if error.code == "scheduler_ttl":
            raise error
        self._store.stats.moves[error.code or error.type] += 1
        if isinstance(error, StoreDown):  # until its record is read again
            assert self._view is not None, "as _choose"
            self._view.forget(target.instance)
        elif not is_restarting and (not isinstance(error, LostError) or error.is_gone):
            avoided.add(target.instance)
        if not isinstance(error, Overloaded):
            logger.warning("request %s goes on elsewhere: %s", request.request_id, error.message)

    async def _place(self, request: Request, avoided: set[str], error: FdsdError | None) -> _Target:
        """Choose an instance. A request that has begun somewhere waits for one as long as for a sign of life, a new one
        for an own engine that is being started again.
        """
        if request.kv_source is not None and _own_name(0) not in avoided:
            self._store.stats.requests["kept"] += 1
            return _Target(_own_name(0), 0, kv_source=request.kv_source)
        waits_s = 0.0 if error is None or isinstance(error, Overloaded) else self._lease.timeout_s
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            target = await self._choose(request, avoided)
            if target is not None:
                self._store.stats.requests["pushed" if target.engine is None else "kept"] += 1
                return target
            is_held = error is None and self._decodes and self._readiness.is_holding
            if is_held:
                self.verify_takes_requests()
            elif loop.time() >= began + waits_s:
                raise error or Unavailable("no instance is there that could run the request", code="no_instance")
            await self._readiness.pause(_LOOK_S, is_new=error is None)
            if loop.time() >= began + _AGAIN_S:
                avoided.clear()

    async def _choose(self, request: Request, avoided: set[str]) -> _Target | None:
        assert self._view is not None, "called before it is connected, or after it is closed"
        await self._view.refresh()
        records = {record.member.instance_id: record for record in self._view.records()}
        candidates = {name: self._view.candidate(record) for name, record in records.items()}
        able = {
            name: candidates[name] for name, r in records.items() if name not in avoided and self._can_run(r, request)
        }
        recorded = {r.engine: name for name, r in records.items() if r.server == self._server}
        own = self._own_candidates({engine: candidates[name] for engine, name in recorded.items()}, avoided)
        adapter = request.adapter_digest
        own = {engine: found for engine, found in own.items() if found.member.has_adapter(adapter)}
        keys = self._seen_by.keys_of(request.prompt_token_ids.tobytes(), request.adapter_digest + request.cache_salt)
        able |= {_own_name(engine): candidate for engine, candidate in own.items()}
        home = min(own, key=lambda engine: (own[engine].load.share, random.random()), default=0)
        placed = self._seen_by.place(able, candidates, keys, home=_own_name(home), adapter_digest=adapter)
        if placed is None:
            return None
        name, source = placed
        self._mention_mismatches(able[name].member, candidates.values())
        engine = next((number for number in own if _own_name(number) == name), None)
        for chosen in (name if engine is None else recorded.get(engine), source):
            if chosen is not None:
                self._view.note_assigned(chosen)
        max_queued = records[name].max_num_queued if engine is None else 0
        kv_source = None if source is None else KvSource(source, records[source].member.kv_address)
        return _Target(name, engine, max_queued, kv_source)

    def _own_candidates(self, recorded: Mapping[int, Candidate], avoided: set[str]) -> dict[int, Candidate]:
        """Return the engines of this server that can take a request, with what others know of them where they do."""
        found: dict[int, Candidate] = {}
        for engine, load in enumerate(self.loads):
            if self._decodes and load.takes_requests and _own_name(engine) not in avoided:
                member = Member.of(self._config, self.model_infos[engine] or self.model_info, "", "")
                found[engine] = Candidate(member, recorded[engine].load if engine in recorded else load)
        return found

    def _can_run(self, record: Record, request: Request) -> bool:
        asks_for = replace(request.speculation, token_sources=False) != Speculation()  # which every server can tell
        return (
            record.server != self._server
            and record.member.generates
            and record.member.has_adapter(request.adapter_digest)
            and record.load.num_waiting < record.max_num_queued
            and len(request.prompt_token_ids) + request.max_tokens <= record.member.max_model_len
            and (not asks_for or record.speculation == self.model_info.speculation)
        )

    def _mention_mismatches(self, member: Member, others: Iterable[Candidate]) -> None:
        if member.role != DECODE or member.kv is None:
            return
        for source in (other.member for other in others if other.member.computes_kv and other.member.kv is not None):
            pair = (member.instance_id or "(this one)", source.instance_id)
            reason = member.kv_mismatch(source)
            if reason is not None and pair not in self._mentioned and len(self._mentioned) < _MAX_MENTIONED:
                self._mentioned.add(pair)
                logger.warning("decode instance %s takes no KV of prefill instance %s: %s", *pair, reason)

    def _run(self, target: _Target, request: Request) -> AsyncGenerator[RequestOutput, None]:
        request = replace(request, kv_source=target.kv_source)
        if target.engine is None:
            return self._run_elsewhere(target, request)
        return self._run_here(target.engine, request)

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
                output = await remote.next(self._lease.ttl_s)
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


def _own_name(engine: int) -> str:
    """Name an engine of this server among instances, whose names have no colon."""
    return f":{engine}"
