"""From samples to metrics, and what is refused before anything is measured."""

from __future__ import annotations

import pytest

from benchmarks import offline
from benchmarks.hardware import MemorySpeed
from benchmarks.offline_run import Sample, Workload
from fastdeploy_sd.types.stats import EngineStats


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
