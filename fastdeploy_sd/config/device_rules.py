"""What a GPU cannot do yet: the options that need the CPU, by name. Knows no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy_sd.config.sections import Config
from fastdeploy_sd.errors import ConfigError


def cpu_only(config: Config) -> Iterator[ConfigError]:
    """Yield an error for every option with a value that only the CPU can serve."""
    ranks, role, swap = config.parallel.tensor_parallel_size, config.splitwise.splitwise_role, config.cache.swap_space
    if ranks > 1:
        yield _error("tensor_parallel_size", "1", ranks)
    if role != "mixed":
        yield _error("splitwise_role", "mixed", role)
    if config.cache.swap_bytes:
        yield _error("swap_space", "none", f"{swap:g}")
    if config.model.enforce_eager:
        yield _error("enforce_eager", "false", "true")


def verify_device(config: Config) -> None:
    """Refuse what a GPU that was asked for cannot do yet.

    Raises:
        ConfigError: naming the first such option.
    """
    if config.device == "gpu":
        for error in cpu_only(config):
            raise error


def _error(option: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"{option}: expected {expected} with device gpu, which can do no other yet, got {got}", param=option
    )
