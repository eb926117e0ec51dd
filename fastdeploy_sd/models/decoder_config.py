"""DecoderConfig: a decoder and each of its layers, read from config.json by models/<family>.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fastdeploy_sd.models.attention_config import (
    HEAD_DIM_MULTIPLE,
    MAX_GROUP_SIZE,
    MAX_HEAD_DIM,
    MAX_LATENT_DIM,
    AnyAttention,
    AttentionConfig,
    LatentAttentionConfig,
)
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, FieldReader, Integer, Number
from fastdeploy_sd.models.layer_windows import read_windows
from fastdeploy_sd.models.rope_config import THETA, RopeConfig, read_rope, scaled_context

MAX_EXPERTS, MAX_GROUPS = 65_536, 32
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
        num_groups, num_chosen_groups: experts are chosen from some of the ranges of equal length; see ops.moe.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
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

    attention: AnyAttention
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
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embeddings of its layers, each once."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers))

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


def integer_fields(low: int, high: int, *names: str) -> dict[str, Integer]:
    return dict.fromkeys(names, Integer(low, high))


GRANITE_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
# Every key that is read, of all families. Bounds are far beyond any model, and small enough to count up to.
FIELDS: Mapping[str, Field] = {
    **integer_fields(1, MAX_I32, "vocab_size"),
    **integer_fields(1, 1 << 24, "hidden_size", "intermediate_size", "moe_intermediate_size"),
    **integer_fields(1, 10_000, "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "head_dim": Integer(1, MAX_HEAD_DIM),
    "max_position_embeddings": Integer(2, MAX_I32),
    "rms_norm_eps": Number(1e-30, 1),
    "rope_theta": THETA,
    "tie_word_embeddings": Boolean(),
    "attention_bias": Boolean(),
    "mlp_bias": Boolean(),
    "use_bias": Boolean(),
    **integer_fields(1, MAX_I32, "sliding_window"),
    "use_sliding_window": Boolean(),
    "max_window_layers": Integer(0, 10_000, 28),
    # Qwen3
    "num_experts": Integer(0, MAX_EXPERTS),
    "num_local_experts": Integer(0, MAX_EXPERTS, 0),
    "num_experts_per_tok": Integer(1, MAX_EXPERTS),
    "norm_topk_prob": Boolean(),
    "decoder_sparse_step": Integer(0, 10_000, 1),
    # ERNIE 4.5
    "moe_num_experts": Integer(1, MAX_EXPERTS),
    "moe_k": Integer(1, MAX_EXPERTS),
    "moe_num_shared_experts": Integer(0, MAX_EXPERTS, 0),
    "moe_layer_interval": Integer(1, 10_000, 1),
    "moe_norm_min": Number(0, 1, 1e-12),
    "moe_use_aux_free": Boolean(default=True),
    "moe_norm_gate_logits": Boolean(default=True),
    # DeepSeek's router, as GLM has it
    **integer_fields(1, MAX_EXPERTS, "n_routed_experts"),
    "n_shared_experts": Integer(0, MAX_EXPERTS, 1),
    **dict.fromkeys(("n_group", "topk_group"), Integer(1, MAX_GROUPS, 1)),
    "routed_scaling_factor": Number(1e-6, 1e6, 1.0),
    "first_k_dense_replace": Integer(0, 10_000, 1),
    "use_qk_norm": Boolean(),
    # DeepSeek's attention
    **integer_fields(1, 1 << 24, "q_lora_rank"),
    **integer_fields(1, MAX_LATENT_DIM, "kv_lora_rank", "qk_rope_head_dim"),
    **integer_fields(1, 10_000, "qk_nope_head_dim", "v_head_dim"),
    "rope_interleave": Boolean(default=True),
    # gpt-oss
    "swiglu_limit": Number(1e-3, 1e6),
    # Several families
    "partial_rotary_factor": Number(0, 1, 1.0),
    # SmolLM3
    "no_rope_layer_interval": Integer(1, 10_000, 4),
    # Gemma
    "query_pre_attn_scalar": Number(1, 1e6, 256.0),
    "sliding_window_pattern": Integer(1, 10_000),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Number(1e-3, 1e6)),
    "rope_local_base_freq": THETA,
    "rms_norm_offset": Number(0, 1, 1.0),
    # Granite
    **dict.fromkeys(GRANITE_MULTIPLIERS, Number(1e-6, 1e6, 1.0)),
}
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
