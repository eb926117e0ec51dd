"""The position-keyed random numbers: known answers, and kernel against definition."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.ops.reference.sampling import philox4x32, philox_uniform

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result.
Words = tuple[int, int, int, int]
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_reference_gives_known_answers(counter: Words, key: tuple[int, int], words: Words) -> None:
    assert philox4x32(counter, key) == words


def test_kernel_gives_the_known_answer() -> None:
    assert native.philox_uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


def test_kernel_matches_reference_at_every_bit_of_seed_and_position() -> None:
    seeds = [0, 2**64 - 1, *(1 << bit for bit in range(64))]
    positions = [0, 2**31 - 1, 2**32 - 1, *(1 << bit for bit in range(32))]
    for seed in seeds:
        for position in positions:
            assert native.philox_uniform(seed, position) == philox_uniform(seed, position)


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    numbers = np.array([native.philox_uniform(7, position) for position in range(20000)])
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    # Chi-square, 19 degrees of freedom, the value exceeded with probability 1e-4.
    assert ((counts - 1000) ** 2 / 1000).sum() < 50.80
