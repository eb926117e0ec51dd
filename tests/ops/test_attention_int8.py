"""Attention over an int8 cache: its error is that of the roundings it is defined by, and its rows are independent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.kv_cache import KvCache, Rotary, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.reference.kv_quantize import dequantize_heads, quantize_heads, quantize_heads_float8
from fastdeploy_sd.ops.rope_table import rope_table
from tests.ops.backends import LEVELS, isa, threads
from tests.ops.cases.attention import VERIFY, Geometry, batch, own_blocks
from tests.ops.cases.attention_int8 import CASCADE_APPEND_ATTENTION_INT8, blunt, copied, quantized, store_inputs
from tests.ops.cases.rope import random_norm
from tests.ops.chunks import chunk, run_chunks

pytestmark = pytest.mark.slow

LENGTH = 700
GEOMETRIES = [(2, 1, 32, 16), (5, 1, 48, 64), (16, 1, 16, 32)]
DTYPES = [np.float32, np.uint16]


def zero_cache(num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> KvCache[np.ndarray]:
    k, v = (np.zeros(shape, np.int8) for shape in kv_cache_shapes(num_blocks, block_size, kv_heads, head_dim, 1))
    k_scale, v_scale = np.zeros((2, *kv_scale_shape(num_blocks, block_size, kv_heads)), np.float32)
    return KvCache(k, v, 0, k_scale, v_scale)


def rounded_weights(weights: np.ndarray) -> np.ndarray:
    """Weights [H, K] in units of 1/254 of the largest of each 64; an error goes to the key 16 further on."""
    y = np.zeros_like(weights)
    for begin in range(0, weights.shape[1], 64):
        part = weights[:, begin : begin + 64]
        unit = part.max(axis=1, keepdims=True) / 254
        error = np.zeros((len(part), 16))
        for panel in range(0, part.shape[1], 16):
            keys = slice(begin + panel, begin + min(panel + 16, part.shape[1]))
            wanted = weights[:, keys] / unit + error[:, : keys.stop - keys.start]
            y[:, keys] = np.rint(wanted) * unit
            error[:, : keys.stop - keys.start] = wanted - np.rint(wanted)
    return y


def attend(args: dict[str, Any]) -> np.ndarray:
    """The op with its roundings, in float64: [T, Hq * D]."""
    cache = args["cache"]
    q, q_scale = quantize_heads(widen(args["q"]).reshape(len(args["q"]), -1, cache.head_dim))
    k, v = (
        unpack(x).astype(np.float64) for unpack, x in ((reference.unpack_k, cache.k), (reference.unpack_v, cache.v))
    )
    group = q.shape[1] // cache.num_kv_heads
    y = np.zeros(q.shape)
    for r, length in enumerate(args["seq_lens"]):
        first, stop = args["query_start_loc"][r : r + 2]
        for row in range(first, stop):
            slots = np.arange(length - (stop - row) + 1)
            blocks = own_blocks(args, r)[slots // cache.block_size]
            keys, values, k_scale, v_scale = (
                x[blocks, slots % cache.block_size].repeat(group, axis=1)
                for x in (k, v, cache.k_scale.transpose(0, 2, 1), cache.v_scale.transpose(0, 2, 1))
            )
            scores = np.einsum("hd,khd->hk", q[row], keys) * k_scale.T * q_scale[row][:, None] * args["scale"]
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            units = rounded_weights(weights * v_scale.T)
            y[row] = np.einsum("hk,khd->hd", units, values) / weights.sum(axis=1, keepdims=True)
    return y.reshape(args["q"].shape)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("geometry", [(4, 2, 128, 64), (5, 1, 48, 16)], ids=str)
def test_the_error_is_that_of_the_roundings(level: str, geometry: Geometry) -> None:
    args = quantized(batch([*VERIFY, (699, 1)], *geometry, np.float32))
    with isa(level):
        y = ops.cascade_append_attention(**args)
    error = np.abs(y - attend(args))
    # Rarely a product lies so near a tie that float32 rounds it to the other side: one unit of a weight.
    assert error.max() < 2e-2
    assert error.mean() < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_against_exact_attention_is_about_a_percent(dtype: Any) -> None:
    """Random normal data; the cache's own rounding and that of the arithmetic together."""
    args = batch([(1500, 8)], 4, 2, 128, 64, dtype)
    args["q"][::3] = args["q"][1:2]
    want = widen(reference.cascade_append_attention(**args))
    y = widen(ops.cascade_append_attention(**quantized(args)))
    assert np.sqrt(np.mean((y - want) ** 2)) < 0.016 * np.sqrt(np.mean(want**2))


