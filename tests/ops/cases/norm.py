"""Cases of rms_norm, concat_rms_norm and concat_columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import rowwise as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.reference import rowwise as reference
from tests.ops.cases.case import OpCases


def inputs() -> dict[str, dict[str, Any]]:
    """One row, ragged widths (not a multiple of 16 lanes), many rows; zero and huge rows; with and without residual."""
    rng = np.random.default_rng(0)
    found = {}
    for rows, hidden in [(0, 16), (1, 1), (1, 16), (3, 17), (7, 130), (33, 256), (5, 1024)]:
        for dtype in ("float32", "bfloat16"):
            for residual in (False, True):
                x = rng.standard_normal((rows, hidden), np.float32)
                if rows > 2:
                    x[1] = 0.0
                    x[2] *= 1e4
                found[f"{dtype}-{rows}x{hidden}-{'residual' if residual else 'plain'}"] = {
                    "x": to_bf16(x) if dtype == "bfloat16" else x,
                    "weight": rng.standard_normal(hidden).astype(np.float32),
                    "eps": 1e-5,
                    "residual": rng.standard_normal((rows, hidden)).astype(np.float32) if residual else None,
                }
    return found


RMS_NORM = OpCases("rms_norm", ops.rms_norm, reference.rms_norm, inputs(), ops.RMS_NORM)


def pairs() -> dict[str, dict[str, Any]]:
    """Two matrices of every size and dtype of the plain cases, the second with rows of another scale."""
    rng = np.random.default_rng(1)
    found = {}
    for name, case in inputs().items():
        if case["residual"] is None:
            second = (100 * rng.standard_normal(case["x"].shape)).astype(np.float32)
            found[name] = {
                "first": case["x"],
                "second": to_bf16(second) if case["x"].dtype == np.uint16 else second,
                "first_weight": case["weight"],
                "second_weight": rng.standard_normal(len(case["weight"])).astype(np.float32),
                "eps": 1e-5,
            }
    return found


CONCAT_RMS_NORM = OpCases(
    "concat_rms_norm", ops.concat_rms_norm, reference.concat_rms_norm, pairs(), ops.CONCAT_RMS_NORM
)


def columns() -> dict[str, dict[str, Any]]:
    """Widths whose rows are and are not aligned; no row, and no column of the first or the second."""
    rng = np.random.default_rng(2)
    return {
        f"{dtype.__name__}-{rows}x{first}+{second}": {
            "first": rng.integers(0, 100, (rows, first)).astype(dtype),
            "second": rng.integers(0, 100, (rows, second)).astype(dtype),
        }
        for dtype in (np.float32, np.uint16)
        for rows, first, second in [
            (0, 4, 4),
            (1, 1, 2),
            (3, 8, 17),
            (5, 16, 8),
            (7, 0, 3),
            (2, 130, 0),
            (33, 256, 512),
        ]
    }


CONCAT_COLUMNS = OpCases(
    "concat_columns", ops.concat_columns, reference.concat_columns, columns(), ops.CONCAT_COLUMNS, rtol=0.0, atol=0.0,
    bf16_ulps=0.0,
)  # fmt: skip
