"""The cost of a step around the model: the real runner, a clock of its own, and every second in one phase."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.host import PHASES, HostCost, HostLoad, TimedExecutor, measure_host
from benchmarks.stand_in import BLOCK_SIZE, stand_in_executor
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine

NO_BUFFER = np.ones(0, np.int64)


def measure(load: HostLoad, num_steps: int) -> HostCost:
    speculative = SpeculativeConfig() if load.method == "naive" else SpeculativeConfig(load.method, 3)
    limits = SchedulerConfig(max_num_seqs=load.num_requests, max_num_batched_tokens=4096)
    config = Config(ModelConfig("stand-in"), cache=CacheConfig(block_size=BLOCK_SIZE), scheduler=limits)
    executor = TimedExecutor(stand_in_executor(speculative, load.num_requests, 640, NO_BUFFER))
    return measure_host(Engine(config, executor), executor, load, num_steps)


@pytest.mark.parametrize("load", [HostLoad("naive", 1), HostLoad("ngram", 5), HostLoad("suffix", 4, output_len=9)])
def test_every_second_of_a_step_is_in_one_phase(load: HostLoad, ticking: Callable[[], float]) -> None:
    measure(load, num_steps=1)
    one = ticking()
    cost = measure(load, num_steps=9)
    seconds_per_step = (ticking() - one - one) / 8
    assert tuple(cost.us) == PHASES
    assert all(us["p50"] >= 1e6 for us in cost.us.values())
    # From the step's first look to its last; the forward pass is none of the host's.
    assert cost.total_us["p50"] + cost.forward_us["p50"] == (seconds_per_step - 1) * 1e6
    assert (cost.num_drafts > 0) is (load.method != "naive")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "1", "2", "--drafts", "2", "--steps", "2", "--evict-mib", "0"]
    assert main(["host", *options, "--json"]) == 0
    loads = [cost["load"] for cost in json.loads(capsys.readouterr().out)]
    assert [(load["method"], load["num_requests"]) for load in loads] == [
        ("naive", 1), ("naive", 2), ("ngram", 1), ("ngram", 2),
    ]  # fmt: skip


def test_nothing_is_drafted_of_random_text(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "2", "--steps", "40", "--evict-mib", "0", "--methods", "auto", "--json"]
    found = []
    for more in ([], ["--random-text"]):
        assert main(["host", *options, *more]) == 0
        [cost] = json.loads(capsys.readouterr().out)
        found.append(cost["num_drafts"])
    assert found[0] > 0.1
    assert found[1] == 0
    with pytest.raises(SystemExit):
        main(["host", "--random-text", "--model", "demo"])


def test_the_command_runs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "demo", "--num-threads", "1", "--methods", "mtp", "--batch", "2", "--steps", "3"]
    assert main(["host", *options]) == 0
    [row] = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [cell.strip() for cell in row] == ["mtp", "2", "3.0"]
