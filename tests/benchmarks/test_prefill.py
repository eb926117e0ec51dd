"""`bench prefill` on the bundled model, and its shares."""

from __future__ import annotations

import json

import pytest

from benchmarks import prefill
from benchmarks.prefill import ChunkCost, chunk_table
from fastdeploy_sd.errors import ConfigError

DEMO = ["--model", "demo", "--prompt", "96"]


def test_a_prompt_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill.main([*DEMO, "--chunks", "32", "96", "--rounds", "2", "--json"]) == 0
    small, whole = json.loads(capsys.readouterr().out)["chunks"]
    assert (small["chunk_len"], whole["chunk_len"]) == (32, 96)
    assert whole["first"] == whole["last"]
    assert small["first"] != small["last"]
    assert {"linear", "cascade_append_attention", "rms_norm"} < small["last"].keys()
    with pytest.raises(ConfigError, match=r"chunks: expected at most prompt \(96\), got 128"):
        prefill.main([*DEMO, "--chunks", "32", "128"])


def test_shares_of_a_chunk() -> None:
    ops = {"linear": 60.0, "cascade_append_attention": 30.0, "rms_norm": 6.0, "swiglu": 4.0}
    lines = chunk_table([ChunkCost(512, 1234.4, 415.6, ops, {"linear": 1.0})]).splitlines()
    assert lines[2] == "| 512 | 1234 | 416 | 60.0% | 30.0% | 10.0% | 100.0% | 0.0% | 0.0% |"
