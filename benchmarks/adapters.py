"""`bench adapters`: what low-rank adapters add to the products of a step, by how many of them its rows have.

Matrices are those of all layers in turn, so that no cache still holds them.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.command import Command, Progress, show, table_of
from benchmarks.hardware import describe_hardware
from benchmarks.kernels import FORMATS, WORKING_SET_BYTES, measure_linear
from benchmarks.shapes import SHAPES
from fastdeploy_sd.device import library
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.models.adapted_linears import AdaptedLinear, adapted_linears
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.ops.lora import LORA_EXPAND, LORA_SHRINK
from fastdeploy_sd.types import U16

_COUNTS = (0, 1, 8)


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """What the ops of all layers take in a step, in microseconds.

    Attributes:
        num_adapters: of the step's rows, which have them in turn; 0 = rows have none.
        linear: the products of the layers themselves.
    """

    num_adapters: int
    num_rows: int
    shrink: float
    expand: float
    linear: float

    @property
    def share(self) -> float:
        """Of the layers' own products."""
        return (self.shrink + self.expand) / self.linear


def main(argv: Sequence[str]) -> int:
    """Measure and print a table."""
    command = Command("adapters", "Measure what low-rank adapters of all linear layers add to a step.")
    command.some("--shape", tuple(SHAPES), "the model's (default: qwen3-0.6b)", ("qwen3-0.6b",))
    command.some("--formats", FORMATS, "of its weights (default: bfloat16)", ("bfloat16",))
    command.number("--adapters", _COUNTS, least=0)
    command.number("--rows", 8)
    command.number("--rank", 16)
    command.number("--rounds", 5)
    command.json()
    args = command.read(argv)
    config = read_decoder_config(SHAPES[args.shape[0]])
    costs = measure(config, args.formats[0], args.adapters, args.rows, args.rank, args.rounds)
    show(args, {"hardware": describe_hardware(), "adapters": costs}, adapter_table(costs))
    return 0


def measure(
    config: DecoderConfig, fmt: str, counts: Sequence[int], num_rows: int, rank: int, num_rounds: int
) -> list[AdapterCost]:
    """Measure a step of so many rows with each number of adapters."""
    shard = DecoderShard(config)
    linears = [linear for i in range(config.num_layers) for linear in adapted_linears(config, shard, i).values()]
    shapes = [(linear.in_features, sum(linear.num_rows)) for linear in linears]
    progress = Progress(len(set(shapes)) + 1, "adapters")
    base = {}
    for shape in dict.fromkeys(shapes):
        [cost] = measure_linear(fmt, *shape, (num_rows,), num_rounds, WORKING_SET_BYTES)  # type: ignore[arg-type]
        base[shape] = cost.us
        progress.advance(f"{fmt} {shape[0]}x{shape[1]}")
    slots: list[np.ndarray] = [_slots(num_rows, count) for count in counts]
    bound = _Calls(linears, num_rows, max(*counts, 1), rank)
    rounds = [[bound.run(of_rows) for of_rows in slots] for _ in range(num_rounds + 1)][1:]
    progress.advance("adapters")
    linear_us = sum(base[shape] for shape in shapes)
    costs = []
    for i, count in enumerate(counts):
        shrink, expand = (median(turn[i][op] for turn in rounds) for op in range(2))
        costs.append(AdapterCost(count, num_rows, shrink, expand, linear_us))
    return costs


def adapter_table(costs: Sequence[AdapterCost]) -> str:
    """Return the costs as a Markdown table."""
    columns: dict[str, str | Callable[[AdapterCost], object]] = {
        "Adapters": "{0.num_adapters}",
        "Rows": "{0.num_rows}",
        "lora_shrink, us": "{0.shrink:.0f}",
        "lora_expand, us": "{0.expand:.0f}",
        "linear, us": "{0.linear:.0f}",
        "More": "{0.share:.1%}",
    }
    return table_of(costs, columns)


def _slots(num_rows: int, num_adapters: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.int32) % num_adapters if num_adapters else np.full(num_rows, -1, np.int32)


class _Calls:
    """Both ops of every layer, on slots that differ from run to run."""

    def __init__(self, linears: Sequence[AdaptedLinear], num_rows: int, num_slots: int, rank: int) -> None:
        self._slots = np.zeros(num_rows, np.int32)
        self._calls: dict[HostOp, list[BoundCall]] = {LORA_SHRINK: [], LORA_EXPAND: []}
        # A step's rows are in a cache, unlike its matrices: all layers have the same.
        rows_of = functools.cache(functools.partial(_ones, num_rows))
        for linear in linears:
            num_parts, ends = len(linear.num_rows), np.cumsum(linear.num_rows).astype(np.int32)
            u = np.zeros((num_rows, num_parts * rank), np.float32)
            shared = {"slots": self._slots, "ranks": np.full((num_slots, num_parts), rank, np.int32), "u": u}
            shrink = {
                "x": rows_of(linear.in_features),
                "a": _ones(num_slots, num_parts * rank, linear.in_features),
                "num_slices": linear.slices.count,
                "slice_unit": linear.slices.unit,
            }
            expand = {
                "y": rows_of(int(ends[-1])),
                "b": _ones(num_slots, rank, int(ends[-1])),
                "scales": np.ones((num_slots, num_parts), np.float32),
                "part_ends": ends,
            }
            self._calls[LORA_SHRINK].append(LORA_SHRINK.bind(**shared, **shrink))
            self._calls[LORA_EXPAND].append(LORA_EXPAND.bind(**shared, **expand))

    def run(self, slots: np.ndarray) -> tuple[float, float]:
        """Return the microseconds of all calls of each op."""
        self._slots[:] = slots
        shrink, expand = (self._time(op) for op in (LORA_SHRINK, LORA_EXPAND))
        return shrink, expand

    def _time(self, op: HostOp) -> float:
        function = getattr(library.library(), f"fdsd_{op.declaration.name}")
        params = [ctypes.byref(call.params) for call in self._calls[op]]
        start = time.perf_counter()
        for call in params:
            function(call)
        return (time.perf_counter() - start) * 1e6


def _ones(*shape: int) -> U16:
    """Bfloat16; written, so that the memory is there."""
    return np.full(shape, 0x3F80, np.uint16)
