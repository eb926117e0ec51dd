"""Finds the weights of decoder layers by role, under Hugging Face's names (`model.`) or Paddle's (`ernie.`).

Paddle's ERNIE checkpoints store matrices [in, out] and may hold q, k, v and gate, up fused. Here matrices are [out, in]
of q | k | v and gate | up, in parts that are views of the mapped file. Knows names and shapes, not layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fastdeploy_sd.models.attention_config import AttentionConfig, GatedDeltaConfig, LatentAttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, MoeConfig
from fastdeploy_sd.models.weights.delta_weights import DeltaNetWeights, split_roles
from fastdeploy_sd.models.weights.latent_weights import LatentWeights
from fastdeploy_sd.models.weights.source import Weights, WeightSource
from fastdeploy_sd.models.weights.storages.registry import has_weight, read_weight
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.weight_matrix import WeightMatrix

SHARED_EXPERTS = "mlp.shared_experts"
# Names of gate and up in one matrix: Paddle's, and Phi-3's. Both have the gate first.
_FUSED_GATE_UP = ("up_gate_proj", "gate_up_proj")


class LayerWeights:
    """Weights of decoder layers by role.

    Layer i's names begin with `<prefix>.<i>.`. Every method raises CheckpointError where a tensor is missing or has
    another shape.
    """

    def __init__(self, source: WeightSource, config: DecoderConfig, prefix: str) -> None:
        self._source, self._config, self._prefix = source, config, prefix

    def input_norms(self, layer: int) -> Sequence[Callable[[int], Weights]]:
        """Return the look-ups of the norms of what a layer reads."""
        return (self.input_norm,)

    def input_norm(self, layer: int) -> Weights:
        """Return f32[H]: the norm before attention."""
        return self._norm_weight(f"{self._layer(layer)}.input_layernorm", self._config.hidden_size)

    def feed_forward_norm(self, layer: int) -> Weights:
        """Return f32[H]: the norm before the feed-forward network."""
        # Where attention has a norm after it too, that one has the name.
        role = "pre_feedforward" if self._config.layers[layer].output_norms else "post_attention"
        return self._norm_weight(f"{self._layer(layer)}.{role}_layernorm", self._config.hidden_size)

    def output_norms(self, layer: int) -> tuple[Weights, Weights] | None:
        """Return the f32[H] norms after attention and feed-forward network, None when the layer has none."""
        if not self._config.layers[layer].output_norms:
            return None
        name, hidden = self._layer(layer), self._config.hidden_size
        attention = self._norm_weight(f"{name}.post_attention_layernorm", hidden)
        return attention, self._norm_weight(f"{name}.post_feedforward_layernorm", hidden)

    def qkv(self, layer: int) -> tuple[WeightMatrix, Weights | None]:
        """Return [(Hq + 2 * Hkv) * D, H] and its bias f32[(Hq + 2 * Hkv) * D] or None."""
        attention, name = self._plain_attention(layer), f"{self._layer(layer)}.self_attn"
        if attention.output_gate:
            (q, _), width = self._q_and_gate(layer), self._attention_width(layer)
            k, v = (self._matrix(f"{name}.{part}", attention.kv_size, width) for part in ("k_proj", "v_proj"))
            return WeightMatrix(q.parts + k.parts + v.parts), None
        sizes = {"q_proj": attention.q_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size}
        return self._fused(name, ("qkv_proj",), sizes, attention.qkv_bias, self._attention_width(layer))

    def output_gate(self, layer: int) -> WeightMatrix | None:
        """Return the projection [Hq * D, H] of the gates of what heads return, None when the layer has none."""
        return self._q_and_gate(layer)[1] if self._plain_attention(layer).output_gate else None

    def delta_net(self, layer: int) -> DeltaNetWeights:
        """Return what a gated delta net has besides its output projection."""
        config = self._config.layers[layer].attention
        assert isinstance(config, GatedDeltaConfig)
        return DeltaNetWeights.read(self._source, f"{self._layer(layer)}.linear_attn", config, self._config.hidden_size)

    def output(self, layer: int) -> tuple[WeightMatrix, Weights | None]:
        """Return the output projection [H, Hq * D] of what mixes tokens, and its bias or None."""
        attention, hidden = self._config.layers[layer].attention, self._config.hidden_size
        role = "linear_attn.out_proj" if isinstance(attention, GatedDeltaConfig) else "self_attn.o_proj"
        name = f"{self._layer(layer)}.{role}"
        has_bias = isinstance(attention, AttentionConfig) and attention.output_bias
        weight = self._matrix(name, hidden, attention.q_size)
        return weight, self._vector(f"{name}.bias", hidden) if has_bias else None

    def qk_norms(self, layer: int) -> tuple[Weights, Weights] | None:
        """Return the f32[D] norms of q and k heads, None when the layer has none."""
        attention = self._plain_attention(layer)
        if not attention.qk_norm:
            return None
        name, dim = f"{self._layer(layer)}.self_attn", attention.head_dim
        return self._norm_weight(f"{name}.q_norm", dim), self._norm_weight(f"{name}.k_norm", dim)

    def sinks(self, layer: int) -> Weights | None:
        """Return the f32[Hq] scores that softmaxes count besides those of keys, None when the layer has none."""
        attention = self._plain_attention(layer)
        return self._vector(f"{self._layer(layer)}.self_attn.sinks", attention.num_heads) if attention.sinks else None

    def latent(self, layer: int) -> LatentWeights:
        """Return what latent attention has besides its output projection."""
        config, name = self._config.layers[layer].attention, f"{self._layer(layer)}.self_attn"
        assert isinstance(config, LatentAttentionConfig)
        hidden, source = self._config.hidden_size, self._source
        return LatentWeights.read(
            config, name, hidden, self._matrix, self._vector, lambda stored: has_weight(source, stored)
        )

    def gate_up(self, layer: int, part: str = "mlp", size: int | None = None) -> tuple[WeightMatrix, Weights | None]:
        """Return gate | up, [2 * I, H], and its bias or None, of a feed-forward network inside the layer.

        It is "mlp", SHARED_EXPERTS or "mlp.experts.<e>"; size None = the layer's `intermediate_size`.
        """
        size = self._config.layers[layer].mlp.intermediate_size if size is None else size
        sizes = {"gate_proj": size, "up_proj": size}
        name, hidden = self._feed_forward(layer, part), self._config.hidden_size
        return self._fused(name, _FUSED_GATE_UP, sizes, self._has_mlp_bias(layer), hidden)

    def down(self, layer: int, part: str = "mlp", size: int | None = None) -> tuple[WeightMatrix, Weights | None]:
        """Return the down projection [H, I] and its bias or None; arguments as gate_up."""
        size = self._config.layers[layer].mlp.intermediate_size if size is None else size
        name, hidden = f"{self._feed_forward(layer, part)}.down_proj", self._config.hidden_size
        bias = self._vector(f"{name}.bias", hidden) if self._has_mlp_bias(layer) else None
        return self._matrix(name, hidden, size), bias

    def shared_gate(self, layer: int) -> WeightMatrix | None:
        """Return the [1, H] whose product with a token gates the shared experts, None when the layer has none."""
        moe, name = self._config.layers[layer].mlp, f"{self._layer(layer)}.mlp.shared_expert_gate"
        has_one = isinstance(moe, MoeConfig) and moe.shared_gate
        return self._matrix(name, 1, self._config.hidden_size) if has_one else None

    def router(self, layer: int, moe: MoeConfig) -> tuple[Weights, Weights | None]:
        """Return the router f32[E, H] and the selection bias f32[E] or None."""
        name, experts = f"{self._layer(layer)}.mlp", moe.num_experts
        role = "gate" if has_weight(self._source, f"{name}.gate") else "router"
        weight = widen(self._matrix(f"{name}.{role}", experts, self._config.hidden_size).to_array())
        if not moe.selection_bias:
            return weight, None
        if moe.sigmoid:  # DeepSeek's
            return weight, self._vector(f"{name}.gate.e_score_correction_bias", experts)
        bias_name = f"{name}.moe_statics.e_score_correction_bias"  # ERNIE's, which some releases leave out
        if bias_name not in self._source:
            return weight, None
        return weight, widen(self._source.tensor(bias_name, (1, experts))).reshape(experts)

    def moe_biases(self, layer: int, moe: MoeConfig) -> tuple[Weights, Weights, Weights] | None:
        """Return those of router f32[E], gate | up f32[E, 2 * I] and down f32[E, H]; None = there are none."""
        if not moe.biases:
            return None
        name, experts, size = f"{self._layer(layer)}.mlp", moe.num_experts, moe.intermediate_size

        def read(role: str, width: int) -> Weights:
            return widen(self._source.tensor(f"{name}.experts.{role}_bias", (experts, width)))

        if f"{name}.experts.gate_proj_bias" in self._source:  # GGUF's
            parts = [read("gate_proj", size), read("up_proj", size)]
        else:  # as the rows of the matrices, those of gate and up take turns
            gate_up = read("gate_up_proj", 2 * size)
            parts = [gate_up[:, ::2], gate_up[:, 1::2]]
        down = read("down_proj", self._config.hidden_size)
        return self._vector(f"{name}.router.bias", experts), np.concatenate(parts, axis=1), down

    def verify_layer(self, layer: int) -> None:
        """Look up every tensor of a layer, before the long work, without reading large ones."""
        attention = self._config.layers[layer].attention
        mixer: tuple[Callable[[int], object], ...] = (self.qkv, self.output_gate, self.qk_norms, self.sinks)
        if isinstance(attention, GatedDeltaConfig):
            mixer = (self.delta_net,)
        elif isinstance(attention, LatentAttentionConfig):
            mixer = (self.latent,)
        for look_up in (
            *self.input_norms(layer),
            *mixer,
            self.shared_gate,
            self.output,
            self.feed_forward_norm,
            self.output_norms,
        ):
            look_up(layer)
        moe = self._config.layers[layer].mlp
        if isinstance(moe, DenseConfig):
            parts = [("mlp", moe.intermediate_size)]
        else:
            self.router(layer, moe)
            self.moe_biases(layer, moe)
            parts = [(part, moe.intermediate_size) for part in expert_parts(moe)]
            parts += [(SHARED_EXPERTS, moe.shared_intermediate_size)] * (moe.shared_intermediate_size > 0)
        for part, size in parts:
            self.gate_up(layer, part, size)
            self.down(layer, part, size)

    def has_router(self, layer: int) -> bool:
        """Whether the layer's feed-forward network is a mixture of experts."""
        return any(has_weight(self._source, f"{self._layer(layer)}.mlp.{role}") for role in ("gate", "router"))

    def _q_and_gate(self, layer: int) -> list[WeightMatrix]:
        """Return both parts of a projection whose rows are, head by head, those of q and then those of its gate."""
        attention, name = self._plain_attention(layer), f"{self._layer(layer)}.self_attn.q_proj"
        whole = self._matrix(name, 2 * attention.q_size, self._attention_width(layer))
        return split_roles(whole, attention.num_heads, [attention.head_dim] * 2)

    def _feed_forward(self, layer: int, part: str) -> str:
        moe = self._config.layers[layer].mlp
        # Where there is a gate, an only one is named so.
        is_only = part == SHARED_EXPERTS and isinstance(moe, MoeConfig) and moe.shared_gate
        return f"{self._layer(layer)}.{part.removesuffix('s') if is_only else part}"

    def _has_mlp_bias(self, layer: int) -> bool:
        mlp = self._config.layers[layer].mlp
        return isinstance(mlp, DenseConfig) and mlp.bias

    def _plain_attention(self, layer: int) -> AttentionConfig:
        config = self._config.layers[layer].attention
        assert isinstance(config, AttentionConfig)
        return config

    def _attention_width(self, layer: int) -> int:
        """Return the width of the rows that q, k and v are made of."""
        return self._config.hidden_size

    def _layer(self, layer: int) -> str:
        return f"{self._prefix}.{layer}"

    def _norm_weight(self, name: str, size: int) -> Weights:
        return np.add(self._vector(f"{name}.weight", size), self._config.norm_offset, dtype=np.float32)

    def _vector(self, name: str, size: int) -> Weights:
        return widen(self._source.tensor(name, (size,)))

    def _matrix(self, name: str, rows: int, columns: int) -> WeightMatrix:
        return WeightMatrix((read_weight(self._source, name, (rows, columns)),))

    def _fused(
        self, name: str, fused: Sequence[str], sizes: dict[str, int], has_bias: bool, width: int
    ) -> tuple[WeightMatrix, Weights | None]:
        rows = sum(sizes.values())
        for whole in (f"{name}.{part}" for part in fused):
            if has_weight(self._source, whole):
                bias = self._vector(f"{whole}.bias", rows) if has_bias else None
                return self._matrix(whole, rows, width), bias
        weight = WeightMatrix(
            tuple(read_weight(self._source, f"{name}.{part}", (size, width)) for part, size in sizes.items())
        )
        biases = [self._vector(f"{name}.{part}.bias", size) for part, size in sizes.items()] if has_bias else None
        return weight, None if biases is None else np.concatenate(biases)


def expert_parts(moe: MoeConfig) -> list[str]:
    """Return the names of a layer's experts inside the layer."""
    return [f"mlp.experts.{e}" for e in range(moe.num_experts)]
