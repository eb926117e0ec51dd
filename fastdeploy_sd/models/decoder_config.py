"""DecoderConfig: a decoder and each of its layers, read from config.json by models/<family>.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fastdeploy_sd.models.attention_config import (
    HEAD_DIM_MULTIPLE,
    MAX_GROUP_SIZE,
    AnyAttention,
    AnyMixer,
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
)
from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.layer_windows import read_windows
from fastdeploy_sd.models.rope_config import RopeConfig, read_rope, scaled_context

# Of the gate in a feed-forward network; gelu_tanh is GELU approximated by a hyperbolic tangent.
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A dense feed-forward network; `bias`: whether its linear layers have one."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture-of-experts feed-forward network.

    Attributes:
        num_experts_field: what config.json calls `num_experts`, for errors.
        normalize, norm_min: divide the chosen weights by max(their sum, norm_min); `scale` is their factor after that.
        sigmoid: an expert's probability is the sigmoid of its logit, not the softmax over all.
        selection_bias: a bias is added to the probabilities for choosing experts only.
        biases: the router and the experts have biases.
        gate_limit: c: the gate of the experts is clamped, see ops.moe; None = it is SwiGLU's.
        shared_gate: what the shared experts return is multiplied by the sigmoid of a product of the token.
        num_groups, num_chosen_groups: experts are chosen from some of the ranges of equal length; see ops.moe.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    normalize: bool = True
    norm_min: float = 0.0
    scale: float = 1.0
    sigmoid: bool = False
    selection_bias: bool = False
    biases: bool = False
    gate_limit: float | None = None
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_experts_field: str = "num_experts"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. The layers of a model may differ.

    Attributes:
        output_norms: what attention and feed-forward network return is normalised too.
    """

    attention: AnyMixer
    mlp: DenseConfig | MoeConfig
    output_norms: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer.

    Attributes:
        dense, moe: the feed-forward networks that config.json describes. Each layer has one of them, draft layers too.
        max_position: the longest context, with what rotary scaling adds.
        norm_offset: what is added to the weights of every norm.
        embedding_scale, logits_scale: factors of embedded tokens and of logits.
        logits_cap: bounds logits smoothly, see `softcap`; None = no bound.
        residual_scale: factor of what a layer adds to the residual stream.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    dense: DenseConfig
    max_position: int
    norm_eps: float
    norm_offset: float = 0.0
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    moe: MoeConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AnyAttention, ...]:
        """The attention of the layers that have a KV cache."""
        return tuple([layer.attention for layer in self.layers if not isinstance(layer.attention, GatedDeltaConfig)])

    @property
    def delta_nets(self) -> tuple[GatedDeltaConfig, ...]:
        """Those of the layers that have a recurrent state in place of a KV cache."""
        return tuple([layer.attention for layer in self.layers if isinstance(layer.attention, GatedDeltaConfig)])

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that are mixtures of experts."""
        return tuple([i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeConfig)])

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embeddings of its layers, each once."""
        return tuple(dict.fromkeys(attention.rope for attention in self.attentions))

    def with_experts(self, moe: MoeConfig, layers: Collection[int]) -> DecoderConfig:
        """Return the decoder whose layers of these numbers are mixtures of experts."""
        changed = self.with_layers(lambda i, layer: replace(layer, mlp=moe) if i in layers else layer)
        return replace(changed, moe=moe)

    def with_layers(self, change: Callable[[int, LayerConfig], LayerConfig]) -> DecoderConfig:
        """Return the decoder whose layer i is change(i, what it was)."""
        return replace(self, layers=tuple(change(i, layer) for i, layer in enumerate(self.layers)))

    def with_attention(self, change: Callable[[int, AttentionConfig], AttentionConfig]) -> DecoderConfig:
        """Return the decoder whose layer i has the attention change(i, what it was), where that is of this kind."""

        def changed(i: int, layer: LayerConfig) -> LayerConfig:
            own = layer.attention
            return replace(layer, attention=change(i, own)) if isinstance(own, AttentionConfig) else layer

        return self.with_layers(changed)


# What some models of these shapes ask for and the layers do not do; see FieldReader.require_neutral.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1.0,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "qk_layernorm": (False,),
    "residual_multiplier": (1.0,),
    "use_mrope": (False,),
}


def read_decoder(  # noqa: PLR0913
    reader: FieldReader,
    activations: tuple[str, ...] = ("silu",),
    activation: Activation = "silu",
    *,
    reads: Collection[str] = (),
    mlp_bias: bool = False,
    rope_interleaved: bool = False,
    layer_type: str = "",
    find_windows: Callable[[FieldReader, int], list[int | None]] = read_windows,
    read_attention: Callable[[FieldReader, int], LatentAttentionConfig] | None = None,
    **attention: bool,
) -> DecoderConfig:
    """Read what every family writes under the same names: a decoder whose layers are alike and dense.

    `activations` are names of the activation, `attention` flags of AttentionConfig. The family reads the keys `reads`
    itself, but partial_rotary_factor, which is read here. `layer_type`: see read_rope. `read_attention` reads another
    kind of attention, given max_position_embeddings.

    Raises CheckpointError: a key is missing, mistyped, out of range, or asks for something unsupported.
    """
    neutral = {key: values for key, values in _NEUTRAL.items() if key not in reads}
    reader.require_neutral({**neutral, "hidden_act": activations})
    hidden_size, max_position = reader.integer("hidden_size"), reader.integer("max_position_embeddings")
    own: AnyAttention
    if read_attention is not None:
        own = read_attention(reader, max_position)
    else:
        num_heads = reader.integer("num_attention_heads")
        num_kv_heads, head_dim = _read_heads(reader, num_heads, hidden_size)
        is_partial = "partial_rotary_factor" in reads
        rope = read_rope(reader, max_position, head_dim, is_partial=is_partial, layer_type=layer_type)
        rope = replace(rope, interleaved=rope_interleaved)
        own = AttentionConfig(num_heads, num_kv_heads, head_dim, rope, **attention)
    max_position = scaled_context(None if own.rope is None else own.rope.scaling, max_position)
    dense = DenseConfig(reader.integer("intermediate_size"), mlp_bias, activation)
    layers = (LayerConfig(own, dense),) * reader.integer("num_hidden_layers")
    windows = find_windows(reader, len(layers))
    # One that holds the whole context is none.
    windows = [None if window is None or window >= max_position else window for window in windows]
    return DecoderConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        dense=dense,
        max_position=max_position,
        norm_eps=reader.number("rms_norm_eps"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
    ).with_attention(lambda i, found: replace(found, window=windows[i]))


def verify_top_k(reader: FieldReader, name: str, top_k: int, num_experts: int) -> int:
    """Return how many experts a token has; raises CheckpointError where there are fewer."""
    if top_k > num_experts:
        raise reader.error(name, f"at most the {num_experts} experts there are", top_k)
    return top_k


def _read_heads(reader: FieldReader, num_heads: int, hidden_size: int) -> tuple[int, int]:
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads != 0 or num_heads // num_kv_heads > MAX_GROUP_SIZE:
        expected = f"a divisor of num_attention_heads ({num_heads}) with at most {MAX_GROUP_SIZE} heads in a group"
        raise reader.error("num_key_value_heads", expected, num_kv_heads)
    head_dim = reader.integer("head_dim", hidden_size // num_heads)
    if head_dim % HEAD_DIM_MULTIPLE != 0:
        raise reader.error("head_dim", f"a multiple of {HEAD_DIM_MULTIPLE}", head_dim)
    return num_kv_heads, head_dim
