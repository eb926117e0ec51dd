"""Engine loops over the toy model for the tests of this folder: in a thread, or as factories for a real process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import AdapterReader
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.engine.ipc.engine_loop import EngineLoop
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import ModelInfo, Request, RequestId, RequestOutput, SchedulerOutput
from fastdeploy_sd.types.stats import EngineStats
from fastdeploy_sd.wire.channel import ServerChannel, private_address
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.toy_executor import ToyExecutor

WAIT_S = 120.0
ENDLESS = 4000


class Gate:
    """Lets a test stop the engine inside a step and let it go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, plan: SchedulerOutput) -> None:
        self.entered.set()
        assert self._open.wait(WAIT_S), "the test never opened the gate"

    async def wait_entered(self) -> None:
        """Wait until the engine is in a step that began after `close`."""
        assert await asyncio.to_thread(self.entered.wait, WAIT_S), "the engine never stepped"


def dawdle(plan: SchedulerOutput) -> None:
    """Makes steps slow enough for a request of ENDLESS tokens to be still running whenever a test acts on it."""
    time.sleep(0.002)


class Host:
    """An engine loop in a thread of this process."""

    def __init__(
        self,
        address: str,
        config: Config,
        info: ModelInfo,
        before_step: Callable[[SchedulerOutput], None] | None,
        shutdown_timeout_s: float,
        adapters: AdapterReader | None = None,
    ) -> None:
        self.address = address
        self.executor = ToyExecutor(info, before_step=before_step)
        self.executor.adapters = adapters
        self.engine = Engine(config, self.executor)
        self.channel = ServerChannel(address)
        self.loop = EngineLoop(self.engine, self.channel, shutdown_timeout_s)
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.status = self.loop.run()

    async def ended(self) -> int:
        """Wait for the loop's end; return its exit status."""
        await asyncio.to_thread(self._thread.join, WAIT_S)
        assert self.status is not None, "the loop did not end"
        return self.status


@asynccontextmanager
async def hosted(
    *,
    config: Config | None = None,
    info: ModelInfo | None = None,
    before_step: Callable[[SchedulerOutput], None] | None = None,
    shutdown_timeout_s: float = WAIT_S,
    adapters: AdapterReader | None = None,
) -> AsyncIterator[Host]:
    """A host that is ended, and its engine checked, at the end."""
    with private_address() as address:
        config, info = config or toy_config(), info or toy_info(num_blocks=4096)
        host = Host(address, config, info, before_step, shutdown_timeout_s, adapters)
        try:
            yield host
        finally:
            host.loop.end_now()
            if await host.ended() == 0:
                host.engine.check_integrity()
                assert not host.engine.has_work()


@asynccontextmanager
async def connected(host: Host) -> AsyncIterator[EngineClient]:
    """A client of a host in this process."""
    client = EngineClient(host.address)
    try:
        await asyncio.wait_for(client.connect(), WAIT_S)
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, request: Request) -> list[RequestOutput]:
    """All outputs of a request."""
    return [output async for output in client.generate(request)]


def tokens_of(outputs: Iterable[RequestOutput]) -> list[int]:
    """The outputs' tokens in a row."""
    return [token_id for output in outputs for token_id in output.token_ids]


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition that another thread or process brings about."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s in vain for: {what}"
        await asyncio.sleep(0.002)


async def until_stats(client: EngineClient, condition: Callable[[EngineStats], bool]) -> EngineStats:
    """Wait until the engine's statistics satisfy a condition; return them."""
    deadline = time.monotonic() + WAIT_S
    while not condition(stats := await client.stats()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s in vain; last: {stats}"
        await asyncio.sleep(0.002)
    return stats


async def until_idle(client: EngineClient) -> None:
    """Wait until the engine has no request left."""
    await until_stats(client, lambda stats: stats.num_running + stats.num_waiting == 0)


# ---- executor factories for engine processes -------------------------------------------------------------------------

_CRASH_REQUEST: RequestId = "crash"


def create_toy(config: Config) -> ToyExecutor:
    """Steps as fast as it can; a request of the id "crash" breaks its first step."""

    def crash(plan: SchedulerOutput) -> None:
        if _CRASH_REQUEST in plan.request_ids:
            raise RuntimeError("the toy broke")

    return ToyExecutor(toy_info(num_blocks=4096), before_step=crash)


def create_slow_toy(config: Config) -> ToyExecutor:
    """Takes a while per step, so that requests are still running when a test acts on them."""
    return ToyExecutor(toy_info(num_blocks=4096), before_step=dawdle)


def create_misconfigured(config: Config) -> ToyExecutor:
    """Fails as a wrong checkpoint does."""
    raise ConfigError("model: expected a checkpoint with weights, got none")


def create_broken(config: Config) -> ToyExecutor:
    """Fails as a bug does."""
    raise RuntimeError("the toy cannot be loaded")
