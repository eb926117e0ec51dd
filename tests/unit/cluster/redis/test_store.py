"""The connection to Redis, without one."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy_sd.cluster.redis.store import Store
from fastdeploy_sd.config import RedisConfig
from fastdeploy_sd.metrics import RedisStats

pytestmark = pytest.mark.slow


async def test_a_cancellation_reaches_its_task_whatever_the_client_library_does_with_it() -> None:
    """The library swallows one now and then: a request whose client has left would go on, and never end."""
    store = Store(RedisConfig(), RedisStats())
    asked, steps = asyncio.Event(), list[str]()

    async def answer() -> int:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            steps.append("swallowed")
        return 1

    async def go_on() -> None:
        await store._do("push", answer())
        steps.append("went on")

    task = asyncio.create_task(go_on())
    await asked.wait()
    assert task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    await store.close()
    assert steps == ["swallowed"]
