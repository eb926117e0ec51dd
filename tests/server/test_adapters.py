"""LoRA adapters of a server: named as models in every kind of request, loaded and unloaded while it runs.

Processes, sockets and HTTP are real, and so are the tiny model and its engines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models.peft_adapters import ALL, ATTENTION, write_adapter
from tests.server.router_process import wait_until
from tests.server.split_deployment import START_S, ModelServer, SplitDeployment

pytestmark = pytest.mark.slow

MODEL = "qwen3-tiny"
KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "add"}], "max_tokens": 8, "temperature": 0}),
    ("/v1/responses", {"input": "add", "max_output_tokens": 8, "temperature": 0}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "add"}], "max_tokens": 8, "temperature": 0}),
    (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "add"}],
            "stream": False,
            "options": {"num_predict": 8, "temperature": 0},
        },
    ),
    ("/api/generate", {"prompt": "add", "stream": False, "options": {"num_predict": 8, "temperature": 0}}),
    ("/v1/embeddings", {"input": "def add(a, b):"}),
]


def ask(url: str, path: str, model: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": model, **body}, headers=HEADERS, timeout=START_S)


def change(url: str, action: str, **body: object) -> httpx.Response:
    """Load or unload an adapter."""
    return httpx.post(f"{url}/v1/{action}_lora_adapter", json=body, headers=HEADERS, timeout=START_S)


def said(path: str, answer: httpx.Response) -> object:
    """What the model said, without ids and times."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    match path:
        case "/v1/embeddings":
            return body["data"][0]["embedding"]
        case "/v1/responses":
            return body["output"]
        case "/v1/messages":
            return body["content"]
        case "/api/chat":
            return body["message"]
        case "/api/generate":
            return body["response"]
    return [choice.get("message", choice.get("text")) for choice in body["choices"]]


def text(url: str, model: str, **options: object) -> object:
    """A completion of some tokens."""
    body = {"prompt": "def add(a, b):\n    return", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **options}
    return said("/v1/completions", ask(url, "/v1/completions", model, **body))


def wait_ready(url: str) -> None:
    """Wait until both engines take requests."""
    wait_until(lambda: all(e["state"] == "ready" for e in httpx.get(f"{url}/health").json()["engines"]), START_S)


