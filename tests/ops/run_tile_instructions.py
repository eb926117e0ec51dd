"""Runs linear, experts and attention as compiled for the chip's tiles, and compares bits with the twin's.

Usage: python -m tests.ops.run_tile_instructions [TRAPS], the library of tile_traps.cc, on a processor without tiles
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import paddle

from fastdeploy_sd.device import library
from fastdeploy_sd.ops import attention, moe
from fastdeploy_sd.ops import linear as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.group_packing import group_format
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.ops.backends import isa, threads, tiles
from tests.ops.cases.attention import MIXED, batch
from tests.ops.cases.attention_int8 import quantized
from tests.ops.expert_model import pack_experts
from tests.ops.test_grouped_linear import NUM_COLUMNS, grouped_matrices, packed
from tests.ops.test_tiles import CHIP, PRODUCTS, TWIN, add_product, bf16_operands, int_operands

FORMATS: tuple[LinearFormat, ...] = ("bfloat16", "wint8", "wint4")


def main(traps: str | None) -> None:
    if traps is not None:
        # Paddle handles the signal itself from its import on.
        paddle.disable_signal_handler()
        if ctypes.CDLL(traps).install_tile_traps() != 0:
            raise SystemExit("the signal of illegal instructions cannot be handled here")
    library.set_isa("avx512")
    compare_products()
    for fmt in FORMATS:
        compare_linear(fmt)
        compare_experts(fmt)
    compare_groups()
    compare_attention()


def compare_products() -> None:
    with tiles("chip"):
        for product in PRODUCTS:
            operands = bf16_operands(7, (-6, 6), seed=3) if product == "bf16" else int_operands(product, 7)
            chip, twin = (add_product(kind, product, *operands).view(np.uint32) for kind in (CHIP, TWIN))
            np.testing.assert_array_equal(chip, twin, product)


def compare_linear(fmt: LinearFormat) -> None:
    """One pack of one tile and of two, and several; several chunks of K; slices that end within a step."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((70, 1100), np.float32)
    x = rng.standard_normal((98, 1100), np.float32)
    packed = pack_linear(weight, fmt, SliceRule(2, 3))
    for count in (1, 16, 29, 98):
        rows: np.ndarray = x[:count].copy()
        with tiles("chip"), isa("amx"), threads(1 + count % 2):
            chip = ops.linear(rows, packed)
        with tiles("twin"), isa("amx"):
            twin = ops.linear(rows, packed)
        np.testing.assert_array_equal(chip.view(np.uint32), twin.view(np.uint32), f"{fmt} {count} rows")


def compare_groups() -> None:
    """Groups of every size, in one tile, in two and in several packs."""
    x = np.random.default_rng(7).standard_normal((41, NUM_COLUMNS), np.float32)
    for name, weight in grouped_matrices().items():
        fmt = group_format([weight], WHOLE)
        assert fmt is not None
        own = packed(weight, fmt)
        for count in (8, 29, 41):
            found = []
            for kind in ("chip", "twin"):
                with tiles(kind), isa("amx"):
                    found.append(ops.linear(x[:count].copy(), own).view(np.uint32))
            np.testing.assert_array_equal(found[0], found[1], f"{name} {count} rows")


def compare_experts(fmt: LinearFormat) -> None:
    """Experts with one row, with a tile's and with several tiles'; sums that end within a step and within a group."""
    rng = np.random.default_rng(6)
    hidden, inner, num_experts = 150, 70, 6
    gate_up = pack_experts(rng.standard_normal((num_experts, 2 * inner, hidden), np.float32), fmt)
    down = pack_experts(rng.standard_normal((num_experts, hidden, inner), np.float32), fmt)
    router = rng.standard_normal((num_experts, hidden), np.float32) / np.float32(np.sqrt(hidden))
    bias = np.zeros(num_experts, np.float32)
    bias[4] = 2.0  # every token chooses it
    x = to_bf16(rng.standard_normal((40, hidden), np.float32))
    for count in (1, 40):

        def run(rows: np.ndarray = x[:count]) -> np.ndarray:
            return moe.moe_ffn(
                rows, router, gate_up, down, top_k=2, normalize=True, norm_min=1e-12, selection_bias=bias
            )

        with tiles("chip"), isa("amx"), threads(2):
            chip = run()
        with tiles("twin"), isa("amx"):
            twin = run()
        np.testing.assert_array_equal(chip, twin, f"{fmt} experts, {count} tokens")


def compare_attention() -> None:
    """One tile of vectors and several, one panel and many, a head that ends within a product, hidden values."""
    floats = batch(MIXED, 3, 1, 112, 32, np.uint16)
    for args in (floats, quantized(floats)):
        with tiles("chip"), isa("amx"), threads(2):
            chip = attention.cascade_append_attention(**args)
        with tiles("twin"), isa("amx"):
            twin = attention.cascade_append_attention(**args)
        np.testing.assert_array_equal(chip, twin)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
