"""From samples to metrics, and what is refused before anything is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import checkpoint, offline
from benchmarks.__main__ import main
from benchmarks.checkpoint import CHECKPOINT_DIR, SHAPES, ensure_checkpoint
from benchmarks.engines import verify_room
from benchmarks.hardware import MemorySpeed
from benchmarks.offline_run import Sample, Workload
from benchmarks.suite import FORMATS, METHODS, offline_arguments
from fastdeploy_sd.config import Config, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.stats import EngineStats
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.toy_executor import ToyExecutor


def make_sample(step_s: float) -> Sample:
    """Two requests of 8 + 3 tokens, one step per token."""
    ends = EngineStats(num_steps=1), EngineStats(num_steps=3, timings_ms={"forward": 6.0})
    return Sample([0.5, 0.5], [1.0, 1.0], [step_s] * 4, 0.5, 1.0, [step_s] * 2, 4, ends, {})


def test_metrics_are_rates_and_percentiles() -> None:
    workload, memory = (
        Workload(batch=2, prompt_len=8, output_len=3),
        [MemorySpeed(10.0, 50.0), MemorySpeed(30.0, 150.0)],
    )
    metrics = offline.offline_metrics([make_sample(0.25), make_sample(0.75)], workload, 1_000_000_000, memory)
    assert metrics["ttft_ms"] == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert metrics["decode_tokens_per_s"] == pytest.approx(8 / 2.0)
    assert metrics["output_tokens_per_s"] == pytest.approx(12 / 2.0)
    assert metrics["prefill_tokens_per_s"] == pytest.approx(32 / 1.0)
    assert metrics["weights_gb_per_s"] == pytest.approx(1 / 0.5)
    assert (metrics["read_gb_per_s"], metrics["core_latency_ns"]) == (20.0, 100.0)
    assert (metrics["acceptance_rate"], metrics["mean_output_len"]) == (None, 1.0)
    assert metrics["forward_ms"] == 3.0


@pytest.mark.parametrize(
    ("batch", "length", "message"),
    [
        (5, 16, r"max_num_seqs: expected at least the batch \(5\), got 4"),
        (1, 101, r"max_model_len: expected at least 101 \(prompt \+ output\), got 100"),
        (4, 100, "kv_cache_memory_gb: expected room for 100 blocks, got 32"),
    ],
)
def test_batch_must_run_as_a_whole(batch: int, length: int, message: str) -> None:
    config = toy_config(max_num_seqs=4)
    engine = Engine(config, ToyExecutor(toy_info(max_model_len=100)))
    with pytest.raises(ConfigError, match=message):
        verify_room(engine, config, batch, length)


@pytest.fixture
def _toy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs the toy engine, in a folder of its own; the module that would import Paddle is replaced."""
    module = ModuleType("fastdeploy_sd.worker.executor")

    def create_executor(config: Config) -> ToyExecutor:
        assert config.speculative.suffix_decoding_cache_file is None
        return ToyExecutor(toy_info(num_blocks=64))

    module.create_executor = create_executor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastdeploy_sd.worker.executor", module)
    monkeypatch.setattr(offline, "measure_memory", lambda: MemorySpeed(40.0, 100.0))
    monkeypatch.setattr(offline, "describe_hardware", dict)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_toy_machine")
@pytest.mark.parametrize(
    ("speculative", "methods"),
    [
        ("{method: naive}", ["naive"]),
        (
            "{method: mtp, mtp_strategy: with_suffix, num_speculative_tokens: 2, suffix_decoding_cache_file: cache}",
            ["naive", "mtp-suffix"],
        ),
    ],
)
def test_a_drafting_configuration_is_measured_beside_plain_decoding(
    speculative: str, methods: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model: demo\nspeculative_config: {speculative}\n", encoding="utf-8")
    sizes = ["--batch", "2", "--prompt-len", "8", "--output-len", "6", "--repeats", "1"]
    assert main([str(path), *sizes, "--output", "records"]) == 0
    rows = [[cell.strip() for cell in row.split("|")] for row in capsys.readouterr().out.splitlines()[2:]]
    assert [row[4] for row in rows] == methods
    assert all(row[6].endswith("x") for row in rows), "each is compared with plain decoding"
    names = sorted(p.stem for p in (tmp_path / "records").iterdir())
    assert names == sorted(f"demo-bfloat16-{method}-b2" for method in methods)


def test_only_missing_random_checkpoints_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written: list[Path] = []

    def write(path: Path) -> None:
        written.append(path)
        path.mkdir()

    monkeypatch.setattr(checkpoint, "make_checkpoint", lambda _, path: write(path))
    monkeypatch.setattr(checkpoint, "add_mtp_layer", lambda path: write(path / "mtp"))
    CHECKPOINT_DIR.mkdir(parents=True)
    path = CHECKPOINT_DIR / "qwen3-0.6b"
    for model in ("elsewhere/qwen3-0.6b", str(CHECKPOINT_DIR / "unknown"), str(path), str(path)):
        ensure_checkpoint(["--model", model])
    assert written == [path, path / "mtp"]
    # One that was written without an MTP layer gets it.
    (path / "mtp").rmdir()
    ensure_checkpoint(["--model", str(path)])
    assert written == [path, path / "mtp", path / "mtp"]


@pytest.mark.parametrize("fmt", FORMATS)
def test_suite_runs_valid_configurations(fmt: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(SHAPES["qwen3-0.6b"])))
    config = load_config(offline_arguments(str(tmp_path), fmt, METHODS[0]))
    assert (config.model.quantization or config.model.dtype) == fmt
    assert config.speculative.method == "naive"
