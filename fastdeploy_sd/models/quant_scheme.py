"""QuantScheme: the format that each kind of linear layer is multiplied in; weights/packer.py converts to it."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.config import Activations, Quantization, formats_of
from fastdeploy_sd.config.quantization import WeightFormat
from fastdeploy_sd.models.decoder_config import AttentionConfig, DecoderConfig
from fastdeploy_sd.ops.linear_format import LinearFormat

# Raised whenever a scheme gives a matrix another format.
SCHEME_VERSION = 2
# An error in a KV head reaches all query heads that share it. From so many on, q, k and v are a small part of a layer.
_SHARING_QUERY_HEADS = 3


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Formats of a model's linear layers; `dtype` is that of activations, unquantised weights and, unless of bytes, KV.

    wint8 and wint4 also quantise activations inside the multiplication (int8, per row and group of 128), and so does
    fp8 (e4m3), which only GPUs multiply. Routers, norms and the embedding table keep their type.
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

    def formats(self, decoder: DecoderConfig) -> set[LinearFormat]:
        """Return all formats that a decoder's linear layers have."""
        return {self.linear, self.experts, self.lm_head, *(self.qkv(layer.attention) for layer in decoder.layers)}

    def qkv(self, attention: AttentionConfig) -> LinearFormat:
        """Return the format of the q, k and v projection: of four bits only where few query heads share a KV head."""
        is_shared = attention.num_heads >= _SHARING_QUERY_HEADS * attention.num_kv_heads
        return "wint8" if self.linear == "wint4" and is_shared else self.linear
