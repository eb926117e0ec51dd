"""Meaning of the ops on single rows: norms, concat_columns, activations, softcap and cast."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.types import F32


def rms_norm(x: Array, weight: F32, eps: float, residual: F32 | None = None, x_scale: float = 1.0) -> tuple[Array, F32]:
    """Normalise each row of h = x * x_scale (+ residual) by its root mean square, and weight it.

    Source: arXiv:1910.07467.
    """
    scaled = widen(x) * np.float32(x_scale)
    h = scaled if residual is None else scaled + residual
    scale = 1.0 / np.sqrt(np.mean(np.square(h, dtype=np.float64), axis=-1, keepdims=True) + eps)
    return narrow((h * scale * weight).astype(np.float32), x.dtype), h


def concat_rms_norm(first: Array, second: Array, first_weight: F32, second_weight: F32, eps: float) -> Array:
    """Normalise two matrices [T, H] and put them side by side. Source: arXiv:2412.19437, section 2.2."""
    parts = [rms_norm(x, weight, eps)[0] for x, weight in ((first, first_weight), (second, second_weight))]
    return np.concatenate(parts, axis=1)


def concat_columns(first: Array, second: Array) -> Array:
    """Put two matrices side by side."""
    return np.concatenate([first, second], axis=1)


def swiglu(gate_up: Array) -> Array:
    """Return silu(gate) * up, where a row is [gate | up] and silu(x) = x / (1 + e^-x).

    Source: arXiv:2002.05202.
    """
    gate, up = np.split(widen(gate_up).astype(np.float64), 2, axis=1)
    sigmoid = np.exp(-np.logaddexp(0.0, -gate))
    return narrow((gate * sigmoid * up).astype(np.float32), gate_up.dtype)


def geglu(gate_up: Array) -> Array:
    """Return gelu(gate) * up, where a row is [gate | up]. Source: arXiv:1606.08415, section 2."""
    gate, up = np.split(widen(gate_up).astype(np.float64), 2, axis=1)
    u = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return narrow((0.5 * gate * (1 + np.tanh(u)) * up).astype(np.float32), gate_up.dtype)


def add_silu(residual: Array, x: Array) -> Array:
    """Return residual + silu(x), with silu(x) = x / (1 + e^-x). Source: arXiv:2401.10774, section 2.1.1."""
    wide = widen(x).astype(np.float64)
    y = widen(residual) + wide * np.exp(-np.logaddexp(0.0, -wide))
    return narrow(y.astype(np.float32), x.dtype)


def bias_gelu(x: Array, bias: F32) -> Array:
    """Return gelu(x + bias), where gelu(x) = x / 2 * (1 + erf(x / sqrt(2))). Source: arXiv:1606.08415, section 2."""
    biased = (widen(x) + bias).astype(np.float64)
    erf = np.array([math.erf(value) for value in (biased / math.sqrt(2)).flat]).reshape(biased.shape)
    return narrow((0.5 * biased * (1 + erf)).astype(np.float32), x.dtype)


def sigmoid_gate(x: Array, gate: Array) -> Array:
    """Return x * sigmoid(gate), each gate for as many neighbouring columns. Source: arXiv:2505.06708, section 2.2."""
    sigmoid = np.exp(-np.logaddexp(0.0, -widen(gate).astype(np.float64)))
    y = widen(x) * np.repeat(sigmoid, x.shape[1] // gate.shape[1], axis=1)
    return narrow(y.astype(np.float32), x.dtype)


def softcap(x: F32, cap: float) -> F32:
    """Return cap * tanh(x / cap). Source: arXiv:2408.00118, section 2."""
    return (cap * np.tanh(x.astype(np.float64) / cap)).astype(np.float32)


def cast(x: Array, dtype: npt.DTypeLike) -> Array:
    """Return x [T, N] in float32, bfloat16 or float16; the last two are rounded to nearest, ties to even."""
    return narrow(widen(x), dtype)
