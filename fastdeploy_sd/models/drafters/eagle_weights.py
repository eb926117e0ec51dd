"""Finds the weights of an EAGLE head by role. Needs no Paddle.

EAGLE-1 and 2 share their layout: `fc` over embedding | hidden row, and a decoder layer without an input norm. EAGLE-3
has `fc` over rows of several layers of the target, a first layer `midlayer` or `layers.0` that attends to normed
embedding | normed hidden row, a norm and a head over a vocabulary of its own. P-EAGLE adds `mask_hidden`, in place
of rows that the target has not computed yet.

Source: arXiv:2401.15077, arXiv:2503.01840; vllm-project/speculators, for P-EAGLE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.drafter_kind import P_EAGLE, drafter_kind, open_drafter
from fastdeploy_sd.models.drafters.eagle_config import EagleConfig, read_eagle, read_eagle3, read_p_eagle
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.models.weight_bytes import layer_bytes
from fastdeploy_sd.models.weights.layer_weights import LayerWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.bf16 import storage, widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import packed_bytes
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from fastdeploy_sd.types import F32, I32, I64
from fastdeploy_sd.types.shard import Shard

# Of no use when drafting: which tokens have an own one, and tables of rotary embeddings.
_UNUSED = ("t2d", "rotary_emb.inv_freq")


class EagleWeights(LayerWeights):
    """DraftWeights of an EAGLE-1 or EAGLE-2 head, by role; raises as LayerWeights."""

    _noun = "an EAGLE head"

    def __init__(self, checkpoint: ModelSource, read: EagleConfig) -> None:
        super().__init__(checkpoint, read.decoder, "layers")
        self.checkpoint, self.read, self.num_layers = checkpoint, read, read.decoder.num_layers
        self.config = self._config = read.decoder.with_attention(self._with_parts)

    def _with_parts(self, layer: int, attention: AttentionConfig) -> AttentionConfig:
        """Return the attention with the biases and norms that the layer has."""
        name = f"{self._layer(layer)}.self_attn"
        return replace(
            attention,
            qkv_bias=f"{name}.q_proj.bias" in self._source,
            output_bias=f"{name}.o_proj.bias" in self._source,
            qk_norm=f"{name}.q_norm.weight" in self._source,
        )

    @property
    def reads(self) -> tuple[int, ...]:
        return self.read.reads

    @property
    def drafts_at_once(self) -> bool:
        return self.read.mask_token is not None

    def input_norms(self, layer: int) -> Sequence[Callable[[int], Weights]]:
        return super().input_norms(layer) if layer else ()

    def verify(self, num_steps: int) -> None:
        """See DraftWeights: look up every tensor, and find those that would not be used."""
        for look_up in self._look_ups():
            look_up()
        for layer in range(self.num_layers):
            self.verify_layer(layer)
        unused = [name for name in self._source.unread() if not name.endswith(_UNUSED)]
        if unused:
            raise CheckpointError(
                f"{self._source.path}: expected only tensors of {self._noun} as config.json tells of it, got"
                f" {len(unused)} more: {', '.join(map(shown, unused[:3]))}"
            )

    def _look_ups(self) -> Sequence[Callable[[], object]]:
        return self.fc, self.embedding, self.head, self.token_map

    def num_kv_layers(self, num_steps: int) -> int:
        """See DraftWeights: all layers make every draft."""
        return self.num_layers

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        """See DraftWeights: with its own head and embedding, where it has some."""
        config, own, has_head = self.config, DecoderShard(self.config, shard), self.head() is not None
        head = (head or scheme.lm_head) if has_head else head
        total = 0 if head is None else packed_bytes(config.hidden_size, len(own.vocabulary()), head)
        if (table := self.embedding()) is not None:
            total += table.data.size * storage(scheme.dtype).itemsize
        if (fc := self.fc()) is not None:
            total += packed_bytes(fc[0].shape[1], len(own.hidden()), scheme.linear)
        return total + sum(
            layer_bytes(config, scheme, layer, shard, self._attention_width(i)) for i, layer in enumerate(config.layers)
        )

    def fc(self) -> tuple[WeightMatrix, Weights | None] | None:
        """Return [H, 2 * H] over embedding | hidden row, and its bias f32[H] or None."""
        return self._fc(2 * self.config.hidden_size)

    def _fc(self, width: int) -> tuple[WeightMatrix, Weights | None]:
        name, hidden = self._name("fc"), self.config.hidden_size
        matrix, has_bias = self._matrix(name, hidden, width), self._has("bias", f"{name}.bias")
        return matrix, self._vector(f"{name}.bias", hidden) if has_bias else None

    def embedding(self) -> FloatPart | None:
        """Return None: the table is the target's. Files may hold a copy of it."""
        self._table()
        return None

    def _table(self) -> FloatPart | None:
        """Return the file's [V, H]; None = it has none, where the target's would do."""
        name = self._name("embed_tokens") + ".weight"
        if name not in self._source and self.config.hidden_size == self.read.target_size:
            return None
        return FloatPart(name, self._source.tensor(name, (self.read.vocab_size, self.config.hidden_size)))

    def head(self) -> WeightMatrix | None:
        """Return [V of the drafts, H], or None for the target's head."""
        name, size = self._name("lm_head"), self.config.vocab_size
        is_targets = (size, self.config.hidden_size) == (self.read.vocab_size, self.read.target_size)
        if f"{name}.weight" not in self._source and is_targets:
            return None
        return self._matrix(name, size, self.config.hidden_size)

    def token_map(self) -> I32 | None:
        """Return the target's token of each of the head's i32[V of the drafts]; None = it has the same number.

        The file has what is added to the number.
        """
        name, size = self._name("d2t"), self.config.vocab_size
        if name not in self._source and size == self.read.vocab_size:
            return None
        tokens: I64 = self._source.tensor(name, (size,), ("I64", "I32")).astype(np.int64) + np.arange(size)
        if (np.diff(tokens) <= 0).any() or not 0 <= tokens[0] <= tokens[-1] < self.read.vocab_size:
            raise CheckpointError(
                f"{self._source.path}: tensor {name!r}: expected what is added to draft tokens to give tokens of the"
                f" target in their order, below {self.read.vocab_size}, got others"
            )
        return tokens.astype(np.int32)

    def _has(self, flag: str, name: str) -> bool:
        """Whether the head has a part, as config.json says or else the tensors."""
        return self.read.flags.get(flag, name in self._source)

    def _name(self, part: str) -> str:
        """Return a tensor's name without its ending; files may put `model.` before it."""
        root = "model." if any(name.startswith(f"model.{part}") for name in self._source.names()) else ""
        return f"{root}{part}"

    def _layer(self, layer: int) -> str:
        return self._name(f"{self._prefix}.{layer}")


