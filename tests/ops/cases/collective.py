"""Cases of all_reduce and all_gather for one rank alone; several ranks are in tests/ops/test_collectives.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import collective as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.reference import collective as reference
from tests.ops.cases.case import OpCases

SHAPES = [(0, 16), (1, 1), (3, 17), (5, 0), (7, 130), (33, 1024)]


def sums() -> dict[str, dict[str, Any]]:
    """Widths that are no multiple of 16 lanes, several pieces for threads; with and without what is added."""
    rng = np.random.default_rng(0)
    found = {}
    for rows, columns in SHAPES:
        for dtype in (np.float32, np.uint16):
            for extras in ("plain", "bias", "shared"):
                shared = rng.standard_normal((rows, columns), np.float32)
                found[f"{np.dtype(dtype).name}-{rows}x{columns}-{extras}"] = {
                    "x": rng.standard_normal((rows, columns), np.float32),
                    "out_dtype": dtype,
                    "bias": rng.standard_normal(columns).astype(np.float32) if extras == "bias" else None,
                    "shared": None if extras != "shared" else to_bf16(shared) if dtype == np.uint16 else shared,
                }
    return found


def all_reduce_alone(x: Any, out_dtype: Any, bias: Any, shared: Any) -> Any:
    return ops.all_reduce(x, None, out_dtype, bias, shared)


def sum_of_one(x: Any, out_dtype: Any, bias: Any, shared: Any) -> Any:
    return reference.all_reduce([x], out_dtype, bias, shared)


ALL_REDUCE = OpCases("all_reduce", all_reduce_alone, sum_of_one, sums(), ops.ALL_REDUCE, rtol=0, atol=0, bf16_ulps=0)


def columns() -> dict[str, dict[str, Any]]:
    """Every shape in both types."""
    rng = np.random.default_rng(1)
    found: dict[str, dict[str, Any]] = {}
    for rows, width in SHAPES:
        x = rng.standard_normal((rows, width), np.float32)
        found |= {f"float32-{rows}x{width}": {"x": x}, f"bfloat16-{rows}x{width}": {"x": to_bf16(x)}}
    return found


def all_gather_alone(x: Any) -> Any:
    return ops.all_gather(x, None, x.shape[1], 64)


def columns_of_one(x: Any) -> Any:
    return reference.all_gather([x])


ALL_GATHER = OpCases(
    "all_gather", all_gather_alone, columns_of_one, columns(), ops.ALL_GATHER, rtol=0, atol=0, bf16_ulps=0
)
