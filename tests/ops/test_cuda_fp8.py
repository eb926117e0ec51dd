"""Weights and activations of 8-bit floats, on GPUs: on chips that have such products, and before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.reference.linear import to_e4m3
from fastdeploy_sd.types.ranges import SliceRule
from tests.ops.cases import linear as linear_cases
from tests.ops.cases import moe as moe_cases
from tests.ops.cuda_device import GPU, OpRunner, emulated, runner
from tests.ops.test_ops import assert_same, bits

pytestmark = pytest.mark.slow

# Of an operator's inputs, those that are cases of this format.
OPS = {
    "linear": (linear_cases.LINEAR, linear_cases.inputs(["fp8"])),
    "moe_ffn": (moe_cases.MOE_FFN, {k: v for k, v in moe_cases.inputs(["fp8"]).items() if v["fmt"] == "fp8"}),
}
# Products of a chip that has them for 8-bit floats add in fewer bits than float32 has; so does the emulated Hopper.
CHIP_TOLERANCE = 2e-3


@pytest.fixture(params=["emulated 80", "emulated 90", pytest.param(GPU, marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[OpRunner]:
    if request.param == GPU:
        yield runner(GPU)
        return
    with emulated().emulates(int(request.param.split()[1])):
        yield emulated()


@pytest.mark.parametrize("name", OPS)
def test_matches_reference(name: str, device: OpRunner, request: pytest.FixtureRequest) -> None:
    op, inputs = OPS[name]
    if request.node.callspec.params["device"] != "emulated 80":
        op = dataclasses.replace(op, rtol=CHIP_TOLERANCE, atol=CHIP_TOLERANCE)
    for case, kwargs in inputs.items():
        with device.runs_ops():
            got = op.run(kwargs)
        assert_same(got, op.run_reference(kwargs), op, f"{name} {case}")


@pytest.mark.parametrize("count", [1, 4])
def test_linear_has_the_same_bits_for_any_number_of_rows(count: int, device: OpRunner) -> None:
    rng = np.random.default_rng(5)
    x: np.ndarray = rng.standard_normal((130, 1300), np.float32)
    packed = pack_linear(rng.standard_normal((72, 1300), np.float32), "fp8", SliceRule(count, 130))
    with device.runs_ops():
        want = linear(x, packed)
        for rows in (1, 9, 64):
            np.testing.assert_array_equal(bits(linear(x[:rows], packed)), bits(want[:rows]), err_msg=f"{rows} rows")


def test_weights_are_rounded_to_the_nearest_number() -> None:
    """All 127 magnitudes of e4m3, the middles between two, where the even one is right, and their neighbours."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    numbers = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10)).astype(np.float32)
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    to_even = np.where(codes[1:] % 2 == 0, codes[1:], codes[:-1])
    values = np.concatenate([numbers, middles, np.nextafter(middles, np.float32(500)), np.nextafter(middles, 0)])
    want = np.concatenate([codes, to_even, codes[1:], codes[:-1]])
    np.testing.assert_array_equal(to_e4m3(values), numbers[want])
    # Each with the largest number in its group, so that scales are one; one group a row.
    weight: np.ndarray = np.zeros((len(values), 128), np.float32)
    weight[:, 0], weight[:, 1], weight[:, 2] = values, -values, 448
    packed = pack_linear(weight, "fp8").data.reshape(-1, 32 * 128 + 128)[:, : 32 * 128].reshape(-1, 32, 32, 4)
    words = packed[:, 0].reshape(-1, 4)[: len(values)]
    np.testing.assert_array_equal(words[:, 0], want)
    np.testing.assert_array_equal(words[:, 1], want | 0x80)
    np.testing.assert_array_equal(words[:, 2], 126)
