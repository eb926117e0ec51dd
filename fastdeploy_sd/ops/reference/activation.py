"""Meaning of swiglu."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen


def swiglu(gate_up: Array) -> Array:
    """Return silu(gate) * up, where a row is [gate | up] and silu(x) = x / (1 + e^-x).

    Source: arXiv:2002.05202.
    """
    gate, up = np.split(widen(gate_up).astype(np.float64), 2, axis=1)
    sigmoid = np.exp(-np.logaddexp(0.0, -gate))
    return narrow((gate * sigmoid * up).astype(np.float32), gate_up.dtype)
