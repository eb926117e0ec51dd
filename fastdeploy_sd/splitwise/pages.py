"""The memory that KV travels from and to, as the connector sees it: bytes of a block in a layer, whatever they mean.

The memory may be a device's, on which steps are under way. What the thread that starts them says keeps the two apart:
pages are read and written behind the steps that were started at the last `follow_steps`, and steps that are started
after `end_writes` find what was written before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def read_all(self, layer: int, block_ids: Sequence[int]) -> Sequence[tuple[Bytes, ...]]:
        """The pieces of each of some pages, u8[n] and contiguous, together page_bytes(layer); until the next call."""
        ...

    def awaited(self, layer: int) -> Callable[[], None] | None:
        """What a write to this layer would wait for, for the writer to call where nobody waits for him; None = nothing.

        Raises what the device's failing does.
        """
        ...

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """Overwrite a page with page_bytes(layer) bytes, the pieces one after the other."""
        ...

    def follow_steps(self) -> None:
        """Read and write behind the steps that were started. For the thread that starts steps."""
        ...

    def end_writes(self) -> None:
        """Have steps that are started from here on find what was written. For the thread that starts steps."""
        ...
