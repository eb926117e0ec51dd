"""Errors of a start whose model does not fit onto its device: they name the options that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastdeploy_sd.device.device import device
from fastdeploy_sd.errors import ConfigError, device_lost_as_error

# Memory allocated after the weights has the size of the largest step, and the KV cache takes most of the rest.
_OF_STEPS = (
    "kv_cache_memory_gb, num_gpu_blocks_override, max_num_seqs, max_num_batched_tokens, max_model_len,"
    " num_speculative_tokens"
)


@contextmanager
def asking_for_memory(options: str, what: str) -> Iterator[None]:
    """Turn a device's refusal of memory into an error that names options.

    Raises ConfigError: the body raised MemoryError; its text names the requested and the available memory.
    """
    try:
        yield
    except MemoryError as error:
        text = f"{options}: expected {what} that {device().text} has memory for, got {error}"
        raise ConfigError(text, param=options.partition(",")[0]) from None


@contextmanager
def loading() -> Iterator[None]:
    """Return the context in which a model is loaded.

    Raises:
        ConfigError: the device has no memory for the largest steps.
        InternalError: the device was lost.
    """
    with device_lost_as_error(), asking_for_memory(_OF_STEPS, "steps"):
        yield
