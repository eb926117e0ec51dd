"""`bench compare`: whole steps of another checkout of this program and of this one, turn about.

A machine's speed changes from one second to the next, so two builds that are measured one after the other say nothing
of each other. Here both have the model loaded, and take every prompt and every number of rows in turn, within tenths of
a second. What is quoted is the least time of each and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import Command, Progress, show, table_of, with_default
from benchmarks.compare_peer import STEPS_PER_TURN
from benchmarks.hardware import describe_hardware
from fastdeploy_sd.errors import ConfigError, FdsdError

FORMATS = ("bfloat16", "wint8", "wint4")
ROWS = (1, 2, 3, 4, 5, 8, 16)
_ROOT = Path(__file__).resolve().parents[1]
_PEER = Path(__file__).with_name("compare_peer.py")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One kind of step in both builds: the least milliseconds of all rounds.

    Attributes:
        step: "prompt of 512" or "4 rows".
        to_one: this build's time over its own step of one row; None for prompts.
    """

    weights: str
    step: str
    other_ms: float
    own_ms: float
    to_one: float | None

    @property
    def speed(self) -> float:
        """This build's speed as a multiple of the other's."""
        return self.other_ms / self.own_ms


def main(argv: Sequence[str]) -> int:
    """Measure every format and print a table."""
    text = "Time whole steps of two checkouts of this program, turn about. Build the other one's kernels first."
    command = Command("compare", text, "the engine's (--model, --num-threads, ...)")
    command.add_argument("--other", type=Path, required=True, metavar="DIR", help="the other checkout, kernels built")
    command.some("--formats", FORMATS, "of the weights (default: all)", FORMATS)
    command.number("--rows", ROWS, "1 among them")
    command.number("--context", 512, "tokens before them")
    command.number("--prompt", 512, "tokens of the prompts that are timed")
    command.number("--rounds", 12)
    busy = "time of one thread's processor instead of the clock's, for a busy machine"
    command.add_argument("--cpu-time", action="store_true", help=busy)
    command.json()
    args = command.read(argv)
    if 1 not in args.rows:
        raise ConfigError(f"rows: expected 1 among them, got {args.rows}", param="rows")
    if not (args.other / "benchmarks" / "step_cost.py").is_file():
        raise ConfigError(f"other: expected a checkout of this program, got {args.other}", param="other")
    # The processor's time of threads that wait for each other is no time of a step.
    others = with_default(args.others, "--num-threads", 1) if args.cpu_time else args.others
    own_model = [] if "--model" in others else ["--model", str((CHECKPOINT_DIR / "qwen3-0.6b").absolute())]
    ensure_checkpoint(["--model", str(CHECKPOINT_DIR / "qwen3-0.6b")] if own_model else others)
    progress = Progress(len(args.formats) * (_prompts(args.rounds) + args.rounds * len(args.rows)), "compare")
    times: list[StepTimes] = []
    for fmt in args.formats:
        weights = ["--dtype", fmt] if fmt == "bfloat16" else ["--quantization", fmt]
        times += measure(fmt, [*others, *own_model, *weights], args, progress.advance)
    show(args, {"hardware": describe_hardware(), "steps": times}, compare_table(times))
    return 0


def measure(
    fmt: str, engine: Sequence[str], args: argparse.Namespace, advance: Callable[[], object]
) -> list[StepTimes]:
    """Return the times of one format.

    Args:
        engine: its options.

    Raises:
        FdsdError: a build failed; its own message is above.
    """
    options = {
        "engine": list(engine),
        "context_len": args.context,
        "prompt_len": args.prompt,
        "max_rows": max(args.rows),
        "is_cpu_time": args.cpu_time,
        "max_tokens": (args.rounds + 1) * len(args.rows) * STEPS_PER_TURN + max(args.rows) + 1,
    }
    orders = [{"prompt": args.prompt}] * _prompts(args.rounds) + [{"rows": m} for m in args.rows] * args.rounds
    least: dict[str, list[float]] = {}
    with _build(args.other, options) as other, _build(_ROOT, options) as own:
        builds = [other, own]
        for number, order in enumerate(orders):
            # Neither always runs after the other.
            turn = [0, 1] if number % 2 == 0 else [1, 0]
            ms = least.setdefault(json.dumps(order), [float("inf")] * 2)
            for i in turn:
                ms[i] = min(ms[i], builds[i](order))
            advance()
    one = least[json.dumps({"rows": 1})][1]
    return [_step_times(fmt, json.loads(order), ms, one) for order, ms in least.items()]


def _prompts(num_rounds: int) -> int:
    """A prompt takes as long as many steps, and so is disturbed less."""
    return max(2, num_rounds // 3)


def _step_times(fmt: str, order: Mapping[str, int], ms: Sequence[float], one_ms: float) -> StepTimes:
    if "prompt" in order:
        return StepTimes(fmt, f"prompt of {order['prompt']}", ms[0], ms[1], None)
    return StepTimes(fmt, f"{order['rows']} rows", ms[0], ms[1], ms[1] / one_ms)


@contextlib.contextmanager
def _build(checkout: Path, options: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, int]], float]]:
    """Run a build's process; what is yielded gives it an order and returns the milliseconds."""
    # -P: modules next to the file are this build's, those on the path the checkout's.
    command = [sys.executable, "-P", str(_PEER), json.dumps(options)]
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def answer() -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise FdsdError(f"compare: expected an answer, got exit status {process.wait()} from {checkout}")
        return line

    def run(order: Mapping[str, int]) -> float:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return float(json.loads(answer())["ms"])

    with process:
        try:
            answer()
            yield run
        finally:
            process.stdin.close()
            process.stdout.close()


def compare_table(times: Sequence[StepTimes]) -> str:
    """Return the times as a Markdown table."""
    columns: dict[str, str | Callable[[StepTimes], object]] = {
        "Weights": "{0.weights}",
        "Step": "{0.step}",
        "Other ms": "{0.other_ms:.2f}",
        "This ms": "{0.own_ms:.2f}",
        "Speed": "{0.speed:.2f}x",
        "T(M)/T(1)": "{0.to_one:.2f}",
    }
    return table_of(times, columns)
