"""Finds the weights of Medusa and Hydra heads by role. Knows names and shapes, not heads.

Sources, for names and layouts: FasterDecoding/Medusa, zankner/Hydra, foundation-model-stack/fms-extras and vLLM.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.errors import CheckpointError, ConfigError, shown
from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder_config import DecoderConfig, LayerConfig
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM
from fastdeploy_sd.models.drafters.drafter_kind import open_drafter
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.models.weight_bytes import layer_bytes
from fastdeploy_sd.models.weights.layer_weights import LayerWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.bf16 import storage, widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import packed_bytes
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.shard import Shard

_PARAM = "speculative_config"
_HYDRA_ARCHS = ("mlp", "prefix-mlp")


class Linear(NamedTuple):
    """A matrix [N, K] and its bias f32[N], if it has one."""

    weight: WeightMatrix
    bias: Weights | None = None


class HeadsWeights(ABC):
    """DraftWeights of a chain of heads, which read the target's newest hidden row and no KV.

    Attributes:
        num_heads: each makes one draft.
        width: outputs of every linear layer but the output heads.
        token_map: the target's token of each output of the heads; None = it has the same number.
    """

    num_layers, drafts_at_once = 1, False
    token_map: I32 | None = None

    def __init__(self, checkpoint: ModelSource, target: DecoderConfig, num_heads: int, width: int) -> None:
        self.checkpoint, self.num_heads, self.width = checkpoint, num_heads, width
        self.config = replace(target, hidden_size=width, layers=())
        self._hidden_size = target.hidden_size

    @property
    def reads(self) -> tuple[int, ...]:
        return (FINAL_NORM,)

    @abstractmethod
    def linears(self, i: int) -> list[Linear]:
        """Return the linear layers of head i, in their order."""

    @abstractmethod
    def head(self, i: int) -> Linear | None:
        """Return the output head [V, width] of head i; None = the target's."""

    def embedding(self, i: int) -> FloatPart | None:
        """Return the table [V, width] that head i looks tokens up in; None = the target's, or it reads no token."""
        return None

    def verify(self, num_steps: int) -> None:
        """See DraftWeights."""
        if num_steps > self.num_heads:
            raise ConfigError(
                f"{_PARAM}.num_speculative_tokens, num_model_steps: expected at most {self.num_heads}, as "
                f"{self.checkpoint.path} has so many heads and each makes one draft, got {num_steps}",
                param=_PARAM,
            )
        for i in range(num_steps):
            self.linears(i)
            self.head(i)
            self.embedding(i)

    def num_kv_layers(self, num_steps: int) -> int:
        return 0

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        """See DraftWeights. What several heads share is counted once."""
        own, found, tables = DecoderShard(self.config, shard), dict[str, int](), dict[str, int]()
        for i in range(num_steps):
            for linear in self.linears(i):
                columns = linear.weight.shape[1]
                found[linear.weight.name] = packed_bytes(columns, len(own.hidden()), scheme.linear)
            output, table = self.head(i), self.embedding(i)
            fmt = scheme.lm_head if head is None else head
            if output is not None or head is not None:
                name = "" if output is None else output.weight.name
                found[name] = packed_bytes(self.width, len(own.vocabulary()), fmt)
            if table is not None:
                tables[table.name] = table.data.size * storage(scheme.dtype).itemsize
        return sum(found.values()) + sum(tables.values())

    def _linear(self, name: str, rows: int, columns: int) -> Linear:
        weight = FloatPart(f"{name}.weight", self.checkpoint.tensor(f"{name}.weight", (rows, columns)))
        return Linear(WeightMatrix((weight,)), self._vector(f"{name}.bias", rows))

    def _vector(self, name: str, size: int) -> Weights | None:
        return widen(self.checkpoint.tensor(name, (size,))) if name in self.checkpoint else None

    def _output(self, names: Sequence[str]) -> Linear | None:
        """Return the output head that is there, by the first of these names."""
        name = next((name for name in names if f"{name}.weight" in self.checkpoint), None)
        if name is None and self.token_map is None:
            return None
        return self._linear(name or names[0], self.config.vocab_size, self.width)


class MedusaWeights(HeadsWeights):
    """Medusa heads: residual blocks over the target's row, and an output head each.

    Two layouts: `<i>.<block>.linear` and `<i>.<number of blocks>`; `blocks.<i>.layers.<block>` and `lm_heads.<i>`.
    """

    def __init__(self, checkpoint: ModelSource, target: DecoderConfig) -> None:
        prefix = prefix_of(checkpoint, "medusa_heads.", "medusa_head.")
        pairs = _numbers(checkpoint, prefix, r"(\d+)\.(\d+)\.linear\.weight")
        self._names = f"{prefix}{{}}.{{}}.linear", f"{prefix}{{}}.{{}}"
        if not pairs:
            pairs = _numbers(checkpoint, prefix, r"blocks\.(\d+)\.layers\.(\d+)\.weight")
            self._names = f"{prefix}blocks.{{}}.layers.{{}}", f"{prefix}lm_heads.{{}}"
        super().__init__(checkpoint, target, _count(checkpoint, {i for i, _ in pairs}, "heads"), target.hidden_size)
        self._num_blocks = _count(checkpoint, {j for _, j in pairs}, "blocks of a head")
        name = f"{prefix}token_map"
        if name in checkpoint:
            self.token_map = self._read_token_map(name)
            self.config = replace(self.config, vocab_size=len(self.token_map))

    def linears(self, i: int) -> list[Linear]:
        return [self._linear(self._names[0].format(i, j), self.width, self.width) for j in range(self._num_blocks)]

    def _read_token_map(self, name: str) -> I32:
        tokens = self.checkpoint.tensor(name, self.checkpoint.shape(name), ("I64", "I32")).astype(np.int64)
        vocab_size = self.config.vocab_size
        if tokens.ndim != 1 or len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
            expected = f"token ids below {vocab_size}"
            raise CheckpointError(f"{self.checkpoint.path}: tensor {name!r}: expected {expected}, got others")
        return tokens.astype(np.int32)

    def head(self, i: int) -> Linear | None:
        shared = 0 if self.checkpoint.config.get("original_lm_head") is True else i
        return self._output([self._names[1].format(shared, self._num_blocks)])


