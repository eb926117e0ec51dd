"""`bench ranks`: what several ranks cost and gain: a step's plan on its way to another rank, and whole steps of two
ranks beside those of one on the same cores.

Each number of ranks is an engine in a process of its own; they take turns, round by round, and only one runs at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import Command, show, table_of, with_default
from benchmarks.hardware import describe_hardware
from benchmarks.percentiles import percentiles
from benchmarks.progress import Progress
from benchmarks.ranks_peer import Steps
from fastdeploy_sd.config import Config, ModelConfig, ParallelConfig
from fastdeploy_sd.distributed.messages import decode, encode, frame_of
from fastdeploy_sd.distributed.processes import RankProcesses
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.types import DraftTokens, RequestDelta, SchedulerOutput, offsets
from fastdeploy_sd.worker.ranks.commands import RunRows, TakePlan
from fastdeploy_sd.worker.ranks.lead import GroupLead

RANKS = (1, 2, 4)
_FOLLOWER = "benchmarks.idle_follower:create_follower"
_BLOCK_SIZE = 64
_KV_GB = 1
_NUM_WARM_UP = 20
_TIMEOUT_S = 60.0
_STOP_S = 60.0
_US = 1e6
Percentiles = dict[str, float]


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What it takes to have another rank run a step that computes nothing, in microseconds over the steps.

    Attributes:
        num_requests, num_drafts: of the step, and per request.
        num_bytes: of the frame.
        encode_us: the plan on rank 0. send_us: from then until the frame is written. decode_us: the frame, measured
            here; the other rank does the same.
        order_us: from the plan to the answer, all of that included.
    """

    num_requests: int
    num_drafts: int
    num_bytes: int
    encode_us: Percentiles
    send_us: Percentiles
    decode_us: Percentiles
    order_us: Percentiles


@dataclass(frozen=True, slots=True)
class StepCost:
    """Whole steps of one kind on one number of ranks.

    Attributes:
        ms: over all steps of all rounds.
        ratio: of the median to that of the first number of ranks.
    """

    what: str
    num_ranks: int
    num_threads: int
    ms: Percentiles
    ratio: float


PLAN_COLUMNS = {
    "Requests": "{0.num_requests}",
    "Drafts": "{0.num_drafts}",
    "Bytes": "{0.num_bytes}",
    **{
        f"{heading} us, {rank}": f"{{0.{name}[{rank}]:.0f}}"
        for heading, name in {
            "Encode": "encode_us",
            "Send": "send_us",
            "Decode": "decode_us",
            "Order to answer": "order_us",
        }.items()
        for rank in ("p50", "p99")
    },
}
STEP_COLUMNS = {
    "Step": "{0.what}",
    "Ranks": "{0.num_ranks}",
    "Threads": "{0.num_threads}",
    "ms, p50": "{0.ms[p50]:.2f}",
    "ms, p99": "{0.ms[p99]:.2f}",
    "Ratio": "{0.ratio:.2f}",
}


