"""The KV cache of a rank, target and draft layers: how many blocks there are, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle import Tensor

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.parallel.shard import Shard
from fastdeploy_sd.worker import kv_sizing, kv_tensors
from fastdeploy_sd.worker.draft_layers import DraftLayers
from fastdeploy_sd.worker.free_memory import free_memory
from fastdeploy_sd.worker.kv_sizing import LayerKv
from fastdeploy_sd.worker.rank_group import RankGroup


@dataclass(frozen=True, slots=True, eq=False)
class KvMemory:
    """The KV of all layers over the same blocks.

    Attributes:
        max_tokens: of a sequence.
        caches: of the target's layers. draft_caches, block_hidden: of the draft layers, if there are any.
    """

    size: kv_sizing.KvCacheSize
    format: kv_sizing.KvCacheFormat
    max_tokens: int
    caches: Sequence[KvCache[Tensor]]
    draft_caches: Sequence[KvCache[Tensor]]
    block_hidden: Sequence[Tensor]


def allocate_kv(
    config: Config,
    target: DecoderConfig,
    draft: DraftLayers | None,
    max_model_len: int,
    group: RankGroup,
    shard: Shard,
) -> KvMemory:
    """Allocate what a rank has of the KV, as many blocks as are configured or of use.

    Args:
        draft: None = no layers draft.
        shard: of this rank.

    Raises:
        ConfigError: no block fits, or the system has no memory for them.
    """
    kv_format, target_layers = kv_sizing.KvCacheFormat.create(config), LayerKv.of_decoder(target, shard)
    draft_layers = [] if draft is None else LayerKv.of_draft_layers(draft.config, draft.model.num_layers, shard)
    one_block = group.size * kv_sizing.block_bytes([*target_layers, *draft_layers], kv_format)
    size = kv_sizing.choose_size(config, one_block, max_model_len, lambda: group.smallest(free_memory))
    return KvMemory(
        size,
        kv_format,
        # No sequence outgrows the cache: tables by position need no more rows, whatever context the checkpoint claims.
        max_tokens=min(max_model_len, size.num_tokens + 1),
        caches=kv_tensors.allocate(target_layers, size.num_blocks, kv_format),
        draft_caches=kv_tensors.allocate(draft_layers, size.num_blocks, kv_format),
        block_hidden=kv_tensors.allocate_block_hidden(draft_layers, size.num_blocks, kv_format),
    )
