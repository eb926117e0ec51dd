"""Loops on threads: the same bits with any number of them, also while other threads take a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.rowwise import rms_norm
from tests.ops.backends import threads

DEADLINE_S = 120.0
RNG = np.random.default_rng(14)
WEIGHT: np.ndarray = RNG.standard_normal((2048, 512), np.float32)
PROCESSORS = sorted(os.sched_getaffinity(0))


def random_rows(num_rows: int, size: int) -> np.ndarray:
    return RNG.standard_normal((num_rows, size), np.float32)


@contextmanager
def threads_at_once(count: int) -> Iterator[None]:
    """As many threads as if there were a processor for each: they spin, and are woken group by group."""
    before = library.num_threads()
    library.set_num_threads(count, num_processors=count)
    try:
        yield
    finally:
        library.set_num_threads(before)


@pytest.mark.parametrize("count", [2, 3, 8, 9, 17, 64])
def test_all_threads_are_told_and_no_piece_is_lost(count: int) -> None:
    """Jobs of changing sizes right after one another: some for all threads, some for few."""
    weight = np.ones(64, np.float32)
    inputs = [random_rows(rows, 64) for rows in (1, 500, 70, 4000, 33, 2000)]
    with threads(1):
        wanted = [rms_norm(x, weight, 1e-5)[0] for x in inputs]
    with threads_at_once(count):
        for _ in range(20):
            for x, want in zip(inputs, wanted, strict=True):
                np.testing.assert_array_equal(rms_norm(x, weight, 1e-5)[0], want)
        num_jobs, counts = library.thread_counts()
    assert len(counts) == count
    assert num_jobs == 20 * 5  # one row stays on the calling thread
    # A row reads and writes 1 KB; 16 KB are a piece.
    num_pieces = 20 * sum(-(-len(x) // 16) for x in inputs[1:])
    assert sum(c.pieces for c in counts) == num_pieces
    assert sum(c.bytes_read for c in counts) == 20 * sum(len(x) for x in inputs[1:]) * 1024
    assert sum(c.stolen for c in counts) <= num_pieces


@pytest.mark.parametrize("fmt", ["bfloat16", "wint8", "wint4"])
def test_a_product_has_the_same_bits_with_any_number_of_threads(fmt: str) -> None:
    packed = pack_linear(WEIGHT, fmt)  # type: ignore[arg-type]
    inputs = [random_rows(rows, 512) for rows in (1, 5, 16, 70)]
    with threads(1):
        wanted = [linear(x, packed) for x in inputs]
    for count in (2, 7, 16, 33, 64):
        for chosen in (threads(count), threads_at_once(count)):
            with chosen:
                for x, want in zip(inputs, wanted, strict=True):
                    np.testing.assert_array_equal(linear(x, packed), want)


def test_one_row_reads_every_weight_once() -> None:
    packed = pack_linear(WEIGHT, "wint8")
    with threads(2):
        linear(random_rows(1, 512), packed)
        num_jobs, counts = library.thread_counts()
    assert num_jobs == 1
    assert sum(c.bytes_read for c in counts) == packed.data.nbytes


@contextmanager
def neighbour(processor: int) -> Iterator[None]:
    """A process that takes what it can of one processor."""
    code = f"import os; os.sched_setaffinity(0, [{processor}]); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(len(PROCESSORS) < 2, reason="needs two processors")
def test_a_thread_that_is_stopped_in_a_piece_ends_it_on_the_callers_processor() -> None:
    """With a neighbour on every processor but one, threads are stopped; all may run anywhere again later."""
    packed = pack_linear(WEIGHT, "wint8")
    # Long loops, in which a thread is likely to be stopped, and short ones.
    inputs = {num_rows: random_rows(num_rows, 512) for num_rows in (200, 2)}
    with threads(1):
        wanted = {num_rows: linear(x, packed) for num_rows, x in inputs.items()}
    give_up = time.monotonic() + DEADLINE_S

    def multiply(num_rows: int) -> None:
        np.testing.assert_array_equal(linear(inputs[num_rows], packed), wanted[num_rows])
        assert time.monotonic() < give_up

    with threads_at_once(2):
        before = set(os.listdir("/proc/self/task"))
        multiply(2)
        [worker] = (int(task) for task in set(os.listdir("/proc/self/task")) - before)
        with neighbour(PROCESSORS[0]), neighbour(PROCESSORS[1]):
            while library.thread_counts()[1][1].moves == 0:
                multiply(200)
        while os.sched_getaffinity(worker) != set(PROCESSORS):
            multiply(2)


@pytest.mark.parametrize(("count", "num_processors", "text"), [(0, 0, "1..1024, got 0"), (2, 0, "1 or more, got 0")])
def test_wrong_numbers_are_refused(count: int, num_processors: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        library.set_num_threads(count, num_processors)
