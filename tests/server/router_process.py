"""Routers as processes, and servers over the toy model that register with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.doubles.ports import free_port
from tests.server.toy_process import WAIT_S, Program, Server

Body = Mapping[str, Any]


class Router(Program):
    """A router's process; `options` are flags without their dashes."""

    def __init__(self, state: Path, port: int, **options: object) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {"port": port, **options}.items()]
        super().__init__(
            [sys.executable, "-m", "fastdeploy_sd.cluster.router.launch", *flags], XDG_STATE_HOME=str(state)
        )
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"

    def get(self, path: str) -> httpx.Response:
        """The answer to a GET; waits while the router does not listen yet."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                return httpx.get(f"{self.url}{path}", timeout=WAIT_S)
            except httpx.ConnectError:
                assert self.process.poll() is None, self.stderr
                assert time.monotonic() < deadline, "it does not listen"
                time.sleep(0.05)

    def instances(self) -> list[dict[str, Any]]:
        """What it says of its instances."""
        found: list[dict[str, Any]] = self.get("/instances").json()["instances"]
        return found

    def available(self) -> set[str]:
        """The addresses of the instances that are available."""
        return {instance["address"] for instance in self.instances() if instance["state"] == "available"}

    def wait_for_instances(self, *servers: Program) -> None:
        """Wait until just these servers are available."""
        wanted = {server.url.removeprefix("http://") for server in servers if isinstance(server, Server)}
        wait_until(lambda: self.available() == wanted)

    def metric(self, sample: str) -> float:
        """The sum of the samples whose line starts so."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(sample)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Fleet:
    """Servers and routers of one test, ended with it; all share a state folder, and so the deployment's secret."""

    def __init__(self, golden_dir: Path, state: Path) -> None:
        self._golden_dir = golden_dir
        self.state = state
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def router(self, **options: object) -> Router:
        """Start a router."""
        router = Router(self.state, int(str(options.pop("port", free_port()))), **options)
        return self._stack.enter_context(contextlib.closing(router))

    def server(
        self, *routers: Router, executor: str = "create_slow", state: Path | None = None, **options: object
    ) -> Server:
        """Start a server that registers with routers; `state` is its folder, where that is not the fleet's."""
        folders = {"XDG_STATE_HOME": state or self.state}
        options["router"] = [router.address for router in routers]
        server = Server(self._golden_dir, executor, None, folders, "", **options)
        return self._stack.enter_context(contextlib.closing(server))


def wait_until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Poll until something is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "expected it to become true"
        time.sleep(0.02)


def kill(server: Program) -> None:
    """End a server's processes at once, as a machine that loses power does."""
    for pid in [*server.children(""), server.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def load_of(server: Server) -> int:
    """Requests running and waiting at a server."""
    load = httpx.get(f"{server.url}/load", timeout=WAIT_S).json()
    return int(load["num_requests_running"]) + int(load["num_requests_waiting"])


def serving_one(*servers: Server) -> Server:
    """The server that has a request; waits for one."""
    found = list[Server]()

    def is_found() -> bool:
        found.extend(filter(load_of, servers))
        return bool(found)

    wait_until(is_found)
    return found[0]


def anonymous(text: str) -> list[str]:
    """The events of a stream without what differs from request to request: its id and time."""
    return [_anonymous_event(event) for event in text.split("\n\n") if event]


def by_choice(text: str) -> dict[int | None, list[str]]:
    """The same per choice, as the order between them is a matter of steps; None = events of no choice."""
    found: dict[int | None, list[str]] = {}
    for event in anonymous(text):
        choices = json.loads(event).get("choices") if event.startswith("{") else None
        found.setdefault(choices[0]["index"] if choices else None, []).append(event)
    return found


def _anonymous_event(event: str) -> str:
    name, data, value = event.partition("data: {")
    if not data:
        return event
    return name + json.dumps(json.loads("{" + value, object_hook=_anonymous_object))


def _anonymous_object(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in ("id", "created", "created_at", "item_id")}


@contextlib.contextmanager
def reading(url: str, path: str, body: Body) -> Iterator[Iterator[str]]:
    """A stream that is being read, as pieces of its text."""
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=WAIT_S) as response:
        assert response.status_code == 200, response.read()
        yield response.iter_text()
