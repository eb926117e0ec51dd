"""KvPages: the bytes of one block in one layer, so that KV can be stored, or computed by another instance.

Layers are the target's with KV, its layers with recurrent states, then the draft layers that read its hidden rows. A
draft model that reads only tokens computes its KV again where a block comes from elsewhere. Layers with states have a
group of their own, whose blocks are snapshots: see `pieces_of_states`. Else a page is all that the layer's cache holds
of a block, in this order:

    k | v | k_scale | v_scale (of an int8 cache) | hidden row of the block's last token (where one is read)

Each but the last holds the model's KV heads in order, so a page is the same for any number of ranks. A head that
several ranks have is read from one of them and written to all.

Owns no memory. Knows no transport, and not which request a block belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.worker.kv.kv_memory import RankKv
from fastdeploy_sd.worker.kv.state_memory import StateMemory, pieces_of_states

# A part of a layer's pages, or one rank's share of it: [num_blocks, bytes], of every rank that has the same.
_Piece = tuple[Bytes, ...]


class KvPages:
    """Pages of all layers over the same blocks. May be used by several threads, for different pages.

    Args:
        ranks: all of them; empty = no layers. states: of their layers with recurrent states.

    Attributes:
        num_layers: target and draft layers together. num_target_layers: the first ones. groups: KV group of each layer.
        block_bytes: of a block in all layers with KV.
        host_bytes: of host memory that all blocks take, on all ranks together.
    """

    def __init__(self, ranks: Sequence[RankKv], states: Sequence[StateMemory] = ()) -> None:
        layers = [[tuple(map(_by_block, copies)) for copies in layer] for layer in pieces_of_layers(ranks)]
        every = [copy for layer in layers for piece in layer for copy in piece]
        self.num_blocks = min(map(len, every), default=0)
        self._in_block = [piece for layer in layers for piece in layer]
        self.block_bytes = sum(piece[0].shape[1] for piece in self._in_block)
        self.host_bytes = sum(copy.nbytes for copy in every)
        nets, num_kv_layers = pieces_of_states(states), len(ranks[0].caches) if ranks else 0
        self._layers: list[list[_Piece]] = [*layers[:num_kv_layers], *nets, *layers[num_kv_layers:]]
        self.num_target_layers, self.num_layers = num_kv_layers + len(nets), len(self._layers)
        groups = groups_of_layers(ranks)
        state_group = max(groups, default=-1) + 1
        self.groups: Sequence[int] = [*groups[:num_kv_layers], *[state_group] * len(nets), *groups[num_kv_layers:]]

    def spans(self, block_id: int) -> Sequence[Sequence[Bytes]]:
        """See block_mover.Blocks: a block's pages without those of states."""
        return [[copy[block_id] for copy in piece] for piece in self._in_block]

    @property
    def port(self) -> None:
        """See transfer.pages.Pages: they are in host memory."""

    def page_bytes(self, layer: int) -> int:
        """Return the length of a page of this layer."""
        return sum(piece[0].shape[1] for piece in self._layers[layer])

    def read_all(self, layer: int, block_ids: Sequence[int]) -> Sequence[tuple[Bytes, ...]]:
        """Return pages in pieces, u8[n] each: views that change when the page does.

        Raises IndexError: there is no such layer or block.
        """
        for block_id in block_ids:
            self._verify(layer, block_id)
        return [tuple(piece[0][block_id] for piece in self._layers[layer]) for block_id in block_ids]

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """Overwrite a page.

        Raises IndexError: no such layer or block; ValueError: other data than a page's bytes, which is not written.
        """
        self._verify(layer, block_id)
        if data.nbytes != self.page_bytes(layer):
            raise ValueError(f"page of layer {layer}: expected {self.page_bytes(layer)} bytes, got {data.nbytes}")
        source, begin = np.frombuffer(data, np.uint8), 0
        for piece in self._layers[layer]:
            end = begin + piece[0].shape[1]
            for copy in piece:
                copy[block_id] = source[begin:end]
            begin = end

    def awaited(self, _layer: int) -> None:
        """See transfer.pages.Pages: host memory is always ready."""

    def follow_steps(self) -> None:
        """See transfer.pages.Pages: no step is in flight when the engine continues."""

    def end_writes(self) -> None:
        """See transfer.pages.Pages: writes are complete at once."""

    def close(self) -> None:
        """See DevicePages: it holds nothing."""

    def _verify(self, layer: int, block_id: int) -> None:
        num_blocks = len(self._layers[layer][0][0]) if 0 <= layer < self.num_layers else 0
        verify_page(layer, block_id, self.num_layers, num_blocks)


def verify_page(layer: int, block_id: int, num_layers: int, num_blocks: int) -> None:
    """Verify that a layer and block have a page. Raises IndexError: they have none."""
    if not (0 <= layer < num_layers and 0 <= block_id < num_blocks):
        raise IndexError(
            f"page: expected a layer below {num_layers} and a block below {num_blocks},"
            f" got layer {layer}, block {block_id}"
        )


def groups_of_layers(ranks: Sequence[RankKv]) -> list[int]:
    """Return the KV group of every layer in the order of pages."""
    own = ranks[:1]
    return [cache.group for rank in own for cache in (*rank.caches, *(layer.cache for layer in rank.copied_drafts))]


def pieces_of_layers(ranks: Sequence[RankKv]) -> list[list[tuple[Tensor, ...]]]:
    """Return the parts of every layer in the order of a page, [num_blocks, ...] each, of every rank that has it."""
    targets = [list(zip(rank.kv_heads, rank.caches, strict=True)) for rank in ranks]
    layers = [_pieces(layer) for layer in zip(*targets, strict=True)]
    for drafts in zip(*(rank.copied_drafts for rank in ranks), strict=True):
        hidden = tuple(layer.hidden for layer in drafts if layer.hidden is not None)
        layers.append([*_pieces((layer.kv_heads, layer.cache) for layer in drafts), *([hidden] if hidden else [])])
    return layers


def _pieces(caches: Iterable[tuple[range, KvCache[Tensor]]]) -> list[tuple[Tensor, ...]]:
    """Return a layer's pieces in the order of a page, from all ranks with their heads."""
    by_heads: dict[int, list[list[Tensor]]] = {}
    for heads, cache in caches:
        parts = [part for part in (cache.k, cache.v, cache.k_scale, cache.v_scale) if part is not None]
        by_heads.setdefault(heads.start, []).append(parts)
    # First per head: its parts, of all ranks that have it. Then per part: over the heads.
    of_heads = [list(zip(*copies, strict=True)) for _, copies in sorted(by_heads.items())]
    return [piece for part in zip(*of_heads, strict=True) for piece in part]


def _by_block(part: Tensor) -> Bytes:
    array = device().read(part)
    return array.reshape(len(array), -1).view(np.uint8)
