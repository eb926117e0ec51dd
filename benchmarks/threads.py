"""`bench threads`: how decoding falls on the kernel threads, and what a neighbour on one processor leaves of its speed.

Windows without and with the neighbour, a process that takes what it can of one processor, are run in turn: what is
quoted are medians of the ratios of a window and the one before it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import Command, show, table_of, with_default
from benchmarks.engines import greedy_request, running_engine
from benchmarks.hardware import describe_hardware
from benchmarks.progress import Progress
from fastdeploy_sd.config import SpeculativeConfig, load_config
from fastdeploy_sd.device import library
from fastdeploy_sd.device.library import ThreadCounts
from fastdeploy_sd.device.processors import own_processors
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError

_PROMPT_LEN = 64
_NUM_WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps of the same requests.

    Attributes:
        num_loops: shared by the threads: how often they met.
        threads: what each did, the caller's first.
    """

    num_steps: int
    seconds: float
    num_loops: int
    threads: tuple[ThreadCounts, ...]

    @property
    def steps_per_s(self) -> float:
        """The speed."""
        return self.num_steps / self.seconds


@dataclass(frozen=True, slots=True)
class ThreadShare:
    """What one thread did per step of a window."""

    neighbour: str
    thread: int
    loops: float
    pieces: float
    stolen: float
    megabytes: float
    moves: float
    sleeps: float


@dataclass(frozen=True, slots=True)
class NeighbourCost:
    """What is measured.

    Attributes:
        ratio: of the speed with the neighbour, the median over the pairs of windows; least and most of them.
        shares: of the median quiet window and of the median busy one.
    """

    hardware: dict[str, object]
    quiet_steps_per_s: float
    busy_steps_per_s: float
    ratio: float
    ratio_least: float
    ratio_most: float
    shares: list[ThreadShare]


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    text = "Count what every thread does per decoding step, and time steps beside a process that takes one processor."
    command = Command("threads", text, "the engine's (--model, --quantization, --num-threads, ...)")
    command.number("--batch", 1, "requests that decode")
    command.number("--pairs", 8, "of windows, without and with the neighbour")
    command.number("--window-ms", 500)
    command.number(
        "--processor", None, "of the neighbour, as the system numbers it (default: the last usable)", least=0
    )
    command.json()
    args = command.read(argv)
    allowed = own_processors().allowed
    processor = allowed[-1] if args.processor is None else args.processor
    if processor not in allowed:
        raise ConfigError(f"processor: expected one of {allowed}, got {processor}", param="processor")
    options = with_default(args.others, "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    ensure_checkpoint(options)
    config = replace(load_config(options, command.prog), speculative=SpeculativeConfig())
    with running_engine(config) as engine:
        cost = measure(engine, args.batch, args.pairs, args.window_ms / 1e3, processor)
    show(args, cost, neighbour_table(cost))
    return 0


def measure(engine: Engine, batch: int, num_pairs: int, seconds: float, processor: int) -> NeighbourCost:
    """Run pairs of windows of plain decoding.

    Args:
        processor: of the neighbour.
    """
    steps = _Decoding(engine, batch)
    progress = Progress(num_pairs, "threads")
    quiet, busy = [], []
    for _ in range(num_pairs):
        quiet.append(steps.window(seconds))
        with neighbour(processor):
            busy.append(steps.window(seconds))
        progress.advance()
    steps.close()
    ratios = [b.steps_per_s / q.steps_per_s for q, b in zip(quiet, busy, strict=True)]
    return NeighbourCost(
        describe_hardware(),
        median(w.steps_per_s for w in quiet),
        median(w.steps_per_s for w in busy),
        median(ratios),
        min(ratios),
        max(ratios),
        [*_shares("no", quiet), *_shares(f"on {processor}", busy)],
    )


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


class _Decoding:
    """Requests that decode without end: one that has ended is followed by another."""

    def __init__(self, engine: Engine, batch: int) -> None:
        self._engine, self._batch, self._number = engine, batch, 0
        self._running: set[str] = set()
        for _ in range(_NUM_WARM_UP_STEPS):
            self._step()

    def window(self, seconds: float) -> Window:
        """Step until so much time has passed."""
        begin, num_steps, (num_loops, before) = time.perf_counter(), 0, library.thread_counts()
        while (taken := time.perf_counter() - begin) < seconds:
            self._step()
            num_steps += 1
        end_loops, after = library.thread_counts()
        threads = tuple(
            ThreadCounts(*(getattr(a, name) - getattr(b, name) for name in ThreadCounts.__slots__))
            for a, b in zip(after, before, strict=True)
        )
        return Window(num_steps, taken, end_loops - num_loops, threads)

    def close(self) -> None:
        self._engine.abort(list(self._running))

    def _step(self) -> None:
        info = self._engine.model_info
        while len(self._running) < self._batch:
            self._number += 1
            rng = np.random.default_rng(self._number)
            prompt = rng.integers(1, info.vocab_size, _PROMPT_LEN, np.int32)
            name = f"request-{self._number}"
            self._engine.submit(greedy_request(name, prompt, info.max_request_tokens - _PROMPT_LEN))
            self._running.add(name)
        for output in self._engine.step():
            if output.finish_reason is not None:
                self._running.discard(output.request_id)


def _shares(name: str, windows: Sequence[Window]) -> list[ThreadShare]:
    """Return what every thread did per step of the window of median speed."""
    window = sorted(windows, key=lambda w: w.steps_per_s)[len(windows) // 2]
    n = max(window.num_steps, 1)
    return [
        ThreadShare(
            name, t, window.num_loops / n, c.pieces / n, c.stolen / n, c.bytes_read / n / 1e6, c.moves / n, c.sleeps / n
        )
        for t, c in enumerate(window.threads)
    ]


def neighbour_table(cost: NeighbourCost) -> str:
    """Return the shares as Markdown, and a line with the speeds."""
    columns = {
        "Neighbour": "{0.neighbour}",
        "Thread": "{0.thread}",
        "Loops": "{0.loops:.0f}",
        "Pieces": "{0.pieces:.0f}",
        "Stolen": "{0.stolen:.0f}",
        "MB read": "{0.megabytes:.1f}",
        "Moves": "{0.moves:.2f}",
        "Sleeps": "{0.sleeps:.2f}",
    }
    speeds = f"{cost.quiet_steps_per_s:.1f} steps/s alone, {cost.busy_steps_per_s:.1f} beside a neighbour"
    ratio = f"{cost.ratio:.2f}x ({cost.ratio_least:.2f}-{cost.ratio_most:.2f})"
    return f"{table_of(cost.shares, columns)}\n\nPer step. {speeds}: {ratio}."
