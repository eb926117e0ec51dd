"""`bench host`: what a step costs outside the model's kernels, in microseconds per phase.

Scheduler, worker's table, batch building, committing and the messages to the clients are the real ones. In place of the
model something reads a buffer, as a model reads its weights: what a step's host code finds in the caches then is as
little as in a server, and costs it two to three times as much. Drafting is left out: see `bench drafters`.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fastdeploy_sd.bench.percentiles import percentiles
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ipc.messages import Outputs, encode
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import (
    I64,
    DraftTokens,
    ModelInfo,
    Request,
    SchedulerOutput,
    SpeculationInfo,
    StepResult,
    VerifyResult,
)
from fastdeploy_sd.worker.batch import BatchBuilder
from fastdeploy_sd.worker.request_state import RequestTable

# In the order of a step. `append`: the worker's table takes the output in. `encode`: one message to one client.
PHASES = ("schedule", "batch", "append", "commit", "encode")
DEFAULT_BATCHES = (1, 32, 256)
DEFAULT_DRAFTS = (0, 4)
_BLOCK_SIZE = 64
_VOCAB_SIZE = 32_000
_PROMPT_LEN = 64
_NUM_WARM_UP_STEPS = 20
_US_PER_S = 1e6
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The requests of a measurement.

    Attributes:
        num_requests: running in every step.
        num_drafts: judged per request and step, a random number of them accepted.
        output_len: tokens after which a request ends and another takes its place; 0 = nobody ends.
    """

    num_requests: int
    num_drafts: int = 0
    output_len: int = 0


@dataclass(frozen=True, slots=True)
class HostCost:
    """What the steps of one load cost.

    Attributes:
        us: phase -> {p50, p90, p99} over the steps.
        total_us: the same of all phases together.
    """

    load: HostLoad
    us: dict[str, dict[str, float]]
    total_us: dict[str, float]


