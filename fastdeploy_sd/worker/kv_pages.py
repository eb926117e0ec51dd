"""KvPages: what one block holds in one layer, as bytes, so that it can be kept or computed elsewhere.

Layers are the target's, then the draft layers. A page is whatever the layer's cache holds of a block, in this order:

    k | v | k_scale | v_scale (of an int8 cache) | hidden row of the block's last token (of a draft layer)

Owns no memory. Knows no transport, and not which blocks are whose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.runtime.device import DEVICE

Bytes = npt.NDArray[np.uint8]


class KvPages:
    """Pages of all layers over the same blocks. May be used by several threads, for different pages.

    Args:
        caches: of the target's layers. draft_caches: of the draft layers.
        block_hidden: per draft layer [num_blocks, H], the rows that it reads from.

    Attributes:
        num_layers: target and draft layers together. num_target_layers: the first ones.
        num_blocks: blocks of every layer; 0 = there are no layers.
    """

    def __init__(
        self,
        caches: Sequence[KvCache[Tensor]],
        draft_caches: Sequence[KvCache[Tensor]] = (),
        block_hidden: Sequence[Tensor] = (),
    ) -> None:
        layers = [_parts(cache) for cache in caches]
        layers += [[*_parts(cache), rows] for cache, rows in zip(draft_caches, block_hidden, strict=True)]
        # Per layer, one array [num_blocks, bytes] over each part.
        self._layers = [tuple(_by_block(part) for part in parts) for parts in layers]
        self.num_layers, self.num_target_layers = len(layers), len(caches)
        self.num_blocks = min((cache.num_blocks for cache in caches), default=0)

    def page_bytes(self, layer: int) -> int:
        """Return the length of a page of this layer."""
        return sum(part.shape[1] for part in self._layers[layer])

    def read(self, layer: int, block_id: int) -> tuple[Bytes, ...]:
        """Return the parts of a page, u8[n] each: views that change when the page does.

        Raises:
            IndexError: there is no such layer or block.
        """
        self._verify(layer, block_id)
        return tuple(part[block_id] for part in self._layers[layer])

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """Overwrite a page.

        Args:
            data: the parts of a page of the same format, behind each other.

        Raises:
            IndexError: there is no such layer or block.
            ValueError: the data is not as long as the page; nothing is written then.
        """
        self._verify(layer, block_id)
        if data.nbytes != self.page_bytes(layer):
            raise ValueError(f"page of layer {layer}: expected {self.page_bytes(layer)} bytes, got {data.nbytes}")
        source, begin = np.frombuffer(data, np.uint8), 0
        for part in self._layers[layer]:
            end = begin + part.shape[1]
            part[block_id] = source[begin:end]
            begin = end

    def _verify(self, layer: int, block_id: int) -> None:
        if not (0 <= layer < self.num_layers and 0 <= block_id < self.num_blocks):
            raise IndexError(
                f"page: expected a layer below {self.num_layers} and a block below {self.num_blocks}, "
                f"got layer {layer}, block {block_id}"
            )


def _parts(cache: KvCache[Tensor]) -> list[Tensor]:
    return [part for part in (cache.k, cache.v, cache.k_scale, cache.v_scale) if part is not None]


def _by_block(part: Tensor) -> Bytes:
    array = DEVICE.read(part)
    return array.reshape(len(array), -1).view(np.uint8)
