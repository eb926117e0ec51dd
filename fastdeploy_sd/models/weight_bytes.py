"""How many bytes of weights a decoding step reads, and a rank has. Knows shapes and packed sizes; loads nothing."""

from __future__ import annotations

from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, LayerConfig, MoeConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import DecoderShard, SumPart
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import packed_bytes
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard


def weight_bytes_per_step(config: DecoderConfig, scheme: QuantScheme) -> int | None:
    """Return the packed bytes of every linear layer and the head, each read once per step whatever the batch.

    The embedding table is left out (a step reads one row per token of it), and so are the norms (a few kilobytes).
    None for a mixture of experts: which experts are read depends on the tokens.
    """
    if any(isinstance(layer.mlp, MoeConfig) for layer in config.layers):
        return None
    layers = sum(layer_bytes(config, scheme, layer) for layer in config.layers)
    return layers + packed_bytes(config.hidden_size, config.vocab_size, scheme.lm_head)


def resident_bytes(config: DecoderConfig, scheme: QuantScheme, shard: Shard = WHOLE_MODEL) -> int:
    """Return the bytes of everything that a rank has of a decoder on a device, but for norms and biases.

    Raises ConfigError: as DecoderShard.
    """
    layers = sum(layer_bytes(config, scheme, layer, shard) for layer in config.layers)
    head = packed_bytes(config.hidden_size, len(DecoderShard(config, shard).vocabulary()), scheme.lm_head)
    embedding = config.vocab_size * config.hidden_size * storage(scheme.dtype).itemsize
    return layers + head + embedding


def draft_bytes(
    config: DecoderConfig, scheme: QuantScheme, num_layers: int, head: LinearFormat | None, shard: Shard = WHOLE_MODEL
) -> int:
    """Return the same of MTP layers without an embedding or a head; `head` is the format of their copy of a head."""
    own, hidden = DecoderShard(config, shard), config.hidden_size
    projection = packed_bytes(2 * hidden, len(own.hidden()), scheme.linear)
    copy = 0 if head is None else packed_bytes(hidden, len(own.vocabulary()), head)
    return copy + sum(projection + layer_bytes(config, scheme, layer, shard) for layer in config.layers[:num_layers])


def layer_bytes(config: DecoderConfig, scheme: QuantScheme, layer: LayerConfig, shard: Shard = WHOLE_MODEL) -> int:
    """Return the bytes of the matrices that a rank has of a decoder layer; raises as resident_bytes."""
    hidden, mlp, own = config.hidden_size, layer.mlp, DecoderShard(config, shard)
    attention = own.attention(layer.attention)
    total = packed_bytes(hidden, sum(map(len, own.qkv(layer.attention))), scheme.qkv(layer.attention))
    total += packed_bytes(len(attention.inputs), hidden, scheme.linear, attention.slices)
    if isinstance(mlp, DenseConfig):
        return total + _dense_bytes(hidden, scheme.linear, own.feed_forward(mlp.intermediate_size))
    if mlp.shared_intermediate_size > 0:
        total += _dense_bytes(hidden, scheme.linear, own.shared_experts(mlp))
    expert = packed_bytes(hidden, 2 * mlp.intermediate_size, scheme.experts)
    expert += packed_bytes(mlp.intermediate_size, hidden, scheme.experts)
    return total + len(own.experts(mlp).inputs) * expert + 4 * mlp.num_experts * hidden


def _dense_bytes(hidden_size: int, fmt: LinearFormat, own: SumPart) -> int:
    """Of a feed-forward network of which a rank has a part of the inner width."""
    size = len(own.inputs)
    return packed_bytes(hidden_size, 2 * size, fmt) + packed_bytes(size, hidden_size, fmt, own.slices)
