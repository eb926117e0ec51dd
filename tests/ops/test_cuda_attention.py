"""Attention as GPUs alone have it: split keys, padding, trees, float8; emulated, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.kv_cache import KvCache, Rotary, kv_cache_shapes
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.reference.kv_quantize import FLOAT8_VALUES, quantize_heads_float8
from fastdeploy_sd.ops.rope_table import rope_table
from tests.ops.cases.attention import batch, own_blocks, select
from tests.ops.cases.attention_int8 import blunt, quantized, store_inputs
from tests.ops.cases.trees import as_chain, path_of, random_tree
from tests.ops.cuda_device import OpRunner, emulated
from tests.ops.test_ops import OPS

pytestmark = pytest.mark.slow

# Type of activations and of the cache.
CACHES = ["bf16", "float32", "float16", "int8", "float8", "int8 beside float16"]


def over(cache: str, args: dict[str, Any]) -> dict[str, Any]:
    """The call, whose activations are bfloat16 unless it says otherwise, over a cache of this type."""
    cache = cache.split(maxsplit=1)[0]
    if cache == "int8":
        return quantized(args, args["cache"].first_key)
    return quantized(args, args["cache"].first_key, quantize_heads_float8) if cache == "float8" else args


def dtype_of(cache: str) -> Any:
    return {"float32": np.float32, "float16": np.float16}.get(cache.rsplit(maxsplit=1)[-1], np.uint16)


def arrays_of(cache: KvCache[np.ndarray]) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}


@pytest.mark.parametrize("cache", ["bf16", "float8"])
def test_attention_has_the_same_bits_however_partitions_are_computed(device: OpRunner, cache: str) -> None:
    """By blocks of their own, or by one for a row where there are enough rows to fill a GPU."""
    few = over(cache, batch([(300, 1), (512, 2), (600, 1), (40, 1)], 2, 1, 16, 16, dtype_of(cache)))
    many = select(few, [0, 1, 2] + [3] * 510)
    with device.runs_ops():
        want, got = (OPS["cascade_append_attention"].function(**args) for args in (few, many))
    np.testing.assert_array_equal(got, np.concatenate([want, np.tile(want[-1:], (509, 1))]))


def test_rows_and_requests_that_fill_up_a_bucket_change_nothing(device: OpRunner) -> None:
    """Graphs have few sizes: after the step's requests come some without rows, after its rows some of no request."""
    args = batch([(300, 1), (14, 9), (511, 3)], 4, 2, 32, 16, np.uint16)
    starts, blocks = args["query_start_loc"], args["blocks"]
    filled = {
        **args,
        "q": np.concatenate([args["q"], np.full((5, args["q"].shape[1]), 0x7FC0, np.uint16)]),
        "query_start_loc": np.concatenate([starts, np.repeat(starts[-1:], 4)]),
        "seq_lens": np.concatenate([args["seq_lens"], np.array([0, 77, 100_000, -1], np.int32)]),
        "blocks": blocks._replace(table_rows=np.concatenate([blocks.table_rows, np.full(4, -1, np.int32)])),
    }
    stored = dict(OPS["rope_store_kv"].inputs["uint16-41x6:3x80-80-True-True-False"])
    padded = {**stored, "slot_mapping": np.concatenate([stored["slot_mapping"][:30], np.full(11, -1)])}
    first = {name: stored[name][:30] for name in ("qkv", "positions", "slot_mapping")}
    with device.runs_ops():
        want, got = (OPS["cascade_append_attention"].function(**case) for case in (args, filled))
        small, large = (OPS["rope_store_kv"].run(case) for case in ({**stored, **first}, padded))
    np.testing.assert_array_equal(got[: starts[-1]], want)
    np.testing.assert_array_equal(large[0][:30], small[0])
    for cached, name in ((2, "k"), (3, "v")):
        np.testing.assert_array_equal(large[cached], small[cached], err_msg=name)


@pytest.mark.parametrize(
    "requests", [[(0, 1), (62, 1), (511, 2), (300, 5), (1100, 1)], [(0, 33), (40, 9), (3, 1)]], ids=str
)
@pytest.mark.parametrize("geometry", [(8, 2, 128, 16), (3, 1, 48, 32), (2, 1, 256, 16)], ids=str)
def test_attention_over_float8_is_that_of_its_values(
    device: OpRunner, geometry: tuple[int, int, int, int], requests: list[tuple[int, int]]
) -> None:
    args = over("float8", blunt(batch(requests, *geometry, np.uint16)))
    with device.runs_ops():
        y = widen(ops.cascade_append_attention(**args))
    # bfloat16 rounds queries, weights, values and results: each by up to 2^-9 of values of size up to 4.
    np.testing.assert_allclose(y, widen(reference.cascade_append_attention(**args)), rtol=0, atol=0.02)