def main(argv: Sequence[str]) -> int:
    """Measure and print two tables."""
    text = "Measure what ranks say to each other in a step, and whole steps on several ranks and on one."
    command = Command("ranks", text, "the engines' (default: Qwen3-0.6B's shape); cores are shared out among ranks")
    command.number("--ranks", (1, 2), "of the whole steps")
    command.number("--batch", (1, 8), "decoding requests")
    command.number("--prompt-len", 512, "tokens of the prompt whose computation is timed")
    command.number("--steps", 10, "of decoding, per round")
    command.number("--rounds", 10)
    command.number("--plans", 2000, "steps that compute nothing")
    command.json()
    args = command.read(argv)
    for num_ranks in args.ranks:
        if num_ranks not in RANKS:
            raise ConfigError(f"ranks: expected some of 1, 2, 4, got {num_ranks}", param="ranks")
    options = with_default(args.others, "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    options = with_default(options, "--kv-cache-memory-gb", _KV_GB)
    options = with_default(options, "--speculative-config", "naive")
    ensure_checkpoint(options)
    plans = measure_plans([(1, 0), (8, 0), (8, 5), (256, 0)], args.plans)
    kinds = {f"prompt of {args.prompt_len}": Steps(args.prompt_len, 1, 0)}
    kinds |= {f"decode {batch}": Steps(_BLOCK_SIZE, batch, args.steps) for batch in args.batch}
    steps = measure_steps(kinds, args.ranks, args.rounds, options)
    tables = f"{table_of(plans, PLAN_COLUMNS)}\n\n{table_of(steps, STEP_COLUMNS)}"
    hardware = describe_hardware()
    show(args, {"hardware": hardware, "plans": plans, "steps": steps}, f"{hardware['cpu']}\n\n{tables}")
    return 0


def measure_plans(sizes: Sequence[tuple[int, int]], num_steps: int) -> list[PlanCost]:
    """Send plans of decoding requests to a rank in another process; per size requests and drafts of each.

    Raises:
        FdsdError: the other rank did not start, or ended.
    """
    parallel = ParallelConfig(tensor_parallel_size=2, rank_timeout_s=_TIMEOUT_S)
    others = RankProcesses(Config(ModelConfig("none"), parallel=parallel), _FOLLOWER)
    try:
        others.wait_ready()
        lead = GroupLead(others, others.communicator)
        return [_measure_plan(lead, *size, num_steps) for size in sizes]
    finally:
        others.close()


def _measure_plan(lead: GroupLead, num_requests: int, num_drafts: int, num_steps: int) -> PlanCost:
    taken: dict[str, list[float]] = {name: [] for name in ("encode", "send", "decode", "order")}
    num_bytes = 0
    for i in range(num_steps + _NUM_WARM_UP):
        plan = decoding_plan(i, num_requests, num_drafts)
        begin = time.perf_counter()
        lead.take_plan(plan, ())
        encoded = time.perf_counter()
        with lead.attempt(RunRows):
            sent = time.perf_counter()
        answered = time.perf_counter()
        frame = frame_of([encode(TakePlan(plan)), encode(RunRows(i))])
        before = time.perf_counter()
        decode(frame)
        after = time.perf_counter()
        num_bytes = max(num_bytes, len(frame))
        if i >= _NUM_WARM_UP:
            spans = (encoded - begin, sent - encoded, after - before, answered - begin)
            for name, span in zip(taken, spans, strict=True):
                taken[name].append(span * _US)
    of = {f"{name}_us": percentiles(values) or {} for name, values in taken.items()}
    return PlanCost(num_requests, num_drafts, num_bytes, **of)


def decoding_plan(step: int, num_requests: int, num_drafts: int) -> SchedulerOutput:
    """Return the plan of a step in which every request decodes, and one of 64 tokens gets a block."""
    ids = tuple(f"cmpl-{row:032x}" for row in range(num_requests))
    rows = range(num_requests)
    blocks = {row: [(i + row) * (num_drafts + 1) // _BLOCK_SIZE for i in (step - 1, step)] for row in rows}
    growing = [row for row, (before, now) in blocks.items() if now > before]
    counts = np.full(num_requests, num_drafts, np.int32)
    return SchedulerOutput(
        step_id=step,
        request_ids=ids,
        new=(),
        deltas=tuple(RequestDelta(ids[row], (row,)) for row in growing),
        num_computed_tokens=np.full(num_requests, 1000 + step, np.int32),
        num_new_tokens=counts + 1,
        draft=DraftTokens(np.full(num_requests * num_drafts, 1000, np.int32), offsets(counts)),
        max_draft_len=counts,
    )


def measure_steps(
    kinds: dict[str, Steps], ranks: Sequence[int], num_rounds: int, options: Sequence[str]
) -> list[StepCost]:
    """Measure every kind of step on every number of ranks, in turns.

    Raises:
        FdsdError: an engine did not start, or ended; its own message is on standard error.
    """
    ms: dict[tuple[str, int], list[float]] = {(what, size): [] for what in kinds for size in ranks}
    with ExitStack() as stack:
        peers = {size: stack.enter_context(_peer(size, options)) for size in ranks}
        progress = Progress((num_rounds + 1) * len(ranks), "ranks")
        for turn in range(num_rounds + 1):
            for size in ranks if turn % 2 else ranks[::-1]:
                for what, steps in kinds.items():
                    found = peers[size].run(steps)
                    ms[what, size] += found if turn > 0 else []  # the first one touches memory for the first time
                progress.advance(f"{size} ranks")
        costs = []
        for (what, size), values in ms.items():
            of = percentiles(values) or {}
            first = percentiles(ms[what, ranks[0]]) or {}
            costs.append(StepCost(what, size, peers[size].num_threads, of, of["p50"] / first["p50"]))
        return costs


class _Peer:
    """An engine in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.num_threads = int(self._read())

    def run(self, steps: Steps) -> list[float]:
        """Return the milliseconds of its steps, or of the prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(steps)) + "\n")
        self._process.stdin.flush()
        taken: list[float] = json.loads(self._read())
        return taken

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise FdsdError("ranks: expected an engine to answer, got its end; its own message is above")
        return line


@contextmanager
def _peer(num_ranks: int, options: Sequence[str]) -> Iterator[_Peer]:
    command = [sys.executable, "-m", "benchmarks.ranks_peer", *options, "--tensor-parallel-size", str(num_ranks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            yield _Peer(process)
        finally:
            process.stdin.close()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
