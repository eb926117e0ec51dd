"""Which device a configuration means on this machine, chosen before anything of a model is allocated."""

from __future__ import annotations

import logging

from fastdeploy_sd.config import Config, cpu_only
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.runtime.cuda_library import cuda_refusal
from fastdeploy_sd.runtime.device import Device, choose

_log = logging.getLogger(__name__)


def choose_device(config: Config) -> Device:
    """Choose the device for what this process loads from now on.

    Raises:
        ConfigError: a GPU was asked for, and there is none that can be used, or an option needs the CPU.
    """
    if config.device == "cpu":
        return choose("cpu")
    refusals = list(cpu_only(config))
    if (reason := cuda_refusal()) is not None:
        refusals.insert(
            0, ConfigError(f"device: expected cpu or auto on this machine, got gpu: {reason}", param="device")
        )
    if not refusals:
        return choose("gpu")
    if config.device == "gpu":
        raise refusals[0]
    _log.info("device auto: the CPU is used: %s", refusals[0].message)
    return choose("cpu")
