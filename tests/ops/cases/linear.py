"""Cases of linear (and, through it, of pack_linear)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.ops import linear as ops
from fastdeploy_sd.ops import packing
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.reference import linear as reference
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.ops.cases.case import OpCases

# (M, K, N): empty, single, odd and not a multiple of a step, group or panel; one tile and several; several row
# blocks; rows that threads pack in parts, with ends that fit neither a group nor four pairs.
SHAPES = [(0, 8, 8), (1, 1, 1), (3, 0, 5), (2, 5, 0), (1, 256, 32), (2, 129, 33), (5, 127, 31), (13, 260, 96)]
# With the unit of their slices: none, fewer units than slices, groups that begin anew, the same groups as without.
SLICED_SHAPES = [((2, 0, 5), 1), ((3, 3, 33), 1), ((5, 129, 31), 1), ((14, 300, 96), 7), ((3, 640, 32), 128)]
LARGE_SHAPES = [(8, 1024, 100), (300, 384, 70), (9, 6605, 40)]


def inputs(formats: Sequence[LinearFormat] = LINEAR_FORMATS) -> dict[str, dict[str, Any]]:
    """Shapes and formats in float32 with a bias; bf16 in, out and weights; zero, huge, tiny and non-finite rows."""
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, shape: tuple[int, int, int], fmt: str, **changes: Any) -> dict[str, Any]:
        m, k, n = shape
        x = rng.standard_normal((m, k), np.float32)
        weight = (rng.standard_normal((n, k)) / np.sqrt(max(k, 1))).astype(np.float32)
        found[f"{fmt}-{m}x{k}x{n}-{name}"] = {
            "x": x,
            "weight": weight,
            "fmt": fmt,
            "bias": rng.standard_normal(n).astype(np.float32),
            "out_dtype": None,
            "slices": WHOLE,
        } | changes
        return found[f"{fmt}-{m}x{k}x{n}-{name}"]

    for fmt in formats:
        for shape in SHAPES + LARGE_SHAPES:
            add("bias", shape, fmt)
        add("no-bias", (4, 130, 40), fmt, bias=None)
        add("bf16-out", (4, 130, 40), fmt, out_dtype=np.uint16)
        bits = add("bf16", (7, 257, 65), fmt)
        bits["x"], bits["weight"] = to_bf16(bits["x"]), to_bf16(bits["weight"])
        widened = add("bf16-to-float32", (7, 256, 65), fmt, out_dtype=np.float32)
        widened["x"] = to_bf16(widened["x"])
        for count in (2, 4):
            for shape, unit in SLICED_SHAPES:
                add(f"{count}x{unit}", shape, fmt, slices=SliceRule(count, unit))
        corner = add("corner", (6, 300, 40), fmt)
        corner["x"][0] = 0.0
        corner["x"][1, :128] = 1e-32
        corner["x"][2, 5] = np.inf
        corner["x"][3, 290] = np.nan
        corner["x"][4] *= 10
        corner["weight"][3] = 0.0
        corner["weight"][3, 1] = 1e-32
        corner["weight"][4, :128] *= 1e-20
    return found


def packed_and_multiplied(x: Any, weight: np.ndarray, fmt: Any, bias: Any, out_dtype: Any, slices: SliceRule) -> Any:
    return ops.linear(x, packing.pack_linear(weight, fmt, slices), bias, out_dtype)


# Outputs are of order 1 and a sum of K float32 terms is off by about 1e-7 sqrt(K); row 4 of "corner" is of order 10.
LINEAR = OpCases(
    "linear",
    packed_and_multiplied,
    reference.linear,
    inputs(),
    ops.LINEAR,
    on_host={"weight"},
    rtol=1e-5,
    atol=1e-5,
)
