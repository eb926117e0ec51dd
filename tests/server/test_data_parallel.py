"""A server of several engines: streams survive the end of one, which is started again.

Processes, sockets, HTTP and signals are real; the model is the toy one or the demo model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.weight_pages import weight_pages
from tests.server.outcomes import BODIES, outcome
from tests.server.router_process import wait_until
from tests.server.split_deployment import ModelServer
from tests.server.toy_process import WAIT_S, Server, Stream, complete, error_of, is_complete, serving

pytestmark = pytest.mark.slow

SAMPLED: list[dict[str, object]] = [{"seed": seed, "temperature": 1.0, "prompt": [5 + seed]} for seed in range(4)]


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", timeout=WAIT_S)


def states(url: str) -> list[str]:
    """The states of the engines, as /health tells them."""
    body: dict[str, Any] = get(url, "/health").json()
    return [engine["state"] for engine in body["engines"]]


def num_running(url: str, engine: int) -> float:
    """Requests in the batch of an engine."""
    name = f'fastdeploy:num_requests_running{{engine="{engine}"}} '
    (line,) = (line for line in get(url, "/metrics").text.splitlines() if line.startswith(name))
    return float(line.removeprefix(name))


def begun_on_both(url: str, pool: ThreadPoolExecutor, bodies: list[tuple[str, dict[str, Any]]]) -> list[Future[object]]:
    """Begin requests, and wait until both engines have some. Those of a fast machine may end before that is seen: then
    they begin again.
    """
    while True:
        running: list[Future[object]] = [pool.submit(outcome, url, *body) for body in bodies]
        wait_until(lambda: all(num_running(url, i) for i in range(2)) or all(one.done() for one in running))  # noqa: B023
        if not all(one.done() for one in running):
            return running


def samples(url: str, name: str) -> dict[str, float]:
    """The samples of a metric, by their labels."""
    lines = (line for line in get(url, "/metrics").text.splitlines() if line.startswith(name + "{"))
    return {labels: float(value) for labels, _, value in (line.rpartition(" ") for line in lines)}


def post(url: str, path: str, **body: object) -> httpx.Response:
    """Ask one of the routes about experts, which have no password."""
    return httpx.post(f"{url}{path}", json=body, timeout=WAIT_S)


def check(url: str) -> dict[str, Any]:
    """Whether experts move, and where they are."""
    found: dict[str, Any] = post(url, "/check_redundant", check_get_workloads=True).json()
    return found


def placement(url: str) -> list[list[list[int]]]:
    """The experts of each rank, by layer."""
    slots = check(url)["data"]["ep_rank_to_expert_id_list"]
    return [[sorted(layer[:6]), sorted(layer[6:])] for layer in slots]


def verify_one_copy(engines: list[int]) -> None:
    """Verify that all pages of the weights that an engine reads are those of the others too."""
    pages = [weight_pages(pid) for pid in engines]
    assert len({tuple(each.inodes) for each in pages}) == len(pages[0].inodes) == 1
    assert sum(each.own_share for each in pages) <= 1.1 * min(each.resident for each in pages), pages


def sampled(server: Server, max_tokens: int) -> list[Stream]:
    """Streams that both engines have."""
    streams = [Stream(server.url, max_tokens, **body) for body in SAMPLED]
    wait_until(lambda: num_running(server.url, 0) and num_running(server.url, 1))
    return streams


def text_of(events: list[str]) -> str:
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def test_streams_of_an_engine_that_dies_or_hangs_go_on_and_it_is_started_again(golden_dir: Path) -> None:
    with serving(golden_dir, data_parallel_size=2, workers=2, timeout_engine=1.0) as server:
        assert server.url
        server.wait_for_workers(2)
        expected = [text_of(stream.read()) for stream in sampled(server, 120)]
        for number in (signal.SIGKILL, signal.SIGSTOP):
            streams = sampled(server, 120)
            engine, _ = server.children("engine_process")
            os.kill(engine, number)
            events = [stream.read() for stream in streams]
            assert all(map(is_complete, events))
            assert [text_of(e) for e in events] == expected
            server.wait_for_line(rf"engine \d process {engine} failed \(killed by SIGKILL\)")
            wait_until(lambda: states(server.url) == ["ready", "ready"])
            assert engine not in server.children("engine_process")
        assert "leaves engine" in server.stderr


def test_an_engine_drains_all_die_and_are_started_again_and_all_end_with_the_server(golden_dir: Path) -> None:
    with serving(golden_dir, data_parallel_size=2) as server:
        streams = sampled(server, 100)
        engine, _ = server.children("engine_process")
        os.kill(engine, signal.SIGTERM)
        server.wait_for_line(r"engine \d: draining: \d requests may finish")
        assert complete(server.url).status_code == 200
        assert all(is_complete(stream.read()) for stream in streams)
        server.wait_for_line(r"another engine \d process starts")
        wait_until(lambda: states(server.url) == ["ready", "ready"])
        assert "leaves engine" not in server.stderr
        streams = sampled(server, 100)
        for engine in server.children("engine_process"):
            os.kill(engine, signal.SIGKILL)
        wait_until(lambda: get(server.url, "/health").status_code == 503)
        assert complete(server.url).status_code == 200, "a new request waits for an engine"
        assert all(is_complete(stream.read()) for stream in streams)
        wait_until(lambda: states(server.url) == ["ready", "ready"])
        streams, endless = sampled(server, 100), sampled(server, 4000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping: running requests may finish")
        assert complete(server.url).json()["error"]["code"] == "draining"
        assert all(is_complete(stream.read()) for stream in streams)
        server.process.send_signal(signal.SIGINT)
        for stream in endless:
            assert error_of(stream.read())["type"] == "service_unavailable_error"
        assert server.wait() == 0
        assert "Traceback" not in server.stderr


def test_engines_that_cannot_be_started_any_more_end_the_server_with_status_1(golden_dir: Path, tmp_path: Path) -> None:
    setup = "from fastdeploy_sd.entrypoints import worker_pool; worker_pool._MAX_QUICK_DEATHS = 2"
    with serving(golden_dir, "create_once", tmpdir=tmp_path, setup=setup, data_parallel_size=2) as server:
        streams = sampled(server, 4000)
        for engine in server.children("engine_process"):
            os.kill(engine, signal.SIGKILL)
        refused = complete(server.url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
        for stream in streams:
            assert error_of(stream.read())["type"] == "service_unavailable_error"
        assert server.wait() == 1
        assert "no engine 1 process is started any more: 3 died in a row" in server.stderr
        assert server.stderr.splitlines()[-1] == "error: the engine process failed (exit status 1)"


def test_no_engine_goes_on_without_the_experts_of_another(golden_dir: Path, tmp_path: Path) -> None:
    setup = "from fastdeploy_sd.entrypoints import worker_pool; worker_pool._MAX_QUICK_DEATHS = 1"
    options: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with serving(golden_dir, "create_once", tmpdir=tmp_path, setup=setup, **options) as server:
        assert complete(server.url).status_code == 200
        os.kill(server.children("engine_process")[1], signal.SIGKILL)
        assert server.wait() == 1
        assert "no engine 1 process is started any more: 2 died in a row" in server.stderr


def test_an_engine_that_cannot_be_started_at_first_ends_the_start(golden_dir: Path) -> None:
    with serving(golden_dir, "create_second_misconfigured", data_parallel_size=2) as server:
        assert server.wait() == 2
        errors = [line for line in server.stderr.splitlines() if line != "loading" and " INFO " not in line]
        assert errors == ["error: model: expected a checkpoint with weights, got none"]


def test_engines_that_share_experts_wait_for_one_that_dies(golden_dir: Path, tmp_path: Path) -> None:
    """Requests of both go on at the other one, whose steps wait until the experts of the first are there again. Experts
    move meanwhile; the first engine places them. Once the server is stopped, no step waits for lost experts.
    """
    options: dict[str, Any] = {"kv_cache_memory_gb": 0.1, "data_parallel_size": 2, "enable_expert_parallel": True}
    options["timeout_graceful_shutdown"] = 10 * WAIT_S
    eplb = {"redundant_experts_num": 2, "redundant_expert_dump_workload_interval": 3600}
    options |= {"enable_eplb": True, "eplb_config": json.dumps(eplb)}
    bodies = [("/v1/completions", {"prompt": [5 + i], "seed": i, "logprobs": 2, "max_tokens": 1500}) for i in range(4)]
    model = golden_dir / "qwen3_moe-tiny"
    with contextlib.closing(ModelServer(model, tmp_path, timeout_engine=2.0, **options)) as server:
        wait_until(lambda: states(server.url) == ["ready", "ready"])
        before = placement(server.url)
        outcome(server.url, "/v1/completions", bodies[0][1] | {"max_tokens": 40})
        assert post(server.url, "/rearrange_experts").status_code == 200
        wait_until(lambda: check(server.url)["status"] == "FREE")
        assert placement(server.url) != before
        verify_one_copy(server.children("engine_process"))
        with ThreadPoolExecutor(len(bodies)) as pool:
            running = begun_on_both(server.url, pool, bodies)
            assert post(server.url, "/rearrange_experts").status_code == 200
            os.kill(server.children("engine_process")[0], signal.SIGKILL)
            outcomes = [one.result() for one in running]
        server.wait_for_line("leaves engine 0")
        verify_one_copy(server.children("engine_process"))
        assert "no sign of life" not in server.stderr
        assert states(server.url) == ["ready", "ready"]
        plain = {"speculation": {"enabled": False}}
        assert outcomes == [outcome(server.url, path, body | plain) for path, body in bodies]
        wait_until(lambda: check(server.url)["status"] == "FREE")
        rows = post(server.url, "/get_per_expert_tokens_stats").json()["data"][0]
        served = samples(server.url, "fastdeploy_sd:expert_rows_total")
        assert sum(map(sum, rows)) > 0
        assert all(served.values())
        assert {labels.partition('rank="')[2][0] for labels in served} == {"0", "1"}
        with ThreadPoolExecutor(len(bodies)) as pool:
            running = begun_on_both(server.url, pool, bodies)
            os.kill(server.children("engine_process")[0], signal.SIGKILL)
            wait_until(lambda: "down" in states(server.url))
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0  # long before requests may take no longer
            assert all("'code': 'draining'" in str(one.exception()) for one in running)


@pytest.mark.long
def test_every_kind_of_stream_goes_on_at_another_engine(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_cache_memory_gb": 0.3, "data_parallel_size": 2}
    with contextlib.closing(ModelServer("demo", tmp_path, **options)) as server:
        outcomes: dict[int, object] = {}

        def read(i: int) -> None:
            outcomes[i] = outcome(server.url, *BODIES[i])

        wait_until(lambda: states(server.url) == ["ready", "ready"])
        readers = [threading.Thread(target=read, args=(i,)) for i in range(len(BODIES))]
        for reader in readers:
            reader.start()
        wait_until(lambda: num_running(server.url, 0) >= 3)
        os.kill(server.children("engine_process")[0], signal.SIGKILL)
        for reader in readers:
            reader.join()
        server.wait_for_line("leaves engine 0")
        plain = {"speculation": {"enabled": False}}
        assert outcomes == {i: outcome(server.url, path, body | plain) for i, (path, body) in enumerate(BODIES)}
