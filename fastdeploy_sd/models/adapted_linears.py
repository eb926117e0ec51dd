"""Which linear layers low-rank adapters can change, by which names, and what a rank has of them. Knows no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig
from fastdeploy_sd.models.sharding import DecoderShard, SumPart
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from fastdeploy_sd.types.shard import Shard


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear layer that adapters can change.

    Attributes:
        place: of its modules, as `layers.3.self_attn`.
        parts: name -> rows of each matrix that it is made of, in order.
        fused: what checkpoints call it where it is one matrix; None = it has one part only.
        rows: what the rank has of each part.
        in_features: of the whole layer. inputs: what the rank has of them.
        slices: of the rank's sum over its inputs.
    """

    place: str
    parts: Mapping[str, int]
    fused: str | None
    rows: Sequence[range]
    in_features: int
    inputs: range
    slices: SliceRule = WHOLE

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """Every module by which adapters can change it -> its rows and inputs."""
        sizes = dict(self.parts) if self.fused is None else {**self.parts, self.fused: sum(self.parts.values())}
        return {f"{self.place}.{name}": (rows, self.in_features) for name, rows in sizes.items()}

    def rows_within(self, module: str) -> dict[int, range]:
        """Return the rank's rows of a module, by the number of the part that they belong to."""
        name = module.removeprefix(f"{self.place}.")
        if name != self.fused:
            part = list(self.parts).index(name)
            return {part: self.rows[part]}
        found, first = dict[int, range](), 0
        for part, (rows, size) in enumerate(zip(self.rows, self.parts.values(), strict=True)):
            found[part] = range(first + rows.start, first + rows.stop)
            first += size
        return found

    def num_bytes(self, num_slots: int, max_rank: int, itemsize: int) -> int:
        """Return what the matrices of so many adapters take on the rank."""
        num_rows = sum(map(len, self.rows))
        return num_slots * max_rank * (len(self.parts) * len(self.inputs) + num_rows) * itemsize


def adapted_linears(config: DecoderConfig, shard: DecoderShard, layer: int) -> Mapping[str, AdaptedLinear]:
    """Return those of a decoder layer, by role: qkv, output, gate_up, down.

    Left out are mixtures of experts, gated attention's q, k and v, and whatever is in the place of usual attention.
    """
    return dict(_of_layer(config, shard, layer))


def adapter_bytes(config: Config, decoder: DecoderConfig, shard: Shard) -> int:
    """Return the bytes of a rank's places for adapters, 0 = there are none; raises ConfigError as DecoderShard."""
    lora, itemsize = config.lora, storage(config.model.dtype).itemsize
    layers = (adapted_linears(decoder, DecoderShard(decoder, shard), i).values() for i in range(decoder.num_layers))
    return sum(linear.num_bytes(lora.num_slots, lora.max_rank, itemsize) for linears in layers for linear in linears)


def _of_layer(config: DecoderConfig, shard: DecoderShard, layer: int) -> Iterator[tuple[str, AdaptedLinear]]:
    attention, mlp, hidden = config.layers[layer].attention, config.layers[layer].mlp, config.hidden_size
    if isinstance(attention, AttentionConfig):
        place = f"layers.{layer}.self_attn"
        if not attention.output_gate:
            sizes = {"q_proj": attention.q_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size}
            yield "qkv", _outputs(place, sizes, "qkv_proj", shard.qkv(attention), hidden)
        yield "output", _summed(place, "o_proj", hidden, attention.q_size, shard.attention(attention))
    if isinstance(mlp, DenseConfig):
        place, size = f"layers.{layer}.mlp", mlp.intermediate_size
        own = shard.feed_forward(size)
        rows = own.inputs, range(size + own.inputs.start, size + own.inputs.stop)
        yield "gate_up", _outputs(place, {"gate_proj": size, "up_proj": size}, "gate_up_proj", rows, hidden)
        yield "down", _summed(place, "down_proj", hidden, size, own)


def _outputs(
    place: str, sizes: Mapping[str, int], fused: str, rows: Sequence[range], in_features: int
) -> AdaptedLinear:
    """Of a layer whose outputs are shared out: `rows` are the rank's of the fused matrix."""
    own, first = list[range](), 0
    for part, size in zip(rows, sizes.values(), strict=True):
        own.append(range(part.start - first, part.stop - first))
        first += size
    return AdaptedLinear(place, sizes, fused, own, in_features, range(in_features))


def _summed(place: str, name: str, out_features: int, in_features: int, own: SumPart) -> AdaptedLinear:
    """Of a layer whose inputs are shared out."""
    rows = [range(out_features)]
    return AdaptedLinear(place, {name: out_features}, None, rows, in_features, own.inputs, own.slices)
