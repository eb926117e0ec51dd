"""Chooses the device of a configuration on this machine, before anything of a model is allocated."""

from __future__ import annotations

import logging

import paddle

from fastdeploy_sd.config import Config, cpu_only, gpu_only
from fastdeploy_sd.device import library
from fastdeploy_sd.device.cuda.device import cuda_device
from fastdeploy_sd.device.cuda.library import CudaLibrary, usable_library
from fastdeploy_sd.device.cuda.paddle_memory import memory_text
from fastdeploy_sd.device.cuda.sharing import num_devices
from fastdeploy_sd.device.device import Device, choose
from fastdeploy_sd.device.processors import own_processors
from fastdeploy_sd.errors import ConfigError, DeviceLost
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)


def choose_device(config: Config, rank: int = 0) -> Device:
    """Choose the device of this process; of several GPUs, the one with the rank's number among those of all engines.

    Kernels that are missing for a GPU are built first.

    Raises ConfigError: a GPU was asked for, or an option needs one, but none can be used; an option needs the CPU; or
    the CPU is chosen where there is no Paddle.
    """
    needs_gpu = next(iter(gpu_only(config)), None)
    if config.device == "cpu":
        if needs_gpu is not None:
            raise needs_gpu
        return _host()
    refusal = next(iter(cpu_only(config)), None)
    library = usable_library(config.parallel.first_rank + rank, may_build=refusal is None)
    if isinstance(library, str):
        refusal = ConfigError(f"device: expected cpu or auto on this machine, got gpu: {library}", param="device")
    elif refusal is None and (refusal := _too_few(config, library)) is None:
        try:
            chosen = cuda_device(library)
            _log.info("GPU memory: %s", memory_text(library))
            return choose(chosen)
        except (ValueError, MemoryError, DeviceLost) as error:  # others fill it, or the driver gave it up
            text = f"device: expected a GPU with room for a context, got {library.device_name}: {error}"
            refusal = ConfigError(text, param="device")
    assert refusal is not None
    if config.device == "gpu":
        raise refusal
    if needs_gpu is not None:
        raise ConfigError(f"{needs_gpu.message}: device auto takes the CPU: {refusal.message}", param=needs_gpu.param)
    _log.info("device auto: the CPU is used: %s", refusal.message)
    return _host()


def _host() -> Device:
    if paddle.__version__ == "none":
        text = "device: expected gpu, as Paddle is not installed, got cpu; `pip install 'fastdeploy_sd[cpu]'` brings it"
        raise ConfigError(text, param="device")
    return choose(None)


def _too_few(config: Config, library: CudaLibrary) -> ConfigError | None:
    num_ranks, num_engines = config.parallel.tensor_parallel_size, config.parallel.data_parallel_size
    num_gpus = num_devices(library)
    if (others := config.parallel.neighbours.ranks_before) and others + num_ranks * num_engines > num_gpus:
        text = f"models: expected at most {num_gpus} ranks of all, as every rank has a GPU of its own, got more"
        return ConfigError(text, param="models")
    if num_ranks * num_engines <= num_gpus:
        return None
    name, value, most = "tensor_parallel_size", num_ranks, num_gpus
    if num_ranks <= num_gpus:
        name, value, most = "data_parallel_size", num_engines, num_gpus // num_ranks
    text = f"{name}: expected at most {most}, as every rank has a GPU of its own, got {value}"
    return ConfigError(text, param=name)


def set_kernel_threads(config: Config, group: RankGroup) -> None:
    """Set the configured number, else a rank's share of the processors, else leave the library's default.

    Raises ConfigError: as library.set_num_threads.
    """
    num_threads = config.num_threads or (group.num_threads if group.size > 1 else None)
    if num_threads is not None:
        library.set_num_threads(num_threads)
    if library.num_threads() > 1 and own_processors().warning is not None:
        _log.warning("%s", own_processors().warning)
