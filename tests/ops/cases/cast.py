"""Cases of cast."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import rowwise as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.reference import rowwise as reference
from tests.ops.cases.case import OpCases


def inputs() -> dict[str, dict[str, Any]]:
    """Every pair of dtypes; no rows, one column, ragged widths, many rows; ties, infinities and tiny numbers."""
    rng = np.random.default_rng(0)
    found = {}
    for rows, columns in [(0, 8), (1, 1), (3, 17), (40, 256), (5, 1000)]:
        x = rng.standard_normal((rows, columns), np.float32)
        x.reshape(-1)[:6] = np.array([1.00390625, 1.01171875, np.inf, -np.inf, 1e-40, 3.4e38], np.float32)[: x.size]
        for name, array in (("float32", x), ("bfloat16", to_bf16(x))):
            for other in (np.float32, np.uint16):
                found[f"{name}-{np.dtype(other)}-{rows}x{columns}"] = {"x": array, "dtype": other}
    return found


CAST = OpCases("cast", ops.cast, reference.cast, inputs(), ops.CAST, rtol=0, atol=0, bf16_ulps=0)
