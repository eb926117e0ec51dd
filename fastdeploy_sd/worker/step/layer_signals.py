"""LayerSignals: the number of layers of the running step with stored KV, for a thread that sends it meanwhile.

One thread runs steps, another one reads. Knows no transport.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.signal import signal_


class LayerSignals:
    """A count that every layer of a pass raises once the step's tokens are in its cache.

    A failed step runs again in parts. A part's layers have only its rows, so later signals do not count: only layers
    that the first try reached hold the KV of all rows.

    Args:
        num_ranks: that run a pass together; this one signals. It finishes a layer only after every rank stored its
            heads and added them to the layer's sum. So the others lag by at most one layer.

    Attributes:
        fd: becomes readable with a signal; the reader reads it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._lag = 0 if num_ranks == 1 else 1
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._count = np.zeros(1, np.int64)
        self._counter = device().wrap(self._count)
        self._begin = 0
        self._end: int | None = None

    def on_stored(self, cache: KvCache[Any], inputs: AttentionInputs) -> None:
        """Signal, or record a signal; see AttentionInputs."""
        signal_(inputs.positions, self._counter, self.fd)

    def begin(self) -> None:
        """A step begins: no layer has stored anything."""
        self._begin, self._end = self._count.item(0), None

    def stop(self) -> None:
        """The rest of this step runs in parts."""
        if self._end is None:
            self._end = self._count.item(0)

    @property
    def num_layers(self) -> int:
        """Return how many layers surely hold the KV of all the step's tokens on every rank."""
        count, end = self._count.item(0), self._end  # in this order: a part's signals come after `stop`
        return max((count if end is None else min(count, end)) - self._begin - self._lag, 0)

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
