"""How many bytes of weights a decoding step reads, and a rank has. Knows shapes and packed sizes; packs nothing."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy_sd.models.attention_config import AnyMixer, GatedDeltaConfig, LatentAttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, LayerConfig, MoeConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import DecoderShard, SumPart, attention_slices, feed_forward_slices
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.layer_weights import SHARED_EXPERTS, expert_parts
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.group_format import GROUP_FORMATS
from fastdeploy_sd.ops.group_packing import group_format, in_group_order, kept_format
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import packed_bytes
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard

Matrix = tuple[WeightMatrix, LinearFormat, SliceRule]


def weight_bytes_per_step(
    config: DecoderConfig, scheme: QuantScheme, weights: DecoderWeights | None = None, *, on_gpu: bool = False
) -> int | None:
    """Return the packed bytes of every linear layer and the head, each read once per step whatever the batch.

    The embedding table is left out (a step reads one row per token of it), and so are the norms (a few kilobytes).
    None for a mixture of experts: which experts are read depends on the tokens.

    Args:
        weights: of which `kept_format` keeps some as they are stored; None = all have the scheme's formats.
    """
    if any(isinstance(layer.mlp, MoeConfig) for layer in config.layers):
        return None
    if weights is not None:
        return sum(_stored_bytes(*matrix, on_gpu=on_gpu) for matrix in matrices(weights, config, scheme))
    layers = sum(layer_bytes(config, scheme, layer) for layer in config.layers)
    return layers + packed_bytes(config.hidden_size, config.vocab_size, scheme.lm_head)


def embedding_bytes(weights: DecoderWeights) -> int:
    """Return what an embedding of integers takes besides the head, 0 where it is numbers, which stay in the file."""
    embedding, head = WeightMatrix((weights.embedding(),)), weights.lm_head()
    fmt = group_format([embedding], WHOLE)
    rows, columns = embedding.shape
    if fmt is None or fmt not in GROUP_FORMATS or embedding.name == head.name:
        return 0
    return packed_bytes(columns, rows, fmt)


def matrices(weights: DecoderWeights, config: DecoderConfig, scheme: QuantScheme) -> Iterator[Matrix]:
    """Yield every matrix that a scheme stores, its format, and how the sum over its inputs is cut."""
    yield weights.lm_head(), scheme.lm_head, WHOLE
    for i, layer in enumerate(config.layers):
        yield from _layer_matrices(weights, i, layer, scheme)
        for part in expert_parts(layer.mlp) if isinstance(layer.mlp, MoeConfig) else ():
            yield from _expert_matrices(weights, i, layer.mlp.intermediate_size, part, scheme)


def _layer_matrices(weights: DecoderWeights, i: int, layer: LayerConfig, scheme: QuantScheme) -> Iterator[Matrix]:
    """Yield those of a layer but for experts that a router chooses."""
    attention, mlp = layer.attention, layer.mlp
    yield from _attention_matrices(weights, i, attention, scheme)
    yield weights.output(i)[0], scheme.linear, attention_slices(attention)
    if isinstance(mlp, DenseConfig):
        dense = [("mlp", mlp.intermediate_size)]
    else:
        dense = [(SHARED_EXPERTS, mlp.shared_intermediate_size)] * (mlp.shared_intermediate_size > 0)
        if (gate := weights.shared_gate(i)) is not None:
            yield gate, scheme.dtype, WHOLE
    for part, size in dense:
        yield weights.gate_up(i, part, size)[0], scheme.linear, WHOLE
        yield weights.down(i, part, size)[0], scheme.linear, feed_forward_slices(size)


def _expert_matrices(weights: DecoderWeights, i: int, size: int, part: str, scheme: QuantScheme) -> Iterator[Matrix]:
    """Yield those of an expert of a layer."""
    yield weights.gate_up(i, part, size)[0], scheme.experts, WHOLE
    yield weights.down(i, part, size)[0], scheme.experts, WHOLE


def _attention_matrices(weights: DecoderWeights, i: int, attention: AnyMixer, scheme: QuantScheme) -> Iterator[Matrix]:
    """Yield those before the output projection."""
    if isinstance(attention, GatedDeltaConfig):
        net = weights.delta_net(i)
        yield net.qkvz, scheme.linear, WHOLE
        yield net.beta_and_decay, scheme.dtype, WHOLE
        return
    if not isinstance(attention, LatentAttentionConfig):
        yield weights.qkv(i)[0], scheme.linear, WHOLE
        if (gate := weights.output_gate(i)) is not None:
            yield gate, scheme.linear, WHOLE
        return
    own = weights.latent(i)
    if own.query_latent is not None:
        yield own.query_latent[0], scheme.linear, WHOLE
    yield own.queries, scheme.linear, WHOLE
    yield own.latent, scheme.linear, WHOLE
    for matrix in (*own.keys, *own.values):
        yield matrix, scheme.dtype, WHOLE


def _stored_bytes(matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule, *, on_gpu: bool) -> int:
    matrix, slices, _ = in_group_order(matrix, slices)
    rows, columns = matrix.shape
    return packed_bytes(columns, rows, kept_format([matrix], fmt, slices, on_gpu=on_gpu) or fmt, slices)


def resident_bytes(
    config: DecoderConfig,
    scheme: QuantScheme,
    shard: Shard = WHOLE_MODEL,
    weights: DecoderWeights | None = None,
    spread: Shard | None = None,
) -> int:
    """Return the bytes of everything that a rank has of a decoder on a GPU, but for norms and biases.

    Args:
        weights: as for weight_bytes_per_step.
        spread: the rank among those over which experts are spread, None = they are not.

    Raises ConfigError: as DecoderShard.
    """
    layers = sum(layer_bytes(config, scheme, layer, shard, spread=spread) for layer in config.layers)
    head = packed_bytes(config.hidden_size, len(DecoderShard(config, shard).vocabulary()), scheme.lm_head)
    embedding = config.vocab_size * config.hidden_size * storage(scheme.dtype).itemsize
    if weights is None:
        return layers + head + embedding
    layers -= _saved_bytes(config, scheme, shard, weights, spread)
    if group_format([WeightMatrix((weights.embedding(),))], WHOLE) in GROUP_FORMATS:
        embedding = embedding_bytes(weights)
    return layers + head + embedding


def _saved_bytes(
    config: DecoderConfig, scheme: QuantScheme, shard: Shard, weights: DecoderWeights, spread: Shard | None
) -> int:
    """Return how much less a rank's layers and head take as they are stored; all experts of a layer are alike."""
    dense: list[Matrix] = [(weights.lm_head(), scheme.lm_head, WHOLE)]
    dense += [one for i, layer in enumerate(config.layers) for one in _layer_matrices(weights, i, layer, scheme)]
    saved, own = 0, DecoderShard(config, shard, spread)
    for matrix, fmt, slices in dense:
        rows, columns = matrix.shape
        saved += packed_bytes(columns, rows, fmt, slices) - _stored_bytes(matrix, fmt, slices, on_gpu=True)
    saved //= shard.size
    for i, layer in enumerate(config.layers):
        if isinstance(moe := layer.mlp, MoeConfig):
            less = expert_bytes(config, scheme, moe) - expert_bytes(config, scheme, moe, weights, i)
            saved += len(own.experts(moe).inputs) * less
    return saved


