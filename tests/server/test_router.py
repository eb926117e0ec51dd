"""A router in front of servers: answers are theirs, byte for byte, and requests survive what happens to them.

Routers, servers, sockets and signals are real; the model is the toy one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.ports import free_port
from tests.server.router_process import (
    Fleet,
    anonymous,
    by_choice,
    kill,
    load_of,
    reading,
    serving_one,
    wait_until,
)
from tests.server.toy_process import WAIT_S, Server

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi there"}]
LONG = 150  # tokens: 1.5 s of a slow toy, and more
# What a stream may hold that must not be lost, repeated or counted twice when it goes on elsewhere.
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": [5, 6], "temperature": 0}),
    "seeded": (COMPLETIONS, {"prompt": [5, 6], "seed": 7, "temperature": 1.0}),
    "chat": (CHAT, {"messages": MESSAGES, "seed": 3}),
    "several": (CHAT, {"messages": MESSAGES, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2}),
    "prompts": (COMPLETIONS, {"prompt": [[5, 6], [7, 8]], "n": 2, "seed": 1, "logprobs": 2, "return_token_ids": True}),
    "echo": (COMPLETIONS, {"prompt": "a prompt", "seed": 5, "echo": True}),
    "usage": (COMPLETIONS, {"prompt": [5], "temperature": 0, "stream_options": {"continuous_usage_stats": True}}),
    "held back": (COMPLETIONS, {"prompt": [9, 9], "seed": 2, "stop": ["e that never comes", "a b c d", " t\n"]}),
    "response": (RESPONSES, {"input": "hi there", "seed": 2, "instructions": "be brief", "stop": ["a b c d", " t\n"]}),
}


@pytest.fixture
def fleet(golden_dir: Path, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(golden_dir, tmp_path) as fleet:
        yield fleet


def stream_body(options: dict[str, Any], max_tokens: int = LONG) -> dict[str, Any]:
    stream_options = {"include_usage": True} | options.get("stream_options", {})
    return {"model": "toy", "max_tokens": max_tokens, "stream": True, **options, "stream_options": stream_options}


def limited(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body with the route's own name of the limit."""
    return (
        body if path != RESPONSES else {("max_output_" + n[4:] if n == "max_tokens" else n): v for n, v in body.items()}
    )


def text_of(url: str, path: str, body: dict[str, Any]) -> str:
    return httpx.post(f"{url}{path}", json=body, timeout=WAIT_S).text


# ---- answers ------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_an_instance(toy_fleet: tuple[Fleet, Any, Server]) -> None:
    _, router, server = toy_fleet
    for path, options in STREAMS.values():
        body = limited(path, stream_body(options, max_tokens=12))
        assert by_choice(text_of(router.url, path, body)) == by_choice(text_of(server.url, path, body))
        assert ": fdsd" not in text_of(router.url, path, body)
        whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        answers = [text_of(url, path, whole) for url in (router.url, server.url)]
        assert anonymous(f"data: {answers[0]}") == anonymous(f"data: {answers[1]}")
    listed = router.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["toy"]
    assert router.get("/v1/models/toy").json() == listed[0]
    assert router.get("/v1/models/another").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x80\x04N.",
        b"[" * 100_000,
        b'{"model": "toy"}',
        b'{"model":"x","prompt":"a"}',
        b"\xff" * 9,
        b"null",
    ],
)
def test_bodies_that_make_no_sense_get_the_instances_own_words(
    toy_fleet: tuple[Fleet, Any, Server], content: bytes
) -> None:
    _, router, server = toy_fleet
    for path in (
        CHAT,
        COMPLETIONS,
        RESPONSES,
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
    ):
        answers = [httpx.post(f"{url}{path}", content=content, timeout=WAIT_S) for url in (router.url, server.url)]
        assert answers[0].status_code == answers[1].status_code >= 400
        assert answers[0].content == answers[1].content


@pytest.fixture(scope="module")
def toy_fleet(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Any, Server]]:
    """A router and a server that a test leaves as they are."""
    with Fleet(golden_dir, tmp_path_factory.mktemp("state")) as fleet:
        router = fleet.router(max_body_bytes=1 << 20)
        server = fleet.server(router)
        router.wait_for_instances(server)
        yield fleet, router, server


def test_a_routers_own_refusals_have_the_one_shape(toy_fleet: tuple[Fleet, Any, Server]) -> None:
    _, router, _ = toy_fleet
    large = httpx.post(f"{router.url}{CHAT}", content=b"x" * ((1 << 20) + 1), timeout=WAIT_S)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    unknown = httpx.post(f"{router.url}/v1/unknown", json={}, timeout=WAIT_S)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "route_not_found")
    routed = httpx.post(f"{router.url}{CHAT}", json={}, headers={"X-Fdsd-Route": "e30.00"}, timeout=WAIT_S)
    assert (routed.status_code, routed.json()["error"]["code"]) == (403, "route_not_authentic")


