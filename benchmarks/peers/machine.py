"""What else decides a time: the memory's and the processor's speed at that moment, and other programs' load."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hardware import describe_hardware, measure_memory
from fastdeploy_sd.device import library

_MATMUL_SIZE = 1024
_NUM_MATMULS = 4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Machine:
    """Measures the machine before a round; foreign load is what was used by others since the last time.

    Args:
        threads: that the peers compute with; memory is read by as many.
    """

    def __init__(self, threads: int) -> None:
        library.set_num_threads(threads)
        self._matrix = np.random.default_rng(0).standard_normal((_MATMUL_SIZE, _MATMUL_SIZE), np.float32)
        self._last = (time.perf_counter(), _busy_s() - _own_s())

    def describe(self) -> dict[str, Any]:
        """What does not change."""
        return {"cpu": describe_hardware()["cpu"], "num_cpus": os.cpu_count()}

    def measure(self) -> dict[str, float]:
        """Read bandwidth, latency between cores, speed of a float32 matrix product, and CPUs others used meanwhile."""
        now, foreign = time.perf_counter(), _busy_s() - _own_s()
        (then, before), self._last = self._last, (now, foreign)
        state = asdict(measure_memory())
        state["matmul_gflops"] = self._matmul_gflops()
        state["foreign_cpus"] = max(0.0, (foreign - before) / (now - then))
        return {name: round(value, 2) for name, value in state.items()}

    def _matmul_gflops(self) -> float:
        """With as many threads as NumPy's BLAS takes: one per core unless its environment says otherwise."""
        times = []
        for _ in range(_NUM_MATMULS):
            begin = time.perf_counter()
            self._matrix @ self._matrix
            times.append(time.perf_counter() - begin)
        return 2 * _MATMUL_SIZE**3 / min(times) / 1e9


def state_line(state: dict[str, float]) -> str:
    """One line about a measurement."""
    return (
        f"read {state['read_gb_per_s']:.1f} GB/s, float32 {state['matmul_gflops']:.0f} GFLOP/s,"
        f" others {state['foreign_cpus']:.2f} CPUs"
    )


def _busy_s() -> float:
    """CPU seconds of the whole machine since it started."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (int(word) for word in first.split()[1:])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def _own_s() -> float:
    """CPU seconds of this process and everything it started, ended children included."""
    ticks = 0
    for pid in family(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_S


def family(pid: int) -> list[int]:
    """Return a process and what it and those have started and is still there, parents first."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            children += map(int, path.read_text(encoding="ascii").split())
    return [pid, *(descendant for child in sorted(children) for descendant in family(child))]
