"""Finds the multi-token prediction (MTP) layers of a checkpoint, under the names of ERNIE, Qwen, GLM and DeepSeek.

ERNIE keeps them in a directory of their own, `<model>/mtp`, or with the other weights: `ernie.mtp_emb_norm.<j>`,
`ernie.mtp_hidden_norm.<j>`, `ernie.mtp_linear_proj.<j>` and `ernie.mtp_block.<j>.*`, or the same under `model.`.
Qwen3-Next and Qwen3.5 have `mtp.fc`, `mtp.pre_fc_norm_{embedding,hidden}`, `mtp.norm` and `mtp.layers.<j>`.
GLM and DeepSeek number them as layers that follow the decoder's: `model.layers.<n + j>.{enorm,hnorm,eh_proj}`,
`shared_head.{norm,head}`, `embed_tokens` and a decoder layer. Knows names and shapes, not layers.

Source: paddlepaddle/FastDeploy, fastdeploy/model_executor/models/{ernie4_5_mtp,glm4_mtp}.py, for names and layouts.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fastdeploy_sd.errors import CheckpointError, ConfigError, shown
from fastdeploy_sd.models.checkpoint import Checkpoint, Weights
from fastdeploy_sd.models.checkpoint.fields import is_token_id
from fastdeploy_sd.models.decoder_config import DecoderConfig, LayerConfig
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM
from fastdeploy_sd.models.drafters.drafter_kind import DRAFT_MODEL, KINDS, drafter_kind
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_draft_config
from fastdeploy_sd.models.weight_bytes import draft_bytes
from fastdeploy_sd.models.weights.layer_weights import LayerWeights
from fastdeploy_sd.models.weights.source import FLOATS, ModelSource
from fastdeploy_sd.models.weights.storages.registry import read_weight
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix, WeightPart
from fastdeploy_sd.types.shard import Shard

_PARAM = "speculative_config"
_ERNIE_NAME = re.compile(r"(model|ernie)\.mtp_emb_norm\.(\d+)\.weight")
_NUMBERED_NAME = re.compile(r"(model|ernie)\.layers\.(\d+)\.eh_proj\.weight")
_QWEN_NAME = re.compile(r"(mtp)\.layers\.(\d+)\.input_layernorm\.weight")
_WANTED = "tensors like ernie.mtp_emb_norm.0.weight, mtp.fc.weight or model.layers.<n>.eh_proj.weight"


class MtpRows(StrEnum):
    """Rows that an MTP layer reads: after a final norm or before it; or those that the first draft read."""

    POST_NORM = "post_norm"
    PRE_NORM = "pre_norm"
    TARGET = "target"


# Keys of config.json that no release has, and their values, of which the first is the default.
HIDDEN_KEY, HIDDEN = "mtp_hidden", (MtpRows.POST_NORM, MtpRows.PRE_NORM)
REFEED_KEY, REFEED = "mtp_refeed", (*HIDDEN, MtpRows.TARGET)


@dataclass(frozen=True, slots=True)
class MtpNames:
    """What the parts of MTP layers are called, with `{}` for a layer's number in the checkpoint.

    None = the layout has no such part, and the target's is used. `block` is the prefix of the decoder layers.
    """

    numbers: tuple[int, ...]
    block: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str | None = None
    embedding: str | None = None
    head: str | None = None


def find_names(checkpoint: ModelSource) -> MtpNames | None:
    """Return how a checkpoint names its MTP layers, None where it has none.

    Raises CheckpointError: the numbers have a gap, or are fewer than config.json says.
    """
    ernie = _numbers(checkpoint, _ERNIE_NAME)
    if ernie is not None:
        root, numbers = ernie
        parts = [f"{root}.mtp_{part}.{{}}" for part in ("emb_norm", "hidden_norm", "linear_proj")]
        return MtpNames(numbers, f"{root}.mtp_block", *parts)
    qwen = _numbers(checkpoint, _QWEN_NAME)
    if qwen is not None:
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return MtpNames(qwen[1], "mtp.layers", *norms, "mtp.fc", "mtp.norm")
    numbered = _numbers(checkpoint, _NUMBERED_NAME)
    if numbered is None:
        return None
    root, numbers = numbered
    parts = [f"{root}.layers.{{}}.{part}" for part in ("enorm", "hnorm", "eh_proj")]
    ends = [f"{root}.layers.{{}}.{part}" for part in ("shared_head.norm", "embed_tokens", "shared_head.head")]
    return MtpNames(numbers, f"{root}.layers", *parts, *ends)


def _numbers(checkpoint: ModelSource, pattern: re.Pattern[str]) -> tuple[str, tuple[int, ...]] | None:
    found = [match for match in map(pattern.fullmatch, checkpoint.names()) if match is not None]
    if not found:
        return None
    numbers = tuple(sorted(int(match[2]) for match in found))
    if numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
        raise CheckpointError(f"{checkpoint.path}: expected MTP layers numbered without a gap, got {numbers}")
    declared = checkpoint.config.get("num_nextn_predict_layers")
    if declared is not None and not is_token_id(declared):
        raise CheckpointError(
            f"{checkpoint.config_path}: num_nextn_predict_layers: expected a number of layers, got {shown(declared)}"
        )
    if declared is not None and declared > len(numbers):
        raise CheckpointError(
            f"{checkpoint.path}: num_nextn_predict_layers: expected as many MTP layers as are stored, {len(numbers)}, "
            f"got {declared}"
        )
    return found[0][1], numbers


class MtpWeights(LayerWeights):
    """DraftWeights of MTP layers, by role; layer j is the j-th of them, from 0. Raises as LayerWeights.

    Attributes:
        hidden: which rows of the target are read, one of HIDDEN.
        refeed: what the draft after one reads, one of REFEED: this one's rows, or again the target's.
    """

    drafts_at_once = False

    def __init__(self, checkpoint: ModelSource, config: DecoderConfig, names: MtpNames, num_target_layers: int) -> None:
        super().__init__(checkpoint, config, names.block)
        self.hidden, self.refeed = _choice(checkpoint, HIDDEN_KEY, HIDDEN), _choice(checkpoint, REFEED_KEY, REFEED)
        self._num_target_layers = num_target_layers
        self.checkpoint, self.path = checkpoint, checkpoint.path
        self.num_layers, self._names = len(names.numbers), names
        layer = LayerConfig(config.attentions[-1], config.dense)
        own = replace(config, layers=(layer,) * self.num_layers)
        has_router = [j for j in range(self.num_layers) if self.has_router(j)]
        if has_router and config.moe is None:
            raise CheckpointError(f"{checkpoint.path}: config.json: expected the experts of the MTP layers, found none")
        self.config = self._config = own if config.moe is None else own.with_experts(config.moe, has_router)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self._num_target_layers if self.hidden is MtpRows.PRE_NORM else FINAL_NORM,)

    def num_kv_layers(self, num_steps: int) -> int:
        """See DraftWeights: an only layer makes all drafts, several make one each."""
        return min(num_steps, self.num_layers)

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        """See DraftWeights; of layers that have neither an embedding nor a head of their own."""
        return draft_bytes(self.config, scheme, self.num_kv_layers(num_steps), head, shard)

    def verify(self, num_steps: int) -> None:
        """See DraftWeights: look for every tensor of the layers, as DecoderWeights.verify does."""
        if self.num_layers > 1 and num_steps > self.num_layers:
            raise ConfigError(
                f"speculative_config.num_model_steps: expected at most the {self.num_layers} MTP layers of "
                f"{self.path}, each of which makes one step, got {num_steps}",
                param=_PARAM,
            )
        for j in range(self.num_kv_layers(num_steps)):
            for look_up in (self.embedding_norm, self.hidden_norm, self.projection, self.output_norm):
                look_up(j)
            self.verify_layer(j)

    def embedding_norm(self, j: int) -> Weights:
        """Return f32[H]."""
        return self._norm(self._names.embedding_norm, j)

    def hidden_norm(self, j: int) -> Weights:
        """Return f32[H]."""
        return self._norm(self._names.hidden_norm, j)

    def projection(self, j: int) -> tuple[WeightMatrix, Weights | None]:
        """Return [H, 2 * H] over normed embedding | normed hidden row, and its bias f32[H] or None."""
        name = self._name(self._names.projection, j)
        bias = f"{name}.bias"
        has_bias = bias in self._source
        weight = WeightMatrix((self._projection(name),))
        return weight, self._vector(bias, self.config.hidden_size) if has_bias else None

    def output_norm(self, j: int) -> Weights | None:
        """Return f32[H], or None for the target's final norm."""
        return None if self._names.output_norm is None else self._norm(self._names.output_norm, j)

    def embedding(self, j: int) -> WeightPart | None:
        """Return [V, H], or None for the target's table."""
        pattern = self._names.embedding
        name = "" if pattern is None else self._name(pattern, j)
        if f"{name}.weight" not in self._source:
            return None
        return read_weight(self._source, name, (self.config.vocab_size, self.config.hidden_size))

    def head(self, j: int) -> WeightMatrix | None:
        """Return [V, H], or None for the target's head."""
        name = "" if self._names.head is None else self._name(self._names.head, j)
        if f"{name}.weight" not in self._source:
            return None
        return self._matrix(name, self.config.vocab_size, self.config.hidden_size)

    def _projection(self, name: str) -> WeightPart:
        """It is never square, so its shape tells which way round its numbers are stored.

        Baidu's converter to PyTorch's layout leaves this one matrix as Paddle has it.
        """
        hidden, stored = self.config.hidden_size, f"{name}.weight"
        if stored in self._source and self._source.tensors[stored].dtype not in FLOATS:
            return read_weight(self._source, name, (hidden, 2 * hidden))
        name = stored
        is_transposed = name in self._source and self._source.shape(name) == (2 * hidden, hidden)
        shape = (2 * hidden, hidden) if is_transposed else (hidden, 2 * hidden)
        return FloatPart(name, self._source.tensor(name, shape), is_transposed)

    def _norm(self, pattern: str, j: int) -> Weights:
        return self._norm_weight(self._name(pattern, j), self.config.hidden_size)

    def _name(self, pattern: str, j: int) -> str:
        return pattern.format(self._names.numbers[j])

    def _layer(self, layer: int) -> str:
        return super()._layer(self._names.numbers[layer])