def draft_bytes(
    config: DecoderConfig, scheme: QuantScheme, num_layers: int, head: LinearFormat | None, shard: Shard = WHOLE_MODEL
) -> int:
    """Return the same of MTP layers without an embedding or a head; `head` is the format of their copy of a head."""
    own, hidden = DecoderShard(config, shard), config.hidden_size
    projection = packed_bytes(2 * hidden, len(own.hidden()), scheme.linear)
    copy = 0 if head is None else packed_bytes(hidden, len(own.vocabulary()), head)
    return copy + sum(projection + layer_bytes(config, scheme, layer, shard) for layer in config.layers[:num_layers])


def layer_bytes(
    config: DecoderConfig,
    scheme: QuantScheme,
    layer: LayerConfig,
    shard: Shard = WHOLE_MODEL,
    attention_width: int | None = None,
    spread: Shard | None = None,
) -> int:
    """Return the bytes of the matrices that a rank has of a decoder layer; raises as resident_bytes.

    `attention_width`: of the rows that q, k and v are made of; None = of hidden rows. spread: as there.
    """
    hidden, mlp, own = config.hidden_size, layer.mlp, DecoderShard(config, shard, spread)
    attention, mixer = own.attention(layer.attention), layer.attention
    if isinstance(mixer, LatentAttentionConfig):
        total = _latent_bytes(hidden, scheme, mixer, len(own.heads(mixer)))
    elif isinstance(mixer, GatedDeltaConfig):
        total = packed_bytes(hidden, sum(map(len, own.qkvz(mixer))), scheme.linear)
        total += packed_bytes(hidden, 2 * len(own.heads(mixer)), scheme.dtype)
    else:
        total = packed_bytes(attention_width or hidden, sum(map(len, own.qkv(mixer))), scheme.linear)
        total += packed_bytes(hidden, len(attention.inputs), scheme.linear) if mixer.output_gate else 0
    total += packed_bytes(len(attention.inputs), hidden, scheme.linear, attention.slices)
    if isinstance(mlp, DenseConfig):
        return total + _dense_bytes(hidden, scheme.linear, own.feed_forward(mlp.intermediate_size))
    if mlp.shared_intermediate_size > 0:
        total += _dense_bytes(hidden, scheme.linear, own.shared_experts(mlp))
        total += packed_bytes(hidden, 1, scheme.dtype) if mlp.shared_gate else 0
    return total + len(own.experts(mlp).inputs) * expert_bytes(config, scheme, mlp) + 4 * mlp.num_experts * hidden


