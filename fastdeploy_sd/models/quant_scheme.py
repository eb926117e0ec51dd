"""QuantScheme: the format that each kind of linear layer is multiplied in; weights/packer.py converts to it."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.config import Activations, Quantization, formats_of
from fastdeploy_sd.config.quantization import WeightFormat
from fastdeploy_sd.ops.linear_format import LinearFormat

# Raised whenever a scheme gives a matrix another format.
SCHEME_VERSION = 3


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Formats of a model's linear layers; `dtype` is that of activations, unquantised weights and, unless of bytes, KV.

    wint8 and wint4 also quantise activations inside the multiplication (int8, per row and group of 128), and so does
    fp8 (e4m3), which is for GPUs. Routers, norms and the embedding table keep their type.
    """

    dtype: Activations
    linear: LinearFormat
    experts: LinearFormat
    lm_head: LinearFormat

    @classmethod
    def create(cls, dtype: Activations, quantization: Quantization | None) -> QuantScheme:
        """Return the scheme of `--dtype` and `--quantization`."""

        def stored(fmt: WeightFormat) -> LinearFormat:
            return dtype if fmt == "none" else fmt

        formats = formats_of(quantization)
        return cls(dtype, stored(formats.dense), stored(formats.moe), stored(formats.lm_head))
