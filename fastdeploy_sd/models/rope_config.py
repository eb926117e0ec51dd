"""Reads `rope_parameters` (or `rope_scaling`, its predecessor) of config.json: the base and how it is scaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastdeploy_sd.errors import suggest
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, FieldReader, Integer, Number
from fastdeploy_sd.ops.rope_table import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_amplitude,
)

THETA = Number(1.01, 1e15, 10000.0)
_FACTOR = Number(1, 1e6)
_ORIGINAL = "original_max_position_embeddings"
_ROPE_TYPE_KEYS = ("rope_type", "type")
# Keys of every type, and those of each; another key is refused, as it would change the table.
_EVERY: Mapping[str, Field] = {"rope_theta": THETA, "partial_rotary_factor": Number(0, 1, 1.0)}
_OF_TYPE: Mapping[str, Mapping[str, Field]] = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": Number(1e-6, 1e6),
        "high_freq_factor": Number(1e-6, 1e6),
        _ORIGINAL: Integer(1, MAX_I32),
    },
    "yarn": {
        "factor": _FACTOR,
        _ORIGINAL: Integer(1, MAX_I32),
        "beta_fast": Number(1e-6, 1e6, 32.0),
        "beta_slow": Number(1e-6, 1e6, 1.0),
        "attention_factor": Number(1e-3, 1e3),
        "mscale": Number(1e-3, 1e3),
        "mscale_all_dim": Number(1e-3, 1e3),
        "truncate": Boolean(default=True),
    },
    "factors": {"factors": _FACTOR},
}


def read_rope(config: FieldReader, max_position: int) -> tuple[float, RopeScaling | None]:
    """Return (base of the frequencies, scaling or None); max_position is config.json's max_position_embeddings.

    Raises CheckpointError: a parameter is missing, unknown, mistyped or out of range, or the type is not supported.
    """
    key, values = _parameters(config)
    rope_type = next((values[k] for k in _ROPE_TYPE_KEYS if values.get(k) is not None), "default")
    if not isinstance(rope_type, str) or rope_type not in _OF_TYPE:
        raise config.error(f"{key}.rope_type", f"one of {', '.join(_OF_TYPE)}", rope_type)
    fields = {**_EVERY, **_OF_TYPE[rope_type]}
    where = f"{config.where}: {key}"
    original = config.values.get(_ORIGINAL)
    reader = FieldReader(values, fields, where, {_ORIGINAL: max_position if original is None else original})
    for name, value in values.items():
        if name not in fields and name not in _ROPE_TYPE_KEYS and value is not None:
            expected = f"none of this name for {rope_type}{suggest(name, fields)}"
            raise reader.error(name, expected, value)
    reader.require_neutral({"partial_rotary_factor": (1.0,)})
    theta = reader.number("rope_theta", config.number("rope_theta"))
    return theta, _SCALINGS[rope_type](reader)


def _parameters(config: FieldReader) -> tuple[str, Mapping[str, Any]]:
    found = {key: config.values[key] for key in ("rope_parameters", "rope_scaling") if config.values.get(key)}
    for key, values in found.items():
        if not isinstance(values, Mapping):
            raise config.error(key, "a map", values)
    if any(values != config.values.get("rope_scaling") for values in found.values() if "rope_scaling" in found):
        raise config.error("rope_scaling", "the same as rope_parameters, which are given too", found["rope_scaling"])
    return next(iter(found.items()), ("rope_parameters", {}))


def _llama3(reader: FieldReader) -> Llama3Scaling:
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if high <= low:
        raise reader.error("high_freq_factor", f"more than low_freq_factor ({low:g})", high)
    return Llama3Scaling(reader.number("factor"), low, high, reader.integer(_ORIGINAL))


def _yarn(reader: FieldReader) -> YarnScaling:
    factor = reader.number("factor")
    fast, slow = reader.number("beta_fast"), reader.number("beta_slow")
    if fast < slow:
        raise reader.error("beta_fast", f"at least beta_slow ({slow:g})", fast)
    amplitude = yarn_amplitude(factor)
    if reader.values.get("mscale") and reader.values.get("mscale_all_dim"):
        amplitude = yarn_amplitude(factor, reader.number("mscale"))
        amplitude /= yarn_amplitude(factor, reader.number("mscale_all_dim"))
    if reader.values.get("attention_factor") is not None:
        amplitude = reader.number("attention_factor")
    return YarnScaling(factor, reader.integer(_ORIGINAL), amplitude, fast, slow, reader.boolean("truncate"))


def _factors(reader: FieldReader) -> FactorScaling:
    factors = reader.values.get("factors")
    if not isinstance(factors, list) or not all(
        isinstance(f, float) and _FACTOR.low <= f <= _FACTOR.high for f in factors
    ):
        raise reader.error("factors", f"numbers from {_FACTOR.low:g} to {_FACTOR.high:g}", factors)
    return FactorScaling(tuple(factors))


_SCALINGS: Mapping[str, Callable[[FieldReader], RopeScaling | None]] = {
    "default": lambda reader: None,
    "linear": lambda reader: LinearScaling(reader.number("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _factors,
}


def scaled_context(scaling: RopeScaling | None, max_position: int) -> int:
    """Return the longest context.

    A YaRN checkpoint may give the context of its first training as its own; the scaling says how far it reaches since.
    """
    if not isinstance(scaling, YarnScaling):
        return max_position
    return max(max_position, min(int(scaling.factor * scaling.original_max_position), MAX_I32))
