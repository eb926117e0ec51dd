"""Cosines and sines of the rotary embedding. NumPy, float64 until the end; knows no kernel and no checkpoint format
beyond the `rope_scaling` dictionary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.types import F32

F64 = npt.NDArray[np.float64]
# Keys of `rope_parameters` that the caller has already turned into theta and rotary_dim.
CALLERS_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def rope_table(max_position: int, rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> F32:
    """Build the table `rope_store_kv_` reads: row p holds the cosines, then the sines, of p * inverse frequency.

    Args:
        max_position: rows.
        rotary_dim: even; pair i turns with inverse frequency theta^(-2i / rotary_dim) before scaling.
        theta: base of the frequencies.
        scaling: `rope_scaling` or `rope_parameters` of config.json: rope_type default, linear, llama3 or yarn with its
            parameters; None is default.

    Returns:
        f32[max_position, rotary_dim].

    Raises:
        ConfigError: rotary_dim is odd, rope_type is another one, or a parameter is missing, unknown or not a number.

    Source: arXiv:2104.09864; arXiv:2306.15595 (linear); the Llama 3.1 release (llama3); arXiv:2309.00071 (yarn).
    """
    if rotary_dim <= 0 or rotary_dim % 2 != 0:
        raise ConfigError(f"rotary_dim: expected a positive even number, got {rotary_dim}")
    options = dict(scaling or {})
    rope_type = str(options.get("rope_type", options.get("type", "default")))
    if rope_type not in SCALINGS:
        hint = suggest(rope_type, SCALINGS)
        raise ConfigError(f"rope_scaling.rope_type: expected one of {', '.join(SCALINGS)}, got {rope_type!r}{hint}")
    scale, known = SCALINGS[rope_type]
    _verify_keys(options, known)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    inverse_frequencies, amplitude = scale(float(theta) ** -exponents, float(theta), options)
    angles = np.outer(np.arange(max_position, dtype=np.float64), inverse_frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) * np.float32(amplitude)


def _verify_keys(options: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in options.keys() - CALLERS_KEYS:
        if key not in known:
            expected = ", ".join(sorted(known)) or "no parameter"
            raise ConfigError(f"rope_scaling: expected {expected}, got {key!r}{suggest(key, known)}")


def _number(options: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"rope_scaling.{key}: expected a number, got {value!r}")
    return float(value)


def _default(inverse: F64, theta: float, options: Mapping[str, Any]) -> tuple[F64, float]:
    del theta, options
    return inverse, 1.0


def _linear(inverse: F64, theta: float, options: Mapping[str, Any]) -> tuple[F64, float]:
    del theta
    return inverse / _number(options, "factor"), 1.0


def _llama3(inverse: F64, theta: float, options: Mapping[str, Any]) -> tuple[F64, float]:
    """Keep short wavelengths, stretch long ones, blend between."""
    del theta
    factor = _number(options, "factor")
    low, high = _number(options, "low_freq_factor"), _number(options, "high_freq_factor")
    turns = _number(options, "original_max_position_embeddings") * inverse / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inverse * (kept + (1 - kept) / factor), 1.0


def _yarn(inverse: F64, theta: float, options: Mapping[str, Any]) -> tuple[F64, float]:
    """Keep pairs that turn more than beta_fast times in the original context, stretch those below beta_slow."""
    factor = _number(options, "factor")
    original = _number(options, "original_max_position_embeddings")
    rotary_dim = 2 * len(inverse)

    def pair_with(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(_number(options, "beta_fast", 32.0))
    high = pair_with(_number(options, "beta_slow", 1.0))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    # The width is kept above zero, as in the published code.
    stretched = np.clip((np.arange(len(inverse)) - low) / max(high - low, 0.001), 0.0, 1.0)
    return inverse * ((1 - stretched) + stretched / factor), _yarn_amplitude(factor, options)


def _yarn_amplitude(factor: float, options: Mapping[str, Any]) -> float:
    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if options.get("attention_factor") is not None:
        return _number(options, "attention_factor")
    if options.get("mscale") and options.get("mscale_all_dim"):
        return of(_number(options, "mscale")) / of(_number(options, "mscale_all_dim"))
    return of(1.0)


_Scaling = Callable[[F64, float, Mapping[str, Any]], tuple[F64, float]]
_ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, tuple[_Scaling, frozenset[str]]] = {
    "default": (_default, frozenset()),
    "linear": (_linear, frozenset({"factor"})),
    "llama3": (_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL})),
    "yarn": (
        _yarn,
        frozenset(
            {"factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
        ),
    ),
}
