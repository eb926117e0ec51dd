"""Allocates the paged KV cache: how large a block is, how many fit, and the tensors of every layer.

Draft layers have a cache over the same blocks, and each keeps one hidden row per block: that of the block's last token
in the layer it reads from.
"""

from __future__ import annotations

import numpy as np
from paddle import Tensor

from fastdeploy_sd.config import CacheConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.ops.kv_cache import KvCache, kv_cache_shapes
from fastdeploy_sd.ops.tensors import aligned_zeros, from_numpy


def block_bytes(config: DecoderConfig, block_size: int, dtype: str, num_draft_layers: int = 0) -> int:
    """Return the bytes of one block over all layers: keys, values, and the draft layers' hidden rows."""
    element = 4 if dtype == "float32" else 2
    per_layer = 2 * config.num_kv_heads * config.head_dim * block_size
    num_elements = (config.num_layers + num_draft_layers) * per_layer + num_draft_layers * config.hidden_size
    return num_elements * element


def num_blocks(config: DecoderConfig, cache: CacheConfig, dtype: str, num_draft_layers: int = 0) -> int:
    """Return how many blocks to allocate: the configured number, else what fits into kv_cache_memory_gb.

    Raises:
        ConfigError: not even one block fits.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    one = block_bytes(config, cache.block_size, dtype, num_draft_layers)
    count = int(cache.kv_cache_memory_gb * 2**30) // one
    if count < 1:
        raise ConfigError(
            f"kv_cache_memory_gb: expected at least {one / 2**30:.3f} (one block), got {cache.kv_cache_memory_gb}",
            param="kv_cache_memory_gb",
        )
    return count


def allocate(
    config: DecoderConfig, count: int, block_size: int, dtype: str, num_draft_layers: int = 0
) -> list[KvCache[Tensor]]:
    """Return one cache per layer, the draft layers' last; draft layer j's first_key is j + 1.

    The memory is zero and taken from the system only as blocks are first used.
    """
    storage = _storage(dtype)
    k_shape, v_shape = kv_cache_shapes(
        count, block_size, config.num_kv_heads, config.head_dim, np.dtype(storage).itemsize
    )
    return [
        KvCache(from_numpy(aligned_zeros(k_shape, storage)), from_numpy(aligned_zeros(v_shape, storage)), first_key)
        for first_key in (*[0] * config.num_layers, *range(1, num_draft_layers + 1))
    ]


def allocate_block_hidden(config: DecoderConfig, count: int, dtype: str, num_draft_layers: int) -> list[Tensor]:
    """Return [count, H] hidden rows per draft layer, one row per block."""
    shape = (count, config.hidden_size)
    return [from_numpy(aligned_zeros(shape, _storage(dtype))) for _ in range(num_draft_layers)]


def _storage(dtype: str) -> type[np.float32] | type[np.uint16]:
    return np.float32 if dtype == "float32" else np.uint16
