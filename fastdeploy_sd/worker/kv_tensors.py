"""Allocates the paged KV cache: the tensors of every layer. kv_sizing.py says how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.kv_cache import KvCache, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.runtime.device import DEVICE
from fastdeploy_sd.worker.kv_sizing import KvCacheFormat, LayerKv


def allocate(layers: Iterable[LayerKv], count: int, fmt: KvCacheFormat) -> list[KvCache[Tensor]]:
    """Return one cache of `count` blocks per layer.

    The memory is zero and taken from the system only as blocks are first used.

    Raises:
        ConfigError: the system does not give that much.
    """
    return [_allocate_layer(layer, count, fmt) for layer in layers]


def _allocate_layer(layer: LayerKv, count: int, fmt: KvCacheFormat) -> KvCache[Tensor]:
    geometry = (count, fmt.block_size, layer.num_kv_heads)
    k, v = _zeros(kv_cache_shapes(*geometry, layer.head_dim, np.dtype(fmt.kv_storage).itemsize), fmt.kv_storage)
    if not fmt.is_int8:
        return KvCache(k, v, layer.first_key)
    k_scale, v_scale = _zeros([kv_scale_shape(*geometry)] * 2, np.float32)
    return KvCache(k, v, layer.first_key, k_scale, v_scale)


def allocate_block_hidden(layers: Iterable[LayerKv], count: int, fmt: KvCacheFormat) -> list[Tensor]:
    """Return [count, H] per layer that keeps hidden rows, one row per block; raises as `allocate`."""
    return _zeros([(count, layer.hidden_size) for layer in layers if layer.hidden_size], fmt.row_storage)


def _zeros(shapes: Sequence[tuple[int, ...]], storage: npt.DTypeLike) -> list[Tensor]:
    try:
        return [DEVICE.zeros(shape, storage) for shape in shapes]
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"kv_cache_memory_gb, num_gpu_blocks_override: expected what the system has memory for, got {error}",
            param="kv_cache_memory_gb",
        ) from None
