"""Finds a decoder's weights by role, under Hugging Face's names (`model.`) or Paddle's (`ernie.`).

Paddle's ERNIE checkpoints store matrices [in, out] and may hold q, k, v and gate, up fused. Here matrices are [out, in]
of q | k | v and gate | up, in parts that are views of the mapped file. Knows names and shapes, not layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.attention_config import AttentionConfig, LatentAttentionConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, MoeConfig
from fastdeploy_sd.models.weights.latent_weights import LatentWeights
from fastdeploy_sd.models.weights.source import Weights, WeightSource
from fastdeploy_sd.models.weights.storages.registry import has_weight, read_weight
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.weight_matrix import WeightMatrix, WeightPart

# Of weights and biases.
_SUFFIXES = (".weight", ".bias", ".qweight", ".weight_packed")
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
        sizes = {"q_proj": attention.q_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size}
        return self._fused(name, ("qkv_proj",), sizes, attention.qkv_bias, self._attention_width(layer))

    def output(self, layer: int) -> tuple[WeightMatrix, Weights | None]:
        """Return the attention output projection [H, Hq * D] and its bias or None."""
        attention, name = self._config.layers[layer].attention, f"{self._layer(layer)}.self_attn.o_proj"
        hidden = self._config.hidden_size
        weight = self._matrix(name, hidden, attention.q_size)
        has_bias = isinstance(attention, AttentionConfig) and attention.output_bias
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

        It is "mlp", "mlp.shared_experts" or "mlp.experts.<e>"; size None = the layer's `intermediate_size`.
        """
        size = self._config.layers[layer].mlp.intermediate_size if size is None else size
        sizes = {"gate_proj": size, "up_proj": size}
        name, hidden = f"{self._layer(layer)}.{part}", self._config.hidden_size
        return self._fused(name, _FUSED_GATE_UP, sizes, self._has_mlp_bias(layer), hidden)

    def down(self, layer: int, part: str = "mlp", size: int | None = None) -> tuple[WeightMatrix, Weights | None]:
        """Return the down projection [H, I] and its bias or None; arguments as gate_up."""
        size = self._config.layers[layer].mlp.intermediate_size if size is None else size
        name, hidden = f"{self._layer(layer)}.{part}.down_proj", self._config.hidden_size
        bias = self._vector(f"{name}.bias", hidden) if self._has_mlp_bias(layer) else None
        return self._matrix(name, hidden, size), bias

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
        is_latent = isinstance(self._config.layers[layer].attention, LatentAttentionConfig)
        for look_up in (
            *self.input_norms(layer),
            *((self.latent,) if is_latent else (self.qkv, self.qk_norms, self.sinks)),
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
            parts += [("mlp.shared_experts", moe.shared_intermediate_size)] * (moe.shared_intermediate_size > 0)
        for part, size in parts:
            self.gate_up(layer, part, size)
            self.down(layer, part, size)

    def has_router(self, layer: int) -> bool:
        """Whether the layer's feed-forward network is a mixture of experts."""
        return any(has_weight(self._source, f"{self._layer(layer)}.mlp.{role}") for role in ("gate", "router"))

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


class DecoderWeights(LayerWeights):
    """Weights of one whole decoder by role; raises as LayerWeights."""

    def __init__(self, source: WeightSource, config: DecoderConfig) -> None:
        roots = [root for root in ("model", "ernie") if f"{root}.embed_tokens.weight" in source]
        if not roots:
            raise CheckpointError(
                f"{source.path}: expected model.embed_tokens.weight or ernie.embed_tokens.weight, found neither"
            )
        super().__init__(source, config, f"{roots[0]}.layers")
        self._root = roots[0]
        self._embedding_name = f"{self._root}.embed_tokens.weight"

    def embedding(self) -> WeightPart:
        """Return [V, H]."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        return read_weight(self._source, self._embedding_name.removesuffix(".weight"), shape)

    def lm_head(self) -> WeightMatrix:
        """Return [V, H]; the embedding when the model ties them."""
        if self._config.tie_word_embeddings:
            return WeightMatrix((self.embedding(),))
        return self._matrix("lm_head", self._config.vocab_size, self._config.hidden_size)

    def final_norm(self) -> Weights:
        """Return f32[H]."""
        return self._norm_weight(f"{self._root}.norm", self._config.hidden_size)

    def verify(self) -> None:
        """Look up every tensor of the decoder, and weights of it that would not be used.

        A bias or a layer that config.json does not mention belongs to another model than the one it describes. Raises
        CheckpointError: a tensor is missing, has another shape, or would not be used.
        """
        for look_up in (self.embedding, self.lm_head, self.final_norm):
            look_up()
        for layer in range(self._config.num_layers):
            self.verify_layer(layer)
        unused = [name for name in self._source.unread() if self._is_of_decoder(name)]
        if unused:
            names = ", ".join(map(shown, unused[:3]))
            raise CheckpointError(
                f"{self._source.path}: expected no tensor beyond those that config.json tells of, got"
                f" {len(unused)} more: {names}"
            )

    def _is_of_decoder(self, name: str) -> bool:
        if not name.endswith(_SUFFIXES):
            return False  # as tables of old files, or scales of a quantised KV cache
        if name.endswith(".bias") and not self._source.tensor(name, self._source.shape(name)).any():
            return False  # GPTQ's tools write one of zeros for every linear layer
        if name.startswith("lm_head."):
            return name != "lm_head.weight" or not self._config.tie_word_embeddings
        match = re.match(rf"{self._prefix}\.(\d+)\.", name)
        # Layers with a projection over two rows are draft layers, which some releases number after the decoder's.
        return match is not None and f"{self._prefix}.{match[1]}.eh_proj.weight" not in self._source
