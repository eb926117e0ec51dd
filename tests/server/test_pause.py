"""Operators have new requests refused and taken again: by a server, one of its engines, and a router.

Processes, sockets and HTTP are real; the model is the toy one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.router_process import Fleet, serving_one, wait_until
from tests.server.test_data_parallel import states
from tests.server.toy_process import WAIT_S, Stream, complete, is_complete, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def post(url: str, path: str, **query: object) -> httpx.Response:
    return httpx.post(f"{url}{path}", params={name: str(value) for name, value in query.items()}, timeout=WAIT_S)


def is_paused(url: str, **query: object) -> bool:
    found = httpx.get(f"{url}/is_paused", params={name: str(value) for name, value in query.items()}, timeout=WAIT_S)
    return bool(found.json()["is_paused"])


def statuses(url: str) -> set[int]:
    """Of several requests: each process learns of a pause by itself, and connections are shared out among them."""
    return {complete(url).status_code for _ in range(6)}


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_paused_server_finishes_what_runs_and_takes_nothing_new(golden_dir: Path, pool: ThreadPoolExecutor) -> None:
    """All HTTP processes know of it; choices of a request that has begun are begun, also by engines that are paused. An
    engine that is started again meanwhile is paused, too.
    """
    with serving(golden_dir, data_parallel_size=2, workers=2, max_num_seqs=1) as server:
        server.wait_for_workers(2)
        url = server.url
        stream = Stream(url, 120, n=3)
        pausing = pool.submit(post, url, "/pause")
        wait_until(lambda: is_paused(url))
        assert not pausing.done()
        wait_until(lambda: statuses(url) == {503})
        assert refusal(complete(url)) == (503, "paused")
        assert refusal(httpx.get(f"{url}/ready", timeout=WAIT_S)) == (503, "paused")
        assert is_complete(stream.read())
        assert pausing.result().json() == {"is_paused": True, "num_requests": 0}
        os.kill(server.children("engine_process")[1], signal.SIGKILL)
        server.wait_for_line(r"another engine \d process starts")
        wait_until(lambda: not is_paused(url))  # it is down
        assert refusal(post(url, "/resume")) == (503, "engine_down")
        assert post(url, "/pause", engine=0).status_code == 200
        wait_until(lambda: is_paused(url))
        assert post(url, "/v1/resume").json() == {"is_paused": False, "num_requests": 0}
        wait_until(lambda: statuses(url) == {200})
        assert post(url, "/v1/pause", engine=1).status_code == 200
        wait_until(lambda: states(url) == ["ready", "paused"])
        assert complete(url).status_code == 200


def test_a_router_places_nothing_at_a_paused_instance(
    golden_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with Fleet(golden_dir, tmp_path) as fleet:
        router = fleet.router()
        servers = [fleet.server(router) for _ in range(2)]
        router.wait_for_instances(*servers)
        stream = Stream(router.url, 60)
        other = serving_one(*servers)
        (one,) = (server for server in servers if server is not other)
        name = next(i["id"] for i in router.instances() if i["address"] in other.url)
        pausing = pool.submit(post, router.url, "/pause", instance=name)
        wait_until(lambda: is_paused(router.url, instance=name))
        assert router.available() == {one.url.removeprefix("http://")}
        assert {complete(router.url).status_code for _ in range(4)} == {200}
        assert is_complete(stream.read())
        assert pausing.result().json() == {"is_paused": True, "num_requests": 0}
        assert post(one.url, "/pause").status_code == 200
        wait_until(lambda: router.available() == set())
        assert refusal(complete(router.url)) == (503, "no_instance")
        assert post(router.url, "/resume", instance=other.url.removeprefix("http://")).status_code == 200
        assert complete(router.url).status_code == 200
        assert post(router.url, "/pause", instance="none").status_code == 404
        assert post(router.url, "/pause").status_code == 200
        assert refusal(complete(router.url)) == (503, "paused")
        assert refusal(router.get("/ready")) == (503, "paused")
        assert post(router.url, "/resume").json() == {"is_paused": False, "num_requests": 0}
        assert complete(router.url).status_code == 200
