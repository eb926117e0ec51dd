"""Activations and weights of float16, which only GPUs compute in: the cases of bfloat16 in another type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops.bf16 import from_bf16, narrow
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.rowwise import cast
from fastdeploy_sd.types.ranges import SliceRule
from tests.ops.cases.case import Kwargs, OpCases, arrays, mapped
from tests.ops.cuda_device import GPU, OpRunner, emulated, runner
from tests.ops.test_cuda import TOO_LARGE
from tests.ops.test_ops import BY_ROW, OPS, assert_same, bits

pytestmark = pytest.mark.slow

NAMES = (
    "cast", "rms_norm", "concat_rms_norm", "swiglu", "linear", "moe_ffn", "all_reduce", "all_gather",
    "rope_store_kv", "rope_store_kv to int8", "cascade_append_attention", "cascade_append_attention over int8",
    "gated_delta_net", "sigmoid_gate",
)  # fmt: skip
# Chips have products of their own, and so have these ops; the others are the same on all.
ON_EVERY_CHIP = ("linear", "moe_ffn")
CHIPS = ["emulated 80", "emulated 90", pytest.param(GPU, marks=pytest.mark.gpu)]
RUNS = [
    pytest.param(chip, name, marks=[pytest.mark.gpu] * (chip == GPU))
    for name in NAMES
    for chip in ("emulated 80", "emulated 90", GPU)
    if chip != "emulated 80" or name in ON_EVERY_CHIP
]


@pytest.fixture(params=CHIPS)
def device(request: pytest.FixtureRequest) -> Iterator[OpRunner]:
    if request.param == GPU:
        yield runner(GPU)
        return
    with emulated().emulates(int(request.param.split()[1])):
        yield emulated()


def as_float16(value: Any) -> Any:
    """What is bfloat16 in a case's argument as float16: arrays, and what names a type or a format."""
    if value is np.uint16 or isinstance(value, str):
        return np.float16 if value is np.uint16 else "float16" if value == "bfloat16" else value
    return mapped(value, lambda array: narrow(from_bf16(array), np.float16) if array.dtype == np.uint16 else array)


def inputs_of(op: OpCases) -> Iterator[tuple[str, Kwargs]]:
    """The op's cases that have bfloat16; of attention, all of which other types go through too, every third."""
    found = [case for case, kwargs in op.inputs.items() if has_bfloat16(kwargs) and not is_too_large(op, kwargs)]
    assert found
    for case in found[:: 3 if op.name.startswith("cascade") else 1]:
        yield case, {name: as_float16(value) for name, value in op.inputs[case].items()}


def has_bfloat16(kwargs: Kwargs) -> bool:
    own = [kwargs.get(name) for name in ("dtype", "out_dtype", "fmt")]
    is_named = any(value is np.uint16 or (isinstance(value, str) and value == "bfloat16") for value in own)
    return is_named or any(array.dtype == np.uint16 for array in arrays(tuple(kwargs.values())))


def is_too_large(op: OpCases, kwargs: Kwargs) -> bool:
    return op.name in TOO_LARGE and TOO_LARGE[op.name](kwargs)


@pytest.mark.parametrize(("device", "name"), RUNS, indirect=["device"])
def test_matches_reference(name: str, device: OpRunner) -> None:
    op = OPS[name]
    for case, kwargs in inputs_of(op):
        with device.runs_ops():
            got = op.run(kwargs)
        assert_same(got, op.run_reference(kwargs), op, f"{name} {case}")


@pytest.mark.parametrize(("device", "name"), [run for run in RUNS if run.values[1] in BY_ROW], indirect=["device"])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, device: OpRunner) -> None:
    op, rng = OPS[name], np.random.default_rng(0)
    cases = dict(inputs_of(op))
    for case, kwargs in itertools.islice(cases.items(), 0, None, max(1, len(cases) // 4)):
        count = op.num_rows(kwargs)
        rows = rng.permutation(count).tolist()[:17]
        if count < 2:
            continue
        with device.runs_ops():
            alone = [op.run_rows(op.copied(kwargs), [row]) for row in rows[:4]]
            together = op.run_rows(op.copied(kwargs), rows)
        for got, *want in zip(together, *alone, strict=True):
            one_by_one = np.concatenate(want)
            np.testing.assert_array_equal(bits(got[: len(one_by_one)]), bits(one_by_one), err_msg=f"{name} {case}")


@pytest.mark.parametrize("count", [1, 4])
def test_linear_has_the_same_bits_for_any_number_of_rows(count: int, device: OpRunner) -> None:
    rng = np.random.default_rng(5)
    x: np.ndarray = rng.standard_normal((130, 1300), np.float32).astype(np.float16)
    packed = pack_linear(rng.standard_normal((72, 1300), np.float32), "float16", SliceRule(count, 130))
    with device.runs_ops():
        want = linear(x, packed, None, np.float32)
        for rows in (1, 8, 9, 64):
            got = linear(x[:rows], packed, None, np.float32)
            np.testing.assert_array_equal(bits(got), bits(want[:rows]), err_msg=f"{rows} rows")


def test_every_number_is_widened_exactly_and_the_nearest_is_rounded_to(device: OpRunner) -> None:
    """All 65536, the middles between two, where the even one is right, and their neighbours."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    numbers = codes.view(np.float16)
    finite = np.sort(np.unique(numbers[np.isfinite(numbers)].astype(np.float32)))
    middles = np.append((finite[1:] + finite[:-1]) / 2, [65520, -65520]).astype(np.float32)
    neighbours = [np.nextafter(middles, np.float32(sign * np.inf)) for sign in (1, -1)]
    values = np.concatenate([finite, middles, *neighbours])[None]
    with device.runs_ops():
        np.testing.assert_array_equal(cast(numbers[None], np.float32)[0], numbers.astype(np.float32))
        np.testing.assert_array_equal(cast(values, np.float16), narrow(values, np.float16))


def test_a_processor_refuses_it() -> None:
    x: np.ndarray = np.ones((2, 4), np.float16)
    wide: np.ndarray = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match="cast: dtype: expected float32 or bfloat16 on a processor, got float16"):
        cast(x, np.float32)
    with pytest.raises(ValueError, match="linear: dtype: expected float32 or bfloat16 on a processor, got float16"):
        linear(x, pack_linear(np.ones((3, 4), np.float32), "wint8"))
    with pytest.raises(ValueError, match=r"linear: format: expected .* on a processor, got float16"):
        linear(wide, pack_linear(np.ones((3, 4), np.float32), "float16"))
