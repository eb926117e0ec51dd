"""Servers of two models: each has its own engine, whose end concerns no request of the other model.

Processes, sockets, HTTP and signals are real; models are the toy one, and tiny ones where roles exchange their KV.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_sd import LLM, LoRARequest, SamplingParams
from fastdeploy_sd.entrypoints.launch import DEFAULT_EXECUTOR
from tests.doubles.ports import free_port
from tests.doubles.redis_server import PASSWORD, running_redis
from tests.models.peft_adapters import write_adapter
from tests.server.router_process import Router, wait_until
from tests.server.split_deployment import START_S
from tests.server.test_data_parallel import states, text_of
from tests.server.toy_process import WAIT_S, Program, Stream, complete, is_complete

pytestmark = pytest.mark.slow

START = """
import sys
from fastdeploy_sd.config import load_configs
from fastdeploy_sd.entrypoints import launch, worker_pool
worker_pool._MAX_QUICK_DEATHS = 1
sys.exit(launch.run(load_configs(sys.argv[2:]), sys.argv[1]))
"""


@contextlib.contextmanager
def serving(golden_dir: Path, tmp_path: Path, executor: str, *flags: str) -> Iterator[tuple[Program, str]]:
    """A server of the models "toy" and "other", and where it serves."""
    model = str(golden_dir / "qwen3-tiny")
    models = json.dumps({"toy": model, "other": {"model": model, "served_model_name": "alias"}})
    executor = f"tests.server.lifecycle_executors:{executor}"
    argv = [sys.executable, "-c", START, executor, "--models", models, "--port", "0", *flags]
    with contextlib.closing(Program(argv, TMPDIR=str(tmp_path))) as server:
        yield server, server.wait_for_line(r"serving toy, other, alias on (http://\S+)")[1]


def tokens_by_model(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines()
    samples = [line for line in lines if line.startswith("fastdeploy:generation_tokens_total{")]
    return {line.partition('model_name="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in samples}


def test_a_dead_engine_is_started_again_and_the_other_model_goes_on(golden_dir: Path, tmp_path: Path) -> None:
    with serving(golden_dir, tmp_path, "create_slow", "--workers", "2") as (server, url):
        server.wait_for_workers(2)
        listed: dict[str, Any] = httpx.get(f"{url}/v1/models", timeout=WAIT_S).json()
        assert [card["id"] for card in listed["data"]] == ["toy", "other", "alias"]
        assert complete(url, model="third").status_code == 404
        bodies = [{"model": model, "seed": 3, "temperature": 1.0} for model in ("toy", "alias")]
        streams = [Stream(url, 60, **body) for body in bodies]
        expected = [text_of(stream.read()) for stream in streams]
        assert tokens_by_model(url) == {"toy": 60, "other": 60}
        streams = [Stream(url, 60, **body) for body in bodies]
        kept, lost = server.children("engine_process")
        os.kill(lost, signal.SIGKILL)
        events = [stream.read() for stream in streams]
        assert all(map(is_complete, events))
        assert [text_of(e) for e in events] == expected
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert kept in server.children("engine_process")
        assert server.stderr.count("leaves engine 0") == 1
        # Each process is connected again by itself, and connections are shared out among them.
        wait_until(lambda: {complete(url, model="alias").status_code for _ in range(6)} == {200})
        streams = [Stream(url, 40, **body) for body in bodies]
        server.process.send_signal(signal.SIGTERM)
        assert all(is_complete(stream.read()) for stream in streams)
        assert server.wait() == 0


def test_a_model_whose_engine_cannot_be_started_any_more_is_refused_alone(golden_dir: Path, tmp_path: Path) -> None:
    with serving(golden_dir, tmp_path, "create_other_once", "--timeout-engine", "1") as (server, url):
        kept, lost = server.children("engine_process")
        stream = Stream(url, 60)
        os.kill(lost, signal.SIGKILL)
        server.wait_for_line("no engine 1 process is started any more: 2 died in a row")
        refused = complete(url, model="other")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
        assert complete(url).status_code == 200
        assert is_complete(stream.read())
        assert (states(url), server.children("engine_process")) == (["ready", "down"], [kept])
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


PROMPT = "def add(a, b):\n    return a + b\n" * 4
FORMS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]


NAMES = {"a": "qwen3-tiny", "tuned": "qwen3-tiny", "b": "llama-tiny"}


@dataclass(frozen=True)
class Crossed:
    """A router and two commands of two models: each computes prompts of one and generates with the other.

    Attributes:
        decoding, prefilling: name -> where the command is that has this part of its model.
        expected: name -> what the model says by itself in each of FORMS.
    """

    router: str
    decoding: dict[str, str]
    prefilling: dict[str, str]
    expected: dict[str, list[str]]


def said(url: str, model: str) -> list[str]:
    """What a model says in each of FORMS."""
    bodies = ({"model": model, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, **form} for form in FORMS)
    answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=START_S) for body in bodies]
    assert [answer.status_code for answer in answers] == [200] * len(FORMS), answers[0].text
    return [answer.json()["choices"][0]["text"] for answer in answers]


def alone(golden_dir: Path, adapter: Path) -> dict[str, list[str]]:
    """See Crossed.expected."""
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **form) for form in FORMS]
    found = dict[str, list[str]]()
    for name, model in NAMES.items():
        options: dict[str, Any] = {"max_model_len": 512, "speculative_config": {"method": "naive"}, "num_threads": 1}
        options["enable_lora"] = name == "tuned"
        with LLM(str(golden_dir / model), **options) as llm:
            request = LoRARequest("tuned", 1, str(adapter)) if name == "tuned" else None
            outputs = llm.generate([PROMPT] * len(FORMS), params, use_tqdm=False, lora_request=request)
            found[name] = [output.outputs[0].text for output in outputs]
    return found


def metric(url: str, *parts: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=START_S).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(part in line for part in parts))


@pytest.fixture(scope="module")
def crossed(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crossed]:
    """See there; the commands share their requests through Redis too."""
    folder = tmp_path_factory.mktemp("f")
    adapter = write_adapter(folder / "adapter", "qwen3-tiny")
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(running_redis(folder))
        router = stack.enter_context(contextlib.closing(Router(folder, free_port(), splitwise="true")))
        commands = list[Program]()
        for roles in (("prefill", "decode"), ("decode", "prefill")):
            models: dict[str, dict[str, Any]] = {
                name: {"model": str(golden_dir / model), "splitwise_role": role}
                for (name, model), role in zip((("a", NAMES["a"]), ("b", NAMES["b"])), roles, strict=True)
            }
            models["a"]["lora_modules"] = [f"tuned={adapter}"]
            options = {
                "models": models, "port": 0, "router": [router.address], "max_model_len": 512, "num_threads": 1,
                "speculative_config": {"method": "ngram"},
                "block_size": 16, "scheduler_name": "splitwise", "scheduler_port": redis.port,
                "scheduler_topic": "tests", "scheduler_password": PASSWORD,
            }  # fmt: skip
            file = folder / f"{roles[0]}.json"
            file.write_text(json.dumps(options))
            argv = [sys.executable, "-c", START, DEFAULT_EXECUTOR, "--config", str(file)]
            program = Program(argv, TMPDIR=str(folder), XDG_STATE_HOME=str(folder))
            commands.append(stack.enter_context(contextlib.closing(program)))
        expected = alone(golden_dir, adapter)
        urls = [program.wait_for_line(r"serving a, b on (http://\S+)", START_S)[1] for program in commands]
        wait_until(lambda: [i["state"] for i in router.instances()] == ["available"] * 4, START_S)
        wait_until(lambda: int(redis.do("HLEN", "tests.cluster")) == len(commands) * 2, START_S)
        first, second = urls
        prefilling = {"a": first, "tuned": first, "b": second}
        decoding = {"a": second, "tuned": second, "b": first}
        yield Crossed(router.url, decoding, prefilling, expected)
        for program in commands:
            program.process.send_signal(signal.SIGTERM)
        assert [program.wait(START_S) for program in commands] == [0, 0]
        redis.wait_for_keys()


def test_each_model_has_its_own_prefill_and_decode_engines(crossed: Crossed) -> None:
    assert len({text for texts in crossed.expected.values() for text in texts}) == len(NAMES) * len(FORMS)
    assert {name: said(crossed.router, name) for name in NAMES} == crossed.expected
    for model in ("a", "b"):
        tokens = "supplied_kv_tokens_total{", f'model_name="{model}"', 'origin="prefill"'
        assert metric(crossed.decoding[model], *tokens) > 0
        assert metric(crossed.prefilling[model], *tokens) == 0
    cards = httpx.get(f"{crossed.router}/v1/models", timeout=START_S).json()["data"]
    assert {card["id"]: card.get("parent") for card in cards} == {"a": None, "tuned": "a", "b": None}
    tags = httpx.get(f"{crossed.router}/api/tags", timeout=START_S).json()["models"]
    assert {model["name"] for model in tags} == {"a:latest", "tuned:latest", "b:latest"}


def test_requests_of_each_model_go_through_redis_to_its_decode_engine(crossed: Crossed) -> None:
    def num_pushed() -> dict[str, float]:
        return {model: metric(crossed.prefilling[model], "redis_requests_total{", 'place="pushed"') for model in "ab"}

    before = num_pushed()
    assert {name: said(crossed.prefilling[name], name) for name in NAMES} == crossed.expected
    assert num_pushed() == {"a": before["a"] + 2 * len(FORMS), "b": before["b"] + len(FORMS)}
