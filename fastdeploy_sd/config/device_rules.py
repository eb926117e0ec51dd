"""What a GPU cannot do yet and what a CPU cannot do: the options that need one of them, by name. Knows no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.quantization import formats_of
from fastdeploy_sd.config.sections import Config
from fastdeploy_sd.errors import ConfigError


def cpu_only(config: Config) -> Iterator[ConfigError]:
    """Yield an error for every option with a value that only the CPU can serve."""
    if config.parallel.num_nodes > 1:
        yield _error("ips", "one host", ",".join(config.parallel.ips))
    if config.model.enforce_eager:
        yield _error("enforce_eager", "false", "true")


def gpu_only(config: Config) -> Iterator[ConfigError]:
    """Yield an error for every option with a value that only a GPU can serve."""
    if formats_of(config.model.quantization).has("fp8"):
        yield _needs_gpu("quantization", "wint8, wint4 or none")
    if config.cache.kv_cache_dtype == "fp8":
        yield _needs_gpu("kv_cache_dtype", "auto or int8")
    if config.model.dtype == "float16":
        yield _needs_gpu("dtype", "bfloat16 or float32", "float16")


def verify_device(config: Config) -> None:
    """Refuse what a GPU that was asked for cannot do yet.

    Raises:
        ConfigError: naming every such option.
    """
    if config.device == "gpu":
        _raise_all(cpu_only(config))


def verify_processor(config: Config) -> None:
    """Refuse what a CPU that was asked for cannot do.

    Raises:
        ConfigError: naming every such option.
    """
    if config.device == "cpu":
        _raise_all(gpu_only(config))


def _raise_all(errors: Iterator[ConfigError]) -> None:
    faults = Faults()
    for error in errors:
        faults.add(error)
    faults.raise_all()


def _needs_gpu(option: str, expected: str, got: str = "fp8") -> ConfigError:
    return ConfigError(f"{option}: expected {expected} on a CPU, got {got}, which needs device gpu", param=option)


def _error(option: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"{option}: expected {expected} with device gpu, which can do no other yet, got {got}", param=option
    )
