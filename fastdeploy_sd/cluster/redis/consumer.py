"""RequestConsumer: runs the requests that come through Redis on an own engine, and sends their outputs back."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.membership import InstanceLoad, Member
from fastdeploy_sd.cluster.redis.deployment import LeaseConfig, codec_for, digest_of
from fastdeploy_sd.cluster.redis.frames import CLUSTER, Orders, Record, requests_of, results_of
from fastdeploy_sd.cluster.redis.origin_requests import Host, OriginRequests
from fastdeploy_sd.cluster.redis.store import Store, StoreDown, end_tasks
from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.metrics import RedisStats
from fastdeploy_sd.rules.requests import MAX_ID_CHARS
from fastdeploy_sd.types import FinishReason
from fastdeploy_sd.wire.codec import ProtocolError

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_LOAD_S = 0.25
_FLUSH_S = 2.0
# Each may hold a request of the greatest length.
_MAX_ORDERS = 16
# Records that are not written any more are removed after so many times of their validity.
_STALE = 10


class RequestConsumer:
    """An engine's place in the deployment: its record, its list of orders, and its links to origins.

    Should the engine be lost, its requests fail, and their origins have them go on elsewhere.
    """

    def __init__(
        self, name: str, engine: int, client: EngineGroup, config: Config, server: str, stats: RedisStats
    ) -> None:
        self._name, self._engine = name, engine
        self._client, self._store, self._lease = client, Store(config.redis, stats), LeaseConfig.of(config)
        self._config, self._server = config, server
        self._codec = codec_for(config, client.model_info)
        batch_size = config.redis.writer_batch_size
        self._host = Host(name, engine, client, self._store, self._codec, self._lease, batch_size)
        self._links: dict[str, OriginRequests] = {}
        self._offset_s: float | None = None
        self._load_at = 0.0
        self._is_down = False
        self._is_leaving = False

    def begin_drain(self) -> None:
        """Take no new requests: the record goes, and origins send to others."""
        self._client.begin_drain()
        self._is_leaving = True

    async def run(self) -> None:
        """Serve until the engine has ended; then leave nothing in Redis as far as it can be reached."""
        tasks = [asyncio.create_task(run()) for run in (self._take_orders, self._beat, self._drop_silent)]
        ended = asyncio.create_task(self._client.wait_ended())
        try:
            await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises: these never return
        finally:
            await end_tasks([ended, *tasks])
            await self._leave()

    async def _leave(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                with suppress(StoreDown):
                    await self._remove_record()
                await asyncio.sleep(0)  # requests learn that the engine has ended
                await asyncio.gather(*(link.flushed() for link in self._links.values()))
        for link in self._links.values():
            await link.close()
        with suppress(StoreDown):
            await self._store.remove(requests_of(self._name))
        await self._store.close()

    async def _take_orders(self) -> None:
        while True:
            try:
                frames = await self._store.take(requests_of(self._name), _MAX_ORDERS)
            except StoreDown as error:
                self._note_down(error)
                await asyncio.sleep(_RETRY_S)
                continue
            stopped = [request_id for frame in frames for request_id in self._take(frame)]
            if stopped:
                with suppress(Unavailable):
                    await self._client.abort(stopped, FinishReason.STOP)

    def _take(self, frame: bytes) -> list[str]:
        try:
            orders = self._codec.decode(requests_of(self._name), Orders, frame)
            if not 0 < len(orders.origin) < MAX_ID_CHARS // 2:
                raise ProtocolError(f"origin: expected a name, got {len(orders.origin)} characters")
        except ProtocolError as error:
            logger.error("an unreadable message in Redis is passed over: %s", error.message)
            self._store.stats.errors["unreadable"] += 1
            return []
        if orders.origin not in self._links:
            self._links[orders.origin] = OriginRequests(self._host, orders.origin)
        return self._links[orders.origin].take(orders)

    async def _drop_silent(self) -> None:
        """Origins that ask for nothing have nothing here, or are gone."""
        while True:
            await asyncio.sleep(self._lease.beat_s)
            oldest = time.monotonic() - self._lease.timeout_s
            for origin in [name for name, link in self._links.items() if link.heard_at < oldest]:
                await self._links.pop(origin).close()
                with suppress(StoreDown):
                    await self._store.remove(results_of(origin))

    async def _beat(self) -> None:
        written, load, clock = 0.0, InstanceLoad(), time.monotonic
        while True:
            try:
                now_load = await self._load()
                if clock() - written >= self._lease.beat_s:
                    await self._look()
                    written, load = clock(), now_load
                    await self._write_record(load)
                elif _news_of(now_load) != _news_of(load):
                    load = now_load
                    await self._write_record(load)
            except StoreDown as error:
                self._note_down(error)
            await asyncio.sleep(min(_LOAD_S, self._lease.beat_s))

    async def _load(self) -> InstanceLoad:
        """What the engine has to do; what is known of that while it is inside a long step."""
        asked_at = time.monotonic()
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(min(_LOAD_S, self._lease.beat_s)):
                await self._client.stats_of(self._engine)
            self._load_at = asked_at
        return self._client.loads[self._engine]

    async def _look(self) -> None:
        """Learn what Redis's clock says, and remove the records of instances that are long gone."""
        entries, now = await self._store.read_records(CLUSTER)
        if self._is_down:
            logger.warning("Redis answers again")
            self._is_down = False
        self._offset_s = now - time.monotonic()
        oldest = now - _STALE * self._lease.expire_s
        stale = [name for name, frame in entries.items() if self._is_older(name, frame, oldest)]
        if stale:
            await self._store.remove_records(CLUSTER, stale)

    def _is_older(self, name: str, frame: bytes, oldest: float) -> bool:
        try:
            return self._codec.decode(f"{CLUSTER}.{name}", Record, frame).sent_at < oldest
        except ProtocolError:
            return False  # not for us to judge

    async def _write_record(self, load: InstanceLoad) -> None:
        if not load.takes_requests:
            await self._remove_record()
            return
        if self._is_leaving or self._offset_s is None:
            return
        model = self._client.model_infos[self._engine]  # of an engine that was started again its address is another
        if model is None:
            return
        record = Record(
            member=Member.of(self._config, model, self._name, digest_of(model)),
            server=self._server,
            engine=self._engine,
            sent_at=time.monotonic() + self._offset_s,
            load_at=self._load_at + self._offset_s,
            speculation=model.speculation,
            load=load,
            max_num_queued=self._config.scheduler.max_num_queued_requests,
        )
        frame = self._codec.encode(f"{CLUSTER}.{self._name}", record)
        await self._store.write_record(CLUSTER, self._name, frame, _STALE * self._lease.expire_s)

    async def _remove_record(self) -> None:
        await self._store.remove_records(CLUSTER, [self._name])

    def _note_down(self, error: StoreDown) -> None:
        if not self._is_down:
            logger.error("%s: this instance takes no requests of others until it answers", error.message)
        self._is_down = True


def _news_of(load: InstanceLoad) -> tuple[bool, int, int]:
    return load.takes_requests, load.num_running, load.num_waiting
