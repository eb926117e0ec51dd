"""One piece of memory for buffers that live for a while: where each lies, and the piece itself. Knows no op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from paddle import Tensor

from fastdeploy_sd.device.tensors import aligned_zeros, from_numpy
from fastdeploy_sd.errors import ConfigError

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer's size, and the calls between which its memory is its own, both included."""

    num_bytes: int
    first: int
    last: int


def allocate_arena(num_bytes: int) -> Tensor:
    """Return zeros u8[num_bytes]; the system provides a page when it is first touched.

    One tensor, of which all others are views: Paddle frees what lies at an address once. Raises ConfigError: the system
    does not give that much.
    """
    try:
        return from_numpy(aligned_zeros((max(num_bytes, ALIGNMENT),), np.uint8))
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"max_num_batched_tokens, max_num_seqs: expected steps that the system has memory for, got {num_bytes}"
            f" bytes ({error})"
        ) from None


def place(buffers: Sequence[Lifetime]) -> tuple[tuple[int, ...], int]:
    """Give every buffer an offset, a multiple of 64, so that those alive at the same call do not overlap.

    The largest come first; each gets the lowest gap that is wide enough among those placed before whose lives meet its
    own. Returns the offsets and the bytes of the whole arena.

    Source: arXiv:2001.03288, greedy by size.
    """
    offsets = [0] * len(buffers)
    placed: list[int] = []
    end_of_all = 0
    for i in sorted(range(len(buffers)), key=lambda i: -buffers[i].num_bytes):
        size = -(-buffers[i].num_bytes // ALIGNMENT) * ALIGNMENT
        met = sorted((offsets[j], j) for j in placed if _meet(buffers[i], buffers[j]))
        offset = 0
        for begin, j in met:
            if offset + size <= begin:
                break
            offset = max(offset, begin + -(-buffers[j].num_bytes // ALIGNMENT) * ALIGNMENT)
        offsets[i] = offset
        placed.append(i)
        end_of_all = max(end_of_all, offset + size)
    return tuple(offsets), end_of_all


def _meet(a: Lifetime, b: Lifetime) -> bool:
    return a.first <= b.last and b.first <= a.last
