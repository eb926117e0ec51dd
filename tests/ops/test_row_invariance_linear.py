"""A row of linear's output has the same bits alone, in any batch, on any number of threads; packing has none at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_sd.ops import library
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.native import linear as native
from fastdeploy_sd.ops.native.linear import PackedLinear
from fastdeploy_sd.ops.reference.linear import LINEAR_FORMATS, LinearFormat
from tests.ops.backends import isa, threads

# Every size of a tile at any level (up to 12 rows), and numbers that several tiles share evenly or not; 700 also spans
# several row blocks.
ROW_COUNTS = [*range(2, 14), 16, 23, 24, 25, 31, 37]
IN_FEATURES, OUT_FEATURES = 390, 100


@pytest.fixture(scope="module", params=LINEAR_FORMATS)
def packed(request: pytest.FixtureRequest) -> PackedLinear:
    rng = np.random.default_rng(1)
    return native.pack_linear(rng.standard_normal((OUT_FEATURES, IN_FEATURES), np.float32), request.param)


@pytest.fixture(params=library.available_isas())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with isa(request.param):
        yield request.param


def rows_of_x(count: int, dtype: str) -> np.ndarray:
    """Rows of very different magnitudes."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((count, IN_FEATURES), np.float32) * 10.0 ** rng.integers(-3, 3, (count, 1))
    return to_bf16(x) if dtype == "bfloat16" else x.astype(np.float32)


def bits(y: np.ndarray) -> np.ndarray:
    return y.view(np.uint32) if y.dtype == np.float32 else y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("level")
def test_a_row_is_the_same_alone_and_in_any_batch(packed: PackedLinear, dtype: str) -> None:
    x = rows_of_x(max(ROW_COUNTS), dtype)
    bias = np.random.default_rng(3).standard_normal(OUT_FEATURES).astype(np.float32)
    alone = np.concatenate([native.linear(x[i : i + 1], packed, bias) for i in range(len(x))])
    for count in ROW_COUNTS:
        for num_threads in (1, 2, 3):
            with threads(num_threads):
                first = native.linear(x[:count], packed, bias)
                last = native.linear(x[-count:], packed, bias)
            np.testing.assert_array_equal(bits(first), bits(alone[:count]), err_msg=f"{count} rows")
            np.testing.assert_array_equal(bits(last), bits(alone[-count:]), err_msg=f"{count} rows")


@pytest.mark.usefixtures("level")
def test_a_row_is_the_same_in_a_prefill_chunk(packed: PackedLinear) -> None:
    x = rows_of_x(700, "bfloat16")
    want = native.linear(x[333:334], packed, out_dtype=np.float32)
    for num_threads in (1, 3):
        with threads(num_threads):
            got = native.linear(x, packed, out_dtype=np.float32)
        np.testing.assert_array_equal(bits(got[333:334]), bits(want))


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
@pytest.mark.usefixtures("level")
def test_a_row_is_the_same_when_threads_share_its_packing(fmt: LinearFormat) -> None:
    """Rows long enough that several threads pack parts of them, with ends that fit neither a group nor four pairs."""
    in_features = 6605
    rng = np.random.default_rng(5)
    packed = native.pack_linear(rng.standard_normal((40, in_features), np.float32), fmt)
    x = to_bf16(rng.standard_normal((9, in_features), np.float32))
    alone = np.concatenate([native.linear(x[i : i + 1], packed) for i in range(len(x))])
    for count in (2, 3, 5, 9):
        for num_threads in (1, 3):
            with threads(num_threads):
                np.testing.assert_array_equal(native.linear(x[:count], packed), alone[:count], err_msg=f"{count} rows")


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_packed_form_is_the_same_on_every_level(fmt: LinearFormat, dtype: str) -> None:
    weight = np.random.default_rng(4).standard_normal((70, 300), np.float32)
    forms = []
    for name in library.available_isas():
        for num_threads in (1, 3):
            with isa(name), threads(num_threads):
                packed = native.pack_linear(to_bf16(weight) if dtype == "bfloat16" else weight, fmt)
                forms.append(packed.data.tobytes())
    assert len(set(forms)) == 1


@pytest.mark.parametrize("fmt", ["wint8", "wint4"])
def test_integer_dot_products_are_exact_at_their_extremes(fmt: LinearFormat, level: str) -> None:
    """Scales of one make every sum an integer that float32 holds: the largest ones must not saturate on any level."""
    extremes = {"wint8": (127.0, -127.0), "wint4": (-8.0, 7.0)}[fmt]
    weight = np.tile(np.float32(extremes), (2, 128))
    weight[1, 2:] = extremes[0]
    x = np.repeat(np.float32([[127.0], [-127.0]]), 256, axis=1)
    got = native.linear(x, native.pack_linear(weight, fmt))
    np.testing.assert_array_equal(got, x.astype(np.float64) @ weight.astype(np.float64).T, err_msg=level)


def test_bad_arguments_are_named() -> None:
    x = np.zeros((1, 4), np.float32)
    packed = native.pack_linear(np.zeros((3, 4), np.float32), "float32")
    with pytest.raises(ValueError, match="x: expected contiguous float32"):
        native.linear(x[:, :3], packed)
    with pytest.raises(ValueError, match="format: expected one of float32, bfloat16, wint8, wint4, got 'int3'"):
        native.pack_linear(np.zeros((3, 4), np.float32), "int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="packed: expected an address that is a multiple of 64"):
        native.pack_into(packed.data.ctypes.data + 4, np.zeros((1, 4), np.float32), "float32")
    with pytest.raises(ValueError, match=r"weight: expected \[N, K\], got shape \[4\]"):
        native.pack_linear(np.zeros(4, np.float32), "float32")
    with pytest.raises(ValueError, match="weight: expected float32, float16 or bfloat16"):
        native.pack_linear(np.zeros((3, 4), np.float64), "float32")
