"""`bench host`: what a step costs outside the model's kernels, in microseconds per phase.

Engine and runner are the real ones, messages to the clients included. Without --model a stand-in takes the place of
the forward pass (see stand_in.py): a step is short then, and its host code is nearly all there is to see. With --model
the forward pass is the model's own, and is left out of the sums.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import stand_in
from benchmarks.checkpoint import ensure_checkpoint
from benchmarks.command import Command, Progress, show, table_of
from benchmarks.configurations import METHODS, speculative_of
from benchmarks.engines import greedy_request, verify_room
from benchmarks.record import percentiles
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.block_store import BlockStore
from fastdeploy_sd.engine.interfaces.executor import Executor
from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.engine.ipc.messages import Outputs, encode
from fastdeploy_sd.types import ModelInfo, RequestOutput, SchedulerOutput, StepResult
from fastdeploy_sd.types.draft_methods import NAIVE

# In the order of a step. `take in`: the worker's table and the method learn who came and went; `batch` to `draft`: the
# runner's own times, `verify` and `draft` with their kernels; `encode`: one message to one client.
PHASES = ("schedule", "take in", "batch", "verify", "draft", "commit", "encode")
_PROMPT_LEN = 64
# Prompts repeat themselves, so that there is something to draft from.
_CYCLE_LEN = 16
_NUM_WARM_UP_STEPS = 20
_MIB = 1 << 20
# Of prompts in a step, besides what decoding requests need.
_STEP_TOKENS = 2048
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The requests of a measurement.

    Attributes:
        method: of METHODS, or naive.
        num_requests: running in every step.
        output_len: tokens after which a request ends and another takes its place; 0 = none ends.
    """

    method: str
    num_requests: int
    output_len: int = 0


@dataclass(frozen=True, slots=True)
class HostCost:
    """What the steps of one load cost.

    Attributes:
        num_drafts: verified per request and step, the mean.
        us: phase -> {p50, p90, p99} over the steps.
        total_us, forward_us: the same of all phases together, and of the forward pass, which is none of them.
    """

    load: HostLoad
    num_drafts: float
    us: dict[str, dict[str, float]]
    total_us: dict[str, float]
    forward_us: dict[str, float]


COLUMNS = {
    "Method": "{0.load.method}",
    "Requests": "{0.load.num_requests}",
    "Drafts": "{0.num_drafts:.1f}",
    **{phase.capitalize(): f"{{0.us[{phase}][p50]:.0f}}" for phase in PHASES},
    "All us": "{0.total_us[p50]:.0f}",
    "p99": "{0.total_us[p99]:.0f}",
    "Forward us": "{0.forward_us[p50]:.0f}",
}


def main(argv: Sequence[str]) -> int:
    """Measure every combination of method and batch size and print a table."""
    command = Command("host", "Measure a step without its kernels.", "the engine's, with --model")
    command.some("--methods", (NAIVE, *METHODS), "(default: naive ngram); mtp needs --model", (NAIVE, "ngram"))
    command.number("--batch", (1, 32, 256), "requests")
    command.number("--drafts", None, "per request and step at most (default: the method's)")
    command.number("--steps", 200)
    command.number("--evict-mib", 96, "buffer read in place of a model; 0 = warm caches", least=0)
    command.number("--output-len", 0, "tokens per request; 0 = none ends", least=0)
    text = "the stand-in says random tokens: what a method costs that has nothing to draft"
    command.add_argument("--random-text", action="store_true", help=text)
    command.add_argument("--model", help="run it in place of the stand-in")
    command.json()
    args = command.read(argv)
    if args.others and not args.model:
        command.error(f"expected --model with the engine's options: {' '.join(args.others)}")
    if args.random_text and args.model:
        command.error("expected no --model with --random-text: the stand-in alone has such text")
    progress, costs = Progress(len(args.methods) * len(args.batch), "host"), []
    for method in args.methods:
        with _engine(args, method) as (engine, executor):
            for batch in args.batch:
                load = HostLoad(method, batch, args.output_len)
                costs.append(measure_host(engine, executor, load, args.steps))
                progress.advance(f"{method} {batch}")
    show(args, costs, table_of(costs, COLUMNS))
    return 0


class TimedExecutor:
    """Another executor, and when its last step began and ended."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.begin = self.end = 0.0
        self.phases_s: Mapping[str, float] = {}

    @property
    def model_info(self) -> ModelInfo:
        return self._executor.model_info

    @property
    def block_store(self) -> BlockStore | None:
        return self._executor.block_store

    @property
    def grammars(self) -> Grammars | None:
        return self._executor.grammars

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run a step; `phases_s` are what its result says."""
        self.begin = time.perf_counter()
        result = self._executor.execute(plan)
        self.end = time.perf_counter()
        self.phases_s = {name: ms / 1e3 for name, ms in result.timings_ms.items()}
        return result

    def shutdown(self) -> None:
        self._executor.shutdown()


