"""Origin over a real Redis, where the test is the instance: what is lost, late or comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cluster.redis.deployment import LeaseConfig
from fastdeploy_sd.cluster.redis.frames import PROTOCOL, Answers, Item, Orders, RequestFailure, requests_of, results_of
from fastdeploy_sd.cluster.redis.origin import LostError, Origin, RemoteRequest
from fastdeploy_sd.cluster.redis.store import Store
from fastdeploy_sd.config import RedisConfig
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.errors import Overloaded, Unavailable
from fastdeploy_sd.metrics import RedisStats
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import FinishReason, Request, RequestOutput
from fastdeploy_sd.wire.protocol import SignedCodec
from tests.doubles.redis_server import PASSWORD, RedisServer, running_redis

pytestmark = pytest.mark.slow

WAIT_S = 120.0
INSTANCE = "instance"
CODEC = SignedCodec(PROTOCOL, b"k" * 32, "t", 1 << 20)
# No heartbeat within a test.
QUIET = LeaseConfig(1000.0, WAIT_S)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Side:
    """An origin, and the instance's side of the lists in the hands of the test."""

    def __init__(self, origin: Origin, store: Store) -> None:
        self.origin, self.store = origin, store

    async def submit(self, max_queued: int = 10) -> RemoteRequest:
        request = Request("mine", np.array([1, 2], np.int32), SamplingParams(), 10, 0)
        return await self.origin.submit(INSTANCE, request, max_queued)

    async def answer(self, **fields: Any) -> None:
        frame = CODEC.encode(results_of(self.origin.name), Answers(INSTANCE, **fields))
        await self.store.push(results_of(self.origin.name), frame, WAIT_S)

    async def orders(self) -> Orders:
        """The next message to the instance."""
        async with asyncio.timeout(WAIT_S):
            while not (frames := await self.store.take(requests_of(INSTANCE), 1)):
                pass
        return CODEC.decode(requests_of(INSTANCE), Orders, frames[0])


def item(handle: int, position: int, *tokens: int, is_last: bool = False) -> Item:
    return Item(handle, position, RequestOutput("", tokens, finish_reason=FinishReason.LENGTH if is_last else None))


@asynccontextmanager
async def connected(redis: RedisServer, lease: LeaseConfig) -> AsyncIterator[Side]:
    redis.do("FLUSHALL")
    store = Store(RedisConfig("splitwise", port=redis.port, password=PASSWORD, topic="t"), RedisStats())
    origin = Origin(store, CODEC, lease, batch_size=10)
    try:
        yield Side(origin, store)
    finally:
        await origin.close()
        assert not any("results" in key for key in list(redis.keys()))
        await store.close()


async def test_what_comes_twice_counts_once_and_a_gap_is_a_loss(redis: RedisServer) -> None:
    async with connected(redis, QUIET) as side:
        remote = await side.submit()
        h = remote.handle
        await side.answer(items=(item(h, 0, 5, 6), item(h, 0, 5, 6), item(h, 2, 7)))
        await side.answer(items=(item(h, 2, 7), item(h + 1, 0, 9)))
        await side.answer(items=(item(h, 4, 8),))
        outputs = [await remote.next(WAIT_S) for _ in range(2)]
        assert [output.token_ids for output in outputs] == [(5, 6), (7,)]
        assert {output.request_id for output in outputs} == {"mine"}
        with pytest.raises(LostError, match="lost on its way"):
            await remote.next(WAIT_S)


async def test_what_nobody_waits_for_is_ended_there(redis: RedisServer) -> None:
    async with connected(redis, QUIET) as side:
        remote, other = await side.submit(), await side.submit()
        sent = [submission for _ in range(2) for submission in (await side.orders()).submissions]
        assert [submission.handle for submission in sent] == [remote.handle, other.handle]
        side.origin.leave(remote)
        assert [ending.handle for ending in (await side.orders()).endings] == [remote.handle]
        await side.answer(items=(item(remote.handle, 0, 5), item(remote.handle, 1, 6, is_last=True)))
        assert [ending.handle for ending in (await side.orders()).endings] == [remote.handle]


async def test_an_unknown_request_is_lost_once_the_instance_must_know_it(redis: RedisServer) -> None:
    async with connected(redis, LeaseConfig(3.0, WAIT_S)) as side:
        remote = await side.submit()
        assert (await side.orders()).submissions
        question = await side.orders()
        assert question.waiting == (remote.handle,)
        await side.answer(beat=question.beat - 1, unknown=(remote.handle,))  # of a question that was asked before
        await side.answer(items=(item(remote.handle, 0, 5),))
        assert (await remote.next(WAIT_S)).token_ids == (5,)
        await side.answer(beat=question.beat, unknown=(remote.handle,))
        with pytest.raises(LostError, match="does not have the request") as caught:
            await remote.next(WAIT_S)
        assert not caught.value.is_gone


async def test_a_silent_instance_is_given_up(redis: RedisServer) -> None:
    async with connected(redis, LeaseConfig(0.3, WAIT_S)) as side:
        remote = await side.submit()
        with pytest.raises(LostError, match=r"has said nothing for 0\.6 s") as caught:
            await remote.next(WAIT_S)
        assert caught.value.is_gone


async def test_errors_come_as_they_were_and_time_runs_out(redis: RedisServer) -> None:
    async with connected(redis, QUIET) as side:
        remote, other = await side.submit(), await side.submit()
        error = WireError.of(Overloaded("full", retry_after_s=3))
        await side.answer(failures=(RequestFailure(remote.handle, error),))
        with pytest.raises(Overloaded, match="full") as caught:
            await remote.next(WAIT_S)
        assert caught.value.retry_after_s == 3
        with pytest.raises(Unavailable, match=r"got no token for 0\.01 s") as late:
            await other.next(0.01)
        assert late.value.code == "scheduler_ttl"


async def test_a_full_list_takes_no_more(redis: RedisServer) -> None:
    async with connected(redis, QUIET) as side:
        for _ in range(2):
            await side.submit(max_queued=2)
        with pytest.raises(Overloaded, match="3 messages wait for the instance, at most 2 may"):
            await side.submit(max_queued=2)


async def test_nothing_waits_for_a_closed_origin(redis: RedisServer) -> None:
    async with connected(redis, QUIET) as side:
        remote = await side.submit()
        await side.origin.close()
        with pytest.raises(Unavailable, match="the server shut down"):
            await remote.next(WAIT_S)
        await asyncio.wait_for(side.origin.is_idle.wait(), WAIT_S)
