"""Reads `rope_parameters` (or `rope_scaling`, its predecessor) of config.json: how q and k of a layer turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.errors import suggest
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, FieldReader, Integer, Number
from fastdeploy_sd.ops.rope_table import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    QueryScaling,
    RopeScaling,
    YarnScaling,
    longrope_amplitude,
    yarn_amplitude,
)

THETA = Number(1.01, 1e15, 10000.0)
_FACTOR = Number(1, 1e6)
_AMPLITUDE = Number(1e-3, 1e3)
_PAIR_FACTOR = Number(1e-3, 1e6)
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
        "attention_factor": _AMPLITUDE,
        "mscale": Number(1e-3, 1e3),
        "mscale_all_dim": Number(1e-3, 1e3),
        "truncate": Boolean(default=True),
    },
    "factors": {"factors": _PAIR_FACTOR},
    "longrope": {
        "short_factor": _PAIR_FACTOR,
        "long_factor": _PAIR_FACTOR,
        "factor": _FACTOR,
        "attention_factor": _AMPLITUDE,
        _ORIGINAL: Integer(2, MAX_I32),
    },
}
_OTHER_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of q and k heads, of which `rotary_dim` elements turn; `theta` is the base of the frequencies.

    Attributes:
        interleaved: pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        query_scaling: of q alone.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | LongRopeScaling | None = None
    interleaved: bool = False
    query_scaling: QueryScaling | None = None

    def scaling_of_length(self, max_length: int) -> RopeScaling | None:
        """Return the scaling of a server whose sequences have at most max_length tokens."""
        return self.scaling.of_length(max_length) if isinstance(self.scaling, LongRopeScaling) else self.scaling


def read_rope(
    config: FieldReader, max_position: int, head_dim: int, *, is_partial: bool = False, layer_type: str = ""
) -> RopeConfig:
    """Return the rotary embedding of heads of head_dim; max_position is config.json's max_position_embeddings.

    Args:
        is_partial: some elements of a head may stay as they are.
        layer_type: whose parameters are read where each type has some.

    Raises CheckpointError: a parameter is missing, unknown, mistyped or out of range, or the type is not supported.
    """
    key, values = _parameters(config, layer_type)
    rope_type = next((values[k] for k in _ROPE_TYPE_KEYS if values.get(k) is not None), "default")
    rope_type = _OTHER_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
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
    rotary_dim = head_dim
    if is_partial:
        rotary_dim = int(head_dim * reader.number("partial_rotary_factor", config.number("partial_rotary_factor")))
        if rotary_dim < 2 or rotary_dim % 2 != 0:  # noqa: PLR2004 (a pair)
            raise config.error("partial_rotary_factor", f"one that makes pairs of a head of {head_dim}", rotary_dim)
    else:
        reader.require_neutral({"partial_rotary_factor": (1.0,)})
    theta = reader.number("rope_theta", config.number("rope_theta"))
    return RopeConfig(theta, rotary_dim, _SCALINGS[rope_type](reader, rotary_dim // 2, max_position))


def _parameters(config: FieldReader, layer_type: str) -> tuple[str, Mapping[str, Any]]:
    found = {key: config.values[key] for key in ("rope_parameters", "rope_scaling") if config.values.get(key)}
    for key, values in found.items():
        if not isinstance(values, Mapping):
            raise config.error(key, "a map", values)
    if any(values != config.values.get("rope_scaling") for values in found.values() if "rope_scaling" in found):
        raise config.error("rope_scaling", "the same as rope_parameters, which are given too", found["rope_scaling"])
    nothing: tuple[str, Mapping[str, Any]] = ("rope_parameters", {})
    key, values = next(iter(found.items()), nothing)
    if isinstance(values.get(layer_type), Mapping):
        return f"{key}.{layer_type}", values[layer_type]
    return key, values


def score_factor(config: FieldReader, rope: RopeConfig) -> float:
    """Return what DeepSeek multiplies scores by, of parameters that `read_rope` has read: the square of YaRN's."""
    _, values = _parameters(config, "")
    weight = values.get("mscale_all_dim")
    return yarn_amplitude(rope.scaling.factor, weight) ** 2 if weight and isinstance(rope.scaling, YarnScaling) else 1.0


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


def _factors(reader: FieldReader, name: str, num_pairs: int, amplitude: float = 1.0) -> FactorScaling:
    factors = reader.values.get(name)
    low, high = _PAIR_FACTOR.low, _PAIR_FACTOR.high
    if not isinstance(factors, list) or not all(type(f) in (int, float) and low <= f <= high for f in factors):
        raise reader.error(name, f"numbers from {low:g} to {high:g}", factors)
    if len(factors) != num_pairs:
        raise reader.error(name, f"{num_pairs} numbers, one for each pair", len(factors))
    return FactorScaling(tuple(map(float, factors)), amplitude)


def _longrope(reader: FieldReader, num_pairs: int, max_position: int) -> LongRopeScaling:
    original = reader.integer(_ORIGINAL)
    factor = reader.number("factor", max(max_position / original, 1.0))
    amplitude = reader.number("attention_factor", longrope_amplitude(factor, original))
    short, long = (_factors(reader, name, num_pairs, amplitude) for name in ("short_factor", "long_factor"))
    return LongRopeScaling(short, long, original)


# Of (reader, pairs of a head that turn, max_position_embeddings).
_SCALINGS: Mapping[str, Callable[[FieldReader, int, int], RopeScaling | LongRopeScaling | None]] = {
    "default": lambda *_: None,
    "linear": lambda reader, *_: LinearScaling(reader.number("factor")),
    "llama3": lambda reader, *_: _llama3(reader),
    "yarn": lambda reader, *_: _yarn(reader),
    "factors": lambda reader, num_pairs, _: _factors(reader, "factors", num_pairs),
    "longrope": _longrope,
}


def scaled_context(scaling: RopeScaling | LongRopeScaling | None, max_position: int) -> int:
    """Return the longest context.

    A YaRN checkpoint may give the context of its first training as its own; the scaling says how far it reaches since.
    """
    if not isinstance(scaling, YarnScaling):
        return max_position
    return max(max_position, min(int(scaling.factor * scaling.original_max_position), MAX_I32))
