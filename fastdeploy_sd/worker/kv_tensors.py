"""Allocates the paged KV cache: how large a block is, how many fit, and the tensors of every layer.

Draft layers have a cache over the same blocks, and each keeps one hidden row per block: that of the block's last token
in the layer it reads from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.config import CacheConfig, Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.ops.kv_cache import KvCache, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.tensors import aligned_zeros, from_numpy

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvCacheFormat:
    """What one token's keys, values and hidden rows are stored as.

    Attributes:
        block_size: tokens per block.
        dtype: "float32" or "bfloat16", of the activations and of the hidden rows that draft layers keep.
        is_int8: keys and values are int8, with a float32 scale per token and KV head each; else they have `dtype`.
    """

    block_size: int
    dtype: str
    is_int8: bool = False

    @classmethod
    def create(cls, config: Config) -> KvCacheFormat:
        """Return the format of `--block-size`, `--dtype` and `--kv-cache-dtype`."""
        return cls(config.cache.block_size, config.model.dtype, config.cache.kv_cache_dtype == "int8")

    @property
    def kv_dtype(self) -> str:
        """Type of keys and values: "float32", "bfloat16" or "int8"."""
        return "int8" if self.is_int8 else self.dtype

    @property
    def row_storage(self) -> npt.DTypeLike:
        """NumPy type that holds elements of `dtype`; bfloat16 as its bits."""
        return np.float32 if self.dtype == "float32" else np.uint16

    @property
    def kv_storage(self) -> npt.DTypeLike:
        """The same of keys and values."""
        return np.int8 if self.is_int8 else self.row_storage


def block_bytes(config: DecoderConfig, fmt: KvCacheFormat, num_draft_layers: int = 0) -> int:
    """Return the bytes of one block over all layers: keys, values, their scales, and the draft layers' hidden rows."""
    head_bytes = config.head_dim * np.dtype(fmt.kv_storage).itemsize + (_SCALE_BYTES if fmt.is_int8 else 0)
    layer_bytes = 2 * config.num_kv_heads * fmt.block_size * head_bytes
    hidden_bytes = config.hidden_size * np.dtype(fmt.row_storage).itemsize
    return (config.num_layers + num_draft_layers) * layer_bytes + num_draft_layers * hidden_bytes


def num_blocks(config: DecoderConfig, cache: CacheConfig, fmt: KvCacheFormat, num_draft_layers: int = 0) -> int:
    """Return how many blocks to allocate: the configured number, else what fits into kv_cache_memory_gb.

    Raises:
        ConfigError: not even one block fits.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    one = block_bytes(config, fmt, num_draft_layers)
    count = int(cache.kv_cache_memory_gb * 2**30) // one
    if count < 1:
        raise ConfigError(
            f"kv_cache_memory_gb: expected at least {one / 2**30:.3f} (one block), got {cache.kv_cache_memory_gb}",
            param="kv_cache_memory_gb",
        )
    return count


def allocate(config: DecoderConfig, count: int, fmt: KvCacheFormat, num_draft_layers: int = 0) -> list[KvCache[Tensor]]:
    """Return one cache of `count` blocks per layer, the draft layers' last; draft layer j's first_key is j + 1.

    The memory is zero and taken from the system only as blocks are first used.
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
    """Return [count, H] hidden rows per draft layer, one row per block."""
    return _zeros([(count, config.hidden_size)] * num_draft_layers, fmt.row_storage)


def _zeros(shapes: Sequence[tuple[int, ...]], storage: npt.DTypeLike) -> list[Tensor]:
    return [from_numpy(aligned_zeros(shape, storage)) for shape in shapes]
