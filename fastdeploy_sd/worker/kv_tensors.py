"""Allocates the paged KV cache: the tensors of every layer and draft layer. kv_sizing.py says how large they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.ops.kv_cache import KvCache, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.tensors import aligned_zeros, from_numpy
from fastdeploy_sd.worker.kv_sizing import KvCacheFormat


def allocate(config: DecoderConfig, count: int, fmt: KvCacheFormat, num_draft_layers: int = 0) -> list[KvCache[Tensor]]:
    """Return one cache of `count` blocks per layer, the draft layers' last; draft layer j's first_key is j + 1.

    The memory is zero and taken from the system only as blocks are first used.

    Raises:
        ConfigError: the system does not give that much.
    """
    first_keys = [0] * config.num_layers + list(range(1, num_draft_layers + 1))
    return [_allocate_layer(config, count, fmt, first_key) for first_key in first_keys]


def _allocate_layer(config: DecoderConfig, count: int, fmt: KvCacheFormat, first_key: int) -> KvCache[Tensor]:
    geometry = (count, fmt.block_size, config.num_kv_heads)
    k, v = _zeros(kv_cache_shapes(*geometry, config.head_dim, np.dtype(fmt.kv_storage).itemsize), fmt.kv_storage)
    if not fmt.is_int8:
        return KvCache(k, v, first_key)
    k_scale, v_scale = _zeros([kv_scale_shape(*geometry)] * 2, np.float32)
    return KvCache(k, v, first_key, k_scale, v_scale)


def allocate_block_hidden(config: DecoderConfig, count: int, fmt: KvCacheFormat, num_draft_layers: int) -> list[Tensor]:
    """Return [count, H] hidden rows per draft layer, one row per block; raises as `allocate`."""
    return _zeros([(count, config.hidden_size)] * num_draft_layers, fmt.row_storage)


def _zeros(shapes: Sequence[tuple[int, ...]], storage: npt.DTypeLike) -> list[Tensor]:
    try:
        return [from_numpy(aligned_zeros(shape, storage)) for shape in shapes]
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"kv_cache_memory_gb, num_gpu_blocks_override: expected what the system has memory for, got {error}",
            param="kv_cache_memory_gb",
        ) from None