def test_float8_keys_and_values_are_read_exactly(device: OpRunner) -> None:
    """A row that sees one key has its values; of 256 keys, each with one of the patterns, it picks the one asked."""
    args = over("float8", batch([(0, 1)], 1, 1, 256, 16, np.uint16))
    cache, patterns = args["cache"], np.arange(256, dtype=np.uint8)
    patterns = np.where(patterns & 127 == 127, 0, patterns)
    cache.k_scale[...], cache.v_scale[...] = 1.0, 1.0
    cache.v[own_blocks(args, 0)[0], 0, 0, :, 0] = patterns
    with device.runs_ops():
        y = widen(ops.cascade_append_attention(**args))
    np.testing.assert_array_equal(y[0], FLOAT8_VALUES[patterns])

    # Keys are of one element, values tell which key it was, and the query prefers the largest element or the smallest.
    args = over("float8", batch([(255, 1)], 1, 1, 16, 16, np.uint16))
    cache, blocks = args["cache"], own_blocks(args, 0)[:16]
    cache.k[...], cache.v[...], cache.k_scale[...], cache.v_scale[...] = 0, 0, 1.0, 1.0
    cache.k[blocks, 0, 0, :, 0] = patterns.reshape(16, 16)
    for sign, wanted in ((1.0, 126), (-1.0, 254)):
        cache.v[blocks, 0, :, 0, :] = np.where(patterns == wanted, 0x38, 0).astype(np.uint8).reshape(16, 4, 4)
        args["q"][...] = 0
        args["q"][0, 0] = narrow(np.array([sign], np.float32), np.uint16)[0]
        with device.runs_ops():
            assert widen(ops.cascade_append_attention(**args))[0, 0] == 1.0


def test_float8_is_stored_rounded_to_the_nearest(device: OpRunner) -> None:
    """Random heads, and every value, every tie and its neighbours."""
    for kwargs in store_inputs(np.uint8).values():
        with device.runs_ops():
            got = OPS["rope_store_kv"].run(kwargs)
        want = OPS["rope_store_kv"].run_reference(kwargs)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other) if one.dtype == np.uint8 else np.testing.assert_allclose(
                widen(one) if one.dtype == np.uint16 else one,
                widen(other) if one.dtype == np.uint16 else other,
                rtol=1e-6,
            )
    values = FLOAT8_VALUES[:127]
    ties = (values[1:] + values[:-1]) / 2
    edges = np.concatenate([values, ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(448))]).astype(
        np.float32
    )
    heads = np.zeros((3, 1, 256), np.float32)
    heads.reshape(-1)[: len(edges)] = edges
    heads[:, 0, 255] = 448.0
    heads[:, 0, ::2] *= -1
    qkv = np.concatenate([heads, heads, heads], axis=1).reshape(3, 768)
    case = {**store_inputs(np.uint8)["float32-33x4:4x256"], "qkv": qkv, "slot_mapping": np.arange(3)}
    k, v = (np.zeros(shape, np.uint8) for shape in kv_cache_shapes(1, 16, 1, 256, 1))
    k_scale, v_scale = np.zeros((2, 1, 1, 16), np.float32)
    cache: KvCache[np.ndarray] = KvCache(k, v, 0, k_scale, v_scale)
    case |= {"cache": cache, "positions": np.zeros(3, np.int32), "rotary": Rotary(rope_table(8, 128, 10000.0))}
    with device.runs_ops():
        ops.rope_store_kv_(**case)
    wanted, scales = quantize_heads_float8(heads)
    assert (scales == 1.0).all()
    for stored in (reference.unpack_k(k), reference.unpack_v(v)):
        # Turning by nothing may take the sign of a zero.
        np.testing.assert_array_equal(FLOAT8_VALUES[stored[0, :3]], FLOAT8_VALUES[wanted])


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("cache", CACHES)
def test_an_emulated_chip_has_one_sort_of_product(cache: str, architecture: int) -> None:
    """Hopper's tiles of 64 or 128 rows and others' of 16: a row has its bits in each, over a border of partitions."""
    args = over(cache, batch([(210, 80), (500, 1)], 4, 2, 64, 16, dtype_of(cache)))
    few = {**args, "q": args["q"][[79, 80]], "query_start_loc": np.array([0, 1, 2], np.int32)}
    with emulated().emulates(architecture), emulated().runs_ops():
        together, alone = (ops.cascade_append_attention(**way) for way in (args, few))
        tables = args["blocks"].block_tables
        more = np.full((len(tables), (1 << 18) - tables.shape[1]), -1, np.int32)
        merged = ops.cascade_append_attention(
            **{**args, "blocks": args["blocks"]._replace(block_tables=np.concatenate([tables, more], axis=1))}
        )
    np.testing.assert_array_equal(together[[79, 80]], alone)
    np.testing.assert_array_equal(merged, together, err_msg="a block goes through all partitions")
    want = widen(reference.cascade_append_attention(**args))
    np.testing.assert_allclose(widen(together), want, rtol=0, atol=0.03)


