"""What the attention ops take besides activations: one layer's paged KV cache, the rotary table, the q and k norms.

The classes hold NumPy arrays or Paddle tensors alike and load neither. The layout is that of
custom_ops/include/fdsd/kv_cache.h, with s = 4 / element size: 1 for float32, 2 for bfloat16, 4 for int8 and float8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

A = TypeVar("A", bound=Any)


def kv_cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of k and v of one layer's cache; block_size and head_dim are multiples of 16."""
    s = 4 // element_bytes
    k_shape = (num_blocks, num_kv_heads, head_dim // s, block_size, s)
    v_shape = (num_blocks, num_kv_heads, block_size // s, head_dim, s)
    return k_shape, v_shape


def kv_scale_shape(num_blocks: int, block_size: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the shape of k_scale and of v_scale of one layer's cache of int8 or float8."""
    return (num_blocks, num_kv_heads, block_size)


class RequestBlocks(NamedTuple, Generic[A]):
    """Where the KV of a step's requests is: rows i32[R] of block_tables i32[S, max_blocks], padded with -1."""

    table_rows: A
    block_tables: A


class SharedPrefixes(NamedTuple, Generic[A]):
    """Groups of requests that begin with the same blocks, see fdsd::SharedPrefixes.

    Attributes:
        group_rows: i32[R, 64], as one line: rows of q, those of the first group, request by request, then those of the
            second, ..., then -1.
        group_starts: i32[R + 1], where each group's rows begin there; groups after the last have none.
        group_leaders: i32[R], a request of each group; -1 after the last.
        group_places: i32[R], where each request's rows begin in group_rows; -1: it is in no group.
        shared_partitions: i32[R], how many partitions of 256 keys each request shares with its group; 0: it is in none.
    """

    group_rows: A
    group_starts: A
    group_leaders: A
    group_places: A
    shared_partitions: A


class VerifiedPaths(NamedTuple, Generic[A]):
    """The step's rows of logits whose tokens came out.

    Attributes:
        cu_num_logits, cu_num_output: i32[R+1].
        output_rows: i32[L], the row of logits of each output, rising within a request.
        logits_indices: i32[L], the token of the step that each row of logits belongs to.
    """

    cu_num_logits: A
    cu_num_output: A
    output_rows: A
    logits_indices: A


@dataclass(frozen=True, slots=True, eq=False)
class KvCache(Generic[A]):
    """One layer's paged cache; slot `block * block_size + offset` holds one token.

    Attributes:
        k: f32, bf16, f16, i8 or float8 (bits of e4m3 in u8) [num_blocks, Hkv, D / s, block_size, s].
        v: same dtype [num_blocks, Hkv, block_size / s, D, s]; None: the keys, of one head, are the values too.
        first_key: 0..63: no request's tokens before this position have content here, and only they themselves see them.
            0 but for draft layers, which start after the target's.
        k_scale, v_scale: f32[num_blocks, Hkv, block_size], one token's elements of a byte times this are its values;
            None for others.
        group: KV group of the layer, whose blocks these are; see `types.kv_groups`.
    """

    k: A
    v: A | None
    first_key: int = 0
    k_scale: A | None = None
    v_scale: A | None = None
    group: int = 0

    @property
    def num_blocks(self) -> int:
        return int(self.k.shape[0])

    @property
    def num_kv_heads(self) -> int:
        return int(self.k.shape[1])

    @property
    def block_size(self) -> int:
        return int(self.k.shape[3])

    @property
    def head_dim(self) -> int:
        return int(self.k.shape[2] * self.k.shape[4])


@dataclass(frozen=True, slots=True, eq=False)
class Rotary(Generic[A]):
    """Rotary embedding of q and k: f32[max_position, rotary_dim], see `rope_table`; further elements pass unchanged.

    Interleaved pairs are elements (2i, 2i + 1), as in ERNIE and GLM; else (i, i + rotary_dim / 2), as in NeoX.
    q_scale f32[max_position], where there is one, is what q is multiplied by at each position.
    """

    cos_sin: A
    interleaved: bool = False
    q_scale: A | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QkNorm(Generic[A]):
    """RMS norm of every q and k head before the rotary embedding, as in Qwen3: weights f32[D]."""

    q: A
    k: A
    eps: float
