"""`bench swap` measures each length at each level, and notices when a prefix was not where it says."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.swap import measure_swap
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig
from fastdeploy_sd.errors import InternalError


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "demo", "--prefixes", "64", "130", "--rounds", "1", "--num-threads", "1"]
    assert main(["swap", *options, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert [cost["prefix_len"] for cost in costs] == [64, 128]
    assert costs[1]["megabytes"] == 2 * costs[0]["megabytes"]
    assert all(value > 0 for cost in costs for value in cost.values())


def test_a_second_level_that_is_too_small_is_noticed() -> None:
    config = Config(ModelConfig(model="demo"), cache=CacheConfig(swap_space=0.0012))
    with pytest.raises(InternalError, match="prefix: expected 0 and 192 tokens at the levels, got"):
        measure_swap(config, [192], 2)
