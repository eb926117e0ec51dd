"""Meaning of compact_kv_ and compact_rows_."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.kv_cache import KvCache, VerifiedPaths
from fastdeploy_sd.types import I32, I64


def compact_kv_(cache: KvCache[Array], paths: VerifiedPaths[I32], slot_mapping: I64) -> None:
    """Move k and v of the tokens whose rows have output to where those of a chain would be, in place.

    `slot_mapping`: i64[T], of the step's tokens.
    """
    size, s = cache.block_size, cache.k.shape[-1]
    for source, target in _moves(paths):
        (from_block, i), (to_block, j) = divmod(slot_mapping[source], size), divmod(slot_mapping[target], size)
        cache.k[to_block, :, :, j] = cache.k[from_block, :, :, i]
        if cache.v is not None:
            cache.v[to_block, :, j // s, :, j % s] = cache.v[from_block, :, i // s, :, i % s]
        for scale in (cache.k_scale, cache.v_scale):
            if scale is not None:
                scale[to_block, :, j] = scale[from_block, :, i]


def compact_rows_(rows: Array, paths: VerifiedPaths[I32]) -> None:
    """Move [T, H] rows of the step's tokens likewise."""
    for source, target in _moves(paths):
        rows[target] = rows[source]


def _moves(paths: VerifiedPaths[I32]) -> Iterator[tuple[int, int]]:
    """Tokens of the step, and those whose places they take: output o of a request belongs to its row o."""
    for r in range(len(paths.cu_num_logits) - 1):
        begin, end = paths.cu_num_output[r : r + 2]
        for o in range(begin, end):
            place = paths.cu_num_logits[r] + o - begin
            yield paths.logits_indices[paths.output_rows[o]], paths.logits_indices[place]
