"""Sums of several GPUs: the bits of the CPU's tree on every rank, exchange after exchange. Ranks are threads here."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.collective import ALL_REDUCE
from fastdeploy_sd.ops.reference import collective as reference
from fastdeploy_sd.runtime.layout import struct_type
from fastdeploy_sd.runtime.library import CParams
from tests.ops.cuda_device import emulated
from tests.ops.rank_process import values
from tests.ops.ranks import on_threads

# Five exchanges' worth of elements, the last one not whole, and less than one.
BUFFER_BYTES = 1024
SHAPES = [(7, 170), (3, 17), (1, 1), (0, 8)]


def library() -> Any:
    lib = emulated().device.library.functions
    lib.fdsd_cuda_open_ranks.restype = lib.fdsd_cuda_all_reduce.restype = ctypes.c_char_p
    lib.fdsd_cuda_rank_signals_bytes.restype = ctypes.c_int64
    return lib


@contextlib.contextmanager
def rank_handles(size: int) -> Iterator[list[int]]:
    """Open a group of emulated GPUs, which are one device's memory; gives the ranks' handles."""
    lib, device = library(), emulated().device
    buffers = [device.zeros((2 * BUFFER_BYTES,), np.uint8) for _ in range(size)]
    signals = [device.zeros((lib.fdsd_cuda_rank_signals_bytes(),), np.uint8) for _ in range(size)]
    device.wait()
    places = [(ctypes.c_void_p * size)(*(tensor.address for tensor in tensors)) for tensors in (buffers, signals)]
    handles = []
    try:
        for rank in range(size):
            handle = ctypes.c_int32()
            refusal = lib.fdsd_cuda_open_ranks(rank, size, ctypes.c_int64(BUFFER_BYTES), *places, ctypes.byref(handle))
            assert refusal is None
            handles.append(handle.value)
        yield handles
    finally:
        for handle_value in handles:
            lib.fdsd_cuda_close_ranks(handle_value)


class Sum:
    """One rank's all_reduce, its arrays on the device: what follows allocates nothing there."""

    def __init__(self, handle: int, x: np.ndarray, dtype: type, *added: np.ndarray) -> None:
        device = emulated().device
        self.y = device.zeros(x.shape, dtype)
        self._inputs = [device.wrap(array) for array in (x, *added)]
        bias, shared = [tensor.address for tensor in self._inputs[1:]] or (None, None)
        rows, columns = x.shape
        self.params: CParams = struct_type("AllReduceParams")(
            communicator=handle,
            num_rows=rows,
            num_columns=columns,
            y_dtype=int(dtype is np.uint16),
            x=self._inputs[0].address,
            y=self.y.address,
            bias=bias,
            shared=shared,
        )


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_those_of_the_tree_on_every_rank(size: int) -> None:
    """Buffers are used again and again by ops that follow one another."""
    rng, lib = np.random.default_rng(0), library()
    cases: list[tuple[list[np.ndarray], type, list[np.ndarray]]] = []
    for rows, columns in SHAPES:
        xs = [values(1, rank, rows, columns) for rank in range(size)]
        bias = rng.standard_normal(columns).astype(np.float32)
        shared = rng.standard_normal((rows, columns), np.float32)
        cases += [(xs, np.float32, []), (xs, np.uint16, [bias, to_bf16(shared)]), (xs, np.float32, [bias, shared])]

    def run(sums: Sequence[Sum]) -> None:
        for one in sums:
            assert lib.fdsd_cuda_all_reduce(ctypes.byref(one.params), None, None) is None

    with rank_handles(size) as handles:
        sums = [
            [Sum(handle, xs[rank], dtype, *added) for xs, dtype, added in cases] for rank, handle in enumerate(handles)
        ]
        emulated().device.wait()
        for failure in on_threads(size, lambda rank: run(sums[rank])):
            assert failure is None, failure
        for i, (xs, dtype, added) in enumerate(cases):
            want = reference.all_reduce(xs, dtype, *added)
            for rank in range(size):
                got = emulated().device.read(sums[rank][i].y)
                np.testing.assert_array_equal(got, want, err_msg=f"case {i}, rank {rank}")


def test_handles_of_nobody_and_groups_of_three_are_refused() -> None:
    with emulated().runs_ops(), pytest.raises(ValueError, match="communicator: expected 0 or an open one"):
        ALL_REDUCE(x=np.zeros((1, 1), np.float32), communicator=63, y_dtype="float32")
    refusal = library().fdsd_cuda_open_ranks(0, 3, ctypes.c_int64(BUFFER_BYTES), None, None, None)
    assert b"expected 2 or 4 ranks" in refusal
