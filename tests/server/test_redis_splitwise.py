"""One prefill and one decode instance that find each other through Redis, with the real demo model."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.certificates import make_certificates
from tests.doubles.redis_server import PASSWORD, running_redis
from tests.e2e.server_process import ServerProcess, running_server
from tests.server.redis_deployment import until

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
ALONE = ("--model", "demo", "--num-threads", "1")
PROMPT = "def add(a, b):\n    return a + b\n" * 12


def complete(server: ServerProcess, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 24, **fields}
    choices = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).json()["choices"]
    # What became of drafts is no part of an answer: it follows from what steps take.
    return [{key: value for key, value in choice.items() if key != "speculate_metrics"} for choice in choices]


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
        shared = [*ALONE, "--scheduler-name", "splitwise", "--scheduler-port", str(redis.port), "--scheduler-topic"]
        shared += ["pd", "--scheduler-password-file", str(password), "--scheduler-tls", "--scheduler-tls-ca-file"]
        shared += [str(certificates.ca), "--scheduler-tls-cert-file", str(certificates.client)]
        shared += ["--scheduler-tls-key-file", str(certificates.client_key), "--splitwise-role"]
        alone = stack.enter_context(running_server(*ALONE))
        prefill = stack.enter_context(running_server(*shared, "prefill"))
        decode = stack.enter_context(running_server(*shared, "decode"))
        until(lambda: int(redis.do("HLEN", "pd.cluster")) == 2)
        for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.1}):
            assert complete(prefill, **fields) == complete(alone, **fields) == complete(decode, **fields)
        assert sample(decode, "fastdeploy:request_success_total") == 4
        assert sample(decode, 'fastdeploy_sd:supplied_kv_tokens_total{origin="prefill"}') > 100
        assert prefill.stop() == decode.stop() == 0
        redis.wait_for_keys()