@pytest.mark.parametrize("header", ["", ".", "e30.00", "\xff.\xff", "x" * 4000])
def test_a_server_takes_no_routes_from_clients(toy_fleet: tuple[Fleet, Any, Server], header: str) -> None:
    _, _, server = toy_fleet
    headers = {b"X-Fdsd-Route": header.encode("latin-1")}
    for content in (b"{}", b'{"model": "toy", "prompt": "a"}'):
        answer = httpx.post(f"{server.url}{COMPLETIONS}", content=content, headers=headers, timeout=WAIT_S)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "route_not_authentic")
        assert "signature of a router with this deployment's secret (pd_secret)" in error["message"]


def test_without_an_instance_there_is_a_503_that_says_when_to_try_again(fleet: Fleet) -> None:
    router = fleet.router()
    assert router.get("/health").status_code == router.get("/ready").status_code == 503
    assert router.get("/live").status_code == 200
    answer = httpx.post(f"{router.url}{COMPLETIONS}", json=stream_body({"prompt": "a"}), timeout=WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
    assert int(answer.headers["retry-after"]) >= 1
    server = fleet.server(router)
    router.wait_for_instances(server)
    assert router.get("/health").status_code == 200


# ---- instances that fail --------------------------------------------------------------------------------------------


def test_every_kind_of_stream_goes_on_elsewhere_when_its_server_is_killed(fleet: Fleet) -> None:
    """All begin at one server, as the other is silent, and none ends there: its steps are long, then it is stopped."""
    router = fleet.router(timeout_lost=120)
    first, second = fleet.server(router, executor="create_slower"), fleet.server(router)
    router.wait_for_instances(first, second)
    os.kill(second.process.pid, signal.SIGSTOP)
    router.wait_for_instances(first)
    asks = {name: (path, limited(path, stream_body(options))) for name, (path, options) in STREAMS.items()}
    with contextlib.ExitStack() as stack:
        pieces = {name: stack.enter_context(reading(router.url, *ask)) for name, ask in asks.items()}
        texts = {name: next(text) + next(text) for name, text in pieces.items()}
        os.kill(first.process.pid, signal.SIGSTOP)
        os.kill(second.process.pid, signal.SIGCONT)
        wait_until(lambda: second.url.removeprefix("http://") in router.available())
        kill(first)
        for name, text in pieces.items():
            texts[name] += "".join(text)
    assert router.metric("fastdeploy_sd:router_resumed_streams_total") == len(STREAMS)
    with ThreadPoolExecutor() as pool:
        undisturbed = dict(zip(asks, pool.map(lambda ask: text_of(second.url, *ask), asks.values()), strict=True))
    for name, (path, _) in asks.items():
        assert by_choice(texts[name]) == by_choice(undisturbed[name]), name
        told = set(re.findall(r'"(id|item_id|created|created_at)":("[^"]+"|\d+)', texts[name]))
        assert len(told) == (4 if path == RESPONSES else 2), "one id and one time, and those of a Response's message"


def test_many_streams_survive_two_deaths(fleet: Fleet) -> None:
    router = fleet.router()
    servers = [fleet.server(router) for _ in range(3)]
    router.wait_for_instances(*servers)
    bodies = [stream_body({"prompt": [i, 6], "seed": i}) for i in range(12)]
    undisturbed = [anonymous(text_of(servers[0].url, COMPLETIONS, body)) for body in bodies[:3]]
    texts: dict[int, str] = {}

    def read(i: int) -> None:
        texts[i] = text_of(router.url, COMPLETIONS, bodies[i])

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for victim in servers[:2]:
        kill(serving_one(victim))
    for thread in threads:
        thread.join()
    assert [anonymous(texts[i]) for i in range(3)] == undisturbed
    for text in texts.values():
        assert json.loads(anonymous(text)[-2])["usage"]["completion_tokens"] == LONG
        assert text.endswith("data: [DONE]\n\n")


def test_a_stream_whose_engine_dies_goes_on_elsewhere(fleet: Fleet) -> None:
    """Then the server itself says so, in the stream; it is nothing that a client should see."""
    router = fleet.router()
    servers = [fleet.server(router) for _ in range(2)]
    router.wait_for_instances(*servers)
    body = stream_body({"prompt": [5, 6], "temperature": 0})
    undisturbed = text_of(servers[0].url, COMPLETIONS, body)
    with reading(router.url, COMPLETIONS, body) as pieces:
        text = next(pieces)
        for pid in serving_one(*servers).children("engine_process"):
            os.kill(pid, signal.SIGKILL)
        text += "".join(pieces)
    assert anonymous(text) == anonymous(undisturbed)


def test_a_stream_goes_on_elsewhere_when_its_server_is_suspended(fleet: Fleet) -> None:
    router = fleet.router(timeout_lost=4)
    servers = [fleet.server(router) for _ in range(2)]
    router.wait_for_instances(*servers)
    body = stream_body({"prompt": [5, 6], "temperature": 0})
    undisturbed = text_of(servers[0].url, COMPLETIONS, body)
    with reading(router.url, COMPLETIONS, body) as pieces:
        text = next(pieces)
        victim = serving_one(*servers)
        os.kill(victim.process.pid, signal.SIGSTOP)
        text += "".join(pieces)
    assert anonymous(text) == anonymous(undisturbed)
    others = [server for server in servers if server is not victim]
    router.wait_for_instances(*others)
    os.kill(victim.process.pid, signal.SIGCONT)
    router.wait_for_instances(*servers)
    wait_until(lambda: load_of(victim) == 0)


def test_a_whole_answer_is_computed_anew_elsewhere(fleet: Fleet) -> None:
    router = fleet.router()
    servers = [fleet.server(router) for _ in range(2)]
    router.wait_for_instances(*servers)
    body = {"model": "toy", "prompt": [5, 6], "max_tokens": LONG, "temperature": 0}
    undisturbed = httpx.post(f"{servers[0].url}{COMPLETIONS}", json=body, timeout=WAIT_S).json()
    answers: list[httpx.Response] = []
    reader = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{router.url}{COMPLETIONS}", json=body, timeout=WAIT_S))
    )
    reader.start()
    kill(serving_one(*servers))
    reader.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["choices"] == undisturbed["choices"]
    assert answers[0].json()["usage"] == undisturbed["usage"]
    assert router.metric("fastdeploy_sd:router_retries_total") == 1


