"""Builds the target and the draft models of a server from their checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tqdm import tqdm

from fastdeploy_sd.config import Config, formats_of
from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.processors import own_processors
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.adapters import Adapters
from fastdeploy_sd.models.attention_config import LatentAttentionConfig
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM, DraftModel, DraftWeights, TargetParts
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices, packed_matrices
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.models.weights.shared_weights import SharedWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.worker.loading.draft_weights import (
    draft_head_format,
    draft_scheme,
    model_builder,
    own_scheme,
    parts_of_rank,
    used_layers,
)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """The target and its draft models.

    Attributes:
        drafts: by the names of their methods.
        weight_bytes: of all packed matrices.
    """

    decoder: Decoder
    drafts: Mapping[str, DraftModel]
    weight_bytes: int


def load_model(
    config: Config,
    checkpoint: ModelSource,
    decoder_config: DecoderConfig,
    draft_weights: Mapping[str, DraftWeights],
    group: TpGroup = ALONE,
    adapters: Adapters | None = None,
) -> LoadedModel:
    """Pack this rank's weights, with a progress bar, and build the layers over them; `adapters` get the target's.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        ConfigError: the folder of packed weights cannot be created, a model without experts has an expert format, a
            model of latent attention has a KV cache of bytes, or the model cannot be split among so many ranks.
    """
    _verify_experts(config, decoder_config)
    _verify_kv_format(config, decoder_config)
    shard = group.shard
    DecoderShard(decoder_config, shard, group.spread).verify()
    own_drafts = parts_of_rank(config, draft_weights, shard)
    groups = draft_groups(config, decoder_config, draft_weights, group)
    for name, (weights, part) in own_drafts.items():
        draft_shard = DecoderShard(weights.config, part, groups[name].spread)
        draft_shard.verify()
        draft_shard.hidden()
    scheme = QuantScheme.create(config.model.dtype, config.model.quantization)
    num_bytes = sum(source.num_bytes() for source in {checkpoint, *(w.checkpoint for w in draft_weights.values())})
    with (
        device().loading(num_bytes // shard.size),
        LoadProgress(num_bytes // shard.size, has_bar=shard.rank == 0) as progress,
        _packed(config, checkpoint, scheme, "target", group) as stores,
    ):
        packer = WeightPacker(checkpoint, stores[0], progress.add, config.model.keeps_integers, stores[1])
        decoder = Decoder(checkpoint, decoder_config, scheme, packer, group, adapters=adapters)
        # A copy of the head in another format comes from the target's checkpoint, so it is in the target's file.
        head = draft_head_format(config, scheme.lm_head)
        target = TargetParts(decoder, DecoderWeights(checkpoint, decoder_config), packer, head)
        drafts, num_steps = dict[str, DraftModel](), config.speculative.num_model_steps
        keeps_integers = packer.keeps_integers and config.speculative.quantization is None
        for name, (weights, _) in own_drafts.items():
            if shard.rank == 0 and weights.reads and weights.reads != (FINAL_NORM,):
                _log.info("%s reads what enters the layers %s", name, ", ".join(map(str, weights.reads)))
            source, draft_group = weights.checkpoint, groups[name]
            with _packed(config, source, own_scheme(config), f"draft-{name}", draft_group) as own_stores:
                draft_packer = WeightPacker(source, own_stores[0], progress.add, keeps_integers, own_stores[1])
                build = model_builder(name)
                drafts[name] = build(target, weights, draft_scheme(config), draft_packer, num_steps, draft_group)
        if shard.rank == 0:
            packer.log_kept()
        return LoadedModel(decoder, drafts, progress.num_packed_bytes)


def draft_groups(
    config: Config, target: DecoderConfig, drafts: Mapping[str, DraftWeights], group: TpGroup
) -> Mapping[str, TpGroup]:
    """Return how this rank has each draft model. One that rank 0 has whole has all of its experts there."""
    if config.speculative.draft_tensor_parallel_size == 1:
        return dict.fromkeys(drafts, ALONE)
    if group.experts is None:
        return dict.fromkeys(drafts, group)
    found, first_layer = dict[str, TpGroup](), len(target.expert_layers)
    for name, weights in drafts.items():
        found[name] = TpGroup(group.communicator, replace(group.experts, first_layer=first_layer))
        first_layer += len(used_layers(config, weights).expert_layers)
    return found


@contextmanager
def _packed(
    config: Config, source: ModelSource, scheme: QuantScheme, part: str, group: TpGroup
) -> Iterator[tuple[PackedMatrices | None, PackedMatrices | None]]:
    """Yield what is kept for a rank, see packed_matrices, and for the experts that are spread over ranks.

    Other weights are in a file of their own, and in memory that all engines share.
    """
    folder = config.model.packed_weights_folder
    with ExitStack() as stack:
        of_all = packed_matrices(folder, source, scheme, part, group.shard, _shared_weights(config))
        store = stack.enter_context(of_all)
        spread = None
        if group.spread is not None:
            of_experts = packed_matrices(folder, source, scheme, f"{part}-experts", group.spread)
            spread = stack.enter_context(of_experts)
        yield store, spread


def _shared_weights(config: Config) -> SharedWeights | None:
    """Return what this engine shares with others whose processors are on the same memory node; None = nothing."""
    path, nodes = config.parallel.weights_file, own_processors().nodes
    if path is None or device().kind != "cpu" or len(nodes) > 1:
        return None
    return SharedWeights(Path(path), nodes[0] if nodes else 0)


def _verify_experts(config: Config, decoder_config: DecoderConfig) -> None:
    """Refuse a format of experts on a model without them, unless it is that of the dense layers, as a name sets it."""
    formats = formats_of(config.model.quantization)
    if decoder_config.moe is None and formats.moe not in ("none", formats.dense):
        raise ConfigError(
            f"quantization.moe_quant_type: expected none or the dense_quant_type ({formats.dense}), as the checkpoint"
            f" has no experts, got {formats.moe} (what `quantization` says unless moe_quant_type is given)",
            param="quantization",
        )


def _verify_kv_format(config: Config, decoder_config: DecoderConfig) -> None:
    """Refuse bytes with scales for latent vectors, whose kernels read numbers."""
    found = config.cache.kv_cache_dtype
    if found != "auto" and any(isinstance(layer.attention, LatentAttentionConfig) for layer in decoder_config.layers):
        raise ConfigError(
            f"kv_cache_dtype: expected auto, as layers keep latent vectors (config.json: kv_lora_rank), got {found}",
            param="kv_cache_dtype",
        )


_log = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0
# A shorter load shows no bar.
_BAR_AFTER_S = 1.0
_GB = 1e9


class LoadProgress:
    """Counts bytes of weights as they are packed. Small models are loaded before anything is shown.

    Args:
        total: bytes of the checkpoint's tensors. A few of them are not packed.
        has_bar: False = lines only, as for a rank whose bar would be drawn over another's.

    Attributes:
        num_packed_bytes: what the packed weights take.
    """

    def __init__(self, total: int, *, has_bar: bool = True) -> None:
        self._total, self._num_done = total, 0
        self._next_line = time.monotonic() + _LOG_EVERY_S
        # None: no bar unless standard error is a terminal.
        self._bar = tqdm(
            total=total,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            disable=None if has_bar else True,
            leave=False,
            delay=_BAR_AFTER_S,
        )
        self.num_packed_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, num_bytes: int, num_packed_bytes: int) -> None:
        """Count a matrix: its bytes in the checkpoint, and its packed bytes."""
        self._num_done += num_bytes
        self.num_packed_bytes += num_packed_bytes
        self._bar.update(num_bytes)
        if self._bar.disable and time.monotonic() >= self._next_line:
            _log.info("loading weights: %.1f of about %.1f GB", self._num_done / _GB, self._total / _GB)
            self._next_line = time.monotonic() + _LOG_EVERY_S
