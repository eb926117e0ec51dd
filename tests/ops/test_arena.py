"""Buffers that hold something at the same time must not share memory; the others should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastdeploy_sd.device.program.program import ALIGNMENT, Lifetime, place

pytestmark = pytest.mark.slow


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


@pytest.mark.parametrize("seed", range(40))
def test_buffers_alive_at_the_same_call_do_not_overlap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    firsts = rng.integers(0, 30, 25)
    buffers = [
        Lifetime(int(size), int(first), int(first + length))
        for size, first, length in zip(rng.integers(0, 1000, 25), firsts, rng.integers(0, 6, 25), strict=True)
    ]
    offsets, num_bytes = place(buffers)
    spans = [(offset, offset + b.num_bytes) for offset, b in zip(offsets, buffers, strict=True)]
    for (a, span_a), (b, span_b) in itertools.combinations(zip(buffers, spans, strict=True), 2):
        is_alive_together = not set(range(a.first, a.last + 1)).isdisjoint(range(b.first, b.last + 1))
        assert not (is_alive_together and overlap(span_a, span_b))
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert max(end for _, end in spans) <= num_bytes


def test_a_chain_of_ops_needs_two_buffers_only() -> None:
    chain = [Lifetime(256, i, i + 1) for i in range(100)]
    assert place(chain)[1] == 512


def test_a_freed_buffer_is_used_again() -> None:
    offsets, _ = place([Lifetime(100, 0, 1), Lifetime(100, 1, 2), Lifetime(100, 2, 3)])
    assert offsets[0] == offsets[2] != offsets[1]


def test_no_buffers_need_no_memory() -> None:
    assert place([])[1] == 0
