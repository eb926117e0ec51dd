"""DecoderConfig: what the decoder-only architectures have in common, read from config.json by models/<family>.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture-of-experts feed-forward layers of a model.

    Attributes:
        layers: the layer indices that have one; the others have a dense feed-forward network.
        shared_intermediate_size: of the experts every token uses, 0 = none.
        normalize, norm_min: divide the chosen weights by max(their sum, norm_min).
        selection_bias: a bias is added to the probabilities for choosing experts only.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: frozenset[int]
    shared_intermediate_size: int = 0
    normalize: bool = True
    norm_min: float = 0.0
    selection_bias: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer.

    Attributes:
        rope_scaling: parameters of the rotary scaling; None = plain.
        rope_interleaved: pairs (2i, 2i+1) instead of (i, i + rotary_dim / 2).
        qkv_bias, output_bias, mlp_bias: which linear layers have one.
        qk_norm: RMS norm of every q and k head before the rotary embedding.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rope_interleaved: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    moe: MoeConfig | None = None

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k, v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class ConfigReader:
    """Typed access to config.json: a missing or mistyped key is an error that names it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"config.json: {name}: expected a non-negative integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config.json: {name}: expected a number, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name}: expected true or false, got {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise CheckpointError(f"config.json: {name}: expected a list of integers, got {value!r}")
        return tuple(value)

    def require(self, name: str, expected: object, default: object) -> None:
        """Refuse a model that needs something these layers do not do, instead of computing something else."""
        value = self._get(name, default)
        if value != expected:
            raise CheckpointError(f"config.json: {name}: expected {expected!r}, got {value!r} (not supported)")

    def rope(self) -> tuple[float, Mapping[str, Any] | None]:
        """Return (theta, scaling or None); both the old `rope_scaling` and the new `rope_parameters` are read."""
        parameters = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping):
            raise CheckpointError(f"config.json: rope_parameters: expected a map, got {parameters!r}")
        theta = parameters.get("rope_theta", self._values.get("rope_theta", 10000.0))
        if isinstance(theta, bool) or not isinstance(theta, int | float):
            raise CheckpointError(f"config.json: rope_theta: expected a number, got {theta!r}")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        return float(theta), None if kind == "default" else parameters

    def _get(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: expected a key {name!r}, found none")
        return value


def read_common(reader: ConfigReader) -> dict[str, Any]:
    """Return the DecoderConfig fields every family writes under the same names."""
    num_heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    theta, scaling = reader.rope()
    common: dict[str, Any] = {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": reader.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": reader.integer("num_key_value_heads", num_heads),
        "head_dim": reader.integer("head_dim", hidden_size // max(num_heads, 1)),
        "intermediate_size": reader.integer("intermediate_size"),
        "max_position": reader.integer("max_position_embeddings"),
        "norm_eps": reader.number("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": reader.boolean("tie_word_embeddings"),
    }
    reader.require("hidden_act", "silu", "silu")
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "max_position"):
        if common[name] < 1:
            raise CheckpointError(f"config.json: {name}: expected a positive number, got {common[name]}")
    if num_heads % common["num_kv_heads"] != 0 or common["head_dim"] % 16 != 0:
        raise CheckpointError(
            "config.json: expected num_attention_heads to be a multiple of num_key_value_heads and head_dim of 16, got "
            f"{num_heads}, {common['num_kv_heads']} and {common['head_dim']}"
        )
    return common
