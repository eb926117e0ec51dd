"""Cases of linear (and, through it, of pack_linear), gather_columns and gather_weight_rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np

from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.storages.gguf import BlockPart
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops import linear as ops
from fastdeploy_sd.ops import packing
from fastdeploy_sd.ops.bf16 import narrow, storage, to_bf16
from fastdeploy_sd.ops.group_packing import group_format, pack_groups, stored_matrix
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.reference import linear as reference
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import I32, U8
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.models.gguf_files import random_blocks
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


def gathers() -> dict[str, dict[str, Any]]:
    """Types with scales of every kind, rows again and in any order, none; panels that end early."""
    rng = np.random.default_rng(3)
    return {
        f"{kind}-{dtype}": {
            "blocks": random_blocks(rng, kind, 70, 512),
            "kind": kind,
            "indices": rng.integers(0, 70, count).astype(np.int32),
            "dtype": dtype,
        }
        for kind in ("Q4_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")
        for dtype, count in (("float32", 9), ("bfloat16", 0), ("bfloat16", 33))
    }


def packed_and_gathered(blocks: U8, kind: str, indices: Any, dtype: str) -> Any:
    num_columns = blocks.shape[1] // BLOCK_TYPES[kind].num_bytes * BLOCK_TYPES[kind].size
    matrix = WeightMatrix((BlockPart("w", blocks, BLOCK_TYPES[kind], 0, num_columns),))
    fmt = group_format([matrix], WHOLE)
    assert fmt is not None
    data = WeightMemory().take(packing.packed_bytes(num_columns, len(blocks), fmt))
    stored = stored_matrix(matrix, fmt, WHOLE)
    assert stored is not None
    pack_groups(stored, data)
    return ops.gather_weight_rows(packing.PackedLinear(data, num_columns, len(blocks), fmt), indices, dtype)


def rows_of_blocks(blocks: U8, kind: str, indices: I32, dtype: Any) -> Any:
    return narrow(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])[indices], storage(dtype))


GATHER_WEIGHT_ROWS = OpCases(
    "gather_weight_rows",
    packed_and_gathered,
    rows_of_blocks,
    gathers(),
    ops.GATHER_WEIGHT_ROWS,
    on_host={"blocks"},
    rtol=0.0,
    atol=0.0,
    bf16_ulps=0.0,
)


def column_gathers() -> dict[str, dict[str, Any]]:
    """Columns again and in any order, none, and rows of none."""
    rng = np.random.default_rng(4)
    found: dict[str, dict[str, Any]] = {}
    for rows, width, count in ((0, 8, 8), (1, 1, 3), (3, 0, 5), (2, 5, 0), (5, 300, 420)):
        x = rng.standard_normal((rows, width)).astype(np.float32)
        columns = rng.integers(-1, width, count).astype(np.int32)
        found[f"{rows}x{width}-{count}"] = {"x": x, "columns": columns}
        found[f"{rows}x{width}-{count}-bf16"] = {"x": to_bf16(x), "columns": columns}
    return found


GATHER_COLUMNS = OpCases(
    "gather_columns",
    ops.gather_columns,
    reference.gather_columns,
    column_gathers(),
    ops.GATHER_COLUMNS,
    rtol=0.0,
    atol=0.0,
    bf16_ulps=0.0,
)
