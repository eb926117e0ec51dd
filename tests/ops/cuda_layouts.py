"""Arrays that CUDA kernels lay out otherwise than the CPU's, converted for tests: op -> field -> (to, from) device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastdeploy_sd.ops.reference.attention import pack_k, pack_v, unpack_k, unpack_v

# Array, params struct -> the array of the other side, whose bytes are as many.
Convert = Callable[[np.ndarray, Any], np.ndarray]


def _heads_first(tokens: np.ndarray) -> np.ndarray:
    """[num_blocks, block_size, Hkv, D] <-> [num_blocks, Hkv, block_size, D]."""
    return np.ascontiguousarray(tokens.transpose(0, 2, 1, 3))


def _from_device(pack: Callable[[np.ndarray], np.ndarray]) -> Convert:
    def convert(cache: np.ndarray, params: Any) -> np.ndarray:
        shape = (params.num_blocks, params.num_kv_heads, params.block_size, params.head_dim)
        return pack(_heads_first(cache.reshape(shape)))

    return convert


_KV_CACHE = {
    "k": (lambda cache, _: _heads_first(unpack_k(cache)), _from_device(pack_k)),
    "v": (lambda cache, _: _heads_first(unpack_v(cache)), _from_device(pack_v)),
}
LAYOUTS: Mapping[str, Mapping[str, tuple[Convert, Convert]]] = {
    "rope_store_kv": _KV_CACHE,
    "rope_store_latent": _KV_CACHE,
    "cascade_append_attention": _KV_CACHE,
    "compact_kv": _KV_CACHE,
}
