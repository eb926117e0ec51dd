"""The native program: what it fills in before a run, and the contradictions it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import CParams
from fastdeploy_sd.device.program.native_program import Count, NativeProgram, Patch
from fastdeploy_sd.ops.rowwise import swiglu
from fastdeploy_sd.types import F32

WIDTH = 64
SwigluParams: Any = struct_type("SwigluParams")
GatherOutputRowsParams: Any = struct_type("GatherOutputRowsParams")
RmsNormParams: Any = struct_type("RmsNormParams")


def rows(count: int) -> F32:
    return np.random.default_rng(0).standard_normal((count, WIDTH)).astype(np.float32)


def run(program: NativeProgram, symbol: int) -> None:
    program.symbols[0] = symbol
    program.run()


def swiglu_params(x: F32, y: F32) -> CParams:
    params: CParams = SwigluParams(0, y.shape[1], 0, x.ctypes.data, y.ctypes.data)
    return params


@pytest.mark.parametrize(
    ("op", "params", "patches", "text"),
    [
        ("no_such_op", SwigluParams(), [], r"call 0 \(no_such_op\): expected an op of the library"),
        ("swiglu", RmsNormParams(), [], r"call 0 \(swiglu\): num_bytes: expected the size of the op's params"),
        ("swiglu", SwigluParams(), [Patch(1, 0, 4, 0)], r"patch\.call: expected a call of the program"),
        ("swiglu", SwigluParams(), [Patch(0, 0, 2, 0)], r"call 0 \(swiglu\): patch\.num_bytes: expected 4 or 8"),
        ("swiglu", SwigluParams(), [Patch(0, 2, 4, 0)], r"call 0 \(swiglu\): patch\.offset: expected an aligned field"),
        ("swiglu", SwigluParams(), [Patch(0, -8, 8, 0)], r"call 0 \(swiglu\): patch\.offset"),
        ("swiglu", SwigluParams(), [Patch(0, 32, 8, 0)], r"call 0 \(swiglu\): patch\.offset"),
        ("swiglu", SwigluParams(), [Patch(0, 0, 4, 1)], r"call 0 \(swiglu\): patch\.symbol: expected a symbol"),
    ],
)
def test_a_contradictory_program_is_refused(op: str, params: CParams, patches: list[Patch], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NativeProgram([(op, params)], patches, num_symbols=1)


@pytest.mark.parametrize(
    "patches",
    [
        [Patch(0, 0, 4, 0), Patch(0, 0, 4, 1)],
        [Patch(0, 4, 4, 0), Patch(0, 16, 8, 0), Patch(0, 0, 8, 1)],
        [Patch(0, 16, 8, 0), Patch(1, 0, 4, 0), Patch(0, 16, 8, 0)],
    ],
)
def test_patches_of_the_same_bytes_are_refused(patches: list[Patch]) -> None:
    byte = patches[0].offset
    with pytest.raises(ValueError, match=f"patches: expected one per field, got two for byte {byte} .* of call 0$"):
        NativeProgram([("swiglu", SwigluParams())] * 2, patches, num_symbols=2)


def test_symbols_fill_their_fields_before_every_run() -> None:
    x, y = rows(6), np.zeros((6, WIDTH // 2), np.float32)
    program = NativeProgram([("swiglu", swiglu_params(x, y))], [Patch(0, 0, 4, 0)], num_symbols=1)
    run(program, 2)
    assert (y[:2] != 0).all()
    assert (y[2:] == 0).all()
    run(program, 6)
    np.testing.assert_array_equal(y, swiglu(paddle.to_tensor(x)).numpy())


@pytest.mark.parametrize("value", [-1, 1 << 31])
def test_a_count_must_fit_its_field(value: int) -> None:
    program = NativeProgram([("swiglu", SwigluParams())], [Patch(0, 0, 4, 0)], num_symbols=1)
    with pytest.raises(ValueError, match=r"symbols: expected 0\.\.2\^31 - 1 for a 4-byte field"):
        run(program, value)


def test_a_refused_value_changes_no_field() -> None:
    """One symbol in an 8-byte and in a 4-byte field: the one may not keep what the other refuses."""
    x, y = np.arange(16, dtype=np.uint8), np.zeros(4, np.uint8)
    indices = np.array([1], np.int32)
    params = GatherOutputRowsParams(0, 1, 0, x.ctypes.data, indices.ctypes.data, y.ctypes.data)
    fields = (GatherOutputRowsParams.row_bytes, GatherOutputRowsParams.num_rows_in)
    patches = [Patch(0, field.offset, field.size, 0) for field in fields]
    program = NativeProgram([("gather_output_rows", params)], patches, num_symbols=1)
    for _ in range(2):
        run(program, 4)
        np.testing.assert_array_equal(y, x[4:8])
        y[:] = 0
        with pytest.raises(ValueError, match="symbols: expected 0"):
            run(program, -1)


def gather_calls(counts: np.ndarray, found: np.ndarray, results: list[np.ndarray]) -> list[tuple[str, CParams]]:
    """A call that copies counts[0] to found[0], and one that copies rows of the numbers 0 .. 7 to each of `results`."""
    x, indices = np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32)
    gather_calls.kept = x, indices  # type: ignore[attr-defined]
    count = GatherOutputRowsParams(1, 1, 4, counts.ctypes.data, indices.ctypes.data, found.ctypes.data)
    rest = [GatherOutputRowsParams(8, 0, 4, x.ctypes.data, indices.ctypes.data, y.ctypes.data) for y in results]
    return [("gather_output_rows", params) for params in (count, *rest)]


def test_a_call_says_how_many_rows_those_behind_it_have_and_none_ends_the_run() -> None:
    counts, found, results = np.zeros(1, np.int32), np.zeros(1, np.int32), [np.zeros(8, np.int32) for _ in range(2)]
    calls, at = gather_calls(counts, found, results), GatherOutputRowsParams.num_rows_out.offset
    program = NativeProgram(calls, [Patch(1, at, 4, 0), Patch(2, at, 4, 1)], 2, [Count(0, 0, found.ctypes.data)])
    for room, count in [(8, 3), (8, 8), (5, 0), (6, 2)]:
        counts[0], program.symbols[:] = count, (room, 4)
        for y in results:
            y[:] = -1
        nanoseconds = program.timed_run()
        assert [int((y >= 0).sum()) for y in results] == [count, 4 if count else 0]
        assert (nanoseconds[1:] > 0).all() == (count > 0)
    counts[0] = 9
    with pytest.raises(ValueError, match=r"call 0 \(gather_output_rows\): count: expected 0 to what the symbol was"):
        program.run()


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([Count(3, 0, 0)], r"count\.call: expected a call of the program"),
        ([Count(0, 2, 0)], r"count\.symbol: expected a symbol of the program"),
        ([Count(0, 0, 0), Count(0, 1, 0)], r"count\.call: expected one count per call"),
    ],
)
def test_contradictory_counts_are_refused(counts: list[Count], text: str) -> None:
    calls = gather_calls(np.zeros(1, np.int32), np.zeros(1, np.int32), [np.zeros(8, np.int32)] * 2)
    with pytest.raises(ValueError, match=text):
        NativeProgram(calls, [], 2, counts)