def test_a_stream_ends_with_an_error_when_there_is_nobody_left(fleet: Fleet) -> None:
    router = fleet.router(timeout_resume=0.5)
    server = fleet.server(router)
    router.wait_for_instances(server)
    with reading(router.url, COMPLETIONS, stream_body({"prompt": [5, 6]}, max_tokens=1000)) as pieces:
        text = next(pieces)
        kill(server)
        text += "".join(pieces)
    assert text.endswith("data: [DONE]\n\n")
    assert json.loads(anonymous(text)[-2])["error"]["type"] == "service_unavailable_error"


def test_a_stream_waits_for_a_server_that_is_started_anew(fleet: Fleet) -> None:
    router = fleet.router(timeout_resume=60)
    server = fleet.server(router)
    router.wait_for_instances(server)
    body = stream_body({"prompt": [5, 6], "temperature": 0})
    undisturbed = text_of(server.url, COMPLETIONS, body)
    with reading(router.url, COMPLETIONS, body) as pieces:
        text = next(pieces)
        port = server.url.rpartition(":")[2]
        kill(server)
        server.wait()
        fleet.server(router, port=int(port))
        text += "".join(pieces)
    assert anonymous(text) == anonymous(undisturbed)


def test_a_server_that_refuses_is_passed_over(fleet: Fleet) -> None:
    """Its queue is full; the other one's is not."""
    router = fleet.router()
    small = fleet.server(router, max_num_seqs=1, max_num_queued_requests=1, max_num_batched_tokens=64)
    router.wait_for_instances(small)
    large = fleet.server(router)
    router.wait_for_instances(small, large)
    body = {"model": "toy", "prompt": [5, 6], "max_tokens": 20, "temperature": 0}
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: statuses.append(
                httpx.post(f"{router.url}{COMPLETIONS}", json=body, timeout=WAIT_S).status_code
            )
        )
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 16


# ---- clients ------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_its_request(toy_fleet: tuple[Fleet, Any, Server]) -> None:
    _, router, server = toy_fleet
    with reading(router.url, COMPLETIONS, stream_body({"prompt": [5, 6]}, max_tokens=4000)) as pieces:
        next(pieces)
        assert load_of(server) == 1
    wait_until(lambda: load_of(server) == 0)
    body = {"model": "toy", "prompt": [5, 6], "max_tokens": 4000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{router.url}{COMPLETIONS}", json=body, timeout=httpx.Timeout(WAIT_S, read=1.0))
    wait_until(lambda: load_of(server) == 0)


def test_a_slow_reader_delays_nobody(toy_fleet: tuple[Fleet, Any, Server]) -> None:
    _, router, server = toy_fleet
    body = json.dumps(stream_body({"prompt": [5], "n": 8, "logprobs": 20}, max_tokens=400)).encode()
    host, port = router.address.split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        wait_until(lambda: load_of(server) > 0)
        answer = httpx.post(f"{router.url}{COMPLETIONS}", json=stream_body({"prompt": [7]}, 50), timeout=WAIT_S)
        assert answer.text.endswith("data: [DONE]\n\n")
    wait_until(lambda: load_of(server) == 0)


def test_a_request_has_a_deadline(fleet: Fleet) -> None:
    router = fleet.router(request_timeout_secs=3)
    server = fleet.server(router)
    router.wait_for_instances(server)
    body = stream_body({"prompt": [5, 6]}, max_tokens=4000)
    text = text_of(router.url, COMPLETIONS, body)
    assert text.endswith("data: [DONE]\n\n")
    assert json.loads(anonymous(text)[-2])["error"]["code"] == "deadline_exceeded"
    body |= {"stream": False, "stream_options": None}
    whole = httpx.post(f"{router.url}{COMPLETIONS}", json=body, timeout=WAIT_S)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "deadline_exceeded")
    wait_until(lambda: load_of(server) == 0)


