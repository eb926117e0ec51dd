"""Runs one request's attention in pieces, as chunked prefill does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.ops import attention as ops


def chunk(sequence: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Arguments for running tokens [start, stop) of a one-request batch whose tokens are all in the cache."""
    return {
        **sequence,
        "q": sequence["q"][start:stop],
        "query_start_loc": np.array([0, stop - start], np.int32),
        "seq_lens": np.array([stop], np.int32),
    }


def run_chunks(sequence: dict[str, Any], borders: Sequence[int]) -> np.ndarray:
    chunks = [chunk(sequence, *ends) for ends in itertools.pairwise(borders)]
    return np.concatenate([ops.cascade_append_attention(**args) for args in chunks])
