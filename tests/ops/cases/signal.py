"""Cases of signal_; what a signal sets going is in tests/engine/test_layer_sends.py."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops import signal as ops
from fastdeploy_sd.ops.reference import signal as reference
from tests.ops.cases.case import OpCases

SIGNAL = OpCases(
    "signal",
    ops.signal_,
    reference.signal_,
    {
        f"{num_tokens} tokens, {count}": {
            "positions": np.arange(num_tokens, dtype=np.int32),
            "counter": np.array([count], np.int64),
            "event_fd": -1,
        }
        for num_tokens, count in ((0, 0), (1, 5), (7, -3), (3, 1 << 40))
    },
    ops.SIGNAL,
)
