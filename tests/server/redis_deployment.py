"""Whole servers over the toy model that share their requests through a real Redis, and what they should answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.doubles.redis_server import PASSWORD, RedisServer
from tests.server.toy_process import WAIT_S, Server, Stream

TOPIC = "tests"
CLUSTER = f"{TOPIC}.cluster"
# Short, so that losses are noticed soon; a busy machine may take them for losses too early, which costs no byte.
EXPIRE_MS = 900
NUM_TOKENS = 250
SCHEDULER, ENGINE, HTTP = "cluster.redis.process", "engine_process", "http_process"


class Deployment:
    """Servers of one topic; they are started and stopped in the order of the calls."""

    def __init__(self, golden_dir: Path, state_dir: Path, redis: RedisServer) -> None:
        self.redis = redis
        self._golden_dir, self._state_dir = golden_dir, state_dir
        self._servers: list[Server] = []

    def start(self, executor: str = "create_slow", **options: object) -> Server:
        """Start a server; it runs two requests at once unless told otherwise."""
        shared: dict[str, Any] = {
            "scheduler_name": "splitwise",
            "scheduler_port": self.redis.port,
            "scheduler_password": PASSWORD,
            "scheduler_topic": TOPIC,
            "scheduler_expire_period": EXPIRE_MS,
            "max_num_seqs": 2,
            **options,
        }
        os.environ["XDG_STATE_HOME"] = str(self._state_dir)
        server = Server(self._golden_dir, executor, **shared)
        self._servers.append(server)
        return server

    def settle(self) -> list[Server]:
        """Wait until the servers that run have no request, and Redis has nothing but their records; return them."""
        running = [server for server in self._servers if server.process.poll() is None]
        self.wait_for_instances(len(running))
        until(lambda: all(num_running(server) == 0 for server in running))
        self.redis.wait_for_keys(*[CLUSTER] * bool(running))
        return running

    def two(self) -> list[Server]:
        """The servers that run, and new ones in the place of those that have ended."""
        running = self.settle()
        running += [self.start() for _ in range(2 - len(running))]
        self.wait_for_instances(2)
        return running

    def wait_for_instances(self, count: int) -> None:
        """Wait until so many instances have a record, and each is read by all."""
        until(lambda: int(self.redis.do("HLEN", CLUSTER)) == count)

    def stop(self) -> None:
        """End all servers as a service manager does; they end well and leave nothing in Redis."""
        running = [server for server in self._servers if server.process.poll() is None]
        for server in running:
            server.process.terminate()
        for server in running:
            assert server.wait() == 0
        self.redis.wait_for_keys()

    def close(self) -> None:
        for server in self._servers:
            server.close()


@contextlib.contextmanager
def deployed(golden_dir: Path, state_dir: Path, redis: RedisServer) -> Iterator[Deployment]:
    """A deployment whose servers are killed at the end, should they still run then."""
    with contextlib.closing(Deployment(golden_dir, state_dir, redis)) as deployment:
        yield deployment


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def text_of(events: list[str]) -> str:
    """The text of a stream that ended as it should."""
    assert events[-1] == "[DONE]", events[-3:]
    chunks = [json.loads(event) for event in events[:-1]]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    assert not errors, errors
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"] is not None] == ["length"]
    return "".join(choice["text"] for choice in choices)


def streams(server: Server, count: int, max_tokens: int) -> list[Stream]:
    """Streams that have begun; more than `max_num_seqs` of them run at several instances."""
    return [Stream(server.url, max_tokens) for _ in range(count)]


def sample(server: Server, name: str) -> float | None:
    """A sample of a server's metrics, None = there is none."""
    text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return None if match is None else float(match[1])


def gauge(server: Server, name: str) -> float:
    """A sample that is always there."""
    value = sample(server, name)
    assert value is not None, f"no sample of {name}"
    return value


def counted(server: Server, what: str, **label: str) -> float:
    """What a server has counted of Redis; its processes tell each other once a second."""
    [(name, value)] = label.items()
    return sample(server, f'fastdeploy_sd:redis_{what}_total{{{name}="{value}"}}') or 0.0


def num_running(server: Server) -> float:
    """Requests in a server's engine."""
    return gauge(server, "fastdeploy:num_requests_running") + gauge(server, "fastdeploy:num_requests_waiting")


def signal_all(server: Server, number: signal.Signals, *kinds: str) -> None:
    """Send a signal to a server's children of these kinds."""
    for kind in kinds:
        for pid in server.children(kind):
            os.kill(pid, number)
