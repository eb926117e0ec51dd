"""rope_store_kv_ and cascade_append_attention on Paddle tensors."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, Rotary, kv_cache_shapes
from fastdeploy_sd.ops.rope_table import rope_table

__all__ = ["KvCache", "QkNorm", "Rotary", "cascade_append_attention", "kv_cache_shapes", "rope_store_kv_", "rope_table"]


def rope_store_kv_(
    qkv: Tensor,
    cache: KvCache[Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    rotary: Rotary[Tensor],
    qk_norm: QkNorm[Tensor] | None = None,
) -> Tensor:
    """Split qkv into heads, norm and rotate q and k, and store k and v in the cache, in place.

    The optional norm comes before the rotary embedding; both are computed in float32 and rounded once.

    Args:
        qkv: f32 or bf16 [T, (Hq + 2 * Hkv) * D], a row is [q heads | k heads | v heads].
        cache: of the same dtype, or int8 with its scales; written.
        positions: i32[T], absolute.
        slot_mapping: i64[T], block * block_size + offset; -1 = do not write. No slot may come twice.
        rotary: table and pairing.
        qk_norm: RMS norm of every head of q and k (Qwen3), or None.

    Returns:
        q, the same dtype, [T, Hq * D].

    Raises:
        ValueError: a shape or dtype disagrees, a position is outside the table or a slot outside the cache; nothing is
            written then.
    """
    norm_q, norm_k, eps = (None, None, 0.0) if qk_norm is None else (qk_norm.q, qk_norm.k, qk_norm.eps)
    kv = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    inputs = (qkv, positions, slot_mapping, rotary.cos_sin, *kv, norm_q, norm_k)
    return shim.run("rope_store_kv", *inputs, eps, rotary.interleaved)[0]


def cascade_append_attention(
    q: Tensor, cache: KvCache[Tensor], query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, scale: float
) -> Tensor:
    """Attend every new token of every request to the cached tokens up to and including itself.

    Row i of request r has position seq_lens[r] - rows + i and sees keys cache.first_key..position, its own one always.
    The cache is read once per request and KV head for all of its rows, and blocks with which several requests begin
    once for all of them; a row's bits do not depend on the other rows of the call. Sums are in float32. Over a bfloat16
    cache the softmax weights are rounded to bfloat16, which leaves a row within 0.5 % of its exact length.

    Args:
        q: f32 or bf16 [T, Hq * D], from `rope_store_kv_`.
        cache: of the same dtype, or int8 with its scales, the new tokens' k and v included.
        query_start_loc: i32[R + 1], request r owns rows [q[r], q[r + 1]).
        seq_lens: i32[R], lengths including the new tokens.
        block_tables: i32[R, max_blocks], padded with -1.
        scale: of the scores, usually D ** -0.5.

    Returns:
        The same dtype, [T, Hq * D].

    Raises:
        ValueError: a shape or dtype disagrees, offsets or lengths contradict each other, a block is outside the cache,
            or cache.first_key is not in 0..63.
    """
    inputs = (q, cache.k, cache.v, cache.k_scale, cache.v_scale, query_start_loc, seq_lens, block_tables)
    return shim.run("cascade_append_attention", *inputs, scale, cache.first_key)[0]
