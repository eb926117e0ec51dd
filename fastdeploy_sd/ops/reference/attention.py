"""Meaning of rope_store_kv_, rope_store_latent_ and cascade_append_attention, and of the KV cache layout."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, RequestBlocks, Rotary, SharedPrefixes
from fastdeploy_sd.ops.reference.kv_quantize import dequantize_heads, quantize_heads, quantize_heads_float8
from fastdeploy_sd.types import F32, I32, I64, MAX_TREE_ROWS

# Keys of a partition, and query vectors of a request that may share some.
PARTITION_KEYS, MAX_SHARED_VECTORS = 256, 64


def pack_k(keys: Array) -> Array:
    """Return the cache layout of keys given as [num_blocks, block_size, Hkv, D]."""
    num_blocks, block_size, heads, head_dim = keys.shape
    s = 4 // keys.dtype.itemsize
    split = keys.reshape(num_blocks, block_size, heads, head_dim // s, s)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4))


def unpack_k(k_cache: Array) -> Array:
    num_blocks, heads, num_pairs, block_size, s = k_cache.shape
    return k_cache.transpose(0, 3, 1, 2, 4).reshape(num_blocks, block_size, heads, num_pairs * s)


def pack_v(values: Array) -> Array:
    """Return the cache layout of values given as [num_blocks, block_size, Hkv, D]."""
    num_blocks, block_size, heads, head_dim = values.shape
    s = 4 // values.dtype.itemsize
    split = values.reshape(num_blocks, block_size // s, s, heads, head_dim)
    return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 2))


def unpack_v(v_cache: Array) -> Array:
    num_blocks, heads, num_pairs, head_dim, s = v_cache.shape
    return v_cache.transpose(0, 2, 4, 1, 3).reshape(num_blocks, num_pairs * s, heads, head_dim)


def rotate(x: F32, positions: I32, rotary: Rotary[F32]) -> F32:
    """Turn the first rotary_dim elements of every head [T, heads, D], pair by pair, by its position's angles."""
    rotary_dim = rotary.cos_sin.shape[1]
    half = rotary_dim // 2
    pairs = np.arange(rotary_dim).reshape(half, 2) if rotary.interleaved else np.arange(rotary_dim).reshape(2, half).T
    turn = rotary.cos_sin[positions, None, :half] + 1j * rotary.cos_sin[positions, None, half:].astype(np.complex128)
    turned = (x[..., pairs[:, 0]] + 1j * x[..., pairs[:, 1]].astype(np.complex128)) * turn
    y = x.copy()
    y[..., pairs[:, 0]], y[..., pairs[:, 1]] = turned.real, turned.imag
    return y


def rope_store_kv_(
    qkv: Array,
    cache: KvCache[Array],
    positions: I32,
    slot_mapping: I64,
    rotary: Rotary[F32],
    qk_norm: QkNorm[F32] | None = None,
) -> Array:
    """Split qkv into heads, norm and rotate q and k, and store k and v in the cache, in place; see ops.attention."""
    tokens, head_dim = len(qkv), cache.head_dim
    heads = widen(qkv).reshape(tokens, qkv.shape[1] // head_dim, head_dim)
    q, k, v = np.split(heads, [heads.shape[1] - 2 * cache.num_kv_heads, heads.shape[1] - cache.num_kv_heads], axis=1)
    if qk_norm is not None:
        q, k = (_norm_heads(x, w, qk_norm.eps) for x, w in ((q, qk_norm.q), (k, qk_norm.k)))
    _store(rotate(k, positions, rotary), v, slot_mapping, cache)
    q = rotate(q, positions, rotary)
    if rotary.q_scale is not None:
        q *= rotary.q_scale[positions, None, None]
    return narrow(q, qkv.dtype).reshape(tokens, q.shape[1] * head_dim)


def rope_store_latent_(
    heads: Array, latents: Array, cache: KvCache[Array], positions: I32, slot_mapping: I64, rotary: Rotary[F32]
) -> Array:
    """Rotate the last elements of heads and latent vectors, and store the latter; see ops.attention."""
    tokens, head_dim = latents.shape
    k = _rotate_last(widen(latents).reshape(tokens, 1, head_dim), positions, rotary)
    _store(k, None, slot_mapping, cache)
    q = _rotate_last(widen(heads).reshape(tokens, heads.shape[1] // head_dim, head_dim), positions, rotary)
    return narrow(q, heads.dtype).reshape(heads.shape)


def _rotate_last(x: F32, positions: I32, rotary: Rotary[F32]) -> F32:
    first = x.shape[2] - rotary.cos_sin.shape[1]
    return np.concatenate([x[..., :first], rotate(x[..., first:], positions, rotary)], axis=2)


def _store(k: F32, v: F32 | None, slot_mapping: I64, cache: KvCache[Array]) -> None:
    """Write f32[T, Hkv, D] keys and values, rounded to the cache's type, to their slots."""
    s = 4 // cache.k.dtype.itemsize
    for token, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), cache.block_size)
        if cache.k_scale is None or cache.v_scale is None:
            new_k, new_v = narrow(k[token], cache.k.dtype), None if v is None else narrow(v[token], cache.k.dtype)
        else:
            assert v is not None
            quantize = quantize_heads if cache.k.dtype == np.int8 else quantize_heads_float8
            new_k, cache.k_scale[block, :, offset] = quantize(k[token])
            new_v, cache.v_scale[block, :, offset] = quantize(v[token])
        cache.k[block, :, :, offset] = new_k.reshape(cache.num_kv_heads, -1, s)
        if cache.v is not None and new_v is not None:
            cache.v[block, :, offset // s, :, offset % s] = new_v


def _norm_heads(x: F32, weight: F32, eps: float) -> F32:
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + eps) * weight, np.float32)


