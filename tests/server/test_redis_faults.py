"""What instances that share their requests do while Redis is not there, slow, empty or full. Real servers and Redis."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from tests.doubles.redis_server import RedisServer
from tests.server.abort_storm import MAX_STORMS, is_settled, possessions, storm
from tests.server.redis_deployment import (
    CLUSTER,
    EXPIRE_MS,
    NUM_TOKENS,
    TOPIC,
    Deployment,
    counted,
    gauge,
    num_running,
    streams,
    text_of,
    until,
)
from tests.server.toy_process import Server, complete

pytestmark = pytest.mark.slow


def test_a_server_starts_without_redis_and_shares_when_it_comes(
    deployment: Deployment, redis: RedisServer, want: str
) -> None:
    redis.stop()
    a, b = deployment.start(), deployment.start()
    a.wait_for_line("ERROR server: Redis: .*: the server starts without it, and uses it when it answers")
    assert complete(a.url).status_code == 200
    redis.start()
    deployment.wait_for_instances(2)
    until(lambda: complete(a.url).status_code == 200 and "Redis answers again" in a.stderr)
    endless = streams(a, 3, 4000)
    until(lambda: num_running(b) > 0)
    for stream in endless:
        stream.close()
    assert {text_of(stream.read()) for stream in streams(a, 3, NUM_TOKENS)} == {want}
    deployment.stop()


@pytest.mark.parametrize("comes_back", [False, True])
def test_streams_outlive_redis(pair: list[Server], lasting: Deployment, want: str, comes_back: bool) -> None:
    (a, b), redis = pair, lasting.redis
    running = streams(a, 3, NUM_TOKENS)
    redis.stop()
    if comes_back:
        redis.start()
    assert {text_of(stream.read()) for stream in running} == {want}
    assert complete(b.url).status_code == 200
    until(lambda: num_running(a) == num_running(b) == 0)
    if not comes_back:
        redis.start()
    lasting.wait_for_instances(2)


def test_streams_outlive_whatever_is_deleted(pair: list[Server], lasting: Deployment, want: str) -> None:
    (a, _), redis = pair, lasting.redis
    is_over = threading.Event()

    def flush() -> None:
        while not is_over.wait(0.3):
            redis.do("FLUSHALL")

    flushing = threading.Thread(target=flush)
    flushing.start()
    try:
        assert {text_of(stream.read()) for stream in streams(a, 3, NUM_TOKENS)} == {want}
    finally:
        is_over.set()
        flushing.join()
    lasting.wait_for_instances(2)


def test_streams_outlive_a_redis_that_hangs(pair: list[Server], lasting: Deployment, want: str) -> None:
    """Commands whose answer came too late may have been carried out, and are repeated."""
    (a, b), redis = pair, lasting.redis
    running = streams(a, 3, NUM_TOKENS)
    redis.signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert complete(b.url).status_code == 200
    while time.monotonic() - begun < 3 * EXPIRE_MS / 1000:
        time.sleep(0.1)
    redis.signal(signal.SIGCONT)
    assert {text_of(stream.read()) for stream in running} == {want}
    lasting.wait_for_instances(2)
    until(lambda: num_running(a) == num_running(b) == 0)


def test_streams_outlive_a_redis_that_is_full(pair: list[Server], lasting: Deployment, want: str) -> None:
    (a, b), redis = pair, lasting.redis
    running = streams(a, 3, NUM_TOKENS)
    redis.do("CONFIG", "SET", "maxmemory-policy", "noeviction")
    redis.do("CONFIG", "SET", "maxmemory", "1")
    assert {text_of(stream.read()) for stream in running} == {want}
    assert complete(a.url).status_code == 200
    b.wait_for_line("this instance takes no requests of others until it answers")
    until(lambda: counted(b, "errors", kind="refused") > 0)
    redis.do("CONFIG", "SET", "maxmemory", "0")
    lasting.wait_for_instances(2)
    until(lambda: num_running(a) == num_running(b) == 0)
    redis.wait_for_keys(CLUSTER)


def test_every_key_expires_and_has_the_topic(deployment: Deployment, redis: RedisServer) -> None:
    a, b = deployment.start(), deployment.start()
    deployment.wait_for_instances(2)
    endless = streams(a, 3, 4000)
    until(lambda: num_running(b) > 0)
    b.process.kill()
    b.wait()
    until(lambda: counted(a, "moves", reason="instance_lost") > 0)
    a.process.kill()
    a.wait()
    for stream in endless:
        stream.close()
    keys = redis.keys()
    assert CLUSTER in keys
    assert all(key.startswith(f"{TOPIC}.") for key in keys)
    assert all(redis.do("PTTL", key) != -1 for key in keys)
    redis.wait_for_keys()


def test_hundreds_of_clients_that_leave_leave_nothing(deployment: Deployment, redis: RedisServer, want: str) -> None:
    servers = a, b = deployment.start(max_num_seqs=4), deployment.start(max_num_seqs=16)
    deployment.wait_for_instances(2)
    has = []
    aborted = 0.0
    for seed in range(MAX_STORMS):
        bodies = [{"prompt": [5, 6], "max_tokens": 200, "stream": i % 2 == 0, "n": 4} for i in range(150)]
        print(f"{len(bodies)} connections in {asyncio.run(storm(a.url, bodies, seed, num_at_once=16)):.1f} s")
        until(lambda: num_running(a) == num_running(b) == 0)
        redis.wait_for_keys(CLUSTER)
        has.append([possessions(server) for server in servers])
        # On a busy machine Redis may seem to be down in a storm; then all stays at the first instance.
        aborted = min(gauge(server, 'fastdeploy_sd:requests_finished_total{reason="abort"}') for server in servers)
        if aborted > 10 and is_settled(has):
            break
    else:
        pytest.fail(f"{aborted:.0f} requests aborted; KiB and files after each storm: {has}")
    until(lambda: gauge(a, "fastdeploy_sd:http_connections") <= 2)
    assert {text_of(stream.read()) for stream in streams(a, 3, NUM_TOKENS)} == {want}
    deployment.stop()
    assert "running task(s)" not in a.stderr  # requests whose clients are gone
