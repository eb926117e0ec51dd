"""A server of a model by name: its first process fetches it, once for all ranks, over a connection that is cut."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from tests.doubles.hub_server import COMMIT, running_hub
from tests.e2e.server_process import running_server

pytestmark = pytest.mark.slow

NAME = "some/demo"
WEIGHTS = "model.safetensors"
CUT = 15 << 20  # behind the first 10 MiB, which are written at once


def test_ranks_run_what_was_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = ModelConfig(DEMO_MODEL).path
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with running_hub({NAME: files | {"model.py": b"raise SystemExit"}}) as hub:
        hub.cuts[WEIGHTS] = CUT
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        options = ("--tensor-parallel-size", "2", "--kv-cache-memory-gb", "0.1", "--revision", COMMIT)
        with running_server("--model", NAME, *options) as server:
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=120
            ).json()
            config = httpx.get(f"{server.url}/config-info", timeout=120).json()
            assert server.stop() == 0
    assert answer["model"] == NAME
    assert answer["usage"]["completion_tokens"] > 0
    assert Path(config["model"]["value"]).is_relative_to(tmp_path)
    assert config["model"]["origin"] == f"{NAME}, command line"
    assert config["served_model_name"] == {"value": [NAME], "origin": "model"}
    of_weights = [r for _, path, r in hub.asked if path.endswith(f"{COMMIT}/{WEIGHTS}") and r]
    assert of_weights == [f"bytes={10 << 20}-"]
    assert len(hub.fetched()) == len({*hub.fetched()}) + 1, "once each, and the rest of the one that was cut"
    assert "model.py" not in hub.fetched()
