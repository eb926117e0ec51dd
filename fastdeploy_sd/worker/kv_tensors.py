"""Allocates the paged KV cache: how large a block is, how many fit, and the tensors of every layer."""

from __future__ import annotations

import numpy as np
from paddle import Tensor

from fastdeploy_sd.config import CacheConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.ops.kv_cache import KvCache, kv_cache_shapes
from fastdeploy_sd.ops.tensors import aligned_zeros, from_numpy


def block_bytes(config: DecoderConfig, block_size: int, dtype: str) -> int:
    """Return the bytes of one block over all layers, keys and values."""
    element = 4 if dtype == "float32" else 2
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * block_size * element


def num_blocks(config: DecoderConfig, cache: CacheConfig, dtype: str) -> int:
    """Return how many blocks to allocate: the configured number, else what fits into kv_cache_memory_gb.

    Raises:
        ConfigError: not even one block fits.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    one = block_bytes(config, cache.block_size, dtype)
    count = int(cache.kv_cache_memory_gb * 2**30) // one
    if count < 1:
        raise ConfigError(
            f"kv_cache_memory_gb: expected at least {one / 2**30:.3f} (one block), got {cache.kv_cache_memory_gb}",
            param="kv_cache_memory_gb",
        )
    return count


def allocate(config: DecoderConfig, count: int, block_size: int, dtype: str) -> list[KvCache[Tensor]]:
    """Return one cache per layer; the memory is zero and taken from the system only as blocks are first used."""
    storage = np.float32 if dtype == "float32" else np.uint16
    k_shape, v_shape = kv_cache_shapes(
        count, block_size, config.num_kv_heads, config.head_dim, np.dtype(storage).itemsize
    )
    return [
        KvCache(from_numpy(aligned_zeros(k_shape, storage)), from_numpy(aligned_zeros(v_shape, storage)))
        for _ in range(config.num_layers)
    ]
