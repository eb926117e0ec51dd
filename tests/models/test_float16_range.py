"""Which numbers of a checkpoint float16 is said not to hold: those that NumPy turns into infinities, and no others."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.float16_range import verify_float16
from fastdeploy_sd.ops.bf16 import to_bf16, widen
from fastdeploy_sd.ops.weight_matrix import FloatPart

pytestmark = pytest.mark.slow

NUMBERS = [0.0, -1.0, 65280.0, 65504.0, 65519.996, -65519.996, 65520.0, -65520.0, 65536.0, -7e4, 3e38, np.inf, -np.inf]


@pytest.mark.parametrize("others", [0.5, -0.5, np.nan, -np.nan])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_would_become_infinite_is_refused_with_its_magnitude(dtype: str, others: float) -> None:
    for number in NUMBERS:
        values: np.ndarray = np.full((700, 515), others, np.float32)  # two pieces
        values[699, 514] = number
        with np.errstate(over="ignore"):
            data = to_bf16(values) if dtype == "bfloat16" else values.astype(dtype)
            stored = abs(float(widen(data[-1:, -1])[0]))
            is_lost = dtype != "float16" and bool(np.isinf(np.float16(stored)))
        for part in (FloatPart("w", data), FloatPart("w", data[:, 500:]), FloatPart("w", data.T[:, 600:])):
            if is_lost:
                with pytest.raises(CheckpointError, match=re.escape(f"up to 65504, got one of magnitude {stored:g};")):
                    verify_float16(part)
            else:
                verify_float16(part)


def test_no_numbers_are_none_too_large() -> None:
    verify_float16(FloatPart("w", np.empty((0, 4), np.float32)))
