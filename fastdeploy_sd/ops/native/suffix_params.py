"""The ctypes twins of the structs in custom_ops/cpu/suffix_drafter.h and suffix_cache.h, which describe the fields."""

from __future__ import annotations

import ctypes

from fastdeploy_sd.ops.library import CParams


class SuffixCreateParams(CParams):
    """Twin of fdsd::SuffixCreateParams."""

    _fields_ = (
        ("num_slots", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("max_context", ctypes.c_int32),
        ("max_factor", ctypes.c_double),
        ("min_token_prob", ctypes.c_double),
        ("follows_copies", ctypes.c_int32),
        ("max_cached_outputs", ctypes.c_int64),
        ("max_cached_bytes", ctypes.c_int64),
        ("drafter", ctypes.c_void_p),
    )


class SuffixBeginParams(CParams):
    """Twin of fdsd::SuffixBeginParams."""

    _fields_ = (
        ("drafter", ctypes.c_void_p),
        ("slot", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("salt_digest", ctypes.c_char_p),
        ("first_end", ctypes.c_int32),
        ("num_end_token_ids", ctypes.c_int32),
        ("end_token_ids", ctypes.c_void_p),
    )


class SuffixSequencesParams(CParams):
    """Twin of fdsd::SuffixSequencesParams."""

    _fields_ = (
        ("drafter", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("salt_digests", ctypes.c_void_p),
        ("cu_tokens", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
    )


class SuffixCountParams(CParams):
    """Twin of fdsd::SuffixCountParams."""

    _fields_ = (
        ("drafter", ctypes.c_void_p),
        ("slot", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("max_counts", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("num_counts", ctypes.c_void_p),
    )


class SuffixStats(CParams):
    """What the shared cache holds; twin of fdsd::SuffixStats.

    Attributes:
        num_bytes: of everything kept, memory that was dropped and not yet given back included.
        num_tokens, num_outputs, num_shards, num_salts: now in the cache.
        num_sequences: pieces of outputs in the cache; one that was continued in a younger shard counts in both.
        num_steps: elementary steps of all appends ever.
        num_cut_counts: appends that left the counts of their shortest strings alone.
    """

    num_bytes: int
    num_tokens: int
    num_outputs: int
    num_sequences: int
    num_shards: int
    num_salts: int
    num_steps: int
    num_cut_counts: int

    _fields_ = (
        ("num_bytes", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("num_sequences", ctypes.c_int64),
        ("num_shards", ctypes.c_int64),
        ("num_salts", ctypes.c_int64),
        ("num_steps", ctypes.c_int64),
        ("num_cut_counts", ctypes.c_int64),
    )