# ---- coming and going -----------------------------------------------------------------------------------------------


def test_a_server_that_stops_finishes_its_streams_and_gets_nothing_new(fleet: Fleet) -> None:
    router = fleet.router()
    servers = [fleet.server(router, workers=workers) for workers in (1, 2)]
    router.wait_for_instances(*servers)
    for leaving, staying in (servers, servers[::-1]):
        with reading(router.url, COMPLETIONS, stream_body({"prompt": [5, 6]})) as pieces:
            text = next(pieces)
            if load_of(leaving) == 0:
                continue
            leaving.process.send_signal(signal.SIGTERM)
            router.wait_for_instances(staying)
            assert (
                httpx.post(
                    f"{router.url}{COMPLETIONS}", json={"prompt": [5], "max_tokens": 2}, timeout=WAIT_S
                ).status_code
                == 200
            )
            text += "".join(pieces)
        assert json.loads(anonymous(text)[-2])["usage"]["completion_tokens"] == LONG
        assert leaving.wait() == 0
        assert router.metric("fastdeploy_sd:router_resumed_streams_total") == 0
        return


def test_a_router_that_stops_finishes_its_streams(fleet: Fleet) -> None:
    router = fleet.router()
    server = fleet.server(router)
    router.wait_for_instances(server)
    with reading(router.url, COMPLETIONS, stream_body({"prompt": [5, 6]})) as pieces:
        text = next(pieces)
        router.process.send_signal(signal.SIGTERM)
        wait_until(lambda: router.get("/health").json()["error"]["code"] == "draining")
        refused = httpx.post(f"{router.url}{COMPLETIONS}", json={"prompt": [5]}, timeout=WAIT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        text += "".join(pieces)
    assert json.loads(anonymous(text)[-2])["usage"]["completion_tokens"] == LONG
    assert router.wait() == 0
    assert "Traceback" not in router.stderr


def test_two_routers_serve_the_same_servers_and_one_may_die(fleet: Fleet) -> None:
    routers = [fleet.router() for _ in range(2)]
    server = fleet.server(*routers)
    body = stream_body({"prompt": [5, 6], "temperature": 0})
    for router in routers:
        router.wait_for_instances(server)
    undisturbed = text_of(server.url, COMPLETIONS, body)
    with reading(routers[0].url, COMPLETIONS, body) as pieces, contextlib.suppress(httpx.RemoteProtocolError):
        next(pieces)
        kill(routers[0])
        list(pieces)
    assert anonymous(text_of(routers[1].url, COMPLETIONS, body)) == anonymous(undisturbed)
    wait_until(lambda: load_of(server) == 0)


def test_a_router_that_is_started_anew_finds_its_servers_again(fleet: Fleet) -> None:
    port = free_port()
    first = fleet.router(port=port)
    server = fleet.server(first)
    first.wait_for_instances(server)
    kill(first)
    first.wait()
    second = fleet.router(port=port)
    second.wait_for_instances(server)
    server.wait_for_line("not registered with the router")


def test_a_router_gives_the_metrics_of_all_its_instances(fleet: Fleet) -> None:
    router = fleet.router()
    servers = [fleet.server(router), fleet.server(router)]
    router.wait_for_instances(*servers)
    for server in servers:
        body = {"model": "toy", "prompt": [5], "max_tokens": 3}
        assert httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=WAIT_S).status_code == 200
    kill(servers[1])
    text = router.get("/instances/metrics").text
    one, other = (server.url.removeprefix("http://") for server in servers)
    assert f'fastdeploy:generation_tokens_total{{instance="{one}"}} 3.0' in text
    assert f'fastdeploy_sd:router_instance_scraped{{instance="{one}"}} 1.0' in text
    assert f'fastdeploy_sd:router_instance_scraped{{instance="{other}"}} 0.0' in text
    assert text.count("# TYPE fastdeploy:generation_tokens_total ") == 1
