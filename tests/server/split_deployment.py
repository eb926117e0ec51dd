"""Routers, Redis, prefill and decode instances of a deployment as processes over a real model; what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from fastdeploy_sd.entrypoints.launch import DEFAULT_EXECUTOR
from fastdeploy_sd.wire.channel import private_address
from tests.doubles.ports import free_port
from tests.doubles.redis_server import PASSWORD, RedisServer
from tests.server.router_process import Router, wait_until
from tests.server.toy_process import START_SCRIPT, Program

# A machine may load several models while other work keeps it busy.
START_S = 300.0
BRAKING = "tests.server.model_executors:create_braking"
TOPIC = "tests"


class ModelServer(Program):
    """A server of a real model.

    Args:
        state: its folder, where the deployment's secret is.
        executor: as in `launch.run`.
        options: of the server.
    """

    def __init__(self, model: Path | str, state: Path, executor: str = DEFAULT_EXECUTOR, **options: object) -> None:
        self.role = str(options.get("splitwise_role", "mixed"))
        options = {"model": str(model), "served_model_name": "m", "port": 0, "num_threads": 1, **options}
        folders = {"XDG_STATE_HOME": str(state), "TMPDIR": str(state)}
        super().__init__([sys.executable, "-c", START_SCRIPT, json.dumps(options), executor], **folders)

    @property
    def url(self) -> str:
        """Where it serves; waits until it does."""
        return self.wait_for_line(r"serving m\b.* on (http://\S+)", START_S)[1]

    @property
    def address(self) -> str:
        """The same without the scheme."""
        return self.url.removeprefix("http://")

    def load(self) -> dict[str, int]:
        """What it says of its requests and blocks."""
        load: dict[str, int] = httpx.get(f"{self.url}/load", timeout=START_S).json()
        return load

    def metric(self, sample: str) -> float:
        """The sum of the samples whose line starts so."""
        text = httpx.get(f"{self.url}/metrics", timeout=START_S).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(sample))

    def num_waiting_for_kv(self) -> float:
        """Requests whose KV is on its way."""
        return self.metric("fastdeploy_sd:num_requests_waiting_for_kv ")

    def wait_idle(self) -> None:
        """Wait until no request or order is left, and verify that every block is free again."""
        wait_until(lambda: self._is_idle(self.load()), START_S)

    @staticmethod
    def _is_idle(load: dict[str, int]) -> bool:
        no_request = load["num_requests_running"] == load["num_requests_waiting"] == 0
        return no_request and load["num_free_blocks"] + load["num_cached_blocks"] == load["num_blocks"]


class SplitDeployment:
    """The processes of one deployment, ended with it. All share a folder, which is short enough for sockets.

    Attributes:
        servers: those that were started, in order.
    """

    def __init__(self, model: Path | str, redis: RedisServer | None = None, **options: object) -> None:
        self._model, self._redis, self._options = model, redis, options
        self._stack = contextlib.ExitStack()
        self.state = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fd")))
        self.routers: list[Router] = []
        self.servers: list[ModelServer] = []

    def __enter__(self) -> SplitDeployment:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def router(self, port: int | None = None, **options: object) -> Router:
        """Start a router."""
        router = Router(self.state, port or free_port(), splitwise="true", **options)
        self.routers.append(self._stack.enter_context(contextlib.closing(router)))
        return router

    def server(self, role: str, executor: str = DEFAULT_EXECUTOR, **options: object) -> ModelServer:
        """Start an instance that registers with all routers started before, and shares requests if there is a Redis."""
        shared: dict[str, Any] = {"splitwise_role": role, "router": [router.address for router in self.routers]}
        if self._redis is not None:
            shared |= {"scheduler_name": "splitwise", "scheduler_port": self._redis.port, "scheduler_topic": TOPIC}
            shared |= {"scheduler_password": PASSWORD}
        server = ModelServer(self._model, self.state, executor, **{**shared, **self._options, **options})
        self.servers.append(self._stack.enter_context(contextlib.closing(server)))
        return server

    def wait_for(self, *servers: ModelServer) -> None:
        """Wait until every router that lives has just these servers available."""
        wanted = {server.address for server in servers}
        for router in self.routers:
            if router.process.poll() is None:
                wait_until(lambda: router.available() == wanted, START_S)  # noqa: B023 (called here)

    def stop(self) -> None:
        """End all that runs as a service manager does. Each ends well, which tells that its books were right."""
        running = [p for p in (*self.servers, *self.routers) if p.process.poll() is None]
        for program in running:
            resume(program)
            program.process.terminate()
        for program in running:
            assert program.wait(START_S) == 0
        if self._redis is not None:
            self._redis.wait_for_keys()

    def verify_nothing_left(self) -> None:
        """After all has ended: no process of this deployment, and no file but the secret's."""
        wait_until(lambda: not processes_of(self.state))
        with temporary_files_in(self.state), private_address():  # the next start removes what a kill has left
            pass
        left = [path.name for path in self.state.iterdir() if path.name != "fastdeploy_sd"]
        assert left == [], left


def family(pid: int) -> list[int]:
    """A process and all its descendants that still live."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def send_all(program: Program, number: signal.Signals, pids: Sequence[int] | None = None) -> None:
    """Send a signal to a program and all its descendants, the first one first."""
    for pid in family(program.process.pid) if pids is None else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def suspend(program: Program) -> None:
    """Stop all its processes, as a machine that freezes does."""
    send_all(program, signal.SIGSTOP)


def resume(program: Program) -> None:
    """Undo `suspend`."""
    send_all(program, signal.SIGCONT)


def power_off(program: Program) -> None:
    """End all its processes at once, and wait for that."""
    pids = family(program.process.pid)
    send_all(program, signal.SIGKILL, pids)
    program.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def processes_of(state: Path) -> list[int]:
    """Processes whose environment names a deployment's folder, wherever they were started from."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and str(state).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have this process's temporary files there."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
