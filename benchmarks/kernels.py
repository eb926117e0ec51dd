"""`bench kernels`: what matrix products cost alone, and what memory and arithmetic allow at that moment.

Every product reads matrices that no cache still holds. The formats' numbers of rows take turns, and the machine is
measured before each turn: what is quoted are medians, and shares of a bound within one turn.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.command import Command, Progress, show, table_of
from benchmarks.hardware import describe_hardware, dot_peak, measure_memory
from fastdeploy_sd.device import library
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.device.program.declaration import BF16
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.linear import LINEAR
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import PackedLinear, pack_linear, packed_bytes
from fastdeploy_sd.types import Bytes

FORMATS: tuple[LinearFormat, ...] = ("bfloat16", "wint8", "wint4")
ROWS = (1, 2, 4, 5, 8, 16, 32)
# K x N of Qwen3-0.6B: qkv, o, gate and up, down, the head.
SHAPES = ("1024x4096", "2048x1024", "1024x6144", "3072x1024", "1024x151936")
# Matrices of one shape in turn: together larger than any last-level cache two threads share.
WORKING_SET_BYTES = 128 << 20
# Columns packed from random weights; the matrix repeats their panels.
_PACKED_COLUMNS = 1024
_BF16_ONE = 0x3F80


@dataclass(frozen=True, slots=True)
class LinearCost:
    """One product y[M, N] = x[M, K] . weight^T.

    Attributes:
        us: the median over the rounds; within a round the mean over matrices that are not in a cache.
        gb_per_s: packed weights read, 1e9 bytes per second.
        gop_per_s: multiplications and additions, 1e9 per second.
        bandwidth_share: of the read bandwidth measured in the same round; the median over the rounds.
        peak_share: of the instruction peak measured in the same round, likewise; None where there is none.
    """

    format: str
    in_features: int
    out_features: int
    num_rows: int
    us: float
    gb_per_s: float
    gop_per_s: float
    bandwidth_share: float
    peak_share: float | None


def main(argv: Sequence[str]) -> int:
    """Measure and print a table."""
    command = Command("kernels", "Measure matrix products.")
    command.some("--formats", FORMATS, "(default: all)", FORMATS)
    command.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="KxN", help="(default: Qwen3-0.6B's)")
    command.number("--rows", ROWS)
    command.number("--rounds", 5)
    command.json()
    args = command.read(argv)
    shapes = [read_shape(text) for text in args.shapes]
    progress = Progress(len(args.formats) * len(shapes), "kernels")
    costs = []
    for fmt in args.formats:
        for shape in shapes:
            costs += measure_linear(fmt, *shape, args.rows, args.rounds, WORKING_SET_BYTES)
            progress.advance(f"{fmt} {shape[0]}x{shape[1]}")
    show(args, {"hardware": describe_hardware(), "linear": costs}, linear_table(costs))
    return 0


def read_shape(text: str) -> tuple[int, int]:
    """Return (K, N) of "KxN".

    Raises:
        ConfigError: not two positive numbers.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):  # noqa: PLR2004
        raise ConfigError(f"shapes: expected KxN such as 1024x4096, got {text!r}", param="shapes")
    return int(parts[0]), int(parts[1])


def measure_linear(
    fmt: LinearFormat,
    in_features: int,
    out_features: int,
    rows: Sequence[int],
    num_rounds: int,
    working_set_bytes: int,
) -> list[LinearCost]:
    """Measure one matrix shape for several numbers of rows.

    Args:
        working_set_bytes: at least this many bytes of matrices take turns.
    """
    matrices = _matrices(fmt, in_features, out_features, working_set_bytes)
    products = [_Products(matrices, num_rows) for num_rows in rows]
    num_bytes = matrices[0].data.nbytes
    for product in products:
        product.run()
    seconds: list[list[float]] = [[] for _ in rows]
    bounds = []
    for _ in range(num_rounds):
        bounds.append((measure_memory().read_gb_per_s * 1e9, dot_peak(fmt)))
        for times, product in zip(seconds, products, strict=True):
            times.append(product.run())
    costs = []
    for num_rows, times in zip(rows, seconds, strict=True):
        operations = 2 * num_rows * in_features * out_features
        turns = list(zip(times, bounds, strict=True))
        peak_shares = [operations / s / peak for s, (_, peak) in turns if peak > 0]
        costs.append(
            LinearCost(
                format=fmt,
                in_features=in_features,
                out_features=out_features,
                num_rows=num_rows,
                us=median(times) * 1e6,
                gb_per_s=num_bytes / median(times) / 1e9,
                gop_per_s=operations / median(times) / 1e9,
                bandwidth_share=median(num_bytes / s / bandwidth for s, (bandwidth, _) in turns),
                peak_share=median(peak_shares) if peak_shares else None,
            )
        )
    return costs


def linear_table(costs: Sequence[LinearCost]) -> str:
    """Return the costs as a Markdown table; the ratio is to the same matrix's first number of rows."""
    first: dict[tuple[str, int, int], float] = {}
    for c in costs:
        first.setdefault((c.format, c.in_features, c.out_features), c.us)
    columns: dict[str, str | Callable[[LinearCost], object]] = {
        "Format": "{0.format}",
        "K x N": "{0.in_features} x {0.out_features}",
        "Rows": "{0.num_rows}",
        "us": "{0.us:.1f}",
        "Ratio": lambda c: f"{c.us / first[c.format, c.in_features, c.out_features]:.2f}",
        "GB/s": "{0.gb_per_s:.1f}",
        "of bandwidth": "{0.bandwidth_share:.0%}",
        "GOP/s": "{0.gop_per_s:.0f}",
        "of peak": "{0.peak_share:.0%}",
    }
    return table_of(costs, columns)


class _Products:
    """The calls of one number of rows: one per matrix, all writing the same y."""

    def __init__(self, matrices: Sequence[PackedLinear[Bytes]], num_rows: int) -> None:
        in_features, out_features = matrices[0].in_features, matrices[0].out_features
        self._x = np.full((num_rows, in_features), _BF16_ONE, np.uint16)
        self._y = np.empty((num_rows, out_features), np.uint16)
        code, slices = format_code(matrices[0].format), matrices[0].slices
        numbers = {
            "in_features": in_features,
            "out_features": out_features,
            "format": code,
            "num_slices": slices.count,
            "slice_unit": slices.unit,
            "y_dtype": BF16,
        }
        self._calls = [LINEAR.bind(x=self._x, packed=matrix.data, y=self._y, **numbers) for matrix in matrices]

    def run(self) -> float:
        """Return the mean seconds of a call."""
        function = library.library().fdsd_linear
        params = [ctypes.byref(call.params) for call in self._calls]
        start = time.perf_counter()
        for call in params:
            function(call)
        return (time.perf_counter() - start) / len(params)


def _matrices(fmt: LinearFormat, in_features: int, out_features: int, min_bytes: int) -> list[PackedLinear[Bytes]]:
    """Matrices of one shape, at least `min_bytes` in all."""
    columns = min(out_features, _PACKED_COLUMNS)
    weight = np.random.default_rng(0).standard_normal((columns, in_features), np.float32)
    packed = pack_linear(weight, fmt).data
    num_bytes = packed_bytes(in_features, out_features, fmt)
    data = np.resize(packed, num_bytes)
    memory = WeightMemory()
    matrices = []
    for _ in range(-(-min_bytes // num_bytes)):
        copy = memory.take(num_bytes)
        copy[:] = data
        matrices.append(PackedLinear(copy, in_features, out_features, fmt))
    return matrices