def measure_host(engine: Engine, executor: TimedExecutor, load: HostLoad, num_steps: int) -> HostCost:
    """Run steps of decoding requests in an idle engine and time every phase."""
    requests = _Requests(engine, load)
    started: set[str] = set()
    num_warm_up = 0
    while num_warm_up < _NUM_WARM_UP_STEPS:
        outputs = engine.step()
        requests.replace(outputs)
        started |= {output.request_id for output in outputs}
        num_warm_up += len(started) >= load.num_requests
    num_drafts = engine.stats().num_draft_tokens
    spans = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        outputs = engine.step()
        end = time.perf_counter()
        encode(Outputs(tuple(range(len(outputs))), tuple(outputs)))
        encoded = time.perf_counter()
        inner = executor.phases_s
        spans.append(
            {
                "schedule": executor.begin - begin,
                "take in": executor.end - executor.begin - sum(inner.values()),
                **inner,
                "commit": end - executor.end,
                "encode": encoded - end,
            }
        )
        requests.replace(outputs)
    requests.end()
    num_drafts = engine.stats().num_draft_tokens - num_drafts
    us = {phase: _microseconds([span[phase] for span in spans]) for phase in (*PHASES, "forward")}
    return HostCost(
        load,
        num_drafts / num_steps / load.num_requests,
        {phase: us[phase] for phase in PHASES},
        _microseconds([sum(span[phase] for phase in PHASES) for span in spans]),
        us["forward"],
    )


def _microseconds(seconds: Sequence[float]) -> dict[str, float]:
    return percentiles([s * _US_PER_S for s in seconds]) or {}


class _Requests:
    """As many requests as the load says, at any time."""

    def __init__(self, engine: Engine, load: HostLoad) -> None:
        self._engine, self._load, self._num_submitted = engine, load, 0
        self._random = np.random.default_rng(0)
        info = engine.model_info
        self._max_tokens = load.output_len or info.max_model_len - _PROMPT_LEN - 2 * stand_in.BLOCK_SIZE
        for i in range(load.num_requests):
            # The first ones end one after the other, as if they had come so.
            self._submit(1 + i * load.output_len // load.num_requests if load.output_len else self._max_tokens)

    def replace(self, outputs: Sequence[RequestOutput]) -> None:
        """Submit another request for every one that has ended."""
        for output in outputs:
            if output.finish_reason is not None:
                self._submit(self._max_tokens)

    def end(self) -> None:
        """End them all, and drain the engine."""
        self._engine.abort([self._name(i) for i in range(self._num_submitted)])

    def _submit(self, max_tokens: int) -> None:
        i = self._num_submitted
        self._num_submitted += 1
        length = _PROMPT_LEN + i % stand_in.BLOCK_SIZE
        cycle = self._random.integers(0, self._engine.model_info.vocab_size, _CYCLE_LEN, np.int32)
        prompt = np.resize(cycle, length)
        self._engine.submit(greedy_request(self._name(i), prompt, max_tokens, seed=i))

    def _name(self, i: int) -> str:
        return f"{self._load.method}-{self._load.num_requests}-{i:012}"


@contextmanager
def _engine(args: argparse.Namespace, method: str) -> Iterator[tuple[Engine, TimedExecutor]]:
    """An engine with room for the largest batch until the last step, and its executor."""
    speculative = speculative_of(method, args.drafts)
    # As if every draft were right; other requests' prompts take steps too. A block is left for the last drafts.
    num_tokens = (args.steps + 4 * _NUM_WARM_UP_STEPS) * (speculative.num_speculative_tokens + 1)
    max_model_len = _PROMPT_LEN + 2 * stand_in.BLOCK_SIZE + (args.output_len or num_tokens)
    max_num_seqs = max(args.batch)
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_STEP_TOKENS + max_num_seqs * (1 + speculative.num_speculative_tokens),
    )
    if args.model is None:
        config = Config(ModelConfig("stand-in"), cache=CacheConfig(block_size=stand_in.BLOCK_SIZE), scheduler=limits)
        buffer = np.ones(args.evict_mib * _MIB // 8, np.int64)
        inner: Executor = stand_in.stand_in_executor(
            speculative, max_num_seqs, max_model_len, buffer, is_random=args.random_text
        )
    else:
        from fastdeploy_sd.distributed.executor import create_executor

        ensure_checkpoint(["--model", args.model])
        config = load_config(["--model", args.model, *args.others], "python -m benchmarks host")
        model = replace(config.model, max_model_len=max_model_len)
        config = replace(config, model=model, scheduler=limits, speculative=speculative)
        inner = create_executor(config)
    executor = TimedExecutor(inner)
    try:
        engine = Engine(config, executor)
        verify_room(engine, config, max_num_seqs, max_model_len - stand_in.BLOCK_SIZE)
        yield engine, executor
    finally:
        executor.shutdown()