def names(url: str) -> list[str]:
    answer = httpx.get(f"{url}/v1/models", headers=HEADERS, timeout=START_S)
    return [card["id"] for card in answer.json()["data"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters below one folder: one and two of the served model, other of another model."""
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "one", MODEL, ALL, seed=1)
    write_adapter(root / "two", MODEL, ATTENTION, seed=2)
    write_adapter(root / "other", "ernie4_5-tiny", seed=3)
    return root


@pytest.fixture(scope="module")
def served(golden_dir: Path, folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """Two engines with an adapter from the start, in two HTTP processes."""
    options: dict[str, Any] = {
        "data_parallel_size": 2, "lora_modules": [f"one={folders / 'one'}"], "max_loras": 2, "api_key": KEY,
        "lora_root": str(folders), "speculative_config": {"method": "ngram"}, "max_num_seqs": 8, "max_model_len": 512,
    }  # fmt: skip
    with closing(ModelServer(golden_dir / MODEL, tmp_path_factory.mktemp("s"), **options)) as server:
        yield server


@pytest.fixture
def two(served: ModelServer, folders: Path) -> Iterator[str]:
    """The address of the server, with a second adapter."""
    url = served.url
    assert change(url, "load", lora_name="two", lora_path="two").status_code == 200
    yield url
    wait_ready(url)
    assert change(url, "unload", lora_name="two").status_code == 200


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_the_model_of_a_request_may_be_an_adapter(two: str, path: str, body: dict[str, Any]) -> None:
    found = {name: said(path, ask(two, path, name, **body)) for name in ("m", "one", "two")}
    assert len({str(value) for value in found.values()}) == 3
    missing = ask(two, path, "three", **body)
    assert missing.status_code == 404
    assert "'m', 'one', 'two'" in missing.text


def test_adapters_are_listed_with_their_parent(two: str, folders: Path) -> None:
    cards = httpx.get(f"{two}/v1/models", headers=HEADERS).json()["data"]
    assert [card["id"] for card in cards] == ["m", "one", "two"]
    assert cards[2]["parent"] == "m"
    assert cards[2]["root"] == str(folders / "two")
    assert "parent" not in cards[0]
    assert httpx.get(f"{two}/v1/models/two", headers=HEADERS).json() == cards[2]


def test_one_batch_of_many_adapters_says_what_each_does_alone(two: str) -> None:
    bodies = [
        (name, {"seed": seed, "temperature": t}) for name in ("m", "one", "two") for seed in (1, 2) for t in (0, 0.9)
    ]
    alone = [text(two, name, **options) for name, options in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: text(two, body[0], **body[1]), bodies))
    assert together == alone


def test_what_cannot_be_loaded_is_refused(served: ModelServer, folders: Path) -> None:
    url = served.url
    cases = [
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "lora_path: expected a folder below lora_root"),
        ({"lora_name": "x", "lora_path": "../one"}, 403, "lora_path"),
        ({"lora_name": "x", "lora_path": "missing"}, 400, "missing"),
        ({"lora_name": "x", "lora_path": "other"}, 400, "expected"),
        ({"lora_name": "one", "lora_path": "one"}, 400, "lora_name: expected a name that is not in use"),
        ({"lora_name": "m", "lora_path": "one"}, 400, "lora_name: expected a name that is not in use"),
        ({"lora_name": "a b", "lora_path": "one"}, 400, "lora_name: expected 1..128 printable characters"),
        ({"lora_name": "x"}, 400, "lora_path"),
    ]
    for body, status, words in cases:
        answer = change(url, "load", **body)
        assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert httpx.post(f"{url}/v1/load_lora_adapter", json=cases[0][0]).status_code == 401
    assert change(url, "unload", lora_name="x").status_code == 404
    assert names(url) == ["m", "one"]


def test_requests_go_on_whose_adapter_is_unloaded(served: ModelServer, folders: Path) -> None:
    url = served.url
    load = {"lora_name": "gone", "lora_path": str(folders / "two")}
    assert change(url, "load", **load).status_code == 200
    want = text(url, "gone", max_tokens=300)
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(text, url, "gone", max_tokens=300) for _ in range(6)]
        wait_until(lambda: served.metric("fastdeploy:num_requests_running") > 0 or all(r.done() for r in running))
        assert change(url, "unload", lora_name="gone").status_code == 200
        assert ask(url, "/v1/completions", "gone", prompt="a").status_code == 404
        assert [one.result() for one in running] == [want] * 6
    assert names(url) == ["m", "one"]


def test_a_router_serves_and_changes_the_adapters_of_its_instances(golden_dir: Path, folders: Path, two: str) -> None:
    modules = [f"{name}={folders / name}" for name in ("one", "two")]
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "speculative_config": {"method": "ngram"}}
    prompt = "def add(a, b):\n    return a\n" * 20
    with SplitDeployment(golden_dir / MODEL, **options, block_size=16) as deployment:
        router = deployment.router()
        prefill = deployment.server("prefill", lora_modules=modules[:1], lora_root=str(folders.parent))
        decode = deployment.server("decode", lora_modules=modules, lora_root=str(folders))
        deployment.wait_for(prefill, decode)
        cards = router.get("/v1/models").json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [("m", None), ("one", "m"), ("two", "m")]
        for name, num_arrivals in (("m", 1), ("one", 2), ("two", 2)):
            assert text(router.url, name, prompt=prompt) == text(two, name, prompt=prompt)
            assert decode.metric("fastdeploy_sd:kv_arrivals_total") == num_arrivals, "two is not loaded at the other"
        assert ask(router.url, "/v1/completions", "three", prompt="a").status_code == 404
        assert change(router.url, "load", lora_name="three", lora_path=str(folders / "two")).status_code == 200
        assert "three" in names(router.url)
        assert text(router.url, "three", prompt=prompt) == text(two, "two", prompt=prompt)
        assert {tuple(i["models"]) for i in router.get("/instances").json()["instances"]} == {
            ("m", "one", "three"), ("m", "one", "two", "three"),
        }  # fmt: skip
        failed = change(router.url, "load", lora_name="four", lora_path="two")
        assert (failed.status_code, failed.json()["error"]["code"]) == (502, "instances_failed")
        assert f"{prefill.address} answered 400" in failed.json()["error"]["message"]
        assert names(router.url) == ["m", "one", "two", "three"], "the other one has unloaded it"
        refused = change(router.url, "load", lora_name="one", lora_path=str(folders / "one"))
        assert refused.json()["error"]["message"].startswith("lora_name: expected a name that is not in use")
        assert change(router.url, "load", lora_name="two", lora_path=str(folders / "two")).status_code == 200
        for name in ("two", "three"):
            assert change(router.url, "unload", lora_name=name).status_code == 200
        assert names(router.url) == ["m", "one"]
        assert change(router.url, "unload", lora_name="two").status_code == 404


def test_an_engine_that_is_started_again_has_the_adapters(served: ModelServer, folders: Path, two: str) -> None:
    want = text(two, "two", max_tokens=200)
    assert change(two, "unload", lora_name="one").status_code == 200
    engines = served.children("engine_process")
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(text, two, "two", max_tokens=200) for _ in range(6)]
        os.kill(engines[0], signal.SIGKILL)
        assert [one.result() for one in running] == [want] * 6
    wait_ready(two)
    assert names(two) == ["m", "two"], "not the one that was unloaded"
    os.kill(engines[1], signal.SIGKILL)
    assert text(two, "two", max_tokens=200) == want, "the one that was started again alone"
    wait_ready(two)
    assert change(two, "load", lora_name="one", lora_path="one").status_code == 200
