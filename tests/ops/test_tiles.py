"""One product of AMX tiles: the twin against its definition in exact arithmetic, and the chip against the twin."""

from __future__ import annotations

import ctypes
from fractions import Fraction

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.ops.bf16 import to_bf16
from tests.ops.backends import LEVELS

CHIP, TWIN = 1, 2
PRODUCTS = ("bf16", "s8s8", "s8u8", "u8s8", "u8u8")
SMALLEST = Fraction(1, 2**126)  # normal float32

pytestmark = pytest.mark.skipif("amx" not in LEVELS, reason="this processor has no AVX-512, which the twin is built of")


def add_product(tiles: int, product: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    arrays = [np.ascontiguousarray(a), np.ascontiguousarray(b), np.array(c)]
    function = library.library().fdsd_add_tile_product
    function.restype = ctypes.c_char_p
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    error = function(tiles, PRODUCTS.index(product), len(a), *pointers)
    assert error is None, error
    return arrays[2]


def rounded(exact: Fraction) -> Fraction:
    """To the nearest float32, ties to even; what is below the normal ones in magnitude to zero."""
    if exact == 0:
        return exact
    exponent = 0
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    nearest = round(exact / unit) * unit  # Python rounds ties to even
    return nearest if abs(nearest) >= SMALLEST else Fraction(0)


def exact(value: float) -> Fraction:
    found = Fraction(value)
    return found if abs(found) >= SMALLEST else Fraction(0)


def defined_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """TDPBF16PS as Intel's manual defines it; a [rows, 32] and b [16, 16, 2] hold the values of bf16 numbers."""
    sums = np.zeros_like(c)
    for row in range(len(a)):
        for column in range(16):
            chains = [Fraction(0), Fraction(0)]
            for k in range(16):
                for half in range(2):
                    x, w = exact(float(a[row, 2 * k + half])), exact(float(b[k, column, half]))
                    chains[half] = rounded(x * w + chains[half])
            dot = rounded(chains[0] + chains[1])
            sums[row, column] = float(rounded(exact(float(c[row, column])) + dot))
    return sums


def bf16_operands(rows: int, exponents: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random values whose magnitudes are spread over powers of two, so that sums round and denormals occur."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        spread = np.exp2(rng.integers(*exponents, shape).astype(np.float64))
        return (rng.standard_normal(shape) * spread).astype(np.float32)

    return to_bf16(draw(rows, 32)), to_bf16(draw(16, 16, 2)), draw(rows, 16)


def as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("exponents", [(-6, 6), (-70, -55), (-140, -120)], ids=["usual", "tiny products", "denormals"])
def test_a_bf16_product_of_the_twin_is_the_manuals(exponents: tuple[int, int]) -> None:
    a, b, c = bf16_operands(3, exponents, seed=exponents[1] + 200)
    if exponents[0] == -70:
        c *= np.float32(2.0**-60)  # sums around the smallest normal number
    got = add_product(TWIN, "bf16", a, b, c)
    np.testing.assert_array_equal(got, defined_bf16(as_float(a), as_float(b), c))


def int_operands(product: str, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    kinds = {"s": np.int8, "u": np.uint8}
    a_kind, b_kind = kinds[product[0]], kinds[product[2]]

    def draw(kind: type, *shape: int) -> np.ndarray:
        info = np.iinfo(kind)
        values = rng.integers(info.min, info.max, shape, endpoint=True)
        values[0, :4] = (info.min, info.max, info.min, info.max)
        return values.astype(kind)

    c = rng.integers(-(2**31), 2**31, (rows, 16)).astype(np.int32)
    return draw(a_kind, rows, 64), draw(b_kind, 16, 64), c


@pytest.mark.parametrize("product", PRODUCTS[1:])
def test_an_integer_product_of_the_twin_is_exact_and_wraps(product: str) -> None:
    a, b, c = int_operands(product, 5)
    weights = b.reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16).astype(np.int64)
    wanted = (c + a.astype(np.int64) @ weights).astype(np.uint64).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(add_product(TWIN, product, a, b, c), wanted)


@pytest.mark.skipif(library.amx_refusal() is not None, reason=f"no AMX here: {library.amx_refusal()}")
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_chip_has_the_bits_of_the_twin(product: str) -> None:
    for rows in (1, 7, 16):
        if product == "bf16":
            spreads = ((-6, 6), (-70, -55), (-140, -120))
            cases = [bf16_operands(rows, exponents, seed) for seed in range(20) for exponents in spreads]
        else:
            cases = [int_operands(product, rows)]
        for a, b, c in cases:
            chip, twin = (add_product(tiles, product, a, b, c) for tiles in (CHIP, TWIN))
            np.testing.assert_array_equal(chip.view(np.uint32), twin.view(np.uint32))
