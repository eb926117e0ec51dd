"""The KV cache of target and draft layers: the number of blocks, and their memory on the reachable ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import device
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.adapted_linears import adapter_bytes
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_model import DraftWeights
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.ops.kv_cache import KvCache, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.worker.kv import kv_sizing
from fastdeploy_sd.worker.kv.gpu_kv import share_gpu_kv
from fastdeploy_sd.worker.kv.kv_file import ALIGNMENT, KvFile
from fastdeploy_sd.worker.kv.kv_layout import KvLayout
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv
from fastdeploy_sd.worker.loading import gpu_memory
from fastdeploy_sd.worker.loading.draft_weights import parts_of_rank
from fastdeploy_sd.worker.loading.free_memory import free_memory
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)


class DraftLayerKv(NamedTuple):
    """One rank's part of the KV of a draft layer.

    Attributes:
        kv_heads: as RankKv's.
        hidden: [num_blocks, H], the whole hidden row of every block; None = the layer reads none.
    """

    kv_heads: range
    cache: KvCache[Tensor]
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RankKv:
    """One rank's part of the KV of all layers, over the same blocks as every other rank.

    Attributes:
        kv_heads: the model's heads that each of the target's layers has here. With fewer heads than ranks, several
            ranks have the same.
        caches: of the target's layers.
        drafts: method -> layers of its draft model, in their order in a block.
    """

    kv_heads: Sequence[range]
    caches: Sequence[KvCache[Tensor]]
    drafts: Mapping[str, Sequence[DraftLayerKv]] = field(default_factory=dict)

    @property
    def copied_drafts(self) -> list[DraftLayerKv]:
        """The draft layers whose KV goes where the target's does: of models whose first one reads its hidden rows."""
        return [layer for layers in self.drafts.values() for layer in layers if layers[0].hidden is not None]

    @property
    def of_a_block(self) -> RankKv:
        """The layers of the first KV group, in whose memory the blocks of all groups are."""
        own = [(heads, cache) for heads, cache in zip(self.kv_heads, self.caches, strict=True) if cache.group == 0]
        return replace(self, kv_heads=[heads for heads, _ in own], caches=[cache for _, cache in own])

    def caches_of(self, method: str) -> list[KvCache[Tensor]]:
        """Return the caches of a draft model."""
        return [layer.cache for layer in self.drafts[method]]

    def hidden_of(self, method: str) -> list[Tensor]:
        """Return the hidden rows of blocks that a draft model reads, [num_blocks, H] each."""
        return [layer.hidden for layer in self.drafts[method] if layer.hidden is not None]


@dataclass(frozen=True, slots=True, eq=False)
class KvMemory:
    """The KV that a process reaches.

    Attributes:
        max_tokens: of a sequence.
        own: this rank's. others: of the other ranks, in order, on rank 0 where the group shares KV.
        zeros: what else allocates memory that rank 0 reads, by rank; {} where KV is not copied.
    """

    size: kv_sizing.KvCacheSize
    format: KvCacheFormat
    max_tokens: int
    own: RankKv
    others: Sequence[RankKv]
    zeros: Mapping[int, Zeros]

    @property
    def ranks(self) -> Sequence[RankKv]:
        """The KV of all ranks, on rank 0."""
        return [self.own, *self.others]


def allocate_kv(
    config: Config,
    target: DecoderConfig,
    drafts: Mapping[str, DraftWeights],
    max_model_len: int,
    group: RankGroup,
    state_bytes: Sequence[int] = (),
) -> KvMemory:
    """Allocate a rank's part of the KV, with as many blocks as configured or useful, and map the parts of others.

    `drafts`: weights of the draft models, by method. state_bytes: that recurrent states of each rank will take.

    Raises ConfigError: no block fits, or the system has no memory for them.
    """
    kv_format, num_engines = KvCacheFormat.create(config), config.parallel.engines_on_host
    layers = _Layers(config, target, drafts, group.size)
    layout = layers.layout(kv_format)
    if group.rank == 0 and layout.why_kept:
        _log.info("the KV blocks before a layer's window are kept: %s", layout.why_kept)
    one_block = layers.block_bytes(kv_format, alike=device().kind != "cpu")
    room = partial(room_for_kv, config, target, drafts, group, sum(state_bytes))
    size = kv_sizing.choose_size(config, one_block, max_model_len, room, layout.groups)
    if group.rank == 0 and device().kind == "cpu" and (shortage := size.shortage(free_memory(), num_engines)):
        _log.warning("%s", shortage)
    zeros = _zeros_of_ranks(config, layers, size.num_blocks, kv_format, group, state_bytes)
    return KvMemory(
        size,
        kv_format,
        # No sequence outgrows the cache: tables by position need no more rows, even for a longer context.
        max_tokens=min(max_model_len, size.num_tokens + 1),
        own=layers.allocate(group.rank, size.num_blocks, kv_format, zeros.get(group.rank, device().zeros)),
        others=[
            layers.allocate(rank, size.num_blocks, kv_format, zeros[rank])
            for rank in sorted(zeros)
            if rank != group.rank
        ],
        zeros=zeros,
    )


