"""The cost profile of a configured model on this machine. Knows what the times depend on."""

from __future__ import annotations

from pathlib import Path

import fastdeploy_sd
from fastdeploy_sd.config import Config
from fastdeploy_sd.runtime import library
from fastdeploy_sd.spec_decode.auto_profile import CostProfile, Key
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.worker.cost_measurement import Costs

_CPUINFO = Path("/proc/cpuinfo")


def machine_key(config: Config) -> Key:
    """Return what the times of any model depend on."""
    return {
        "cpu": _cpu_name(),
        "isa": library.isa(),
        "num_threads": library.num_threads(),
        "ranks": config.parallel.tensor_parallel_size,
    }


def model_key(config: Config, info: ModelInfo) -> Key:
    """Return what they depend on besides: the weights and their formats, how large steps may be, and what drafts."""
    return {
        "version": fastdeploy_sd.__version__,
        "fingerprint": info.fingerprint,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "enforce_eager": int(config.model.enforce_eager),
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "drafting": repr(config.speculative),
    }


def profile_of(config: Config, info: ModelInfo, costs: Costs) -> CostProfile:
    """Return the profile that holds what was measured of a model as configured."""
    return CostProfile(machine_key(config), model_key(config, info), costs.steps, costs.drafts)


def _cpu_name() -> str:
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
