"""`bench roofline`: every kind of op under the roofs that this machine's memory and instructions put over it.

A point is an op and a shape of Qwen3-0.6B: operations per byte it must move, and operations per second it reached. The
sloped roof is the read bandwidth, the flat ones are the peaks of the instructions that multiply each weight format, for
every level of the kernels. Weights, KV and logits are read from memory; activations are in the caches, as they are in a
step, so ops that touch nothing else may lie above the slope.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (CACM 52(4), 2009).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import OUTPUT_DIR, Command, show, table_of
from benchmarks.hardware import describe_hardware, dot_peak, measure_memory
from benchmarks.kernels import FORMATS, LinearCost, measure_linear
from benchmarks.plot import panels
from benchmarks.progress import Progress
from benchmarks.roofline_ops import OpCall, other_ops
from fastdeploy_sd.device import library

ROWS = (1, 8, 128)
# K x N: gate and up, down, the head.
SHAPES = ((1024, 6144), (3072, 1024))
HEAD = (1024, 151_936)
WORKING_SET_BYTES = 128 << 20
_MARKERS = "osD^vP*Xh"
COLUMNS = {
    "Op": "{0.op}",
    "Shape": "{0.shape}",
    "us": "{0.us:.1f}",
    "Operations per byte": "{0.intensity:.2f}",
    "GB/s": "{0.gb_per_s:.1f}",
    "GOP/s": "{0.gop_per_s:.1f}",
}


@dataclass(frozen=True, slots=True)
class Point:
    """An op of one shape.

    Attributes:
        us: the median call.
        gb_per_s: bytes that the op must move, 1e9 per second.
        gop_per_s: multiplications, additions and other arithmetic of elements, 1e9 per second.
    """

    op: str
    shape: str
    us: float
    gb_per_s: float
    gop_per_s: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.gop_per_s / self.gb_per_s


@dataclass(frozen=True, slots=True)
class Roof:
    """The most operations per second of a level's instruction for a weight format."""

    level: str
    format: str
    gop_per_s: float


def main(argv: Sequence[str]) -> int:
    """Measure, print a table and write the picture."""
    command = Command("roofline", "Measure every kind of op, and draw it under this machine's roofs.")
    command.number("--rounds", 5)
    command.number("--contexts", (4096,), "tokens that attention reads")
    command.add_argument("--plot", type=Path, default=OUTPUT_DIR / "roofline.png", metavar="FILE", help="PNG to write")
    command.json()
    args = command.read(argv)
    memory = [measure_memory()]
    points = []
    linear = [(fmt, shape) for fmt in FORMATS for shape in (*SHAPES, HEAD)]
    progress = Progress(len(linear) + 1, "roofline")
    for fmt, shape in linear:
        points += [_linear_point(cost) for cost in measure_linear(fmt, *shape, ROWS, args.rounds, WORKING_SET_BYTES)]
        progress.advance(f"{fmt} {shape[0]}x{shape[1]}")
    points += [measure_op(call, args.rounds) for call in other_ops(args.contexts)]
    progress.advance("others")
    roofs = list(measured_roofs())
    memory.append(measure_memory())
    read_gb_per_s = max(speed.read_gb_per_s for speed in memory)
    hardware = describe_hardware()
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    title = f"{hardware['cpu']}, {hardware['isa']}, {hardware['num_threads']} threads"
    save_plot(points, roofs, read_gb_per_s, args.plot, title)
    result = {"hardware": hardware, "memory": memory, "roofs": roofs, "points": points}
    text = f"{table_of(points, COLUMNS)}\n\n{title}; memory reads {read_gb_per_s:.1f} GB/s.\n{args.plot}"
    show(args, result, text)
    return 0


def measured_roofs() -> Iterator[Roof]:
    """Yield the peaks of every level that this processor runs; the level in use is the same after it."""
    level = library.isa()
    try:
        for name in library.available_isas():
            library.set_isa(name)
            peaks = ((fmt, dot_peak(fmt) / 1e9) for fmt in ("bfloat16", "wint8"))
            yield from (Roof(name, fmt, peak) for fmt, peak in peaks if peak)
    finally:
        library.set_isa(level)


def measure_op(call: OpCall, num_rounds: int) -> Point:
    """Run an op on each of its inputs in turn, so often that a round takes some milliseconds."""
    for run in call.runs:
        run()
    seconds = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        for run in call.runs:
            run()
        seconds.append((time.perf_counter() - begin) / len(call.runs))
    s = median(seconds)
    return Point(call.op, call.shape, s * 1e6, call.num_bytes / s / 1e9, call.num_operations / s / 1e9)


def save_plot(points: Sequence[Point], roofs: Sequence[Roof], read_gb_per_s: float, path: Path, title: str) -> None:
    """Write the picture: both scales logarithmic, a marker per kind of op.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    intensities = [point.intensity for point in points]
    ends = [min(intensities) / 2, max(intensities) * 2]
    with panels(path, 1, 1, title, inches=(11.0, 7.0)) as [[panel]]:
        panel.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GOP/s")
        highest = max((roof.gop_per_s for roof in roofs), default=max(point.gop_per_s for point in points))
        knee = highest / read_gb_per_s
        slope = [ends[0], max(ends[0], min(ends[1], knee))]
        panel.plot(slope, [x * read_gb_per_s for x in slope], "k-", label=f"memory, {read_gb_per_s:.0f} GB/s")
        in_use = library.isa()
        for roof in roofs:
            is_used = roof.level == in_use
            panel.plot(ends, [roof.gop_per_s] * 2, "k-" if is_used else "k:", linewidth=1.0)
            text, side = f" {roof.level} {roof.format} {roof.gop_per_s:.0f} ", ("left" if is_used else "right")
            panel.text(ends[not is_used], roof.gop_per_s, text, ha=side, va="bottom", fontsize=7)
        for number, (op, group) in enumerate(_by_op(points).items()):
            marker = _MARKERS[number % len(_MARKERS)]
            x, y = [point.intensity for point in group], [point.gop_per_s for point in group]
            panel.plot(x, y, marker, label=op, markersize=6, alpha=0.8)
            for point in group:
                where = (point.intensity, point.gop_per_s)
                text = point.shape.split()[-1]
                panel.annotate(text, where, xytext=(4, -6), textcoords="offset points", fontsize=6)
        panel.set_xlim(*ends)
        panel.grid(visible=True, which="both", linewidth=0.2)
        panel.legend(fontsize=7, loc="lower right")


def _by_op(points: Sequence[Point]) -> Mapping[str, list[Point]]:
    groups: dict[str, list[Any]] = {}
    for point in points:
        groups.setdefault(point.op, []).append(point)
    return groups


def _linear_point(cost: LinearCost) -> Point:
    kind = "head" if (cost.in_features, cost.out_features) == HEAD else "linear"
    shape = f"{cost.in_features}x{cost.out_features} M={cost.num_rows}"
    return Point(f"{kind} {cost.format}", shape, cost.us, cost.gb_per_s, cost.gop_per_s)
