"""Measures what steps and drafting calls of a model cost, as a server does when it starts, and writes the profile.

Usage: python -m scripts.step_costs FILE [ENGINE OPTION...]; by default of Qwen3-0.6B's shape with random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import with_default
from benchmarks.configurations import without_cache_file
from fastdeploy_sd.config import load_config
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker.autotune.cost_file import profile_of
from fastdeploy_sd.worker.autotune.cost_measurement import measure_costs

_BUDGET_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Measure one configuration and write its profile.

    Raises:
        ConfigError: the KV cache has no room for the requests of a measurement.
    """
    out, options = Path(argv[0]), with_default(argv[1:], "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    ensure_checkpoint(options)
    config = without_cache_file(load_config(options, "python -m scripts.step_costs"))
    executor = create_executor(config)
    try:
        info, limits = executor.model_info, config.scheduler
        costs = measure_costs(executor.execute, info, limits.max_num_seqs, limits.max_num_batched_tokens, _BUDGET_S)
        profile = profile_of(config, info, costs)
    finally:
        executor.shutdown()
    if not profile.steps:
        raise ConfigError("kv_cache_memory_gb: expected room for a request and its drafts, got less")
    out.parent.mkdir(parents=True, exist_ok=True)
    profile.save(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
