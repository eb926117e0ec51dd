"""A server as it starts by itself, which chooses drafts: the same bytes whatever requests ask for, and it says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server_process import running_server

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add(a"


def complete(url: str, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": 160, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["text"], choice.get("speculate_metrics") or {}


def samples(url: str) -> dict[tuple[str, str], float]:
    """Name and value of the only label -> value."""
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return {
        (sample.name.removeprefix("fastdeploy_sd:"), next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_it_drafts_as_requests_allow_and_tells_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path))
    with running_server("--model", "demo", "--num-threads", "1") as server:
        plain, nothing = complete(server.url, speculation={"enabled": False})
        assert not nothing or nothing["accepted_tokens"] == 0
        for _ in range(4):
            text, metrics = complete(server.url)
            assert text == plain
        assert metrics["accepted_tokens"] > 0  # how many is up to the times of this machine's steps
        assert metrics["average_accept_length"] > 1
        assert metrics["tokens_per_step"] > 1
        assert sum(metrics["accepted_by_source"].values()) == metrics["accepted_tokens"]
        for forced in ({"method": "suffix", "num_speculative_tokens": 2}, {"method": "ngram"}):
            assert complete(server.url, speculation=forced)[0] == plain
        assert complete(server.url, speculation={"num_speculative_tokens": 1})[0] == plain
        assert complete(server.url, speculation={"method": "naive"}) == (plain, nothing)
        found = samples(server.url)
        assert found["spec_decode_accepted_tokens_by_source_total", "0"] > 0
        assert found["spec_decode_choices_total", "drafts"] > 0
        assert found["spec_decode_scored_drafts_total", "suffix"] > 40
        assert found["spec_decode_right_drafts_total", "suffix"] > 40
        assert 0 <= found["spec_decode_brier_score", "suffix"] < 0.25
        assert found["spec_decode_step_time_ratio", ""] > 0
        info = httpx.get(f"{server.url}/config-info", timeout=TIMEOUT_S).json()
        assert info["speculative_config.method"] == {"value": "auto", "origin": "default"}
        assert info["speculation"]["value"]["predicted_s"] > 0
        assert info["speculation"]["value"]["measured_s"] > 0
        assert set(info["speculation"]["value"]["num_steps"]) >= {"low_gain", "load", "request", "no_drafter"}
        [model] = httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT_S).json()["data"]
        assert model["speculation"]["methods"] == ["naive", "ngram", "suffix", "auto"]
        assert info["speculation"]["value"]["num_steps"]["drafts"] > 0
        assert info["speculation"]["value"]["calibrations"]["suffix"]["observed"] > 40
        _refuse(server.url, {"speculation": {"method": "mtp"}}, "expected one of naive, ngram, suffix, auto")
        _refuse(server.url, {"include_draft_logprobs": True, "logprobs": 1}, "has enable_draft_logprob and a method")
        assert server.stop() == 0
    assert "costs of steps: measured in" in "".join(server.log)


def _refuse(url: str, fields: dict[str, Any], text: str) -> None:
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x", **fields}, timeout=TIMEOUT_S)
    assert refused.status_code == 400
    assert text in refused.json()["error"]["message"]
