"""Removes disturbances from measured times of steps. Knows no measurement."""

from __future__ import annotations

from collections.abc import Mapping

# Requests, rows of each, tokens before them; 0 requests: rows of a prompt.
Shape = tuple[int, int, int]


def monotone_fit(ms: Mapping[Shape, float]) -> dict[Shape, float]:
    """Return times without those that only a disturbance explains.

    A step can run in parts, so it takes no longer than its parts. A step with fewer rows, or with fewer requests of as
    many rows each, takes no longer than one with more. Jumps in the times of kernels remain. `ms`: shape of a step ->
    its time.
    """
    found: dict[Shape, float] = {}
    for shape in sorted(ms, key=lambda s: (s[0] == 0, s[2], s[0], s[1])):
        n, rows, context = shape
        parts = [
            -(-n // part_n) * -(-rows // part_rows) * time
            for (part_n, part_rows, part_context), time in found.items()
            if part_context == context and 0 < part_n <= n and part_rows <= rows
        ]
        if n == 0:  # a prompt's rows have fewer tokens before them than rows after a context of that length
            parts = [
                -(-rows // part_rows) * time
                for (part_n, part_rows, part_context), time in found.items()
                if part_n == 1 and part_context >= rows >= part_rows
            ]
        found[shape] = min([ms[shape], *parts])
    for shape in sorted(ms, key=lambda s: (s[2], s[0], s[1]), reverse=True):
        n, rows, context = shape
        found[shape] = min(
            time
            for (m, r, c), time in found.items()
            if c == context and r >= rows and (m == n or m > n > 0)  # n = 0: a part of a prompt, of which there is one
        )
    return found
