"""A Redis and servers that share their requests through it, for the tests of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.redis_server import RedisServer, running_redis
from tests.server.redis_deployment import NUM_TOKENS, Deployment, deployed, text_of
from tests.server.toy_process import Server, Stream, serving


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture
def deployment(golden_dir: Path, tmp_path: Path, redis: RedisServer) -> Iterator[Deployment]:
    with deployed(golden_dir, tmp_path, redis) as servers:
        yield servers


@pytest.fixture(scope="module")
def lasting(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment for tests that disturb it and leave it whole."""
    folder = tmp_path_factory.mktemp("deployment")
    with running_redis(folder) as redis, deployed(golden_dir, folder, redis) as servers:
        yield servers
        servers.stop()


@pytest.fixture
def pair(lasting: Deployment) -> Iterator[list[Server]]:
    """Its two servers; one that a test ends has a successor in the next test."""
    yield lasting.two()
    lasting.settle()


@pytest.fixture(scope="session")
def want(golden_dir: Path) -> str:
    """What an undisturbed stream of NUM_TOKENS reads like."""
    with serving(golden_dir, max_num_seqs=2) as server:
        return text_of(Stream(server.url, NUM_TOKENS).read())
