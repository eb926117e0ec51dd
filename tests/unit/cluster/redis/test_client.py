"""What a server makes of the records in Redis: whether it is healthy, and who computes a prompt's KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

import pytest

from fastdeploy_sd.cluster.membership import InstanceLoad, Member
from fastdeploy_sd.cluster.redis.client import ClusterClient
from fastdeploy_sd.cluster.redis.deployment import codec_for, digest_of
from fastdeploy_sd.cluster.redis.frames import CLUSTER, Record
from fastdeploy_sd.cluster.redis.store import Store
from fastdeploy_sd.config import Config, RedisConfig, SplitwiseConfig
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.metrics import RedisStats
from fastdeploy_sd.types import Adapter, KvDescription, ModelInfo
from tests.doubles.engines import toy_config, toy_info, toy_request
from tests.doubles.redis_server import PASSWORD, RedisServer, running_redis
from tests.unit.engine.ipc.hosts import WAIT_S, hosted

pytestmark = pytest.mark.slow

Role = Literal["mixed", "prefill", "decode"]
KV = KvDescription("CPU", "model", 4, "bfloat16", 2, 2, 16, (512, 512))
DRAFTING = replace(KV, page_bytes=(512, 512, 768), draft_fingerprint="mtp")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Cluster:
    """A client of a toy engine in a role, and the records of others in the hands of the test."""

    def __init__(self, client: ClusterClient, config: Config, store: Store) -> None:
        self.client, self._config, self._store = client, config, store

    async def add(self, name: str, role: str, kv: KvDescription, *adapters: Adapter) -> None:
        """Write the record of an instance."""
        info = self.client.model_info
        _, now = await self._store.read_records(CLUSTER)
        address = f"tcp://127.0.0.1:{len(name)}" if role == "prefill" else ""
        member = Member(name, role, digest_of(info), info.max_request_tokens, address, kv, adapters)
        record = Record(member, f"server of {name}", 0, now, now, info.speculation, InstanceLoad(max_num_seqs=8), 8)
        frame = codec_for(self._config, info).encode(f"{CLUSTER}.{name}", record)
        await self._store.write_record(CLUSTER, name, frame, WAIT_S)
        await asyncio.sleep(0.01)  # what was read before is good for some milliseconds

    async def target(self, adapter: Adapter | None = None) -> str | None:
        """Who runs a request."""
        request = replace(toy_request("r", range(2, 20)), adapter=adapter)
        target = await self.client._choose(request, set())
        return None if target is None else target.instance

    async def source(self) -> str | None:
        """Who computes the KV of a prompt."""
        target = await self.client._choose(toy_request("r", range(2, 20)), set())
        assert target is not None
        return None if target.kv_source is None else target.kv_source.instance_id


@asynccontextmanager
async def clustered(redis: RedisServer, role: Role, kv: KvDescription) -> AsyncIterator[Cluster]:
    redis.do("FLUSHALL")
    # The records hold for as long as a test takes.
    shared = RedisConfig("splitwise", port=redis.port, password=PASSWORD, topic="t", expire_period_ms=600_000)
    config = replace(
        toy_config(), redis=shared, splitwise=SplitwiseConfig(splitwise_role=role, pd_secret="a secret of the tests")
    )
    info: ModelInfo = replace(toy_info(), fingerprint="toy", kv=kv)
    async with hosted(config=config, info=info) as host:
        client = ClusterClient([host.address], config, "this server", RedisStats())
        store = Store(shared, RedisStats())
        try:
            await asyncio.wait_for(client.connect(), WAIT_S)
            yield Cluster(client, config, store)
        finally:
            await client.close()
            await store.close()


async def test_a_prefill_instance_is_healthy_when_it_has_found_one_that_generates(redis: RedisServer) -> None:
    async with clustered(redis, "prefill", KV) as cluster:
        for name in ("", "another"):
            if name:
                await cluster.add(name, "prefill", KV)
            with pytest.raises(Unavailable) as caught:
                await cluster.client.verify_healthy()
            assert caught.value.code == "no_instance"
        await cluster.add("decode", "decode", KV)
        await cluster.client.verify_healthy()
        cluster.client.begin_drain()
        with pytest.raises(Unavailable, match="draining"):
            await cluster.client.verify_healthy()


@pytest.mark.parametrize("role", ["mixed", "decode"])
async def test_others_are_healthy_alone(redis: RedisServer, role: Role) -> None:
    async with clustered(redis, role, KV) as cluster:
        await cluster.client.verify_healthy()


async def test_a_prompt_is_computed_where_its_kv_fits(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with clustered(redis, "decode", DRAFTING) as cluster:
        await cluster.add("plain", "prefill", KV)
        for _ in range(3):
            assert await cluster.source() is None
        [line] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert line == (
            "decode instance (this one) takes no KV of prefill instance plain: draft layers: expected at least 1"
            " as on the decode instance, got 0 on the prefill instance"
        )
        await cluster.add("drafting", "prefill", DRAFTING)
        for _ in range(3):
            assert await cluster.source() == "drafting"


async def test_a_request_with_an_adapter_goes_to_who_has_it(redis: RedisServer) -> None:
    own, other = Adapter("tuned", "aa" * 16), Adapter("tuned", "bb" * 16)
    async with clustered(redis, "mixed", KV) as cluster:
        await cluster.add("other", "mixed", KV, other)
        assert await cluster.target(own) is None
        await cluster.add("own", "mixed", KV, own)
        assert {await cluster.target(own) for _ in range(5)} == {"own"}
        assert {await cluster.target(other) for _ in range(5)} == {"other"}