class HydraWeights(HeadsWeights):
    """Hydra heads: each reads what the head before it read, and the embedding of that head's token.

    Hydra++ has a decoder layer before them, whose normalised output stands for the target's rows.

    Attributes:
        is_grounded: else each head reads only the row, as Medusa's.
        prefix_layer: of Hydra++, else None.
    """

    def __init__(self, checkpoint: ModelSource, target: DecoderConfig) -> None:
        self._verify_config(checkpoint)
        found = _numbers(checkpoint, "", r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
        super().__init__(checkpoint, target, _count(checkpoint, {i for i, _ in found}, "heads"), target.hidden_size)
        # A dropout that has no weights may stand before each.
        self._blocks = [[j for head, j in found if head == i] for i in range(self.num_heads)]
        self.is_grounded = f"{self._block(0, 0)}.res_connection.weight" in checkpoint
        self.prefix_layer: LayerWeights | None = None
        if "prefix_embeding_layer.layers.0.input_layernorm.weight" in checkpoint:
            attention = target.attentions[0]
            if not isinstance(attention, AttentionConfig):
                wanted = "prefix_embeding_layer: expected none with a target of latent attention, got one"
                raise CheckpointError(f"{checkpoint.path}: {wanted}")
            layer = LayerConfig(
                AttentionConfig(attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.rope),
                replace(target.dense, bias=False),
            )
            self.config = replace(self.config, layers=(layer,), norm_offset=0.0, residual_scale=1.0)
            self.prefix_layer = LayerWeights(checkpoint, self.config, "prefix_embeding_layer.layers")

    @staticmethod
    def _verify_config(checkpoint: ModelSource) -> None:
        config = checkpoint.config
        arch, offset = config.get("hydra_head_arch", "mlp"), config.get("hidden_state_offset", 0)
        if arch not in _HYDRA_ARCHS:
            wanted = f"hydra_head_arch: expected {' or '.join(_HYDRA_ARCHS)}, got {shown(arch)}"
            raise CheckpointError(f"{checkpoint.config_path}: {wanted}")
        if offset != 0:
            wanted = f"hidden_state_offset: expected 0, the target's last row, got {shown(offset)}"
            raise CheckpointError(f"{checkpoint.config_path}: {wanted}")

    def num_kv_layers(self, num_steps: int) -> int:
        return len(self.config.layers)

    def verify(self, num_steps: int) -> None:
        super().verify(num_steps)
        if self.prefix_layer is not None:
            self.prefix_layer.verify_layer(0)
            self.prefix_norm()

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        layers = sum(layer_bytes(self.config, scheme, layer, shard) for layer in self.config.layers)
        return layers + super().num_bytes(scheme, num_steps, head, shard)

    def prefix_norm(self) -> Weights:
        """Return f32[H], of the norm after that layer."""
        return widen(self.checkpoint.tensor("prefix_embeding_layer.norm.weight", (self.width,)))

    def linears(self, i: int) -> list[Linear]:
        """Return those of the blocks; where heads are grounded, that which goes around the first block is second."""
        first = self._linear(f"{self._block(i, 0)}.linear", self.width, self._num_inputs(i))
        rest = [
            self._linear(f"{self._block(i, j)}.linear", self.width, self.width) for j in range(1, len(self._blocks[i]))
        ]
        if not self.is_grounded:
            return [first, *rest]
        return [first, self._linear(f"{self._block(i, 0)}.res_connection", self.width, self._num_inputs(i)), *rest]

    def head(self, i: int) -> Linear | None:
        return self._output((f"hydra_lm_head.{i}", f"hydra_lm_head.{i}.1"))

    def _num_inputs(self, i: int) -> int:
        return self.width * (i + 2 if self.is_grounded else 1)

    def _block(self, i: int, j: int) -> str:
        return f"hydra_mlp.{i}.{self._blocks[i][j]}"


def prefix_of(checkpoint: ModelSource, *prefixes: str) -> str:
    names = checkpoint.names()
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), "")


def _numbers(checkpoint: ModelSource, prefix: str, pattern: str) -> list[tuple[int, int]]:
    """Return the pairs of numbers in names that fit, sorted."""
    found = map(re.compile(re.escape(prefix) + pattern).fullmatch, checkpoint.names())
    return sorted({(int(match[1]), int(match[2])) for match in found if match is not None})


def _count(checkpoint: ModelSource, numbers: set[int], what: str) -> int:
    if numbers != set(range(len(numbers))) or not numbers:
        got = ", ".join(map(str, sorted(numbers))) or "none"
        raise CheckpointError(f"{checkpoint.path}: expected {what} numbered from 0 without a gap, got {got}")
    return len(numbers)


def open_medusa(target: ModelSource, target_config: DecoderConfig, place: str | None) -> MedusaWeights:
    """Return the Medusa heads in a folder; not read yet. Raises as open_drafter; CheckpointError: they do not fit."""
    return MedusaWeights(open_drafter(place, "medusa"), target_config)


def open_hydra(target: ModelSource, target_config: DecoderConfig, place: str | None) -> HydraWeights:
    """Return the Hydra heads in a folder; as open_medusa."""
    return HydraWeights(open_drafter(place, "hydra"), target_config)
