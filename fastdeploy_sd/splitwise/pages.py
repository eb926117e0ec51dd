"""The memory that KV travels from and to, as the connector sees it: bytes of a block in a layer, whatever they mean."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Pages(Protocol):
    """The KV pages of an instance. Layers are numbered: the target's, then the draft layers.

    Attributes:
        num_layers: how many there are.
    """

    num_layers: int

    def page_bytes(self, layer: int) -> int:
        """Bytes of one block in this layer."""
        ...

    def read(self, layer: int, block_id: int) -> tuple[Bytes, ...]:
        """Views of the pieces of a page, each u8[n] and contiguous; together page_bytes(layer)."""
        ...

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """Overwrite a page with page_bytes(layer) bytes, the pieces one after the other."""
        ...