def room_for_kv(
    config: Config, target: DecoderConfig, drafts: Mapping[str, DraftWeights], group: RankGroup, state_bytes: int = 0
) -> kv_sizing.KvRoom:
    """Return the room in the ranks' memory: they share the host's with other engines, and have a GPU each."""
    found, max_tokens = device(), kv_sizing.max_model_len(config, target)
    if not isinstance(found, CudaDevice):  # the host gives adapters their memory when they are loaded
        taken = state_bytes + group.size * adapter_bytes(config, target, Shard(0, group.size))
        return kv_sizing.half_of(group.smallest(free_memory), config.parallel.engines_on_host, taken)
    steps = gpu_memory.step_bytes(config, target, list(drafts.values()), max_tokens, found.library)
    memory = gpu_memory.GpuMemory(*found.memory.allocator.total_and_free(), steps)
    least = group.smallest(lambda: max(memory.room(config.cache.gpu_memory_utilization), 0))
    return gpu_memory.room_for_kv(config, memory, least, group.size)


class _Layers:
    """The KV of a model's layers, and of its draft layers, on each of `num_ranks` ranks."""

    def __init__(
        self, config: Config, target: DecoderConfig, drafts: Mapping[str, DraftWeights], num_ranks: int
    ) -> None:
        self._config, self._target, self._drafts, self._num_ranks = config, target, drafts, num_ranks
        self._num_steps = config.speculative.num_model_steps

    def of_rank(self, rank: int) -> tuple[list[LayerKv], list[LayerKv]]:
        """Return one per layer of the target, and of the draft models."""
        layers = list[LayerKv]()
        for weights, part in self._drafts_of(rank).values():
            num_layers, reads_hidden = weights.num_kv_layers(self._num_steps), bool(weights.reads)
            per_draft = weights.num_kv_layers(1)
            layers += LayerKv.of_draft_layers(
                weights.config, num_layers, part, reads_hidden=reads_hidden, per_draft=per_draft
            )
        return LayerKv.of_decoder(self._target, Shard(rank, self._num_ranks)), layers

    def _drafts_of(self, rank: int) -> Mapping[str, tuple[DraftWeights, Shard]]:
        return parts_of_rank(self._config, self._drafts, Shard(rank, self._num_ranks))

    def layout(self, fmt: KvCacheFormat) -> KvLayout:
        """Return the KV groups, which are those of any rank; the first one has all of its layers on rank 0."""
        return KvLayout.of_model(*self.of_rank(0), fmt, self._config)

    def in_block(self, rank: int, fmt: KvCacheFormat) -> list[LayerKv]:
        """Return the layers of the first KV group, whose memory those of the others share."""
        targets, drafts = self.of_rank(rank)
        layers = targets + drafts
        return [layers[i] for i in self.layout(fmt).members[0] if i < len(layers)]

    def block_bytes(self, fmt: KvCacheFormat, *, alike: bool) -> int:
        """Return the bytes of a block on all ranks; `alike`: as if all had as much as rank 0, which has the most."""
        ranks = [0] * self._num_ranks if alike else range(self._num_ranks)
        return sum(kv_sizing.block_bytes(self.in_block(rank, fmt), fmt) for rank in ranks)

    def allocate(self, rank: int, num_blocks: int, fmt: KvCacheFormat, zeros: Zeros) -> RankKv:
        """Return a rank's memory; raises as `allocate`."""
        (targets, of_drafts), shard = self.of_rank(rank), Shard(rank, self._num_ranks)
        shared = allocate(self.in_block(rank, fmt), num_blocks, fmt, zeros)
        of_layer = {
            i: replace(shared[j], group=g)
            for g, members in enumerate(self.layout(fmt).members)
            for j, i in enumerate(members[: len(shared)])
        }
        caches = [of_layer[i] for i in range(len(targets) + len(of_drafts))]
        hidden = iter(allocate_block_hidden(of_drafts, num_blocks, fmt, zeros))
        own = DecoderShard(self._target, shard)
        heads = [own.kv_heads(attention) for attention in self._target.attentions]
        left, drafts = iter(zip(caches[len(heads) :], of_drafts, strict=True)), dict[str, list[DraftLayerKv]]()
        for name, (weights, part) in self._drafts_of(rank).items():
            own = DecoderShard(weights.config, part)
            drafts[name] = []
            for attention in weights.config.attentions[: weights.num_kv_layers(self._num_steps)]:
                cache, kept = next(left)
                rows = next(hidden) if kept.hidden_size else None
                drafts[name].append(DraftLayerKv(own.kv_heads(attention), cache, rows))
        return RankKv(heads, caches[: len(heads)], drafts)


