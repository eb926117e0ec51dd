"""Sizes of passes on a GPU: rounded up, so that few graphs serve all. Needs no framework."""

from __future__ import annotations

from collections.abc import Iterator

# From here on rows cost more than launches do.
_MANY, _STEP = 512, 128


def rounded(size: int, bound: int) -> int:
    """Return the next of 0, 1, 2, 3, 4, 6, 8, 12, ..., 384, 512, 640, 768, 896, ..., or the bound.

    That is at most half as much again, and of many rows at most 127 more.
    """
    if size > _MANY:
        return min(-(-size // _STEP) * _STEP, bound)
    power = 1 << max(size - 1, 0).bit_length()
    between = power * 3 // 4
    return min(size if size <= 1 else between if between >= size else power, bound)


def sizes_up_to(bound: int) -> Iterator[int]:
    """Yield 1 and all that `rounded` returns above it; the bound is the last one."""
    size, bound = 1, max(bound, 1)
    while size < bound:
        yield size
        size = rounded(size + 1, bound)
    yield bound
