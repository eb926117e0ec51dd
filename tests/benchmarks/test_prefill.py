"""`bench prefill` on the bundled model, and its shares."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from benchmarks import prefill
from benchmarks.prefill import ChunkCost, chunk_table
from benchmarks.prompt_operations import prompt_operations
from fastdeploy_sd.config import load_config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.registry import read_decoder_config

DEMO = ["--model", "demo", "--prompt", "96"]


def test_a_prompt_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill.main([*DEMO, "--chunks", "32", "96", "--rounds", "2", "--json"]) == 0
    small, whole = json.loads(capsys.readouterr().out)["chunks"]
    assert (small["chunk_len"], whole["chunk_len"]) == (32, 96)
    assert whole["first"] == whole["last"]
    assert small["first"] != small["last"]
    assert all(cost["peak_share"] > 0 for cost in (small, whole))
    assert {"linear", "cascade_append_attention", "rms_norm"} < small["last"].keys()
    with pytest.raises(ConfigError, match=r"chunks: expected at most prompt \(96\), got 128"):
        prefill.main([*DEMO, "--chunks", "32", "128"])


def test_shares_of_a_chunk() -> None:
    ops = {"linear": 60.0, "cascade_append_attention": 30.0, "rms_norm": 6.0, "swiglu": 4.0}
    costs = [ChunkCost(512, 1234.4, share, 415.6, ops, {"linear": 1.0}) for share in (0.404, None)]
    lines = chunk_table(costs).splitlines()
    assert lines[2] == "| 512 | 1234 | 40% | 416 | 60.0% | 30.0% | 10.0% | 100.0% | 0.0% | 0.0% |"
    assert lines[3].startswith("| 512 | 1234 | - |")


def test_operations_of_a_prompt_are_those_of_its_layers(golden_dir: Path) -> None:
    folder = golden_dir / "qwen3-tiny"
    checkpoint = Checkpoint(folder)
    decoder = read_decoder_config(checkpoint.config)
    shapes = [checkpoint.shape(name) for name in checkpoint.names() if ".layers." in name]
    num_weights = sum(prod(shape) for shape in shapes if len(shape) > 1)  # the others are norms
    pairs = 1 + 2 + 3  # token and key
    attention = 4 * decoder.num_layers * decoder.num_heads * decoder.head_dim * pairs
    options = ["--model", str(folder), "--dtype", "bfloat16", "--quantization", "wint4"]
    wint4 = load_config([*options, "--kv-cache-dtype", "int8"], "test")
    assert prompt_operations(wint4, 3) == {"wint4": 2 * 3 * num_weights, "wint8": attention}
    floats = load_config(options[:4], "test")
    assert prompt_operations(floats, 3) == {"bfloat16": 2 * 3 * num_weights + attention}
    moe = load_config(["--model", str(golden_dir / "qwen3_moe-tiny")], "test")
    assert prompt_operations(moe, 3) is None
