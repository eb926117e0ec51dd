"""Cases of swiglu, geglu, add_silu, bias_gelu, sigmoid_gate and softcap."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import rowwise as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.reference import rowwise as reference
from tests.ops.cases.case import OpCases

SHAPES = [(0, 16), (1, 1), (1, 16), (3, 17), (7, 130), (33, 256), (2, 3072)]


def inputs() -> dict[str, dict[str, Any]]:
    """No row, one row, ragged widths (not a multiple of 16 lanes), many rows; gates where e^-x over- and underflows."""
    rng = np.random.default_rng(0)
    found = {}
    for rows, width in SHAPES:
        for dtype in ("float32", "bfloat16"):
            x = rng.standard_normal((rows, 2 * width), np.float32) * 3.0
            if rows > 2:
                x[0, :width] = np.linspace(-200.0, 200.0, width)
                x[1, :width] = 0.0
            found[f"{dtype}-{rows}x{width}"] = {"gate_up": to_bf16(x) if dtype == "bfloat16" else x}
    return found


def added(names: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """The halves of the same as two matrices, or as one and a bias."""
    found = {}
    for case, values in inputs().items():
        first, second = np.split(values["gate_up"], 2, axis=1)
        if names[1] == "bias":
            second = np.linspace(-3.0, 3.0, first.shape[1], dtype=np.float32)
        found[case] = dict(zip(names, (first.copy(), second.copy()), strict=True))
    return found


def gates() -> dict[str, dict[str, Any]]:
    """The halves of the same as values and gates, all of these and fewer: one for several columns, one for all."""
    found: dict[str, dict[str, Any]] = {}
    for case, values in inputs().items():
        gate, x = (half.copy() for half in np.split(values["gate_up"], 2, axis=1))
        widths = {1, x.shape[1]} | ({x.shape[1] // 16} if x.shape[1] % 16 == 0 else set())
        found |= {f"{case}-{n}": {"x": x, "gate": np.ascontiguousarray(gate[:, :n])} for n in sorted(widths)}
    return found


def logits() -> dict[str, dict[str, Any]]:
    """The same shapes; values far below and above the cap."""
    rng = np.random.default_rng(0)
    return {
        f"{rows}x{width}": {"x": rng.standard_normal((rows, width), np.float32) * 10.0 ** (i % 4 - 1), "cap": 30.0}
        for i, (rows, width) in enumerate(SHAPES)
    }


# e^x is within 2e-7, the division and the two products add three roundings. atol: silu is flushed below e^-87.
SWIGLU = OpCases("swiglu", ops.swiglu, reference.swiglu, inputs(), ops.SWIGLU, rtol=5e-7, atol=1e-30)
# Where x is far below 0, gelu is a small number whose exponent had three roundings of up to 87.
GEGLU = OpCases("geglu", ops.geglu, reference.geglu, inputs(), ops.GEGLU, rtol=5e-6, atol=1e-7)
ADD_SILU = OpCases("add_silu", ops.add_silu, reference.add_silu, added(("x", "residual")), ops.ADD_SILU)
# The error function is within 1.5e-7, and x up to 200.
BIAS_GELU = OpCases("bias_gelu", ops.bias_gelu, reference.bias_gelu, added(("x", "bias")), ops.BIAS_GELU)
SIGMOID_GATE = OpCases(
    "sigmoid_gate", ops.sigmoid_gate, reference.sigmoid_gate, gates(), ops.SIGMOID_GATE, rtol=5e-7, atol=1e-30
)
# Three roundings of up to 30.
SOFTCAP = OpCases("softcap", ops.softcap, reference.softcap, logits(), ops.SOFTCAP, rtol=5e-7, atol=8e-6)
