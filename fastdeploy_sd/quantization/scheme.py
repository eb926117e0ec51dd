"""QuantScheme: which storage format each kind of linear layer gets. ops.linear quantises, at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastdeploy_sd.ops.reference.linear import LinearFormat


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Formats of a model's linear layers.

    wint8 and wint4 also quantise activations inside the multiplication (int8, per row and group of 128). The head stays
    at 8 bits under wint4: its rows decide the argmax directly and it is read once per step. Routers, norms and the
    embedding table keep their type.

    Attributes:
        dtype: of activations and unquantised weights, and of the KV cache unless that is int8.
        linear: format of attention and feed-forward layers, experts included.
        lm_head: format of the output head.
    """

    dtype: Literal["float32", "bfloat16"]
    linear: LinearFormat
    lm_head: LinearFormat

    @classmethod
    def create(
        cls, dtype: Literal["float32", "bfloat16"], quantization: Literal["wint8", "wint4"] | None
    ) -> QuantScheme:
        """Return the scheme of `--dtype` and `--quantization`."""
        if quantization is None:
            return cls(dtype, dtype, dtype)
        return cls(dtype, quantization, "wint8")
