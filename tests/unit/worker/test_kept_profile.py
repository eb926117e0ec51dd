"""The cost profile between starts: used where it fits, measured again where it does not."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.spec_decode.control.profile import CostProfile, DraftSample, StepSample
from fastdeploy_sd.types import DraftTokens, ModelInfo, SchedulerOutput, StepResult, VerifyResult
from fastdeploy_sd.worker.autotune import cost_file
from fastdeploy_sd.worker.autotune.cost_file import kept_profile
from fastdeploy_sd.worker.autotune.cost_measurement import Costs, measure_costs
from fastdeploy_sd.worker.autotune.synthetic_requests import Execute

INFO = ModelInfo("m", 100, 512, (), 64, 8, fingerprint="f")
COSTS = Costs((StepSample(1, 1, 64, 0.5),), (DraftSample("ngram", 1, 1, 64, 0.01),), is_steady=True)


class Measurement:
    """In place of the real one: counts the calls and gives what it is told to."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.num_calls = costs, 0

    def __call__(self, execute: Execute, info: ModelInfo, max_requests: int, max_rows: int) -> Costs:
        self.num_calls += 1
        return self.costs


def no_step(plan: SchedulerOutput) -> StepResult:
    raise AssertionError("no step runs here")


@pytest.fixture
def measurement(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Measurement:
    caplog.set_level(logging.INFO)
    made = Measurement(COSTS)
    monkeypatch.setattr(cost_file, "measure_costs", made)
    return made


def config(folder: Path) -> Config:
    return Config(ModelConfig("demo", packed_weights_cache=str(folder)), speculative=SpeculativeConfig("ngram", 1))


def test_a_profile_is_measured_once(tmp_path: Path, measurement: Measurement, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "packed"
    first = kept_profile(config(folder), INFO, no_step)
    assert first is not None
    assert first.steps == COSTS.steps
    assert kept_profile(config(folder), INFO, no_step) == first
    assert measurement.num_calls == 1
    [path] = folder.iterdir()
    assert CostProfile.load(path) == first
    assert caplog.messages[-1] == f"costs of steps: {path}"
    # Another model, KV format or method has a file of its own.
    kept_profile(config(folder), replace(INFO, fingerprint="g"), no_step)
    kept_profile(replace(config(folder), cache=CacheConfig(kv_cache_dtype="int8")), INFO, no_step)
    kept_profile(replace(config(folder), speculative=SpeculativeConfig("suffix", 1)), INFO, no_step)
    assert (measurement.num_calls, len(list(folder.iterdir()))) == (4, 4)


def test_without_packed_weights_it_lies_in_the_users_cache(
    tmp_path: Path, measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path))
    own = replace(config(tmp_path), model=ModelConfig("demo"))
    assert kept_profile(own, INFO, no_step) is not None
    assert [path.suffix for path in (tmp_path / "fastdeploy_sd").iterdir()] == [".json"]


def test_a_damaged_file_is_replaced(tmp_path: Path, measurement: Measurement, caplog: pytest.LogCaptureFixture) -> None:
    first = kept_profile(config(tmp_path), INFO, no_step)
    [path] = tmp_path.iterdir()
    path.write_text("{}")
    assert kept_profile(config(tmp_path), INFO, no_step) == first == CostProfile.load(path)
    assert "measured again: profile: " in caplog.text
    # Nor is another model's taken for its own, whatever its name.
    other = replace(CostProfile.load(path), model={"fingerprint": "x"})
    other.save(path)
    assert kept_profile(config(tmp_path), INFO, no_step) == first == CostProfile.load(path)
    assert measurement.num_calls == 3


def test_what_was_disturbed_is_not_kept(
    tmp_path: Path, measurement: Measurement, caplog: pytest.LogCaptureFixture
) -> None:
    measurement.costs = replace(COSTS, is_steady=False)
    assert kept_profile(config(tmp_path), INFO, no_step) is not None
    assert list(tmp_path.iterdir()) == []
    assert "not kept, as something else runs on this machine" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_file(
    tmp_path: Path, measurement: Measurement, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert kept_profile(config(tmp_path / "file" / "folder"), INFO, no_step) is not None
    assert "not kept: " in caplog.text


def test_a_user_without_a_home_measures_each_time(
    tmp_path: Path, measurement: Measurement, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HOME", "FDSD_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    own = replace(config(tmp_path), model=ModelConfig("demo"))
    assert [kept_profile(own, INFO, no_step) is not None for _ in range(2)] == [True, True]
    assert measurement.num_calls == 2
    assert "not kept, as this user has no home folder" in caplog.text


def test_a_model_that_cannot_run_made_up_requests_serves_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cost_file, "measure_costs", measure_costs)
    ended = list[str]()

    def fail(plan: SchedulerOutput) -> StepResult:
        ended.extend(plan.finished_ids)
        failed = dict.fromkeys(plan.request_ids, ("InternalError", "non-finite logits"))
        nothing = np.zeros(0, np.int32)
        output = VerifyResult(nothing, np.zeros(len(plan.request_ids) + 1, np.int32), nothing)
        return StepResult(plan.step_id, plan.request_ids, output, DraftTokens.none(len(plan.request_ids)), failed)

    assert kept_profile(config(tmp_path), INFO, fail) is None
    assert ended == ["measurement-0-0"]
    assert list(tmp_path.iterdir()) == []
    assert (
        "costs of steps: not measured: measurement: expected steps that succeed, got: non-finite logits" in caplog.text
    )


def test_without_room_there_is_none(tmp_path: Path, measurement: Measurement, caplog: pytest.LogCaptureFixture) -> None:
    measurement.costs = Costs((), (), is_steady=True)
    assert kept_profile(config(tmp_path), INFO, no_step) is None
    assert "not measured, the KV cache has no room" in caplog.text


def test_two_starts_at_once_write_one_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def measured_together(execute: Execute, info: ModelInfo, max_requests: int, max_rows: int) -> Costs:
        number = both.wait(120.0)
        return replace(COSTS, steps=(StepSample(1, 1, 64, 1.0 + number), *COSTS.steps * 2000))

    monkeypatch.setattr(cost_file, "measure_costs", measured_together)
    with ThreadPoolExecutor(2) as threads:
        started = [threads.submit(kept_profile, config(tmp_path), INFO, no_step) for _ in range(2)]
        found = [start.result(120.0) for start in started]
    assert found[0] != found[1]
    [path] = tmp_path.iterdir()
    assert CostProfile.load(path) in found


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (6.0, "drafts by draft_model: 4 take 6.00 ms, a step of one token takes 10.00 ms: 2.50 times the speed if all"),
        (80.0, "drafts by draft_model: 4 take 80.00 ms, a step of one token takes 10.00 ms: too slow to pay"),
    ],
)
def test_what_a_draft_model_can_bring_is_said(
    tmp_path: Path, measurement: Measurement, caplog: pytest.LogCaptureFixture, ms: float, text: str
) -> None:
    steps = StepSample(1, 1, 64, 10.0), StepSample(9, 1, 64, 18.0), StepSample(1, 1, 512, 30.0)
    measurement.costs = Costs(steps, (DraftSample("draft_model", 1, 4, 64, ms),), is_steady=True)
    for _ in range(2):
        caplog.clear()
        kept_profile(config(tmp_path), INFO, no_step)
        assert text in caplog.messages[-1]