@pytest.mark.skipif("amx" not in LEVELS, reason="expected a processor with AVX-512, on which level amx can be tested")
def test_tiles_give_the_bits_of_vectors() -> None:
    """Level amx computes the same integers as avx512, and the same float32 arithmetic on them."""
    for name, args in CASCADE_APPEND_ATTENTION_INT8.inputs.items():
        with isa("avx512"):
            want = ops.cascade_append_attention(**args)
        with isa("amx"):
            np.testing.assert_array_equal(ops.cascade_append_attention(**args), want, err_msg=name)


@pytest.mark.parametrize("level", LEVELS)
def test_many_small_weights_keep_their_share(level: str) -> None:
    """One key of weight 1 and 639 of 0.0019, under half a unit: rounded to nearest, those would vanish."""
    args = quantized(batch([(639, 1)], 1, 1, 16, 64, np.float32))
    cache = args["cache"]
    cache.k[...], cache.k_scale[...], cache.v[...], cache.v_scale[...] = 0, 1.0, 127, 1.0 / 127
    cache.k[own_blocks(args, 0)[0], 0, 0, 0, 0] = 127
    args["q"][0] = 0.0
    args["q"][0, 0] = np.log(1 / 0.0019) / (127 * args["scale"])
    with isa(level):
        np.testing.assert_allclose(ops.cascade_append_attention(**args), 1.0, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_stored_heads_are_half_a_step_from_their_values(level: str, dtype: Any) -> None:
    tokens, heads, kv_heads, head_dim, block_size = 40, 4, 2, 80, 16
    rng = np.random.default_rng(1)
    qkv = narrow(rng.standard_normal((tokens, (heads + 2 * kv_heads) * head_dim), np.float32), dtype)
    inputs: dict[str, Any] = {
        "qkv": qkv,
        "positions": rng.integers(0, 3000, tokens, np.int32),
        "slot_mapping": rng.permutation(4 * block_size)[:tokens].astype(np.int64),
        "rotary": Rotary(rope_table(3000, 64, 10000.0)),
        "qk_norm": random_norm(rng, head_dim),
    }
    k, v = (np.zeros(shape, np.float32) for shape in kv_cache_shapes(4, block_size, kv_heads, head_dim, 4))
    exact: KvCache[np.ndarray] = KvCache(k, v)
    reference.rope_store_kv_(cache=exact, **{**inputs, "qkv": widen(qkv)})
    cache = zero_cache(4, block_size, kv_heads, head_dim)
    with isa(level):
        ops.rope_store_kv_(cache=cache, **inputs)
    for unpack, integers, scale, want in (
        (reference.unpack_k, cache.k, cache.k_scale, exact.k),
        (reference.unpack_v, cache.v, cache.v_scale, exact.v),
    ):
        assert integers is not None
        assert scale is not None
        assert want is not None
        steps, values = scale.transpose(0, 2, 1), np.asarray(unpack(want), np.float32)
        error = np.abs(dequantize_heads(unpack(integers), steps) - values)
        assert (error <= 0.501 * steps[..., None]).all()
        largest = np.abs(values).max(axis=-1)
        np.testing.assert_allclose(127 * steps, largest, rtol=1e-5)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_rows_do_not_depend_on_chunks_or_threads(level: str, dtype: Any, geometry: Geometry) -> None:
    sequence = quantized(batch([(0, LENGTH)], *geometry, dtype))
    rng = np.random.default_rng(1)
    with isa(level):
        with threads(2):
            whole = run_chunks(sequence, [0, LENGTH])
        for count in (1, 3):
            with threads(count):
                cuts = np.sort(rng.choice(np.arange(1, LENGTH), 12, replace=False))
                np.testing.assert_array_equal(run_chunks(sequence, [0, *cuts.tolist(), LENGTH]), whole)
                for row in (0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 511, 512, LENGTH - 1):
                    alone = ops.cascade_append_attention(**chunk(sequence, row, row + 1))
                    np.testing.assert_array_equal(alone[0], whole[row], err_msg=f"row {row}, {count} threads")


@pytest.mark.parametrize("first_key", [1, 17, 63])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_behind_hidden_keys_do_not_depend_on_chunks(level: str, first_key: int) -> None:
    sequence = quantized(batch([(0, 140)], 5, 1, 48, 16, np.uint16))
    sequence["cache"] = replace(sequence["cache"], first_key=first_key)
    rng = np.random.default_rng(first_key)
    with isa(level), threads(2):
        alone = run_chunks(sequence, range(141))
        for count in (0, 1, 9, 40):
            cuts = np.sort(rng.choice(np.arange(1, 140), count, replace=False))
            np.testing.assert_array_equal(run_chunks(sequence, [0, *cuts.tolist(), 140]), alone)


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_head_that_was_not_finite_makes_nan_of_the_rows_that_see_it_only(level: str, which: str) -> None:
    """Integers have no NaN, so it must get around them."""
    bad, block_size = 600, 16
    sequence = quantized(batch([(0, 620)], 4, 2, 32, block_size, np.float32))
    verify = chunk(sequence, 590, 620)
    poisoned = copied(sequence["cache"])
    getattr(poisoned, which)[own_blocks(sequence, 0)[bad // block_size], :, bad % block_size] = np.nan
    with isa(level):
        good = ops.cascade_append_attention(**verify)
        y = ops.cascade_append_attention(**{**verify, "cache": poisoned})
    np.testing.assert_array_equal(y[:10], good[:10])
    assert np.isnan(y[10:]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_query_that_is_not_finite_gives_nan_to_its_head_only(level: str) -> None:
    args = quantized(batch([(100, 2)], 4, 2, 32, 16, np.float32))
    bad = {**args, "q": args["q"].copy()}
    bad["q"][0, 40] = np.inf
    with isa(level):
        good, y = (ops.cascade_append_attention(**x) for x in (args, bad))
    assert np.isnan(y[0, 32:64]).all()
    good[0, 32:64] = y[0, 32:64]
    np.testing.assert_array_equal(y, good)


@pytest.mark.parametrize("level", LEVELS)
def test_scales_of_every_size_are_fine(level: str) -> None:
    """Values around 1e-29, 1e-18 and 1e29 and zeros in one block, and rows that see only the small ones."""
    args = quantized(blunt(batch([(0, 64)], 1, 1, 16, 64, np.float32)))
    scales = args["cache"].v_scale
    table = own_blocks(args, 0)[0]
    scales[table, 0, :64] = np.tile(np.array([1e-31, 0.0, 1e-20, 1e27], np.float32), 16)
    args["cache"].v[table, 0, :, :, 1] = 0
    want = reference.cascade_append_attention(**args)
    with isa(level):
        y = ops.cascade_append_attention(**args)
    assert np.isfinite(y).all()
    largest = np.abs(want).max(axis=1)
    assert (np.abs(y - want).max(axis=1) <= 0.05 * largest).all()
    assert (largest[:2] < 1e-28).all()


@pytest.mark.parametrize("slots", ["anywhere", "in order"])
@pytest.mark.parametrize("level", LEVELS)
def test_stored_rows_do_not_depend_on_the_batch(level: str, slots: str) -> None:
    rng = np.random.default_rng(0)
    tokens = 33
    qkv = rng.standard_normal((tokens, 7 * 48), np.float32)
    rotary = Rotary(rope_table(3000, 48, 10000.0))
    columns: dict[str, Any] = {
        "qkv": qkv,
        "positions": rng.integers(0, 3000, tokens, np.int32),
        "slot_mapping": np.arange(3, 3 + tokens) if slots == "in order" else rng.permutation(64)[:tokens],
    }
    together, one_by_one = (zero_cache(4, 16, 2, 48) for _ in range(2))
    with isa(level), threads(3):
        ops.rope_store_kv_(cache=together, rotary=rotary, **columns)
        for t in range(tokens):
            ops.rope_store_kv_(cache=one_by_one, rotary=rotary, **{n: x[t : t + 1] for n, x in columns.items()})
    for name in ("k", "v", "k_scale", "v_scale"):
        np.testing.assert_array_equal(getattr(one_by_one, name), getattr(together, name), err_msg=name)


def test_integers_without_scales_and_scales_without_integers_are_errors() -> None:
    args = quantized(batch([(5, 1)], 2, 1, 16, 16, np.float32))
    cache = args["cache"]
    text = "k_scale, v_scale: expected both for int8 and float8 and neither else"
    floats = batch([(5, 1)], 2, 1, 16, 16, np.float32)["cache"]
    for wrong in (replace(cache, v_scale=None), replace(floats, k_scale=cache.k_scale, v_scale=cache.v_scale)):
        with pytest.raises(ValueError, match=text):
            ops.cascade_append_attention(**{**args, "cache": wrong})
    short = replace(cache, v_scale=cache.v_scale[:, :, :8].copy())
    with pytest.raises(ValueError, match="cascade_append_attention: v_scale: expected shape"):
        ops.cascade_append_attention(**{**args, "cache": short})


def test_float8_is_for_gpus() -> None:
    args = quantized(batch([(5, 1)], 2, 1, 16, 16, np.float32), quantize=quantize_heads_float8)
    stored = next(iter(store_inputs(np.uint8).values()))
    text = "kv_dtype: expected a type that CPUs have a kernel for"
    with pytest.raises(ValueError, match=text):
        ops.cascade_append_attention(**args)
    with pytest.raises(ValueError, match=text):
        ops.rope_store_kv_(**stored)
