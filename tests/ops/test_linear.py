"""The packed form has no instruction-set level, sums of integers are exact, and wrong arguments are named."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.ops import linear as ops
from fastdeploy_sd.ops import packing
from fastdeploy_sd.ops.bf16 import to_bf16, widen
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.reference import linear as reference
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.ops.backends import LEVELS, isa, threads


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_packed_form_is_the_same_on_every_level(fmt: LinearFormat, dtype: str) -> None:
    weight = np.random.default_rng(4).standard_normal((70, 300), np.float32)
    forms = []
    for name in LEVELS:
        for num_threads in (1, 3):
            with isa(name), threads(num_threads):
                packed = packing.pack_linear(to_bf16(weight) if dtype == "bfloat16" else weight, fmt)
                forms.append(packed.data.tobytes())
    assert len(set(forms)) == 1


@pytest.mark.parametrize("fmt", ["wint8", "wint4"])
def test_integer_dot_products_are_exact_at_their_extremes(fmt: LinearFormat, level: str) -> None:
    """Scales of one make every sum an integer that float32 holds: the largest ones must not saturate on any level."""
    extremes = {"wint8": (127.0, -127.0), "wint4": (-120.0, 105.0)}[fmt]
    weight = np.tile(np.array(extremes, np.float32), (2, 128))
    weight[1, 2:] = extremes[0]
    x: np.ndarray = np.repeat(np.array([[127.0], [-127.0]], np.float32), 256, axis=1)
    got = ops.linear(x, packing.pack_linear(weight, fmt))
    np.testing.assert_array_equal(got, x.astype(np.float64) @ weight.astype(np.float64).T, err_msg=level)


@pytest.mark.parametrize("level", LEVELS)
def test_codes_of_e4m3_are_multiplied_as_the_numbers_they_are(level: str) -> None:
    """Zeros and subnormal codes too; rows alone and in tiles of all heights; slices that end within a step or group."""
    rng = np.random.default_rng(8)
    for in_features, out_features, rule in [(131, 33, SliceRule(2, 1)), (300, 70, WHOLE), (640, 32, SliceRule(4, 128))]:
        weight = rng.standard_normal((out_features, in_features), np.float32)
        weight[:, ::7] *= np.float32(1e-4)
        weight[:, ::11] = 0
        x = rng.standard_normal((29, in_features), np.float32)
        want = widen(to_bf16(x)).astype(np.float64) @ reference.stored_weight(weight, "e4m3", rule).astype(np.float64).T
        packed = packing.pack_linear(weight, "e4m3", rule)
        with isa(level):
            alone = np.concatenate([ops.linear(row[None], packed) for row in x])
            np.testing.assert_allclose(alone, want, rtol=1e-5, atol=3e-5)
            for count in (2, 5, 6, 12, 13, 29):
                for given in (x[:count].copy(), to_bf16(x[:count])):
                    got: np.ndarray = ops.linear(given, packed, None, np.float32)
                    np.testing.assert_array_equal(got.view(np.uint32), alone[:count].view(np.uint32))


def test_bad_arguments_are_named() -> None:
    x: np.ndarray = np.zeros((1, 4), np.float32)
    packed = packing.pack_linear(np.zeros((3, 4), np.float32), "float32")
    with pytest.raises(ValueError, match=r"linear: x: expected shape \[num_rows, 4\], got \[1, 3\]"):
        ops.linear(x[:, :3].copy(), packed)
    with pytest.raises(
        ValueError, match=r"format: expected one of float32, bfloat16, wint8, wint4, fp8, float16, .*, got 'int3'"
    ):
        packing.pack_linear(np.zeros((3, 4), np.float32), "int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="packed: expected an address that is a multiple of 64"):
        packing.pack_into(packed.data.ctypes.data + 4, np.zeros((1, 4), np.float32), "float32")
    with pytest.raises(ValueError, match=r"weight: expected \[N, K\], got shape \[4\]"):
        packing.pack_linear(np.zeros(4, np.float32), "float32")
    with pytest.raises(ValueError, match="weight: expected float32, float16 or bfloat16"):
        packing.pack_linear(np.zeros((3, 4), np.float64), "float32")
