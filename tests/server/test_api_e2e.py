"""The whole product on real checkpoints: server and engine process, model, sockets, and the openai package."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import pytest

from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from tests.models.golden import cases
from tests.server.router_process import wait_until

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
START_S = 300
STOP_S = 60
COMMAND = [sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
TOKENIZER = FastTokenizer(GOLDEN / "qwen3-tiny")


class RunningServer:
    """A server process on a golden checkpoint and a free port, once it has said where it listens.

    Args:
        name: of the checkpoint and of the served model.
        extra: more options, by the names of their flags.
    """

    def __init__(self, name: str, extra: Mapping[str, str] | None = None) -> None:
        options = {"model": str(GOLDEN / name), "served-model-name": name, "dtype": "float32", "port": "0",
                   "num-gpu-blocks-override": "128", **(extra or {})}  # fmt: skip
        flags = [part for option, value in options.items() for part in (f"--{option}", value)]
        self.process = subprocess.Popen([*COMMAND, *flags], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self.url = self._wait_until_serving()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

        self.api = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stop(self) -> int:
        """End it the orderly way; return its exit status."""
        self.api.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            self._stderr.close()

    @property
    def _stderr(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    def _wait_until_serving(self) -> str:
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        try:
            while line := self._stderr.readline():
                self._lines.append(line)
                if match := re.search(r"serving .* on (http://\S+)", line):
                    return match[1]
        finally:
            watchdog.cancel()
        self._stderr.close()
        raise AssertionError(f"the server ended with {self.process.wait(STOP_S)}:\n{''.join(self._lines)}")

    def _read(self) -> None:
        """Keep the pipe empty, so that the server never waits to log."""
        self._lines += self._stderr


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer("qwen3-tiny")
    yield running
    assert running.stop() == 0


def ids_of(answer: Any) -> list[int]:
    token_ids: list[int] = answer.choices[0].completion_token_ids
    return token_ids


@pytest.mark.parametrize("name", ["ernie4_5_moe-tiny", "gpt_oss-tiny", "qwen3_next-tiny"])
def test_other_architectures_give_the_reference_tokens(name: str) -> None:
    """One with experts, one with windows, one with recurrent states; LLM gives the tokens of all: test_golden.py."""
    running = RunningServer(name)
    try:
        verify_reference(running, name)
    finally:
        assert running.stop() == 0


@pytest.mark.fast
def test_greedy_completions_are_the_reference(server: RunningServer) -> None:
    verify_reference(server, "qwen3-tiny")


def test_a_speculating_server_gives_the_reference_and_says_what_drafts_were_worth() -> None:
    running = RunningServer("qwen3-tiny", {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'})
    try:
        verify_reference(running, "qwen3-tiny")
        ask = {"prompt": [5, 6, 7], "max_tokens": 32, "seed": 1, "ignore_eos": True, "logit_bias": {"9": 30.0}}
        with httpx.Client(base_url=running.url, timeout=60) as http:
            drafted, plain = [
                http.post("/v1/completions", json=ask | {"speculation": {"enabled": enabled}}).json()["choices"][0]
                for enabled in (True, False)
            ]
        metrics = drafted.pop("speculate_metrics")
        assert drafted == plain
        assert (metrics["method"], metrics["lossy"]) == ("ngram", False)
        assert metrics["accepted_tokens"] > 0, "the text repeats itself"
    finally:
        assert running.stop() == 0


def verify_reference(server: RunningServer, name: str) -> None:
    golden = cases(name)
    prompts: Any = [case.prompt.tolist() for case in golden]
    answer = server.api.completions.create(
        model=name, prompt=prompts, temperature=0, max_tokens=48,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    got: list[Any] = [choice.completion_token_ids for choice in answer.choices]  # type: ignore[attr-defined]
    assert got == [case.greedy.tolist() for case in golden]


def test_a_stream_has_the_text_of_the_whole_answer(server: RunningServer) -> None:
    ask: Any = {
        "model": "qwen3-tiny",
        "messages": [{"role": "user", "content": "Zürich?"}],
        "seed": 3,
        "max_tokens": 40,
    }
    whole = server.api.chat.completions.create(**ask)
    chunks = list(server.api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_answers_do_not_depend_on_the_company(server: RunningServer) -> None:
    asks: list[Any] = [
        {"model": "qwen3-tiny", "prompt": f"def f{i}(x):" * (i + 1), "seed": i, "max_tokens": 24,
         "extra_body": {"return_token_ids": True}}
        for i in range(6)
    ]  # fmt: skip
    alone = [ids_of(server.api.completions.create(**ask)) for ask in asks]

    async def all_at_once() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            return [ids_of(a) for a in await asyncio.gather(*(api.completions.create(**ask) for ask in asks))]

    assert asyncio.run(all_at_once()) == alone


def test_sampling_options_act(server: RunningServer) -> None:
    def complete(**options: Any) -> Any:
        extra = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
        ask: Any = {"model": "qwen3-tiny", "prompt": "x", "temperature": 0, "max_tokens": 8, "extra_body": extra}
        return server.api.completions.create(**ask | options)

    plain = ids_of(complete())
    assert ids_of(complete(logit_bias={str(plain[0]): -100}))[0] != plain[0]
    assert ids_of(complete(temperature=1.5, seed=1)) != ids_of(complete(temperature=1.5, seed=2))
    assert ids_of(complete(temperature=1.5, seed=1, extra_body={"top_k": 1})) == plain
    stopped = complete(extra_body={"stop_token_ids": [plain[3]]})
    assert ids_of(stopped) == plain[: plain.index(plain[3]) + 1]
    assert stopped.choices[0].finish_reason == "stop"
    scored = complete(logprobs=3).choices[0]
    assert scored.completion_token_ids == plain
    assert all(value <= 0 for value in scored.logprobs.token_logprobs)
    best = [max(entry.values()) for entry in scored.logprobs.top_logprobs]
    assert scored.logprobs.token_logprobs == pytest.approx(best), "greedy takes the best"


def test_a_stop_string_across_token_borders(server: RunningServer) -> None:
    case = cases("qwen3-tiny")[1]
    tokens = case.greedy.tolist()
    pieces = [TOKENIZER.decode([t], skip_hidden=True) for t in tokens]
    first = next(i for i in range(4, 40) if all(len(p) > 1 and "\ufffd" not in p for p in pieces[i : i + 2]))
    stop_string = pieces[first][-1] + pieces[first + 1][0]
    text = TOKENIZER.decode(tokens, skip_hidden=True)
    answer = server.api.completions.create(
        model="qwen3-tiny", prompt=case.prompt.tolist(), temperature=0, max_tokens=48, stop=stop_string,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].text == text[: text.index(stop_string)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_client_that_leaves_frees_the_engine(server: RunningServer) -> None:
    ask = {"model": "qwen3-tiny", "prompt": "x", "stream": True, "max_tokens": 2000, "ignore_eos": True, "n": 4}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask, timeout=30) as response:
        assert len(list(islice(response.iter_lines(), 3))) == 3
    wait_until(lambda: is_idle(server.url))


def is_idle(url: str) -> bool:
    """Whether a server has no request; then it must have all its blocks."""
    load = httpx.get(f"{url}/load", timeout=30).json()
    if load["num_requests_running"] + load["num_requests_waiting"] > 0:
        return False
    assert load["num_free_blocks"] + load["num_cached_blocks"] == load["num_blocks"]
    return True


def test_the_http_process_has_not_loaded_paddle(server: RunningServer) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "python" in maps
    assert "paddle" not in maps.lower()


def test_a_wrong_option_and_a_wrong_checkpoint_end_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for options, message in (
        (["--model", "x", "--max-modle-len", "5"], "did you mean"),
        (
            ["--model", str(tmp_path), "--port", "0"],
            "tokenizer.json: expected a tokenizer.json or a tokenizer.model, got neither",
        ),
    ):
        ended = subprocess.run(
            [*COMMAND, *options], env=ENVIRONMENT, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert ended.returncode == 2, ended.stderr
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("damage", ["quantised", "a FIFO"])
def test_a_checkpoint_that_cannot_be_served_ends_with_status_2_and_one_line(
    golden_dir: Path, tmp_path: Path, damage: str
) -> None:
    model = shutil.copytree(golden_dir / "qwen3-tiny", tmp_path / "m", ignore=shutil.ignore_patterns("*.npz"))
    if damage == "quantised":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(
            json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
        )
        message = f"{model / 'config.json'}: quantization_config: this checkpoint is bitsandbytes"
    else:
        (model / "model.safetensors").unlink()
        os.mkfifo(model / "model.safetensors")
        message = f"{model / 'model.safetensors'}: expected a readable safetensors file: expected a regular file, got"
    options = ["--model", str(model), "--port", "0", "--kv-cache-memory-gb", "0.01"]
    ended = subprocess.run(
        [*COMMAND, *options], env=ENVIRONMENT, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
