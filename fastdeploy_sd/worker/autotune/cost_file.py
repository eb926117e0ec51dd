"""The cost profile of a configured model on this machine: kept between starts, measured where none fits.

Knows what the times depend on, and where the file is.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import fastdeploy_sd
from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.profile import CostProfile, Key, profile_name
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.worker.autotune.cost_measurement import Costs, measure_costs
from fastdeploy_sd.worker.autotune.kept_measurements import keep, machine_key, measurements_folder
from fastdeploy_sd.worker.autotune.synthetic_requests import Execute, FailedStepError

_log = logging.getLogger(__name__)


def model_key(config: Config, info: ModelInfo) -> Key:
    """Return the model's part of the key: weights and their formats, largest steps, drafting methods, expert ranks."""
    return {
        "version": fastdeploy_sd.__version__,
        "fingerprint": info.fingerprint,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "enforce_eager": int(config.model.enforce_eager),
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "drafting": repr(config.speculative),
        **({"expert_ranks": config.parallel.expert_ranks} if config.parallel.expert_ranks > 1 else {}),
    }


def profile_of(config: Config, info: ModelInfo, costs: Costs) -> CostProfile:
    """Return the profile of measured costs of a model as configured."""
    return CostProfile(machine_key(config), model_key(config, info), costs.steps, costs.drafts)


def kept_profile(config: Config, info: ModelInfo, execute: Execute) -> CostProfile | None:
    """Return the kept profile of a model as configured; measures and keeps one where none fits.

    It is kept with the packed weights, or in the user's cache folder where these are not kept. A profile of a busy
    machine is used, but not kept. None where the KV cache has no room for the requests of a measurement, or the model
    cannot run them. Raises InternalError: the executor broke.
    """
    machine, model = machine_key(config), model_key(config, info)
    folder = measurements_folder(config)
    path = None if folder is None else folder / profile_name(machine, model)
    kept = None if path is None else _load(path)
    if kept is not None and kept.fits(machine, model):
        _log.info("costs of steps: %s", path)
        _log_models(kept)
        return kept
    begin = time.perf_counter()
    limits = config.scheduler
    try:
        costs = measure_costs(execute, info, limits.max_num_seqs, limits.max_num_batched_tokens)
    except FailedStepError as error:
        _log.warning("costs of steps: not measured: %s", error.message)
        return None
    if not costs.steps:
        _log.info("costs of steps: not measured, the KV cache has no room for a request and its drafts")
        return None
    profile = profile_of(config, info, costs)
    place = keep(path, costs.is_steady, profile.save)
    _log.info("costs of steps: measured in %.1f s, %s", time.perf_counter() - begin, place)
    _log_models(profile)
    return profile


def _log_models(profile: CostProfile) -> None:
    """Say of each draft model what it takes, and whether it can pay."""
    for method in METHODS.values():
        found = profile.best_case(method.name) if method.needs_model else None
        if found is None:
            continue
        call, step_ms, gain = found
        pays = f"{gain:.2f} times the speed if all are right" if gain > 1 else "too slow to pay, so it rests"
        _log.log(
            logging.INFO if gain > 1 else logging.WARNING,
            "drafts by %s: %d take %.2f ms, a step of one token takes %.2f ms: %s",
            method.name, call.drafts, call.ms, step_ms, pays,
        )  # fmt: skip


def _load(path: Path) -> CostProfile | None:
    try:
        return CostProfile.load(path)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        _log.warning("costs of steps: measured again: %s", error.message)
        return None
