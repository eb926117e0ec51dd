"""Linear at level amx: every row has the bits it has alone, the int formats those of the vector kernels, and bf16 those
that its definition by single tile products gives."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.ops import linear as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.group_packing import group_format
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types.ranges import WHOLE, SliceRule, halved
from tests.ops.backends import LEVELS, isa, threads, tiles
from tests.ops.test_grouped_linear import grouped_matrices, packed
from tests.ops.test_tiles import TWIN, add_product

FORMATS: tuple[LinearFormat, ...] = ("bfloat16", "wint8", "wint4")
# (K, N, slices): tails of steps, groups and panels; slices that begin steps and groups anew; so many panels that
# several packs of rows pass over one, a chunk of K at a time.
SHAPES = [(1, 1, WHOLE), (33, 70, WHOLE), (515, 33, SliceRule(4, 1)), (640, 95, SliceRule(2, 128)), (1400, 560, WHOLE)]
# One pack of one tile, of two, several packs of sizes that differ, and more than are multiplied together.
ROWS = (*range(1, 41), 65, 98)

pytestmark = pytest.mark.skipif("amx" not in LEVELS, reason="this processor has no AVX-512, which the twin is built of")


def operands(in_features: int, out_features: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(in_features)
    weight = rng.standard_normal((out_features, in_features), np.float32)
    return weight, rng.standard_normal((num_rows, in_features), np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_has_the_same_bits_alone_and_in_any_number_on_any_threads(fmt: LinearFormat) -> None:
    for in_features, out_features, rule in SHAPES:
        weight, x = operands(in_features, out_features, max(ROWS))
        packed = pack_linear(weight, fmt, rule)
        with isa("avx512" if fmt != "bfloat16" else "amx"):
            alone = np.concatenate([ops.linear(row[None], packed) for row in x])
        for count in ROWS:
            first = (7 * count) % (len(x) - count + 1)
            with isa("amx"), threads((1, 2, 3, 64)[count % 4]):
                got = ops.linear(x[first : first + count].copy(), packed)
            where = f"K={in_features} N={out_features} {rule}: rows {first}..{first + count}"
            np.testing.assert_array_equal(got.view(np.uint32), alone[first : first + count].view(np.uint32), where)


@pytest.mark.parametrize(("name", "weight"), grouped_matrices().items(), ids=grouped_matrices())
def test_formats_with_groups_have_the_bits_of_every_level(name: str, weight: WeightMatrix) -> None:
    """Fewer rows than go through tiles, one pack of one tile and of two, several; slices that end within a unit."""
    x = np.random.default_rng(3).standard_normal((98, weight.shape[1]), np.float32)
    x[4, 7], x[5], x[6, 300:] = np.inf, 0, np.nan
    for rule in (WHOLE, SliceRule(2, 128), SliceRule(4, 32)):
        fmt = group_format([weight], rule)
        assert fmt is not None
        own = packed(weight, fmt, rule)
        with isa("avx512"):
            want = ops.linear(x, own).view(np.uint32)
        for count in (1, 7, 8, 15, 16, 17, 32, 33, 41, 65, 98):
            first = (7 * count) % (len(x) - count + 1)
            with isa("amx"), threads((1, 2, 3, 64)[count % 4]):
                got = ops.linear(x[first : first + count].copy(), own).view(np.uint32)
            where = f"{name}, {fmt}, {rule}: {count} rows"
            np.testing.assert_array_equal(got, want[first : first + count], where)


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_bf16_is_summed_by_products_of_32_inputs_in_order(x_dtype: str) -> None:
    for in_features, out_features, rule in SHAPES:
        weight, x = operands(in_features, out_features, 5)
        weights, rows = to_bf16(weight), to_bf16(x)
        want = np.zeros((len(x), out_features), np.float32)
        for panel in range(0, out_features, 16):
            columns = min(16, out_features - panel)
            sums = []
            for part in halved(in_features, rule.count, rule.unit):
                total: np.ndarray = np.zeros((len(x), 16), np.float32)
                for k in range(part.start, part.stop, 32):
                    inputs = slice(k, min(k + 32, part.stop))
                    a, b = np.zeros((len(x), 32), np.uint16), np.zeros((16, 32), np.uint16)
                    a[:, : inputs.stop - k] = rows[:, inputs]
                    b[:columns, : inputs.stop - k] = weights[panel : panel + columns, inputs]
                    total = add_product(TWIN, "bf16", a, b.reshape(16, 16, 2).transpose(1, 0, 2), total)
                sums.append(total)
            while len(sums) > 1:
                sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
            want[:, panel : panel + columns] = sums[0][:, :columns]
        given: np.ndarray = rows if x_dtype == "bfloat16" else x
        with isa("amx"):
            got = ops.linear(given, pack_linear(weight, "bfloat16", rule), None, np.float32)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), f"K={in_features} N={out_features}")


@pytest.mark.skipif(library.amx_refusal() is not None, reason=f"no AMX here: {library.amx_refusal()}")
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_chip_has_the_bits_of_the_twin(fmt: LinearFormat) -> None:
    def run() -> list[np.ndarray]:
        found = []
        for in_features, out_features, rule in SHAPES:
            weight, x = operands(in_features, out_features, 98)
            packed = pack_linear(weight, fmt, rule)
            found += [ops.linear(x[:count].copy(), packed).view(np.uint32) for count in (1, 16, 17, 40, 98)]
        return found

    with isa("amx"):
        on_chip = run()
    with isa("avx512"), tiles("twin"), isa("amx"):
        on_twin = run()
    for chip, twin in zip(on_chip, on_twin, strict=True):
        np.testing.assert_array_equal(chip, twin)
