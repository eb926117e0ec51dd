"""Instances that share their requests through Redis: who runs them, and what survives the loss of whom.

Real servers, a real Redis; every stream is compared with that of an instance on its own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.doubles.redis_server import PASSWORD, RedisServer, running_redis
from tests.server.redis_deployment import (
    CLUSTER,
    ENGINE,
    EXPIRE_MS,
    HTTP,
    NUM_TOKENS,
    SCHEDULER,
    TOPIC,
    Deployment,
    counted,
    deployed,
    num_running,
    signal_all,
    streams,
    text_of,
    until,
)
from tests.server.toy_process import Server, complete

pytestmark = pytest.mark.slow

TIMEOUT_S = 2 * EXPIRE_MS / 1000


def test_instances_share_what_comes_to_one(deployment: Deployment, redis: RedisServer, want: str) -> None:
    a, b = deployment.start(workers=2), deployment.start()
    deployment.wait_for_instances(2)
    endless = streams(a, 3, 4000)
    until(lambda: num_running(b) > 0 and num_running(a) > 0)
    for stream in endless:
        stream.close()
    assert {text_of(stream.read()) for stream in streams(a, 3, NUM_TOKENS)} == {want}
    assert (
        complete(a.url, seed=7, temperature=1.0).json()["choices"]
        == (complete(b.url, seed=7, temperature=1.0).json()["choices"])
    )
    redis.wait_for_keys(CLUSTER)
    wanted = (
        (a, "requests", {"place": "kept"}),
        (a, "requests", {"place": "pushed"}),
        (b, "requests", {"place": "taken"}),
        (a, "bytes", {"direction": "taken"}),
        (b, "bytes", {"direction": "pushed"}),
        (b, "round_trips", {"purpose": "write_record"}),
    )
    for server, what, label in wanted:
        until(lambda: counted(server, what, **label) > 0)  # noqa: B023
    deployment.stop()


def test_a_request_that_stays_here_takes_no_round_trip_per_token(
    deployment: Deployment, redis: RedisServer, want: str
) -> None:
    """Besides the heartbeats; one that runs elsewhere takes two a step."""
    a = deployment.start(max_num_seqs=4)
    deployment.wait_for_instances(1)
    before = redis.calls()
    assert {text_of(stream.read()) for stream in streams(a, 3, NUM_TOKENS)} == {want}
    assert redis.calls().get("rpush", 0) == before.get("rpush", 0) == 0
    deployment.stop()


def test_a_prompt_goes_where_its_beginning_has_been(deployment: Deployment) -> None:
    """To the other instance, which was less busy at first, also when the own one is idle."""
    a, _ = (deployment.start(max_num_seqs=size, scheduler_expire_period=6_000) for size in (1, 256))
    deployment.wait_for_instances(2)
    prompt = [7, 8, 9] * 40

    def runs_here(token_ids: list[int]) -> bool:
        before = counted(a, "requests", place="kept")
        assert complete(a.url, prompt=token_ids).status_code == 200
        return counted(a, "requests", place="kept") > before

    (busy,) = streams(a, 1, 4000)
    assert not runs_here(prompt)
    busy.close()
    num_idle = 0

    def was_idle_often() -> bool:
        nonlocal num_idle
        assert not runs_here([*prompt, num_idle])
        num_idle += runs_here([3, 4, 5])
        return num_idle == 3

    until(was_idle_often)
    deployment.stop()


@pytest.mark.parametrize("victim", ["server", ENGINE, SCHEDULER])
def test_what_a_killed_instance_ran_goes_on_elsewhere(pair: list[Server], want: str, victim: str) -> None:
    a, b = pair
    running = streams(a, 3, NUM_TOKENS)
    if victim == "server":
        b.process.kill()
    else:
        signal_all(b, signal.SIGKILL, victim)
    assert {text_of(stream.read()) for stream in running} == {want}
    if victim == SCHEDULER:  # it has a successor
        b.wait_for_line("another scheduler process starts")
        until(lambda: len(b.children(SCHEDULER)) == 1)
    else:
        b.wait()


def test_streams_outlive_the_engine_of_the_instance_that_has_them(pair: list[Server], want: str) -> None:
    a, b = pair
    running = streams(a, 3, NUM_TOKENS)
    signal_all(a, signal.SIGKILL, ENGINE)
    assert {text_of(stream.read()) for stream in running} == {want}
    assert a.wait() == 1
    until(lambda: num_running(b) == 0)


def test_an_instance_that_stops_hands_on_what_it_cannot_finish(deployment: Deployment, want: str) -> None:
    a, b = deployment.start(), deployment.start(timeout_graceful_shutdown=0)
    deployment.wait_for_instances(2)
    running = streams(a, 3, NUM_TOKENS)
    b.process.terminate()
    assert b.wait() == 0
    assert {text_of(stream.read()) for stream in running} == {want}
    deployment.stop()


def test_an_instance_that_stops_lets_its_streams_elsewhere_finish(pair: list[Server], want: str) -> None:
    a, _ = pair
    running = streams(a, 3, NUM_TOKENS)
    a.process.terminate()
    assert {text_of(stream.read()) for stream in running} == {want}
    assert a.wait() == 0


@pytest.mark.parametrize("kinds", [(SCHEDULER,), (SCHEDULER, ENGINE)])
def test_a_suspended_instance_is_given_up_and_comes_back(pair: list[Server], want: str, kinds: tuple[str, ...]) -> None:
    a, b = pair
    running = streams(a, 3, NUM_TOKENS)
    signal_all(b, signal.SIGSTOP, *kinds)
    assert {text_of(stream.read()) for stream in running} == {want}
    signal_all(b, signal.SIGCONT, *kinds)
    until(lambda: num_running(b) == 0)
    assert {text_of(stream.read()) for stream in streams(a, 3, NUM_TOKENS)} == {want}


def test_the_requests_of_an_origin_that_dies_end(pair: list[Server]) -> None:
    a, b = pair
    running = streams(a, 3, 4000)
    until(lambda: num_running(b) > 0)
    a.process.kill()
    until(lambda: num_running(b) == 0)
    for stream in running:
        stream.close()
    a.wait()


def test_the_requests_of_http_processes_that_die_end(deployment: Deployment, redis: RedisServer) -> None:
    a, b = deployment.start(workers=2), deployment.start()
    deployment.wait_for_instances(2)
    running = streams(a, 3, 4000)
    until(lambda: num_running(b) > 0)
    signal_all(a, signal.SIGKILL, HTTP)
    until(lambda: num_running(b) == 0)
    for stream in running:
        stream.close()
    redis.wait_for_keys(CLUSTER)
    until(lambda: num_running(a) == 0)
    deployment.stop()


def test_a_client_that_leaves_ends_its_request_wherever_it_runs(pair: list[Server]) -> None:
    a, b = pair
    for stream in streams(a, 3, 4000):
        stream.close()
    until(lambda: num_running(a) == num_running(b) == 0)


@pytest.fixture(scope="module")
def narrow(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers that run one request each, and queue another."""
    folder = tmp_path_factory.mktemp("narrow")
    with running_redis(folder) as redis, deployed(golden_dir, folder, redis) as deployment:
        servers = [deployment.start(max_num_seqs=1, max_num_queued_requests=1) for _ in range(2)]
        deployment.wait_for_instances(2)
        yield servers
        deployment.stop()


