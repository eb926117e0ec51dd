"""`bench collectives`: what tensor parallel adds to a pass: exchanges between ranks, beside a copy of the same bytes,
and sums in slices, beside sums in one piece.

Ranks are threads here, each with kernels of one thread, over the memory that rank processes would share. Sums take
turns, call by call, over matrices that no cache holds.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.command import Command, show, table_of
from benchmarks.hardware import describe_hardware
from benchmarks.kernels import FORMATS, read_shape
from benchmarks.progress import Progress
from fastdeploy_sd.device import library
from fastdeploy_sd.device.communicator import Communicator, shared_segment
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.device.program.bound_call import BoundCall
from fastdeploy_sd.device.program.declaration import BF16, F32
from fastdeploy_sd.device.program.native_program import NativeProgram
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.ops.collective import ALL_GATHER, ALL_REDUCE
from fastdeploy_sd.ops.linear import LINEAR
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.types.ranges import WHOLE, SliceRule

RANKS = (2, 4)
KIBIBYTES = (4, 16, 64, 256, 1024)
# Of attention's output and the feed-forward network's of Qwen3-0.6B, with the unit of their slices.
SHAPES = ("2048x1024", "3072x1024")
ROWS = (1, 2, 3, 4, 5, 8, 64)
_GROUP = 128
_COLUMNS = 1024
_CALLS = 200
_WORKING_SET_BYTES = 64 << 20
_LIMIT_S = 120.0
_LOW_RANK = 10


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """One collective op.

    Attributes:
        num_bytes: what each rank gives to all_reduce, and what each receives from all_gather.
        min_us, median_us: of rank 0's calls, one after the other.
        copy_us: the same number of bytes copied by one thread, the fastest of as many.
    """

    op: str
    num_ranks: int
    num_bytes: int
    min_us: float
    median_us: float
    copy_us: float


@dataclass(frozen=True, slots=True)
class SliceCost:
    """One product with its sums in four slices.

    Attributes:
        whole_us, sliced_us: the 10th percentile of the calls, over matrices that are not in a cache: nearly what it
            takes while nothing else runs, and not the luckiest call.
        ratio: of the two.
    """

    format: str
    in_features: int
    out_features: int
    num_rows: int
    whole_us: float
    sliced_us: float
    ratio: float


def main(argv: Sequence[str]) -> int:
    """Measure and print two tables."""
    command = Command("collectives", "Measure exchanges between ranks, and sums in slices.")
    command.number("--ranks", RANKS)
    command.number("--kib", KIBIBYTES, "sizes")
    command.some("--formats", FORMATS, "of the sums (default: all)", FORMATS)
    command.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="KxN", help="(default: Qwen3-0.6B's)")
    command.number("--rows", ROWS)
    command.number("--rounds", 15)
    command.json()
    args = command.read(argv)
    for num_ranks in args.ranks:
        if num_ranks not in RANKS:
            raise ConfigError(f"ranks: expected some of 2, 4, got {num_ranks}", param="ranks")
    shapes = [read_shape(text) for text in args.shapes]
    progress = Progress(len(args.ranks) + len(args.formats) * len(shapes), "collectives")
    num_threads = library.num_threads()
    library.set_num_threads(1)
    try:
        exchanges, slices = [], []
        for num_ranks in args.ranks:
            for size in args.kib:
                exchanges += measure_exchange(num_ranks, size << 10)
            progress.advance(f"{num_ranks} ranks")
        for fmt in args.formats:
            for shape in shapes:
                slices += measure_slices(fmt, *shape, args.rows, args.rounds, _WORKING_SET_BYTES)
                progress.advance(f"{fmt} {shape[0]}x{shape[1]}")
    finally:
        library.set_num_threads(num_threads)
    tables = f"{exchange_table(exchanges)}\n\n{slice_table(slices)}"
    show(args, {"hardware": describe_hardware(), "exchanges": exchanges, "slices": slices}, tables)
    return 0


def measure_exchange(num_ranks: int, num_bytes: int) -> list[ExchangeCost]:
    """Measure all_reduce and all_gather of one size.

    Raises:
        FdsdError: a rank did not end.
    """
    num_rows = max(num_bytes // (4 * _COLUMNS), 1)
    x = np.ones((num_rows, _COLUMNS), np.float32)
    own = np.ones((num_rows, _COLUMNS // num_ranks), np.float32)
    copy_us = _copy_us(x)
    costs = []
    for op in (ALL_REDUCE, ALL_GATHER):
        fd = shared_segment()
        try:
            ends = [Communicator.shared(fd, rank, num_ranks, _LIMIT_S) for rank in range(num_ranks)]
        finally:
            os.close(fd)
        ys = [np.empty_like(x) for _ in ends]
        if op is ALL_REDUCE:
            calls = [op.bind(x=x, y=y, communicator=end.handle, y_dtype=F32) for end, y in zip(ends, ys, strict=True)]
        else:
            fixed: Mapping[str, Any] = {"num_columns": _COLUMNS, "unit": 1}
            calls = [op.bind(x=own, y=y, communicator=end.handle, **fixed) for end, y in zip(ends, ys, strict=True)]
        times = _times_us(op.declaration.name, calls)
        for end in ends:
            end.close()
        costs.append(ExchangeCost(op.declaration.name, num_ranks, x.nbytes, min(times), median(times), copy_us))
    return costs


def _times_us(name: str, calls: Sequence[BoundCall]) -> list[float]:
    """Run every rank's call again and again, all ranks at once; return rank 0's times."""
    programs = [NativeProgram([(name, call.params)] * _CALLS, [], 0) for call in calls]
    found: list[Any] = [None] * len(calls)

    def run(rank: int) -> None:
        programs[rank].run()
        found[rank] = programs[rank].timed_run()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _LIMIT_S)
    if any(times is None for times in found):
        raise FdsdError(f"collectives: expected all {len(calls)} ranks to end, got some that did not")
    return [float(ns) / 1e3 for ns in found[0]]


def _copy_us(x: np.ndarray) -> float:
    y = np.empty_like(x)
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        np.copyto(y, x)
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def measure_slices(
    fmt: LinearFormat,
    in_features: int,
    out_features: int,
    rows: Sequence[int],
    num_rounds: int,
    working_set_bytes: int,
) -> list[SliceCost]:
    """Measure one shape, whose slices begin at multiples of 128 where it has enough of them.

    Args:
        working_set_bytes: at least this many bytes of matrices take turns.
    """
    unit = _GROUP if in_features % _GROUP == 0 else 1
    weight = np.random.default_rng(0).standard_normal((out_features, in_features), np.float32)
    costs = []
    rules = (WHOLE, SliceRule(4, unit))
    matrices = {}
    for rule in rules:
        packed = pack_linear(weight, fmt, rule).data
        memory = WeightMemory()
        matrices[rule] = [memory.take(packed.nbytes) for _ in range(-(-working_set_bytes // packed.nbytes))]
        for matrix in matrices[rule]:
            matrix[:] = packed
    for num_rows in rows:
        x = np.full((num_rows, in_features), 0x3F80, np.uint16)  # ones in bfloat16
        y = np.empty((num_rows, out_features), np.uint16)
        calls = {}
        for rule in rules:
            numbers = {"in_features": in_features, "out_features": out_features, "format": format_code(fmt)}
            numbers |= {"num_slices": rule.count, "slice_unit": rule.unit}
            calls[rule] = [LINEAR.bind(x=x, packed=matrix, y=y, y_dtype=BF16, **numbers) for matrix in matrices[rule]]
        whole, sliced = _low_us([calls[rule] for rule in rules], num_rounds)
        costs.append(SliceCost(fmt, in_features, out_features, num_rows, whole, sliced, sliced / whole))
    return costs


def _low_us(sets: Sequence[Sequence[BoundCall]], num_rounds: int) -> list[float]:
    """Run a call of each set in turn, over all matrices in each round; return the 10th percentile of a call of each."""
    function = library.library().fdsd_linear
    references = [[ctypes.byref(call.params) for call in calls] for calls in sets]
    num_matrices = len(sets[0])
    times: list[list[float]] = [[] for _ in sets]
    for turn in range(num_rounds * num_matrices):
        for i in range(len(sets)):
            index = (i + turn) % len(sets)
            # Every call reads another matrix than the one before it.
            params = references[index][(turn * len(sets) + i) % num_matrices]
            start = time.perf_counter()
            function(params)
            times[index].append(time.perf_counter() - start)
    return [float(np.percentile(taken, _LOW_RANK)) * 1e6 for taken in times]


def exchange_table(costs: Sequence[ExchangeCost]) -> str:
    """Return the costs of exchanges as a Markdown table."""
    columns = {"Op": "{0.op}", "Ranks": "{0.num_ranks}", "Bytes": "{0.num_bytes}"}
    columns |= {"us, min": "{0.min_us:.1f}", "us, median": "{0.median_us:.1f}", "us, copy": "{0.copy_us:.1f}"}
    return table_of(costs, columns)


def slice_table(costs: Sequence[SliceCost]) -> str:
    """Return the costs of slices as a Markdown table."""
    columns = {"Format": "{0.format}", "K x N": "{0.in_features} x {0.out_features}", "Rows": "{0.num_rows}"}
    columns |= {"us, whole": "{0.whole_us:.1f}", "us, 4 slices": "{0.sliced_us:.1f}", "Ratio": "{0.ratio:.3f}"}
    return table_of(costs, columns)
