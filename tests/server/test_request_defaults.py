"""Requests that leave sampling open get the checkpoint's values; drafts change nothing, and own values win."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.config import DEMO_MODEL, config_from_kwargs
from tests.e2e.server_process import ServerProcess, running_server

pytestmark = pytest.mark.slow

RECOMMENDED = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.15}
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = config_from_kwargs(model=DEMO_MODEL).model.path
    folder = shutil.copytree(source, tmp_path_factory.mktemp("models") / "demo")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | RECOMMENDED | {"max_new_tokens": 40}))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with running_server("--model", str(checkpoint), "--num-threads", "1") as running:
        yield running


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "seed": 7, "speculation": {"enabled": False}} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0] | {"num_tokens": answer.json()["usage"]["completion_tokens"]}
    return choice


def test_values_of_the_checkpoint_apply_and_drafts_change_nothing(server: ServerProcess) -> None:
    wanted = complete(server, **RECOMMENDED, max_tokens=40)
    assert wanted["text"] != complete(server, temperature=1, top_k=0, top_p=1, repetition_penalty=1)["text"]
    assert complete(server)["text"] == wanted["text"]
    drafted = complete(server, speculation=DRAFTS)
    assert drafted["text"] == wanted["text"]
    assert drafted["speculate_metrics"]["rejected_tokens"] + drafted["speculate_metrics"]["accepted_tokens"] > 0
    guided = complete(server, guided_regex="[a-z ]{200}")  # prepared in a worker process
    assert guided["num_tokens"] <= 40
    assert guided["text"] == complete(server, **RECOMMENDED, max_tokens=40, guided_regex="[a-z ]{200}")["text"]


def test_values_of_a_request_win(server: ServerProcess) -> None:
    greedy = complete(server, temperature=0, repetition_penalty=1, max_tokens=60, ignore_eos=True)
    assert greedy["num_tokens"] == 60
    assert (
        greedy["text"]
        == complete(
            server, temperature=0, repetition_penalty=1, max_tokens=60, ignore_eos=True, seed=1, speculation=DRAFTS
        )["text"]
    )
    assert complete(server, ignore_eos=True)["num_tokens"] == 40
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "top_p": 0.5}, timeout=120).json()
    assert (response["temperature"], response["top_p"]) == (0.8, 0.5)


def test_offline_they_apply_where_no_sampling_params_are_given(checkpoint: Path) -> None:
    options: dict[str, Any] = {"kv_cache_memory_gb": 0.05, "max_model_len": 256, "seed": 7, "num_threads": 1}
    with LLM(str(checkpoint), **options) as llm:
        defaults = llm.get_default_sampling_params()
        assert defaults == SamplingParams(**RECOMMENDED, max_tokens=40)  # type: ignore[arg-type]
        [own] = llm.generate(PROMPT, use_tqdm=False)
        [same] = llm.generate(PROMPT, defaults, use_tqdm=False, speculation={"enabled": False})
        assert own.outputs[0].token_ids == same.outputs[0].token_ids
    with LLM(str(checkpoint), generation_config="vllm", **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