def test_stop_strings_end_requests_elsewhere(narrow: list[Server], want: str) -> None:
    a, b = narrow
    (busy,) = streams(a, 1, 4000)
    stop = want[40:50]
    answer = complete(a.url, max_tokens=4000, stop=[stop]).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == want[: want.index(stop)]
    busy.close()
    until(lambda: num_running(a) == num_running(b) == 0)


def test_when_all_are_full_clients_are_told_when_to_come_back(narrow: list[Server]) -> None:
    a, b = narrow
    with ThreadPoolExecutor() as pool:
        answers = [job.result() for job in [pool.submit(complete, a.url, max_tokens=200) for _ in range(8)]]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert {answer.headers["Retry-After"] for answer in answers if answer.status_code == 429} == {"1"}
    assert len({answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}) == 1
    until(lambda: num_running(a) == num_running(b) == 0)


def test_a_request_that_gets_no_token_for_too_long_ends(deployment: Deployment) -> None:
    a, b = deployment.start(max_num_seqs=1, scheduler_ttl=1), deployment.start("create_stuck", max_num_seqs=1)
    deployment.wait_for_instances(2)
    (busy,) = streams(a, 1, 4000)
    answer = complete(a.url)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "scheduler_ttl"
    busy.close()
    b.process.kill()
    b.wait()
    deployment.stop()


def test_instances_of_another_secret_topic_or_arithmetic_are_left_out(deployment: Deployment, want: str) -> None:
    a = deployment.start(max_num_seqs=1)
    others = [
        deployment.start(pd_secret="another secret of 16"),
        deployment.start(scheduler_topic=f"{TOPIC}.2"),
        deployment.start(dtype="float32"),
    ]
    deployment.wait_for_instances(3)
    assert {text_of(stream.read()) for stream in streams(a, 1, NUM_TOKENS)} == {want}
    a.wait_for_line(r"instance \w+ is left out: .*signature of this deployment's secret")
    a.wait_for_line(r"instance \w+ is left out: it serves another model or in another arithmetic")
    assert complete(a.url, n=3).status_code == 200
    assert [num_running(other) for other in others] == [0, 0, 0]
    deployment.stop()


GARBAGE = [
    b"",
    b"\x00",
    b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    b"\x01" + bytes(32) + b"\x92\xa1x\x90",
    b"\x01" * 5000,
    b"{}",
]


def test_garbage_in_every_list_is_passed_over(pair: list[Server], lasting: Deployment, want: str) -> None:
    (a, b), redis = pair, lasting.redis
    running = streams(a, 3, NUM_TOKENS)
    instances = [name.decode() for name in redis.do("HKEYS", CLUSTER)]
    for frame in GARBAGE:
        for name in instances:
            redis.do("RPUSH", f"{TOPIC}.requests.{name}", frame)
            redis.do("HSET", CLUSTER, f"{name}-copy", redis.do("HGET", CLUSTER, name))
        redis.do("HSET", CLUSTER, b"\xff" + frame, frame)
    assert {text_of(stream.read()) for stream in running} == {want}
    b.wait_for_line("an unreadable message in Redis is passed over")
    assert {text_of(stream.read()) for stream in streams(a, 3, NUM_TOKENS)} == {want}
    redis.do("DEL", CLUSTER)


def test_a_wrong_password_ends_the_start(deployment: Deployment) -> None:
    server = deployment.start(scheduler_password="wrong")
    assert server.wait() == 2
    assert "error: scheduler_password: expected the password of Redis at 127.0.0.1:" in server.stderr
    assert "wrong" not in server.stderr.replace("WRONGPASS", "")
    assert PASSWORD not in server.stderr
    assert deployment.start(scheduler_db=999).wait() == 2