def expert_bytes(
    config: DecoderConfig, scheme: QuantScheme, moe: MoeConfig, weights: DecoderWeights | None = None, layer: int = 0
) -> int:
    """Return the bytes of one expert's matrices in one layer; `weights`: as for weight_bytes_per_step."""
    if weights is not None:
        part = expert_parts(moe)[0]
        own = _expert_matrices(weights, layer, moe.intermediate_size, part, scheme)
        return sum(_stored_bytes(*matrix, on_gpu=True) for matrix in own)
    hidden, inner = config.hidden_size, moe.intermediate_size
    return packed_bytes(hidden, 2 * inner, scheme.experts) + packed_bytes(inner, hidden, scheme.experts)


def _latent_bytes(hidden: int, scheme: QuantScheme, attention: LatentAttentionConfig, num_heads: int) -> int:
    """Of so many heads' matrices before the output projection."""
    rank, latent = attention.query_latent_dim, attention.latent_dim
    total = 0 if rank is None else packed_bytes(hidden, rank, scheme.linear)
    total += packed_bytes(rank or hidden, num_heads * attention.query_dim, scheme.linear)
    total += packed_bytes(hidden, attention.head_dim, scheme.linear)
    of_head = (
        packed_bytes(attention.key_dim, latent, scheme.dtype),
        packed_bytes(latent, attention.value_dim, scheme.dtype),
    )
    return total + num_heads * sum(of_head)


def _dense_bytes(hidden_size: int, fmt: LinearFormat, own: SumPart) -> int:
    """Of a feed-forward network of which a rank has a part of the inner width."""
    size = len(own.inputs)
    return packed_bytes(hidden_size, 2 * size, fmt) + packed_bytes(size, hidden_size, fmt, own.slices)
