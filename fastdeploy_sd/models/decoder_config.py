"""DecoderConfig: a decoder and each of its layers, read from config.json by models/<family>.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, FieldReader, Integer, Number
from fastdeploy_sd.models.rope_config import THETA, read_rope, scaled_context
from fastdeploy_sd.ops.rope_table import RopeScaling

MAX_EXPERTS = 65_536
# What the attention kernels do.
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE, MAX_GROUP_SIZE = 256, 16, 16
# Layer types in config.json.
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Self-attention of a layer.

    Attributes:
        window: tokens that a token attends to, itself included, None = all before it.
        softcap: c: scores become c * tanh(score / c); None = they stay.
        scale: of scores; None = head_dim ** -0.5.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A dense feed-forward network; `bias`: whether its linear layers have one."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture-of-experts feed-forward network. Its linear layers have no bias.

    Attributes:
        num_experts_field: what config.json calls `num_experts`, for errors.
        normalize, norm_min: divide the chosen weights by max(their sum, norm_min).
        selection_bias: a bias is added to the probabilities for choosing experts only.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    normalize: bool = True
    norm_min: float = 0.0
    selection_bias: bool = False
    num_experts_field: str = "num_experts"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. The layers of a model may differ."""

    attention: AttentionConfig
    mlp: DenseConfig | MoeConfig


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer.

    Attributes:
        dense, moe: the feed-forward networks that config.json describes. Each layer has one of them, draft layers too.
        max_position: the longest context, with what rotary scaling adds.
        rope_interleaved: pairs (2i, 2i+1) instead of (i, i + rotary_dim / 2).
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    dense: DenseConfig
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_interleaved: bool = False
    tie_word_embeddings: bool = False
    moe: MoeConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def with_experts(self, moe: MoeConfig, layers: Collection[int]) -> DecoderConfig:
        """Return the decoder whose layers of these numbers are mixtures of experts."""
        changed = [replace(layer, mlp=moe) if i in layers else layer for i, layer in enumerate(self.layers)]
        return replace(self, layers=tuple(changed), moe=moe)


def integer_fields(low: int, high: int, *names: str) -> dict[str, Integer]:
    return dict.fromkeys(names, Integer(low, high))


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


def read_decoder(
    reader: FieldReader,
    activations: tuple[str, ...] = ("silu",),
    *,
    mlp_bias: bool = False,
    rope_interleaved: bool = False,
    **attention: bool,
) -> DecoderConfig:
    """Read what every family writes under the same names: a decoder whose layers are alike and dense.

    `activations` are names of SiLU, `attention` flags of AttentionConfig.

    Raises CheckpointError: a key is missing, mistyped, out of range, or asks for something unsupported.
    """
    reader.require_neutral({**_NEUTRAL, "hidden_act": activations})
    num_heads, hidden_size = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    max_position = reader.integer("max_position_embeddings")
    num_kv_heads, head_dim = _read_heads(reader, num_heads, hidden_size)
    theta, scaling = read_rope(reader, max_position)
    dense = DenseConfig(reader.integer("intermediate_size"), mlp_bias)
    layer = LayerConfig(AttentionConfig(num_heads, num_kv_heads, head_dim, **attention), dense)
    windows = read_windows(reader, reader.integer("num_hidden_layers"))
    return DecoderConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple([replace(layer, attention=replace(layer.attention, window=window)) for window in windows]),
        dense=dense,
        max_position=scaled_context(scaling, max_position),
        norm_eps=reader.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_interleaved=rope_interleaved,
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
    )


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


def read_windows(reader: FieldReader, num_layers: int) -> list[int | None]:
    """Return each layer's window: by `layer_types`, else with `use_sliding_window` from `max_window_layers` on.

    Some releases list draft layers too, so that there may be more types than layers. Raises CheckpointError: there are
    fewer, or another type.
    """
    types = reader.values.get("layer_types")
    if types is None:
        num_full = reader.integer("max_window_layers") if reader.boolean("use_sliding_window") else num_layers
        types = [_FULL if i < num_full else _SLIDING for i in range(num_layers)]
    elif not (
        isinstance(types, list) and len(types) >= num_layers and all(kind in (_FULL, _SLIDING) for kind in types)
    ):
        raise reader.error("layer_types", f"a list of {num_layers} '{_FULL}' or '{_SLIDING}'", types)
    kinds = types[:num_layers]
    window = reader.integer("sliding_window") if _SLIDING in kinds else None
    return [window if kind == _SLIDING else None for kind in kinds]
