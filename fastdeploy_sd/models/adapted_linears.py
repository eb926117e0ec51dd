"""Which linear layers low-rank adapters can change, by which names, and what a rank has of them. Knows no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.attention_config import AttentionConfig, GatedDeltaConfig, LatentAttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig
from fastdeploy_sd.models.sharding import DecoderShard, SumPart
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from fastdeploy_sd.types.shard import Shard

# Linear layers of checkpoints that adapters cannot change -> why.
UNCHANGED: Mapping[str, str] = {
    ".kv_b_proj.": "attention multiplies queries and sums with this matrix, in place of keys and values",
    ".experts.": "experts that tokens choose have no adapters",
}


class AdaptedModule(NamedTuple):
    """A linear layer of checkpoints.

    Attributes:
        num_rows: of the whole layer.
        parts: number of a part of the layer here -> which rows of the module the rank's rows of the part are.
    """

    num_rows: int
    parts: Mapping[int, Sequence[range]]


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear layer that adapters can change.

    Attributes:
        modules: every module by whose name adapters can change it or some of its parts, as `layers.3.mlp.up_proj`.
        num_rows: that the rank has of each part.
        in_features: of the whole layer. inputs: what the rank has of them.
        slices: of the rank's sum over its inputs.
    """

    modules: Mapping[str, AdaptedModule]
    num_rows: Sequence[int]
    in_features: int
    inputs: range
    slices: SliceRule = WHOLE

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Every module -> its rows and inputs."""
        return {name: (module.num_rows, self.in_features) for name, module in self.modules.items()}

    def num_bytes(self, num_slots: int, max_rank: int, itemsize: int) -> int:
        """Return what the matrices of so many adapters take on the rank."""
        return num_slots * max_rank * (len(self.num_rows) * len(self.inputs) + sum(self.num_rows)) * itemsize


def adapted_linears(config: DecoderConfig, shard: DecoderShard, layer: int) -> Mapping[str, AdaptedLinear]:
    """Return those of a decoder layer, by role; what they are named for says the builder of layers.

    Left out are experts that tokens choose, and the matrix that makes keys and values of latent vectors.
    """
    return dict(_of_layer(config, shard, layer))


def adapter_bytes(config: Config, decoder: DecoderConfig, shard: Shard) -> int:
    """Return the bytes of a rank's places for adapters, 0 = there are none; raises ConfigError as DecoderShard."""
    lora, itemsize = config.lora, storage(config.model.dtype).itemsize
    layers = (adapted_linears(decoder, DecoderShard(decoder, shard), i).values() for i in range(decoder.num_layers))
    return sum(linear.num_bytes(lora.num_slots, lora.max_rank, itemsize) for linears in layers for linear in linears)


def _of_layer(config: DecoderConfig, shard: DecoderShard, layer: int) -> Iterator[tuple[str, AdaptedLinear]]:
    attention, mlp, hidden = config.layers[layer].attention, config.layers[layer].mlp, config.hidden_size
    place, own = f"layers.{layer}.self_attn", shard.attention(attention)
    if isinstance(attention, GatedDeltaConfig):
        place = f"layers.{layer}.linear_attn"
        yield from _of_delta_net(place, attention, shard, hidden)
        yield "output", _summed(f"{place}.out_proj", hidden, attention.q_size, own)
    else:
        if isinstance(attention, LatentAttentionConfig):
            yield from _of_latent(place, attention, shard, hidden)
        elif attention.output_gate:
            yield from _of_gated(place, attention, shard, hidden)
        else:
            sizes = {"q_proj": attention.q_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size}
            yield "qkv", _outputs(place, sizes, "qkv_proj", shard.qkv(attention), hidden)
        yield "output", _summed(f"{place}.o_proj", hidden, attention.q_size, own)
    if isinstance(mlp, DenseConfig):
        size = mlp.intermediate_size
        yield from _of_dense(f"layers.{layer}.mlp", "", size, shard.feed_forward(size), hidden)
    elif mlp.shared_intermediate_size > 0:
        # One with a gate is an only one.
        name, size = "shared_expert" if mlp.shared_gate else "shared_experts", mlp.shared_intermediate_size
        yield from _of_dense(f"layers.{layer}.mlp.{name}", "shared_", size, shard.shared_experts(mlp), hidden)
        if mlp.shared_gate:
            yield "shared_gate", _whole(f"layers.{layer}.mlp.shared_expert_gate", 1, [range(1)], hidden)


def _of_gated(
    place: str, attention: AttentionConfig, shard: DecoderShard, hidden: int
) -> Iterator[tuple[str, AdaptedLinear]]:
    """Of attention whose q_proj has, head by head, the rows of q and then those of its gate."""
    heads, dim, (q, k, v) = shard.heads(attention), attention.head_dim, shard.qkv(attention)
    size, of_keys, of_values = 2 * attention.q_size, attention.q_size, attention.q_size + attention.kv_size
    modules = {
        f"{place}.q_proj": AdaptedModule(size, {0: _grouped(heads, 2 * dim, 0, dim)}),
        f"{place}.k_proj": AdaptedModule(attention.kv_size, {1: [_shifted(k, -of_keys)]}),
        f"{place}.v_proj": AdaptedModule(attention.kv_size, {2: [_shifted(v, -of_values)]}),
    }
    yield "qkv", AdaptedLinear(modules, [len(q), len(k), len(v)], hidden, range(hidden))
    yield "gate", _whole(f"{place}.q_proj", size, _grouped(heads, 2 * dim, dim, dim), hidden)