class Eagle3Weights(EagleWeights):
    """DraftWeights of an EAGLE-3 head, by role; raises as LayerWeights."""

    def input_norms(self, layer: int) -> Sequence[Callable[[int], Weights]]:
        return (self.input_norm,) if layer else (self.input_norm, self.hidden_norm)

    def hidden_norm(self, layer: int) -> Weights:
        """Return f32[H]: the norm of hidden rows before attention; `input_norm` is that of embeddings."""
        return self._norm_weight(f"{self._layer(layer)}.hidden_norm", self.config.hidden_size)

    def output_norm(self) -> Weights:
        """Return f32[H]."""
        return self._norm_weight(self._name("norm"), self.config.hidden_size)

    def fc(self) -> tuple[WeightMatrix, Weights | None] | None:
        """Return [H, A * Ht] over the rows of A layers, and its bias f32[H] or None; None = a row is read as it is."""
        if self.read.reads[0] < 0:
            return None
        return self._fc(len(self.reads) * self.read.target_size)

    def embedding(self) -> FloatPart | None:
        """Return [V, H], or None for the target's table."""
        return self._table()

    def fc_norm(self) -> Weights | None:
        """Return the norm f32[A * Ht] of what `fc` reads, if it has one."""
        name = self._name("input_norm")
        has_norm = self._has("norm_before_fc", f"{name}.weight")
        return self._norm_weight(name, len(self.reads) * self.read.target_size) if has_norm else None

    def row_norms(self) -> Sequence[Weights] | None:
        """Return the norms f32[Ht] of each row that `fc` reads, if it has some."""
        names = [self._name(f"fc_norm.{i}") for i in range(len(self.reads))]
        has_norms = self._has("fc_norm", f"{names[0]}.weight")
        return [self._norm_weight(name, self.read.target_size) for name in names] if has_norms else None

    def mask_hidden(self) -> F32 | None:
        """Return f32[H], in place of a hidden row that is not computed yet; None = drafts are made one by one."""
        if (stored := self._mask_rows()) is None:
            return None
        rows = widen(stored).reshape(len(self.reads), self.read.target_size)
        if (each := self.row_norms()) is not None:
            rows = np.array([_normed(row, norm, self.config.norm_eps) for row, norm in zip(rows, each, strict=True)])
        side_by_side: F32 = rows.reshape(-1)
        if (whole := self.fc_norm()) is not None:
            side_by_side = _normed(side_by_side, whole, self.config.norm_eps)
        if (fc := self.fc()) is None:
            return side_by_side
        matrix, bias = fc
        projected = widen(matrix.to_array()) @ side_by_side
        return np.asarray(projected if bias is None else projected + widen(bias), np.float32)

    def _mask_rows(self) -> Weights | None:
        """Return [1, 1, A * Ht], what `mask_hidden` is made from."""
        shape = (1, 1, len(self.reads) * self.read.target_size)
        return self._source.tensor(self._name("mask_hidden"), shape) if self.drafts_at_once else None

    def _look_ups(self) -> Sequence[Callable[[], object]]:
        return *super()._look_ups(), self.output_norm, self.fc_norm, self.row_norms, self._mask_rows

    def _attention_width(self, layer: int) -> int:
        return (1 if layer else 2) * self.config.hidden_size

    def _layer(self, layer: int) -> str:
        is_named = layer == 0 and any("midlayer." in name for name in self._source.names())
        return self._name("midlayer") if is_named else super()._layer(layer)


def open_eagle(target: ModelSource, target_config: DecoderConfig, place: str | None) -> EagleWeights:
    """Open the EAGLE-1 or EAGLE-2 head in a folder; raises as open_drafter and read_eagle."""
    checkpoint = open_drafter(place, "eagle")
    return EagleWeights(checkpoint, read_eagle(checkpoint, target_config))


def open_eagle3(target: ModelSource, target_config: DecoderConfig, place: str | None) -> Eagle3Weights:
    """Open the EAGLE-3 or P-EAGLE head in a folder; raises as open_drafter and read_eagle3."""
    checkpoint = open_drafter(place, "eagle3")
    read = read_p_eagle if drafter_kind(checkpoint) == P_EAGLE else read_eagle3
    return Eagle3Weights(checkpoint, read(checkpoint, target_config))


def _normed(x: F32, weight: Weights, eps: float) -> F32:
    return np.asarray(x / np.sqrt(np.mean(x * x) + eps) * widen(weight), np.float32)
