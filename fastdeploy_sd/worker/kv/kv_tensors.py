"""Allocates the paged KV cache: the tensors of every layer, in the sizes of kv_sizing.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.kv_cache import KvCache, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv

Zeros = Callable[[tuple[int, ...], npt.DTypeLike], Tensor]
# Tensors of a layer at most: k, v, their scales, hidden rows.
MAX_PARTS = 5


def allocate(
    layers: Iterable[LayerKv], count: int, fmt: KvCacheFormat, zeros: Zeros | None = None
) -> list[KvCache[Tensor]]:
    """Return one cache of `count` blocks per layer.

    The memory is zero, and the system provides it only as blocks are first used.

    Args:
        zeros: allocates it; None = the device.

    Raises:
        ConfigError: the system has too little memory.
    """
    with asking_for_memory():
        return [_allocate_layer(layer, count, fmt, zeros or device().zeros) for layer in layers]


def _allocate_layer(layer: LayerKv, count: int, fmt: KvCacheFormat, zeros: Zeros) -> KvCache[Tensor]:
    geometry, kv_bytes = (count, fmt.block_size, layer.num_kv_heads), np.dtype(fmt.kv_storage).itemsize
    k, v = (zeros(shape, fmt.kv_storage) for shape in kv_cache_shapes(*geometry, layer.head_dim, kv_bytes))
    if not fmt.has_scales:
        return KvCache(k, v, layer.first_key)
    k_scale, v_scale = (zeros(kv_scale_shape(*geometry), np.float32) for _ in range(2))
    return KvCache(k, v, layer.first_key, k_scale, v_scale)


def allocate_block_hidden(
    layers: Iterable[LayerKv], count: int, fmt: KvCacheFormat, zeros: Zeros | None = None
) -> list[Tensor]:
    """Return [count, H] per layer that keeps hidden rows, one row per block; arguments and errors as `allocate`'s."""
    with asking_for_memory():
        zeros = zeros or device().zeros
        return [zeros((count, layer.hidden_size), fmt.row_storage) for layer in layers if layer.hidden_size]


@contextmanager
def asking_for_memory() -> Iterator[None]:
    """Turn a system's refusal into a ConfigError."""
    try:
        yield
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"kv_cache_memory_gb, num_gpu_blocks_override: expected what the system has memory for, got {error}",
            param="kv_cache_memory_gb",
        ) from None
