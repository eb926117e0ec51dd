"""The kinds of attention that a decoder's layers may have, and what their kernels can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastdeploy_sd.models.rope_config import RopeConfig

MAX_HEAD_DIM, HEAD_DIM_MULTIPLE, MAX_GROUP_SIZE = 256, 16, 16
MAX_LATENT_DIM, MAX_LATENT_HEADS = 640, 256
MAX_DELTA_DIM, DELTA_DIM_MULTIPLE, MAX_CONV_WIDTH = 256, 16, 8


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Self-attention of a layer.

    Attributes:
        rope: None = q and k do not know their positions.
        window: tokens that a token attends to, itself included; None = all before it.
        softcap: c: scores become c * tanh(score / c); None = they stay.
        scale: of scores; None = head_dim^-0.5.
        sinks: each head's softmax counts a score of its own besides those of keys.
        output_gate: what heads return is multiplied by the sigmoid of a projection of the layer's input.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    output_gate: bool = False

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
class LatentAttentionConfig:
    """Self-attention of a layer over one latent vector per token, which all heads read as key and as value.

    Source: arXiv:2405.04434, section 2.1.

    Attributes:
        key_dim: elements of a query head that meet the latent vector; rope.rotary_dim further ones rotate.
        value_dim: elements that a head makes of the latent vectors.
        latent_dim: of the vector, without the elements of the key that rotate.
        query_latent_dim: of the vector that queries are made of; None = they are made of the hidden row.
        scale: of scores.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    latent_dim: int
    query_latent_dim: int | None
    rope: RopeConfig
    scale: float
    num_kv_heads: ClassVar[int] = 1
    window: ClassVar[int | None] = None

    @property
    def head_dim(self) -> int:
        """What the cache keeps of a token."""
        return self.latent_dim + self.rope.rotary_dim

    @property
    def query_dim(self) -> int:
        """Of a query head as it is projected."""
        return self.key_dim + self.rope.rotary_dim

    @property
    def q_size(self) -> int:
        """What the output projection reads."""
        return self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """A gated delta net in the place of self-attention: each value head keeps a matrix of fixed size, not every token.

    Source: arXiv:2412.06464, sections 3.1 and 3.4.

    Attributes:
        num_value_heads: a multiple of num_key_heads; neighbours share a key head.
        conv_width: tokens that the convolution over q, k and v sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    # What attention has under these names: what ranks share out, and what the output projection reads.

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_heads

    @property
    def q_size(self) -> int:
        return self.value_size


# The kinds of attention that a layer may have.
AnyAttention = AttentionConfig | LatentAttentionConfig
# And what may be in its place.
AnyMixer = AnyAttention | GatedDeltaConfig
