"""What `quantization` says: a name, or a map with the formats of dense layers, experts and the output head.

Owns what the names stand for, and FastDeploy's keys of the map. Knows no model and no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.maps import has_meaning, read_map
from fastdeploy_sd.config.unsupported import UNSUPPORTED_QUANTIZATION
from fastdeploy_sd.errors import ConfigError, shown, suggest

_OPTION = "quantization"
_MIX = "mix_quant"
# Key of the map -> attribute of QuantizationFormats.
_TYPES = {"dense_quant_type": "dense", "moe_quant_type": "moe", "lm_head_quant_type": "lm_head"}
_FORMATS = ("none", "wint8", "wint4", "fp8")

# What `dtype` says.
Activations = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "wint8", "wint4", "fp8"]
WeightFormat = Literal["none", "wint8", "wint4", "fp8"]


@dataclass(frozen=True, slots=True)
class QuantizationFormats:
    """How each kind of linear layer is stored; "none" is unquantised.

    Attributes:
        dense: attention, feed-forward layers and shared experts.
        moe: the experts that a router chooses.
        lm_head: the output head.
    """

    dense: WeightFormat
    moe: WeightFormat
    lm_head: WeightFormat

    def has(self, fmt: WeightFormat) -> bool:
        """Return whether a kind is stored so."""
        return fmt in (self.dense, self.moe, self.lm_head)

    def __str__(self) -> str:
        """The formats in names of files and rows of tables."""
        return f"{self.dense}-moe_{self.moe}-head_{self.lm_head}"

    def to_map(self) -> dict[str, str]:
        """Return the map that says this."""
        return {_OPTION: _MIX} | {key: getattr(self, name) for key, name in _TYPES.items()}


Quantization = QuantizationName | QuantizationFormats

_NAMES: dict[QuantizationName | None, QuantizationFormats] = {
    None: QuantizationFormats("none", "none", "none"),
    "none": QuantizationFormats("none", "none", "none"),
    "wint8": QuantizationFormats("wint8", "wint8", "wint8"),
    # Rows of the head decide the argmax directly, and it is read once per step.
    "wint4": QuantizationFormats("wint4", "wint4", "wint8"),
    # As many bytes as wint8, whose numbers are nearer to the weights'.
    "fp8": QuantizationFormats("fp8", "fp8", "wint8"),
}


def formats_of(quantization: Quantization | None) -> QuantizationFormats:
    """Return the formats that a name stands for; others as they are."""
    return quantization if isinstance(quantization, QuantizationFormats) else _NAMES[quantization]


def read_quantization(value: object) -> Quantization:
    """Return what a map or its JSON text says: a name, where that says the same.

    `quantization` in it is a name, whose formats the other keys replace one by one, or mix_quant, which needs the
    formats of dense layers and of experts. Without one, what is not named is unquantised. The head is wint8 where dense
    layers are quantised, unless it is named. A null says nothing. Raises ConfigError: no map or JSON object, or an
    empty one; a key that is unknown, repeated, missing or not supported; a value its key does not allow.
    """
    if isinstance(value, QuantizationFormats):
        value = value.to_map()
    keys = (_OPTION, *_TYPES)
    written = read_map(_OPTION, value)
    if not written:
        raise ConfigError(f"{_OPTION}: expected some of {', '.join(keys)}, got none", param=_OPTION)
    faults = Faults()
    types: dict[str, str] = {}
    for key, item in written.items():
        with faults.collecting():
            if has_meaning(_OPTION, key, item, keys, UNSUPPORTED_QUANTIZATION) and item is not None:
                types[key] = _choice(key, item, (_MIX, *_FORMATS) if key == _OPTION else _FORMATS)
    name = types.pop(_OPTION, "none")
    given = {_TYPES[key]: item for key, item in types.items()}
    if name == _MIX:
        _verify_mix(written, faults)
        name = "none"
    faults.raise_all()
    base = formats_of(cast(QuantizationName, name))
    dense = given.get("dense", base.dense)
    head = "none" if dense == "none" else "wint8"
    formats = {"dense": dense, "moe": base.moe, "lm_head": head} | given
    return _shortest(QuantizationFormats(**cast(dict[str, Any], formats)))


def _choice(key: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        hint = suggest(value, choices) if isinstance(value, str) else ""
        text = f"{_OPTION}.{key}: expected one of {', '.join(choices)}, got {shown(value)}{hint}"
        raise ConfigError(text, param=_OPTION)
    return value


def _verify_mix(written: Mapping[str, object], faults: Faults) -> None:
    for key, name in _TYPES.items():
        if written.get(key) is None and name != "lm_head":
            text = f"{_OPTION}.{key}: expected one of {', '.join(_FORMATS)} with {_MIX}, got nothing"
            faults.add(ConfigError(text, param=_OPTION))


def _shortest(formats: QuantizationFormats) -> Quantization:
    return next((name for name, meaning in _NAMES.items() if name and meaning == formats), formats)
