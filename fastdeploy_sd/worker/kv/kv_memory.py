"""The KV cache, target and draft layers: how many blocks there are, and their memory on the ranks that are in reach."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.worker.kv import kv_sizing, kv_tensors
from fastdeploy_sd.worker.kv.gpu_kv import share_gpu_kv
from fastdeploy_sd.worker.kv.kv_file import ALIGNMENT, KvFile
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv
from fastdeploy_sd.worker.kv.kv_tensors import Zeros
from fastdeploy_sd.worker.loading import gpu_memory
from fastdeploy_sd.worker.loading.draft_layers import DraftLayers
from fastdeploy_sd.worker.loading.free_memory import free_memory
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RankKv:
    """What one rank has of the KV of all layers, over the same blocks as every other.

    Attributes:
        kv_heads: of the model, that the target's layers have here. draft_kv_heads: the same of the draft layers. Where
            there are fewer than ranks, several ranks have the same.
        caches: of the target's layers. draft_caches, block_hidden: of the draft layers, if there are any. Every rank
            has the whole hidden rows.
    """

    kv_heads: range
    caches: Sequence[KvCache[Tensor]]
    draft_kv_heads: range = range(0)
    draft_caches: Sequence[KvCache[Tensor]] = ()
    block_hidden: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KvMemory:
    """The KV that a process reaches.

    Attributes:
        max_tokens: of a sequence.
        own: this rank's. others: the other ranks', in their order, on rank 0 where the group says so.
    """

    size: kv_sizing.KvCacheSize
    format: KvCacheFormat
    max_tokens: int
    own: RankKv
    others: Sequence[RankKv]

    @property
    def ranks(self) -> Sequence[RankKv]:
        """Of all ranks, on rank 0."""
        return [self.own, *self.others]


def allocate_kv(
    config: Config,
    target: DecoderConfig,
    draft: DraftLayers | None,
    max_model_len: int,
    group: RankGroup,
) -> KvMemory:
    """Allocate what a rank has of the KV, as many blocks as are configured or of use, and reach what others have.

    Args:
        draft: None = no layers draft.

    Raises:
        ConfigError: no block fits, or the system has no memory for them.
    """
    kv_format = KvCacheFormat.create(config)
    layers = _Layers(target, draft, group.size)
    one_block = group.size * kv_sizing.block_bytes(layers.of_rank(group.rank), kv_format)
    size = kv_sizing.choose_size(config, one_block, max_model_len, lambda: _room(config, target, draft, group))
    if group.rank == 0 and device().kind == "cpu" and (shortage := size.shortage(free_memory())):
        _log.warning("%s", shortage)
    zeros = _zeros_of_ranks(config, layers, size.num_blocks, kv_format, group)
    return KvMemory(
        size,
        kv_format,
        # No sequence outgrows the cache: tables by position need no more rows, whatever context the checkpoint claims.
        max_tokens=min(max_model_len, size.num_tokens + 1),
        own=layers.allocate(group.rank, size.num_blocks, kv_format, zeros.get(group.rank, device().zeros)),
        others=[
            layers.allocate(rank, size.num_blocks, kv_format, zeros[rank])
            for rank in sorted(zeros)
            if rank != group.rank
        ],
    )


def _room(config: Config, target: DecoderConfig, draft: DraftLayers | None, group: RankGroup) -> kv_sizing.KvRoom:
    """Of the memory that the ranks compute in: they share the host's, and have a GPU each."""
    found = device()
    if not isinstance(found, CudaDevice):
        return kv_sizing.half_of(group.smallest(free_memory))
    steps = gpu_memory.step_bytes(
        config, target, None if draft is None else draft.config, kv_sizing.max_model_len(config, target), found.library
    )
    memory = gpu_memory.GpuMemory(*found.library.memory_bytes(), steps)
    share = config.cache.gpu_memory_utilization
    least = group.smallest(lambda: max(memory.room(share), 0))
    return gpu_memory.room_for_kv(config, memory, least, group.size)


class _Layers:
    """What the layers of a model, and those that draft for it, keep on each of so many ranks."""

    def __init__(self, target: DecoderConfig, draft: DraftLayers | None, num_ranks: int) -> None:
        self._target, self._draft, self._num_ranks = target, draft, num_ranks

    def of_rank(self, rank: int) -> list[LayerKv]:
        """Return one per layer, draft layers last."""
        shard = Shard(rank, self._num_ranks)
        layers = LayerKv.of_decoder(self._target, shard)
        if self._draft is None:
            return layers
        return layers + LayerKv.of_draft_layers(self._draft.config, self._draft.model.num_layers, shard)

    def allocate(self, rank: int, num_blocks: int, fmt: KvCacheFormat, zeros: Zeros) -> RankKv:
        """Return a rank's memory; raises as `kv_tensors.allocate`."""
        layers, num_target, shard = self.of_rank(rank), self._target.num_layers, Shard(rank, self._num_ranks)
        caches = kv_tensors.allocate(layers, num_blocks, fmt, zeros)
        return RankKv(
            DecoderShard(self._target, shard).kv_heads(),
            caches[:num_target],
            range(0) if self._draft is None else DecoderShard(self._draft.config, shard).kv_heads(),
            caches[num_target:],
            kv_tensors.allocate_block_hidden(layers, num_blocks, fmt, zeros),
        )


def _zeros_of_ranks(
    config: Config, layers: _Layers, num_blocks: int, fmt: KvCacheFormat, group: RankGroup
) -> Mapping[int, Zeros]:
    """Where the KV of ranks is that rank 0 reaches, on any other rank its own; none where KV is nobody else's business.

    All ranks call it. Raises ConfigError where there is no memory.
    """
    found = device()
    if isinstance(found, CudaDevice) and (group.size == 1 or not config.copies_kv):
        return {}

    def num_bytes(rank: int) -> int:
        own = layers.of_rank(rank)
        return num_blocks * kv_sizing.block_bytes(own, fmt) + len(own) * kv_tensors.MAX_PARTS * ALIGNMENT

    with kv_tensors.asking_for_memory():
        if isinstance(found, CudaDevice):
            sizes = [num_bytes(rank) for rank in range(group.size)]
            return {rank: memory.zeros for rank, memory in share_gpu_kv(found, group, sizes).items()}
        files = {rank: KvFile(fd, num_bytes(rank)) for rank, fd in group.kv_files.items()}
    return {rank: partial(_wrapped_zeros, file) for rank, file in files.items()}


def _wrapped_zeros(file: KvFile, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
    return device().wrap(file.zeros(shape, dtype))
