"""The ops of a layer besides its matrix products, in shapes of Qwen3-0.6B, with the bytes and operations they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from benchmarks.sampling import sampling_columns
from fastdeploy_sd.ops.activation import SWIGLU
from fastdeploy_sd.ops.attention import CASCADE_APPEND_ATTENTION, ROPE_STORE_KV
from fastdeploy_sd.ops.kv_cache import kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.norm import RMS_NORM
from fastdeploy_sd.ops.sampling import sample

HIDDEN, INTERMEDIATE, VOCAB = 1024, 3072, 151_936
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 64
SMALL_ROWS = (1, 8, 128)
# Streams of a decoding step, and tokens of a chunk of a prompt.
DECODE_REQUESTS, CHUNK = 8, 512
# Of a stream with a long draft, among streams without: these must take what they take alone.
DRAFTED_ROWS = 16
# Elements' operations that are no dot products, counted as one each.
_NORM_OPERATIONS, _SWIGLU_OPERATIONS, _ROPE_OPERATIONS = 5, 5, 3
_SMALL_CALLS, _LARGE_CALLS = 100, 2
_BF16_ONE = 0x3F80


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op of one shape.

    Attributes:
        runs: calls of it that a round makes.
        num_bytes: that a call must read and write, each once.
    """

    op: str
    shape: str
    runs: Sequence[Callable[[], object]]
    num_bytes: int
    num_operations: int


def other_ops(contexts: Sequence[int]) -> Iterator[OpCall]:
    """Yield norm, rotary embedding, swiglu, attention over both kinds of KV, and sampling.

    Args:
        contexts: tokens that attention reads, the new ones included; at least a chunk.
    """
    for num_rows in SMALL_ROWS:
        yield _norm(num_rows)
        yield _swiglu(num_rows)
        yield _rope(num_rows)
    for context in contexts:
        for is_int8 in (False, True):
            yield _attention("decode", [1] * DECODE_REQUESTS, context, is_int8)
            yield _attention("mixed", [DRAFTED_ROWS, *[1] * (DECODE_REQUESTS - 1)], context, is_int8)
            yield _attention("prefill", [min(CHUNK, context)], context, is_int8)
    for num_rows in (1, 8):
        yield _sampling(num_rows)


def _bf16(*shape: int) -> np.ndarray:
    return np.full(shape, _BF16_ONE, np.uint16)


def _small(op: str, num_rows: int, call: Any, num_bytes: int, num_operations: int) -> OpCall:
    return OpCall(op, f"T={num_rows}", [call.run] * _SMALL_CALLS, num_bytes, num_operations)


def _norm(num_rows: int) -> OpCall:
    x, residual = _bf16(num_rows, HIDDEN), np.ones((num_rows, HIDDEN), np.float32)
    y, out = np.empty_like(x), np.empty_like(residual)
    weight = np.ones(HIDDEN, np.float32)
    call = RMS_NORM.bind(x=x, residual=residual, weight=weight, eps=1e-6, y=y, residual_out=out)
    return _small("norm", num_rows, call, 2 * (x.nbytes + residual.nbytes), _NORM_OPERATIONS * x.size)


def _swiglu(num_rows: int) -> OpCall:
    gate_up, y = _bf16(num_rows, 2 * INTERMEDIATE), _bf16(num_rows, INTERMEDIATE)
    call = SWIGLU.bind(gate_up=gate_up, y=y)
    return _small("swiglu", num_rows, call, gate_up.nbytes + y.nbytes, _SWIGLU_OPERATIONS * y.size)


def _rope(num_rows: int) -> OpCall:
    num_blocks = -(-num_rows // BLOCK_SIZE)
    shapes = kv_cache_shapes(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, 2)
    qkv = _bf16(num_rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    q = _bf16(num_rows, NUM_HEADS * HEAD_DIM)
    call = ROPE_STORE_KV.bind(
        k=_bf16(*shapes[0]),
        v=_bf16(*shapes[1]),
        k_scale=None,
        v_scale=None,
        qkv=qkv,
        positions=np.arange(num_rows, dtype=np.int32),
        slot_mapping=np.arange(num_rows, dtype=np.int64),
        cos_sin=np.ones((num_rows, HEAD_DIM), np.float32),
        q_norm=np.ones(HEAD_DIM, np.float32),
        k_norm=np.ones(HEAD_DIM, np.float32),
        norm_eps=1e-6,
        interleaved=False,
        q=q,
    )
    rotated = num_rows * (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    return _small("rope", num_rows, call, 2 * qkv.nbytes, (_ROPE_OPERATIONS + _NORM_OPERATIONS) * rotated)


def _attention(kind: str, num_new: Sequence[int], context: int, is_int8: bool) -> OpCall:
    """Requests of equal length that share nothing; from some thousand tokens on no cache holds their KV.

    Args:
        num_new: rows of each.
    """
    blocks_each = -(-context // BLOCK_SIZE)
    num_requests, num_rows = len(num_new), sum(num_new)
    num_blocks = num_requests * blocks_each
    shapes = kv_cache_shapes(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, 1 if is_int8 else 2)
    k, v = (np.ones(shape, np.int8) if is_int8 else _bf16(*shape) for shape in shapes)
    scale_shape = kv_scale_shape(num_blocks, BLOCK_SIZE, NUM_KV_HEADS)
    scales = [np.ones(scale_shape, np.float32) if is_int8 else None for _ in range(2)]
    q, y = _bf16(num_rows, NUM_HEADS * HEAD_DIM), _bf16(num_rows, NUM_HEADS * HEAD_DIM)
    call = CASCADE_APPEND_ATTENTION.bind(
        k=k,
        v=v,
        k_scale=scales[0],
        v_scale=scales[1],
        q=q,
        table_rows=np.arange(num_requests, dtype=np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32).reshape(num_requests, blocks_each),
        query_start_loc=np.array([0, *accumulate(num_new)], np.int32),
        seq_lens=np.full(num_requests, context, np.int32),
        scale=HEAD_DIM**-0.5,
        first_key=0,
        y=y,
    )
    num_kv_bytes = k.nbytes + v.nbytes + sum(scale.nbytes for scale in scales if scale is not None)
    # A row sees the keys up to itself; a product with K and one with V, two operations each.
    num_keys = sum(sum(range(context - count + 1, context + 1)) for count in num_new)
    name = f"attention {kind} {'int8' if is_int8 else 'bf16'}"
    shape = f"{' + '.join(f'{num_new.count(n)} x {n}' for n in dict.fromkeys(num_new))} at {context}"
    num_operations = 4 * num_keys * NUM_HEADS * HEAD_DIM
    return OpCall(name, shape, [call.run] * _LARGE_CALLS, num_kv_bytes + q.nbytes + y.nbytes, num_operations)


def _sampling(num_rows: int) -> OpCall:
    """Draw a token from each row of logits at temperature 1."""
    logits = np.random.default_rng(0).standard_normal((num_rows, VOCAB), np.float32)
    rows = np.arange(num_rows, dtype=np.int32)
    sampling = sampling_columns(num_rows, 1, VOCAB, {})

    def run() -> object:
        return sample(logits, rows, rows, sampling)

    return OpCall("sampling", f"T={num_rows}", [run] * _LARGE_CALLS, logits.nbytes, logits.size)
