"""Sampling parameters for tests: everything off except what a test names."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.types import SamplingArrays

DTYPES = {"top_k": np.int32, "seed": np.uint64, "bias_values": np.float32}
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def build_sampling_arrays(num_requests: int, num_rows: int, *, vocab: int = 1, **columns: Any) -> SamplingArrays:
    """Build columns of `num_requests` requests with `num_rows` logits rows; a scalar is the same for every request."""
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
        "num_logprobs": -1,
        "penalty_slot": -1,
    }
    ragged: dict[str, Any] = {
        "token_counts": np.zeros((0, vocab)),
        "cu_bias": np.zeros(num_requests + 1),
        "bias_token_ids": (),
        "bias_values": (),
        "cu_mask": np.zeros(num_rows + 1),
        "mask_token_ids": (),
    }
    unknown = columns.keys() - defaults.keys() - ragged.keys()
    assert not unknown, unknown
    values = {name: np.broadcast_to(columns.get(name, default), num_requests) for name, default in defaults.items()}
    values |= {name: columns.get(name, default) for name, default in ragged.items()}
    dtypes = DTYPES | dict.fromkeys(FLOATS, np.float32)
    return SamplingArrays(**{name: np.array(value, dtypes.get(name, np.int32)) for name, value in values.items()})