def find_shared_prefixes(
    query_start_loc: I32, seq_lens: I32, blocks: RequestBlocks[I32], block_size: int, group_size: int
) -> SharedPrefixes[I32]:
    """Find groups of requests that begin with the same blocks; see ops.attention.find_shared_prefixes."""
    count, num_rows = len(seq_lens), np.diff(query_start_loc)
    sharable = (seq_lens - num_rows) // PARTITION_KEYS
    sharable[(num_rows == 0) | (num_rows > MAX_SHARED_VECTORS // group_size)] = 0

    def blocks_of(r: int) -> tuple[int, ...]:
        own = blocks.block_tables[blocks.table_rows[r], : -(-int(sharable[r]) * PARTITION_KEYS // block_size)]
        return tuple(own.tolist())

    # A tuple that another begins with is before it.
    order = sorted((int(r) for r in np.flatnonzero(sharable)), key=lambda r: (blocks_of(r), r))

    def common_with_next(i: int) -> int:
        if i + 1 >= len(order):
            return 0
        a, b = order[i], order[i + 1]
        is_same = [one == other for one, other in zip(blocks_of(a), blocks_of(b), strict=False)]
        num_same = [*is_same, False].index(False)
        return min(num_same * block_size // PARTITION_KEYS, int(sharable[a]), int(sharable[b]))

    found = SharedPrefixes(
        np.full((count, MAX_SHARED_VECTORS), -1, np.int32),
        np.zeros(count + 1, np.int32),
        np.full(count, -1, np.int32),
        np.full(count, -1, np.int32),
        np.zeros(count, np.int32),
    )
    line, num_groups, place, begin = found.group_rows.reshape(-1), 0, 0, 0
    while begin < len(order):
        end, shared = begin + 1, int(sharable[order[begin]])
        while (common := common_with_next(end - 1)) > 0:
            n, less = end - begin, min(shared, common)
            # Readings that are saved with the next one in this group, and with it in another.
            if n * less + min(less, common_with_next(end)) < (n - 1) * shared + common_with_next(end):
                break
            end, shared = end + 1, less
        if end - begin > 1:
            found.group_leaders[num_groups] = order[begin]
            for r in order[begin:end]:
                found.group_places[r], found.shared_partitions[r] = place, shared
                line[place : place + num_rows[r]] = range(query_start_loc[r], query_start_loc[r + 1])
                place += num_rows[r]
            num_groups += 1
        found.group_starts[num_groups:] = place
        begin = end
    return found


def cascade_append_attention(  # noqa: PLR0913, PLR0917 (it is one op)
    q: Array,
    cache: KvCache[Array],
    query_start_loc: I32,
    seq_lens: I32,
    blocks: RequestBlocks[I32],
    scale: float,
    prefixes: SharedPrefixes[I32] | None = None,
    tree_mask: I64 | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: F32 | None = None,
) -> Array:
    """Attend every new token of every request to the cached tokens up to and including itself.

    Row i of request r has position seq_lens[r] - rows + i and sees keys cache.first_key..position, its own one always,
    with a window the last of these: y = softmax(softcap * tanh(scale * q . K^T / softcap)) . V, without tanh where
    there is no softcap. Query head h uses KV head h / (Hq / Hkv). In a tree, new tokens that a row does not see are
    left out, and later ones count as if they followed at once.

    Arguments are those of ops.attention.cascade_append_attention; `prefixes` change nothing.
    """
    num_heads = q.shape[1] // cache.head_dim
    by_kv_head = (cache.num_kv_heads, num_heads // cache.num_kv_heads)
    heads_of_q = widen(q).reshape(len(q), *by_kv_head, cache.head_dim).astype(np.float64)
    y = np.zeros(heads_of_q.shape, np.float32)
    keys, values = _unpacked(cache)
    for r, length in enumerate(seq_lens):
        rows = range(query_start_loc[r], query_start_loc[r + 1])
        own = blocks.block_tables[blocks.table_rows[r], : -(-int(length) // cache.block_size)]
        k, v = (x[own].reshape(-1, *x.shape[2:])[:length].transpose(1, 0, 2).astype(np.float64) for x in (keys, values))
        for i, row in enumerate(rows):
            is_tree = tree_mask is not None and len(rows) <= MAX_TREE_ROWS
            mask = int(tree_mask[row]) if tree_mask is not None and is_tree else -1
            new = [j for j in range(i) if mask >> j & 1] + [i]
            seen = np.array([*range(int(length) - len(rows)), *(int(length) - len(rows) + j for j in new)])
            seen = seen[min(cache.first_key, len(seen) - 1) :][-(window or len(seen)) :]
            scores = scale * heads_of_q[row] @ k[:, seen].transpose(0, 2, 1)
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            counted = scores if sinks is None else np.concatenate([scores, sinks.reshape(*by_kv_head, 1)], axis=2)
            weights = np.exp(counted - counted.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            y[row] = weights[..., : len(seen)] @ v[:, seen]
    return narrow(y.reshape(q.shape), q.dtype)


def _unpacked(cache: KvCache[Array]) -> tuple[F32, F32]:
    """Return keys and values as f32[num_blocks, block_size, Hkv, D]."""
    keys = unpack_k(cache.k)
    values = keys if cache.v is None else unpack_v(cache.v)
    if cache.k_scale is None or cache.v_scale is None:
        return widen(keys), widen(values)
    return (
        dequantize_heads(keys, cache.k_scale.transpose(0, 2, 1)),
        dequantize_heads(values, cache.v_scale.transpose(0, 2, 1)),
    )