@pytest.mark.parametrize("first_key", [0, 5])
@pytest.mark.parametrize("cache", CACHES)
def test_a_row_of_a_tree_has_the_bits_of_its_path(device: OpRunner, cache: str, first_key: int) -> None:
    """In float32, where nothing is rounded, it is also checked against the definition."""
    rng = np.random.default_rng(first_key)
    args = over(cache, batch([(300, 12), (250, 9), (0, 20), (63, 2), (30, 1), (0, 70)], 4, 2, 32, 16, dtype_of(cache)))
    args["cache"] = replace(args["cache"], first_key=first_key)
    starts = args["query_start_loc"]
    masks = np.concatenate([random_tree(rng, count) for count in np.diff(starts)])
    with device.runs_ops():
        y = ops.cascade_append_attention(**args, tree_mask=masks)
        for r in range(5):
            count = int(starts[r + 1] - starts[r])
            for row in {count - 1, *rng.integers(0, count, 3).tolist()}:
                path = path_of(int(masks[starts[r] + row]), row)
                chain = ops.cascade_append_attention(**as_chain(args, r, path))
                np.testing.assert_array_equal(y[starts[r] + row], chain[-1], err_msg=f"request {r}, row {row}")
        # Too many rows for a tree.
        np.testing.assert_array_equal(y[starts[5] :], ops.cascade_append_attention(**select(args, [5])))
    if cache == "float32":
        want = reference.cascade_append_attention(**args, tree_mask=masks)
        np.testing.assert_allclose(widen(y), widen(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cache", CACHES)
def test_a_chain_has_the_bits_of_no_tree(device: OpRunner, cache: str) -> None:
    args = over(cache, batch([(300, 12), (0, 20), (63, 2)], 4, 2, 32, 16, dtype_of(cache)))
    masks = np.concatenate([(1 << np.arange(count, dtype=np.int64)) - 1 for count in np.diff(args["query_start_loc"])])
    with device.runs_ops():
        want, got = (ops.cascade_append_attention(**args, tree_mask=mask) for mask in (None, masks))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("cache", CACHES)
def test_rows_never_touch_later_keys(device: OpRunner, cache: str) -> None:
    """Not even where they are infinite or NaN and stand in the same tile."""
    first_bad = 580
    args = over(cache, batch([(570, 16)], 4, 2, 32, 16, dtype_of(cache)))
    poisoned: dict[str, Any] = {name: None if x is None else x.copy() for name, x in arrays_of(args["cache"]).items()}
    for position in range(first_bad, 586):
        block, offset = own_blocks(args, 0)[position // 16], position % 16
        bad = np.array([np.inf if position % 2 else np.nan], np.float32)
        if poisoned["v_scale"] is not None:
            poisoned["k_scale"][block, :, offset] = poisoned["v_scale"][block, :, offset] = bad
        else:
            s = poisoned["v"].shape[4]
            poisoned["k"][block, :, :, offset] = poisoned["v"][block, :, offset // s, :, offset % s] = narrow(
                bad, dtype_of(cache)
            )
    with device.runs_ops():
        good = ops.cascade_append_attention(**args)
        y = ops.cascade_append_attention(**{**args, "cache": replace(args["cache"], **poisoned)})
    np.testing.assert_array_equal(y[: first_bad - 570], good[: first_bad - 570])
    assert not np.isfinite(widen(y[first_bad - 570 :])).any()
