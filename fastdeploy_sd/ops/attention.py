"""rope_store_kv_, rope_store_latent_, cascade_append_attention and find_shared_prefixes, whose result it reads."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.program import declaration as d
from fastdeploy_sd.device.program.declaration import (
    ACTIVATIONS,
    F32,
    I32,
    I64,
    Attr,
    DTypeOf,
    In,
    InOut,
    Out,
    Part,
    each,
)
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, RequestBlocks, Rotary, SharedPrefixes


def cache_parts(array: type[In]) -> dict[str, Part]:
    """The fields of fdsd::KvCache; see ops/kv_cache.py for the shapes."""
    s, scales = "4/itemsize(k)", "num_blocks, num_kv_heads, block_size"
    return {
        "k": array(
            (F32, d.BF16, d.F16, d.I8, d.U8), f"num_blocks, num_kv_heads, head_dim*itemsize(k)/4, block_size, {s}"
        ),
        "v": array("k", f"num_blocks, num_kv_heads, block_size*itemsize(k)/4, head_dim, {s}", optional=True),
        **each(array(F32, scales, optional=True), "k_scale", "v_scale"),
        "kv_dtype": DTypeOf("k"),
    }


ROPE_STORE_KV = Op(
    "rope_store_kv",
    "num_tokens",
    **cache_parts(InOut),
    qkv=In(ACTIVATIONS, "num_tokens, (num_heads + 2*num_kv_heads)*head_dim"),
    dtype=DTypeOf("qkv"),
    positions=In(I32, "num_tokens"),
    slot_mapping=In(I64, "num_tokens"),
    cos_sin=In(F32, "max_position, rotary_dim"),
    q_scale=In(F32, "max_position", optional=True),
    q_norm=In(F32, "head_dim", optional=True),
    k_norm=In(F32, "head_dim", optional=True),
    norm_eps=Attr(float),
    interleaved=Attr(bool),
    q=Out("qkv", "num_tokens, num_heads*head_dim"),
)
ROPE_STORE_LATENT = Op(
    "rope_store_latent",
    "num_tokens",
    **cache_parts(InOut),
    latents=In(ACTIVATIONS, "num_tokens, head_dim"),
    heads=In("latents", "num_tokens, num_heads*head_dim"),
    dtype=DTypeOf("latents"),
    positions=In(I32, "num_tokens"),
    slot_mapping=In(I64, "num_tokens"),
    cos_sin=In(F32, "max_position, rotary_dim"),
    interleaved=Attr(bool),
    q=Out("latents", "num_tokens, num_heads*head_dim"),
)


def _prefixes(array: type[In], *, optional: bool) -> dict[str, Part]:
    """The fields of fdsd::SharedPrefixes."""
    return {
        "group_rows": array(I32, "num_requests, 64", optional),
        "group_starts": array(I32, "num_requests + 1", optional),
        **each(array(I32, "num_requests", optional), "group_leaders", "group_places", "shared_partitions"),
    }


_REQUEST_MAPS = {
    "table_rows": In(I32, "num_requests"),
    "block_tables": In(I32, "num_table_rows, max_blocks"),
    "query_start_loc": In(I32, "num_requests + 1"),
    "seq_lens": In(I32, "num_requests"),
}
FIND_SHARED_PREFIXES = Op(
    "find_shared_prefixes",
    None,
    **_REQUEST_MAPS,
    block_size=Attr(int),
    group_size=Attr(int),
    **_prefixes(Out, optional=False),
)
CASCADE_APPEND_ATTENTION = Op(
    "cascade_append_attention",
    "num_requests",
    **cache_parts(In),
    q=In(ACTIVATIONS, "num_tokens, num_heads*head_dim"),
    dtype=DTypeOf("q"),
    sinks=In(F32, "num_heads", optional=True),
    **_REQUEST_MAPS,
    scale=Attr(float),
    softcap=Attr(float),
    first_key=Attr(int),
    window=Attr(int),
    **_prefixes(In, optional=True),
    tree_mask=In(I64, "num_tokens", optional=True),
    y=Out("q", "num_tokens, num_heads*head_dim"),
)


def rope_store_kv_(
    qkv: A, cache: KvCache[A], positions: A, slot_mapping: A, rotary: Rotary[A], qk_norm: QkNorm[A] | None = None
) -> A:
    """Split qkv into heads, norm and rotate q and k, and store k and v in the cache, in place.

    The optional norm comes before the rotary embedding; both are computed in float32 and rounded once.

    Args:
        qkv: f32, bf16 or f16 [T, (Hq + 2 * Hkv) * D], a row is [q heads | k heads | v heads].
        cache: of the same dtype, or int8 or, on a GPU, float8 with its scales; written.
        positions: i32[T], absolute.
        slot_mapping: i64[T], block * block_size + offset; -1 = do not write. No slot may come twice.

    Returns:
        q, the same dtype, [T, Hq * D].

    Raises ValueError: a position is outside the table, a slot outside the cache, or the cache has no values; nothing is
    written then.
    """
    q: A = ROPE_STORE_KV(
        **cache_arrays(cache),
        qkv=qkv,
        positions=positions,
        slot_mapping=slot_mapping,
        cos_sin=rotary.cos_sin,
        interleaved=rotary.interleaved,
        q_scale=rotary.q_scale,
        q_norm=None if qk_norm is None else qk_norm.q,
        k_norm=None if qk_norm is None else qk_norm.k,
        norm_eps=0.0 if qk_norm is None else qk_norm.eps,
    )
    return q


def rope_store_latent_(heads: A, latents: A, cache: KvCache[A], positions: A, slot_mapping: A, rotary: Rotary[A]) -> A:
    """Rotate the last elements of query heads and of latent vectors, and store the latter in the cache, in place.

    Args:
        heads: f32, bf16 or f16 [T, Hq * D].
        latents: same dtype [T, D].
        cache: of the same dtype, without values; written.
        positions: i32[T], absolute.
        slot_mapping: i64[T], as for `rope_store_kv_`.

    Returns:
        The rotated heads.

    Raises ValueError: as `rope_store_kv_`, or the cache has values.
    """
    q: A = ROPE_STORE_LATENT(
        **cache_arrays(cache),
        heads=heads,
        latents=latents,
        positions=positions,
        slot_mapping=slot_mapping,
        cos_sin=rotary.cos_sin,
        interleaved=rotary.interleaved,
    )
    return q


def find_shared_prefixes(
    query_start_loc: A, seq_lens: A, blocks: RequestBlocks[A], block_size: int, group_size: int
) -> SharedPrefixes[A]:
    """Find requests that begin with the same blocks, for all layers of a pass.

    Requests share whole partitions of 256 keys before their new tokens. They are sorted by their blocks; from the first
    to the last, a group takes in the next as long as that saves more readings than letting it begin a group of its own.
    Requests of more than 64 / group_size rows are in none.

    Args:
        query_start_loc: i32[R + 1], request r owns rows [q[r], q[r + 1]).
        seq_lens: i32[R], lengths including the new tokens.
        group_size: query heads per KV head.
    """
    found = FIND_SHARED_PREFIXES(
        table_rows=blocks.table_rows,
        block_tables=blocks.block_tables,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_size=block_size,
        group_size=group_size,
    )
    return SharedPrefixes(*found)


def cascade_append_attention(  # noqa: PLR0913, PLR0917 (it is one op)
    q: A,
    cache: KvCache[A],
    query_start_loc: A,
    seq_lens: A,
    blocks: RequestBlocks[A],
    scale: float,
    prefixes: SharedPrefixes[A] | None = None,
    tree_mask: A | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: A | None = None,
) -> A:
    """Attend every new token of every request to the cached tokens up to and including itself.

    Row i of request r has position seq_lens[r] - rows + i and sees keys cache.first_key..position, its own one always;
    with a window only the last ones of these. No block before the windows of a request's rows is read.
    The cache is read once per request and KV head for all of its rows, and what a group of `prefixes` shares once for
    the group; a row's bits do not depend on the other rows of the call, nor on groups. Sums are in float32. Over a
    bfloat16 cache the softmax weights are rounded to bfloat16, which leaves a row within 0.5 % of its exact length.

    With `tree_mask` the new tokens of a request are a tree of drafts. A row then sees the cached tokens, those new ones
    before it that its bits name, and itself; its bits are those of a call in which these are the request's only new
    tokens. Requests with more than 64 new tokens are no trees, whatever their bits.

    Args:
        q: f32, bf16 or f16 [T, Hq * D], from `rope_store_kv_` or `rope_store_latent_`.
        cache: of the same dtype, or int8 or, on a GPU, float8 with its scales, the new tokens' k and v included.
            Without v its keys are the values.
        query_start_loc: i32[R + 1], request r owns rows [q[r], q[r + 1]).
        seq_lens: i32[R], lengths including the new tokens.
        scale: of the scores, usually D ** -0.5.
        prefixes: from `find_shared_prefixes` of the same offsets, lengths and blocks, None: nothing is shared.
        window: keys that a row sees at most, its own included; None: all.
        softcap: c > 0: scores become c * tanh(score / c); None: they stay.
        sinks: f32[Hq], for each head a score that its softmax counts besides those of keys, without a value.
        tree_mask: i64[T], bit j < 64 of a request's row i: whether it sees the request's new token j, for j < i. None:
            it sees all of them.

    Returns:
        The same dtype, [T, Hq * D].

    Raises ValueError: a block is outside the cache, `prefixes` are of another call or given with a window,
    cache.first_key is not in 0..63, or the device has no kernel for float8.
    """
    y: A = CASCADE_APPEND_ATTENTION(
        **cache_arrays(cache),
        q=q,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        table_rows=blocks.table_rows,
        block_tables=blocks.block_tables,
        scale=scale,
        softcap=softcap or 0.0,
        sinks=sinks,
        window=window or 0,
        first_key=cache.first_key,
        **({} if prefixes is None else prefixes._asdict()),
        tree_mask=tree_mask,
    )
    return y


def cache_arrays(cache: KvCache[Any]) -> dict[str, Any]:
    return {"k": cache.k, "v": cache.v, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