def _zeros_of_ranks(
    config: Config, layers: _Layers, num_blocks: int, fmt: KvCacheFormat, group: RankGroup, more: Sequence[int]
) -> Mapping[int, Zeros]:
    """Return KV memory, with `more` bytes of each rank, that rank 0 can read: of all ranks on rank 0, else the rank's
    own; {} where KV is not copied. All ranks call it. Raises ConfigError when memory is exhausted.
    """
    found = device()
    if isinstance(found, CudaDevice) and (group.size == 1 or not config.copies_kv):
        return {}

    def num_bytes(rank: int) -> int:
        own = layers.in_block(rank, fmt)
        of_blocks = num_blocks * kv_sizing.block_bytes(own, fmt) + (more[rank] if more else 0)
        return of_blocks + len(own) * MAX_PARTS * ALIGNMENT

    with asking_for_memory():
        if isinstance(found, CudaDevice):
            sizes = [num_bytes(rank) for rank in range(group.size)]
            return {rank: memory.zeros for rank, memory in share_gpu_kv(found, group, sizes).items()}
        files = {rank: KvFile(fd, num_bytes(rank)) for rank, fd in group.kv_files.items()}
    return {rank: partial(_wrapped_zeros, file) for rank, file in files.items()}


def _wrapped_zeros(file: KvFile, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
    return device().wrap(file.zeros(shape, dtype))


Zeros = Callable[[tuple[int, ...], npt.DTypeLike], Tensor]
# Tensors of a layer at most: k, v, their scales, hidden rows.
MAX_PARTS = 5


def allocate(
    layers: Iterable[LayerKv], count: int, fmt: KvCacheFormat, zeros: Zeros | None = None
) -> list[KvCache[Tensor]]:
    """Return one cache of `count` blocks per layer.

    The memory is zero, and the system provides it only as blocks are first used. `zeros`: allocates it; None = the
    device.

    Raises ConfigError: the system has too little memory.
    """
    with asking_for_memory():
        return [_allocate_layer(layer, count, fmt, zeros or device().zeros) for layer in layers]


def _allocate_layer(layer: LayerKv, count: int, fmt: KvCacheFormat, zeros: Zeros) -> KvCache[Tensor]:
    geometry, kv_bytes = (count, fmt.block_size, layer.num_kv_heads), np.dtype(fmt.kv_storage).itemsize
    shapes = kv_cache_shapes(*geometry, layer.head_dim, kv_bytes)
    k = zeros(shapes[0], fmt.kv_storage)
    v = zeros(shapes[1], fmt.kv_storage) if layer.has_values else None
    if not fmt.has_scales:
        return KvCache(k, v, layer.first_key)
    k_scale, v_scale = (zeros(kv_scale_shape(*geometry), np.float32) for _ in range(2))
    return KvCache(k, v, layer.first_key, k_scale, v_scale)


def allocate_block_hidden(
    layers: Iterable[LayerKv], count: int, fmt: KvCacheFormat, zeros: Zeros | None = None
) -> list[Tensor]:
    """Return [count, H] per layer that keeps hidden rows, one row per block; arguments and errors as `allocate`'s."""
    with asking_for_memory():
        zeros = zeros or device().zeros
        return [zeros((count, layer.hidden_size), fmt.row_storage) for layer in layers if layer.hidden_size]


@contextmanager
def asking_for_memory(options: str = "kv_cache_memory_gb, num_gpu_blocks_override") -> Iterator[None]:
    """Turn a system's refusal into a ConfigError that names options."""
    try:
        yield
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"{options}: expected what the system has memory for, got {error}", param=options.partition(",")[0]
        ) from None