def main(argv: Sequence[str]) -> int:
    """Measure every combination of batch size and number of drafts and print a table.

    Raises:
        ConfigError: an option is out of its range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastdeploy_sd.bench host", allow_abbrev=False, description="Measure a step without its kernels."
    )
    add = functools.partial(parser.add_argument, type=int, metavar="N")
    add(
        "--batch",
        nargs="+",
        default=list(DEFAULT_BATCHES),
        help=f"requests (default: {' '.join(map(str, DEFAULT_BATCHES))})",
    )
    add(
        "--drafts",
        nargs="+",
        default=list(DEFAULT_DRAFTS),
        help=f"per request and step (default: {' '.join(map(str, DEFAULT_DRAFTS))})",
    )
    add("--steps", default=200, help="(default: %(default)s)")
    add("--evict-mib", default=96, help="buffer read in place of a model; 0 = warm caches (default: %(default)s)")
    add("--output-len", default=0, help="tokens per request; 0 = nobody ends (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    for name, values, least in (
        ("batch", args.batch, 1),
        ("drafts", args.drafts, 0),
        ("steps", [args.steps], 1),
        ("evict-mib", [args.evict_mib], 0),
        ("output-len", [args.output_len], 0),
    ):
        if min(values) < least:
            raise ConfigError(f"{name}: expected at least {least}, got {min(values)}", param=name)
    buffer = np.ones(args.evict_mib * _MIB // 8, np.int64)
    costs = [measure_host(HostLoad(n, k, args.output_len), args.steps, buffer) for n in args.batch for k in args.drafts]
    print(json.dumps([asdict(cost) for cost in costs], indent=1) if args.json else host_table(costs))
    return 0


def measure_host(load: HostLoad, num_steps: int, buffer: I64) -> HostCost:
    """Run steps of decoding requests and time every phase.

    Args:
        buffer: read in place of the model in every step.
    """
    steps = _Steps(load, num_steps + _NUM_WARM_UP_STEPS, buffer)
    for _ in range(_NUM_WARM_UP_STEPS):
        steps.run()
    spans = np.array([steps.run() for _ in range(num_steps)]) * _US_PER_S
    us = {phase: percentiles(column.tolist()) or {} for phase, column in zip(PHASES, spans.T, strict=True)}
    return HostCost(load, us, percentiles(spans.sum(axis=1).tolist()) or {})


def host_table(costs: Sequence[HostCost]) -> str:
    """Return the medians as a Markdown table."""
    head = f"| Batch | Drafts | {' | '.join(phase.capitalize() for phase in PHASES)} | All us | p99 |"
    rows = []
    for c in costs:
        medians = [*(c.us[phase]["p50"] for phase in PHASES), c.total_us["p50"], c.total_us["p99"]]
        rows.append(f"| {c.load.num_requests} | {c.load.num_drafts} | {' | '.join(f'{us:.0f}' for us in medians)} |")
    return "\n".join([head, "|" + "---|" * (len(PHASES) + 4), *rows])


def _lap(spans: list[float], start: float) -> float:
    """Add the time since `start` to the spans; returns now."""
    now = time.perf_counter()
    spans.append(now - start)
    return now


class _Steps:
    """Requests that decode, and everything around the model."""

    def __init__(self, load: HostLoad, num_steps: int, buffer: I64) -> None:
        """Submit the requests; nobody ends within `num_steps` steps unless the load says so."""
        self._buffer, self._random = buffer, np.random.default_rng(0)
        self._num_submitted = 0
        num_seqs, num_drafts = load.num_requests, load.num_drafts
        self._output_len = load.output_len or (num_steps + 1) * (num_drafts + 1)
        max_model_len = _PROMPT_LEN + _BLOCK_SIZE + self._output_len
        num_blocks = num_seqs * (max_model_len // _BLOCK_SIZE + 2)
        speculation = SpeculationInfo("ngram", ("naive", "ngram"), num_drafts) if num_drafts else SpeculationInfo()
        limits = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * max_model_len)
        self._scheduler = Scheduler(
            Config(ModelConfig("stand-in"), cache=CacheConfig(block_size=_BLOCK_SIZE), scheduler=limits),
            ModelInfo("stand-in", _VOCAB_SIZE, max_model_len, (), _BLOCK_SIZE, num_blocks, speculation),
        )
        self._table = RequestTable(num_seqs, max_model_len, _BLOCK_SIZE, _VOCAB_SIZE)
        self._batches = BatchBuilder(self._table, _BLOCK_SIZE)
        for i in range(num_seqs):
            # The first ones end one after the other, as if they had come so.
            self._submit(1 + i * load.output_len // num_seqs if load.output_len else self._output_len)

    def run(self) -> list[float]:
        """Run a step; seconds per phase."""
        spans: list[float] = []
        start = time.perf_counter()
        plan = self._scheduler.schedule()
        start = _lap(spans, start)
        self._table.apply(plan)
        members = self._table.members(plan.request_ids)
        self._batches.build(plan, members)
        _lap(spans, start)
        verified, drafts = self._verify(plan), self._draft(plan)
        result = StepResult(plan.step_id, plan.request_ids, verified, drafts, {}, {"forward": 1.0})
        self._buffer.sum()
        start = time.perf_counter()
        self._table.commit(members, verified)
        start = _lap(spans, start)
        outputs = self._scheduler.commit(plan, result)
        start = _lap(spans, start)
        encode(Outputs(tuple(range(len(outputs))), tuple(outputs)))
        _lap(spans, start)
        for output in outputs:
            if output.finish_reason is not None:
                self._submit(self._output_len)
        return spans

    def _submit(self, max_tokens: int) -> None:
        i = self._num_submitted
        self._num_submitted += 1
        prompt = self._random.integers(0, _VOCAB_SIZE, _PROMPT_LEN + i % _BLOCK_SIZE).astype(np.int32)
        self._scheduler.add(Request(f"request-{i:012}", prompt, SamplingParams(), max_tokens, seed=i))

    def _verify(self, plan: SchedulerOutput) -> VerifyResult:
        """Accept a random number of every row's drafts."""
        num_draft = np.diff(plan.draft.cu_num_draft)
        num_accepted = (self._random.random(len(num_draft)) * (num_draft + 1)).astype(np.int32)
        cu_num_output = np.zeros(len(num_draft) + 1, np.int32)
        np.cumsum(num_accepted + 1, out=cu_num_output[1:])
        token_ids = self._random.integers(0, _VOCAB_SIZE, cu_num_output[-1]).astype(np.int32)
        return VerifyResult(token_ids, cu_num_output, num_accepted)

    def _draft(self, plan: SchedulerOutput) -> DraftTokens:
        cu_num_draft = np.zeros(len(plan.request_ids) + 1, np.int32)
        np.cumsum(plan.max_draft_len, out=cu_num_draft[1:])
        return DraftTokens(np.ones(cu_num_draft[-1], np.int32), cu_num_draft, np.ones(cu_num_draft[-1], np.int8))