def _choice(checkpoint: ModelSource, key: str, options: Sequence[MtpRows]) -> MtpRows:
    value = checkpoint.config.get(key)
    if value is None:
        return options[0]
    if value not in [*options]:
        raise CheckpointError(
            f"{checkpoint.config_path}: {key}: expected one of {', '.join(options)}, got {shown(value)}"
        )
    return MtpRows(value)


def open_mtp_weights(target: ModelSource, target_config: DecoderConfig, directory: str | None) -> MtpWeights:
    """Open the MTP weights that belong to a target.

    They are in `directory`; None = in `<target>/mtp` if that exists, else inside the target's checkpoint.

    Raises ConfigError: there are none where they were looked for; CheckpointError: they are malformed, or do not fit.
    """
    checkpoint, places = _choose(target, directory)
    names = find_names(checkpoint)
    if names is None:
        kind = drafter_kind(checkpoint)
        found = "none" if kind == DRAFT_MODEL else f"{KINDS[kind]} ({kind})"
        raise ConfigError(f"{_PARAM}.model: expected MTP weights ({_WANTED}) in {places}, found {found}", param=_PARAM)
    config = (
        target_config if checkpoint is target else read_draft_config(checkpoint.config, str(checkpoint.config_path))
    )
    _verify_fits(checkpoint.path, config, target.path, target_config)
    return MtpWeights(checkpoint, config, names, target_config.num_layers)


def _choose(target: ModelSource, directory: str | None) -> tuple[ModelSource, str]:
    """Return the checkpoint to look into and, for the error, the places that were considered."""
    if directory is not None:
        path = pathlib.Path(directory)
        if path.is_dir() and path.resolve() == target.path.resolve():
            return target, str(path)
        if not path.is_dir():
            raise ConfigError(f"{_PARAM}.model: expected a checkpoint directory, got {directory!r}", param=_PARAM)
        return Checkpoint(path), str(path)
    path = target.path / "mtp"
    if path.is_dir():
        return Checkpoint(path), str(path)
    return target, f"{path} or {target.path}"


def _verify_fits(path: pathlib.Path, draft: DecoderConfig, target_path: pathlib.Path, target: DecoderConfig) -> None:
    for name in ("hidden_size", "vocab_size", "num_kv_heads", "head_dim"):
        is_attention = name in ("num_kv_heads", "head_dim")
        got, wanted = (getattr(c.attentions[-1] if is_attention else c, name) for c in (draft, target))
        if got != wanted:
            raise CheckpointError(
                f"{path}: {name}: expected {wanted} as in the target {target_path}, whose KV blocks, embedding and "
                f"head the MTP layers share, got {got}"
            )
