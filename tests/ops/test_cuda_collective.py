"""Sums and columns of several GPUs: the bits of the CPU's on every rank, and an end to every wait.

Each rank is a process with its own memory, of which the others see what it gives them a handle of.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from custom_ops import cuda_build
from fastdeploy_sd.ops.collective import ALL_REDUCE
from fastdeploy_sd.ops.reference import collective as reference
from tests.ops.cuda_device import emulated
from tests.ops.gpu_rank_process import columns_of
from tests.ops.rank_process import digest, values
from tests.ops.ranks import TIMEOUT_S, RankProcess, rank_processes

pytestmark = pytest.mark.slow

# More than an exchange carries, less, one element, and none.
SHAPES = [(75, 270), (3, 17), (1, 1), (0, 8)]


@contextlib.contextmanager
def gpu_ranks(size: int, timeout_s: float = TIMEOUT_S) -> Iterator[list[RankProcess]]:
    """The ranks of one group, in their first attempt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
        patch.setenv("FDSD_EMULATED_GPUS", str(size))
        with rank_processes(size, timeout_s, "gpu_rank_process") as ranks:
            ask_all(ranks, "begin", attempt=1)
            yield ranks


def ask_all(ranks: list[RankProcess], order: str, **arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.send(order, **arguments)
    return [rank.reply() for rank in ranks]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_bits_of_the_tree_and_all_columns(size: int) -> None:
    """Ops follow one another, so buffers are used again and again."""
    with gpu_ranks(size) as ranks:
        for rows, columns in SHAPES:
            for added in (None, 7):
                xs = [values(1, rank, rows, columns) for rank in range(size)]
                extras = () if added is None else (values(added, 0, 1, columns)[0], values(added, 1, rows, columns))
                want = digest(reference.all_reduce(xs, np.float32, *extras))
                assert ask_all(ranks, "reduce", seed=1, rows=rows, columns=columns, added=added) == [want] * size
        # Borders between ranks at multiples of 32 elements, and at any; a rank without a column.
        for rows, columns, unit, dtype in [(75, 270, 1, "float32"), (9, 1024, 32, "bfloat16"), (5, 40, 32, "float32")]:
            given = {"seed": 2, "rows": rows, "columns": columns, "unit": unit, "dtype": dtype}
            assert ask_all(ranks, "gather", **given) == [digest(columns_of(given))] * size


def test_a_rank_that_is_late_fails_the_attempt() -> None:
    with gpu_ranks(2, timeout_s=0.5) as [first, _]:
        assert first.ask("reduce", seed=5, rows=2, columns=8) == "error: rank 1 did not come in time"


def test_a_rank_that_fails_fails_the_attempt_and_no_other() -> None:
    """With a timeout for a busy machine: no rank is taken for late."""
    want = digest(reference.all_reduce([values(5, rank, 2, 8) for rank in range(2)], np.float32))
    with gpu_ranks(2) as [first, other]:
        first.send("reduce", seed=5, rows=2, columns=8)
        other.ask("fail")
        assert first.reply() == "error: rank 1 has failed"
        # They stopped at different exchanges, and are in step again.
        ask_all([first, other], "begin", attempt=2)
        assert ask_all([first, other], "reduce", seed=5, rows=2, columns=8) == [want] * 2
        other.process.send_signal(signal.SIGKILL)
        first.send("begin", attempt=3)
        first.send("abort")
        first.send("reduce", seed=5, rows=2, columns=8)
        assert [first.reply() for _ in range(3)] == [None, None, "error: the ranks' group was aborted"]
        assert first.ask("close") is None


def test_handles_of_nobody_and_groups_of_three_are_refused() -> None:
    with emulated().runs_ops(), pytest.raises(ValueError, match="communicator: expected 0 or an open one"):
        ALL_REDUCE(x=np.zeros((1, 1), np.float32), communicator=63, y_dtype="float32")
    library = emulated().device.library
    arguments = ctypes.c_int64(1024), ctypes.c_double(1.0), None, None, None, None
    with pytest.raises(ValueError, match="expected 2 or 4 ranks"):
        library.call("open_ranks", ctypes.c_int32(0), ctypes.c_int32(3), *arguments)
