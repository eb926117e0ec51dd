"""Meaning of the position-keyed random numbers: Philox4x32-10.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.
"""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words."""
    c0, c1, c2, c3 = counter
    for r in range(ROUNDS):
        k0, k1 = ((k + r * w) & WORD for k, w in zip(key, WEYL, strict=True))
        high0, low0 = divmod(MULTIPLIERS[0] * c0, 1 << 32)
        high1, low1 = divmod(MULTIPLIERS[1] * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def philox_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` of a request with `seed`.

    The key is the seed, low word first; the counter is the position. The first two words, the first one high, give the
    53 bits of the fraction.
    """
    high, low, _, _ = philox4x32((position, 0, 0, 0), (seed & WORD, seed >> 32))
    return float(((high << 32 | low) >> 11) / (1 << 53))