def _of_latent(
    place: str, attention: LatentAttentionConfig, shard: DecoderShard, hidden: int
) -> Iterator[tuple[str, AdaptedLinear]]:
    rank, size, queries = attention.query_latent_dim, attention.num_heads * attention.query_dim, "q_proj"
    if rank is not None:
        yield "query_latent", _whole(f"{place}.q_a_proj", rank, [range(rank)], hidden)
        queries = "q_b_proj"
    own = _grouped(shard.heads(attention), attention.query_dim, 0, attention.query_dim)
    yield "queries", _whole(f"{place}.{queries}", size, own, hidden if rank is None else rank)
    name, size = f"{place}.kv_a_proj_with_mqa", attention.head_dim
    yield "latent", _whole(name, size, [range(attention.latent_dim)], hidden)
    yield "rotary_key", _whole(name, size, [range(attention.latent_dim, size)], hidden)


def _of_delta_net(
    place: str, net: GatedDeltaConfig, shard: DecoderShard, hidden: int
) -> Iterator[tuple[str, AdaptedLinear]]:
    """Whose projections Qwen3-Next has in two modules, with the rows of a key head together, and Qwen3.5 in four."""
    heads, keys, (q, k, v, z) = shard.heads(net), shard.kv_heads(net), shard.qkvz(net)
    per_key = net.num_value_heads // net.num_key_heads
    values, channels = per_key * net.value_dim, 2 * net.key_size + net.value_size
    size = 2 * net.key_dim + 2 * values

    def of_heads(group: int, first: int, width: int) -> list[range]:
        """Return the rows of value heads, of which each key head has some, after `first` others."""
        starts = [h // per_key * group + first + h % per_key * width for h in heads]
        return [range(start, start + width) for start in starts]

    modules = {
        f"{place}.in_proj_qkv": AdaptedModule(channels, {0: [q], 1: [k], 2: [v]}),
        f"{place}.in_proj_z": AdaptedModule(net.value_size, {3: [_shifted(z, -channels)]}),
        f"{place}.in_proj_qkvz": AdaptedModule(
            channels + net.value_size,
            {
                0: _grouped(keys, size, 0, net.key_dim),
                1: _grouped(keys, size, net.key_dim, net.key_dim),
                2: of_heads(size, 2 * net.key_dim, net.value_dim),
                3: of_heads(size, 2 * net.key_dim + values, net.value_dim),
            },
        ),
    }
    yield "qkvz", AdaptedLinear(modules, [len(q), len(k), len(v), len(z)], hidden, range(hidden))
    modules = {
        f"{place}.in_proj_b": AdaptedModule(net.num_value_heads, {0: [heads]}),
        f"{place}.in_proj_a": AdaptedModule(net.num_value_heads, {1: [heads]}),
        f"{place}.in_proj_ba": AdaptedModule(
            2 * net.num_value_heads, {0: of_heads(2 * per_key, 0, 1), 1: of_heads(2 * per_key, per_key, 1)}
        ),
    }
    yield "beta_and_decay", AdaptedLinear(modules, [len(heads)] * 2, hidden, range(hidden))


def _of_dense(place: str, role: str, size: int, own: SumPart, hidden: int) -> Iterator[tuple[str, AdaptedLinear]]:
    rows = own.inputs, _shifted(own.inputs, size)
    yield f"{role}gate_up", _outputs(place, {"gate_proj": size, "up_proj": size}, "gate_up_proj", rows, hidden)
    yield f"{role}down", _summed(f"{place}.down_proj", hidden, size, own)


def _outputs(
    place: str, sizes: Mapping[str, int], fused: str, rows: Sequence[range], in_features: int
) -> AdaptedLinear:
    """Of a layer whose outputs are shared out: `rows` are the rank's of the fused matrix."""
    ends = list(accumulate(sizes.values(), initial=0))
    modules = {
        f"{place}.{name}": AdaptedModule(end - first, {part: [_shifted(rows[part], -first)]})
        for part, (name, (first, end)) in enumerate(zip(sizes, pairwise(ends), strict=True))
    }
    modules[f"{place}.{fused}"] = AdaptedModule(ends[-1], {part: [own] for part, own in enumerate(rows)})
    return AdaptedLinear(modules, [len(own) for own in rows], in_features, range(in_features))


def _whole(name: str, num_rows: int, own: Sequence[range], in_features: int) -> AdaptedLinear:
    """Of a layer of one part, whose inputs every rank has."""
    modules = {name: AdaptedModule(num_rows, {0: own})}
    return AdaptedLinear(modules, [sum(map(len, own))], in_features, range(in_features))


def _summed(name: str, out_features: int, in_features: int, own: SumPart) -> AdaptedLinear:
    """Of a layer whose inputs are shared out."""
    modules = {name: AdaptedModule(out_features, {0: [range(out_features)]})}
    return AdaptedLinear(modules, [out_features], in_features, own.inputs, own.slices)


def _grouped(groups: range, size: int, first: int, width: int) -> list[range]:
    """Return `width` rows after `first` others of each of these groups of `size` rows."""
    return [range(group * size + first, group * size + first + width) for group in groups]


def _shifted(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
