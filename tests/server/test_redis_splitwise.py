"""One prefill and one decode instance that find each other through Redis, with the real demo model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_sd import LLM, SamplingParams
from tests.doubles.certificates import make_certificates
from tests.doubles.redis_server import PASSWORD, running_redis
from tests.e2e.server_process import ServerProcess, running_server
from tests.server.redis_deployment import until

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
MODEL = ("--model", "demo", "--num-threads", "1")
NUM_TOKENS = 24
PROMPT = "def add(a, b):\n    return a + b\n" * 12


def complete(server: ServerProcess, fields: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Text and tokens of an instance's answer."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "return_token_ids": True, **fields}
    [choice] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).json()["choices"]
    return choice["text"], choice["completion_token_ids"]


def generate(asks: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """The same of a model in this process."""
    params = [SamplingParams(max_tokens=NUM_TOKENS, **fields) for fields in asks]
    with LLM("demo", kv_cache_memory_gb=0.1, num_threads=1) as llm:
        found = [output.outputs[0] for output in llm.generate([PROMPT] * len(asks), params, use_tqdm=False)]
    return [(output.text, list(output.token_ids)) for output in found]


def sample(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return 0.0 if match is None else float(match[1])


def test_prompts_are_computed_at_one_instance_and_answered_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    certificates, password = make_certificates(tmp_path), tmp_path / "password"
    password.touch(0o600)
    password.write_text(PASSWORD)
    with running_redis(tmp_path, certificates=certificates) as redis, ExitStack() as stack:
        shared = [*MODEL, "--scheduler-name", "splitwise", "--scheduler-port", str(redis.port), "--scheduler-topic"]
        shared += ["pd", "--scheduler-password-file", str(password), "--scheduler-tls", "--scheduler-tls-ca-file"]
        shared += [str(certificates.ca), "--scheduler-tls-cert-file", str(certificates.client)]
        shared += ["--scheduler-tls-key-file", str(certificates.client_key), "--splitwise-role"]
        prefill = stack.enter_context(running_server(*shared, "prefill"))
        decode = stack.enter_context(running_server(*shared, "decode"))
        until(lambda: int(redis.do("HLEN", "pd.cluster")) == 2)
        asks: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.1}]
        for fields, wanted in zip(asks, generate(asks), strict=True):
            assert complete(prefill, fields) == complete(decode, fields) == wanted
        assert sample(decode, "fastdeploy:request_success_total") == 4
        assert sample(decode, 'fastdeploy_sd:supplied_kv_tokens_total{origin="prefill"}') > 100
        assert prefill.stop() == decode.stop() == 0
        redis.wait_for_keys()
