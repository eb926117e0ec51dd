"""`bench prefill`: a long prompt by the tokens of a step, and which op takes which share of its steps.

Prompts of all chunk sizes take turns in one process. Long chunks read the weights less often; short ones let other
requests' tokens come between them sooner. What the whole prompt makes of the machine is the share of the measured peak
that its products reach.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import Command, show, table_of, with_default
from benchmarks.engines import greedy_request
from benchmarks.hardware import describe_hardware
from benchmarks.progress import Progress
from benchmarks.prompt_operations import least_seconds, prompt_operations
from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import Executor
from fastdeploy_sd.errors import ConfigError

CHUNKS = (256, 512, 1024, 2048, 4096)
PROMPT_LEN = 4096
# What the table shows by itself; all other ops of a step are together.
_OPS = ("linear", "cascade_append_attention")

Milliseconds = Mapping[str, float]  # by op


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """A prompt in chunks of one size; times are of the fastest round.

    Attributes:
        tokens_per_s: of the prompt.
        peak_share: the prompt's time if all its products ran at the peaks measured in the same round, over its time;
            None for a mixture of experts and where there is no peak.
        step_ms: of its slowest step, what a decoding request beside it waits.
        first: inside the model, by op, of the prompt's first chunk.
        last: likewise, of its last one.
    """

    chunk_len: int
    tokens_per_s: float
    peak_share: float | None
    step_ms: float
    first: Milliseconds
    last: Milliseconds


def main(argv: Sequence[str]) -> int:
    """Measure and print a table."""
    text = "Time a prompt in chunks of several sizes, and the ops of its first and its last chunk."
    command = Command("prefill", text, "the engine's (--model, --quantization, --num-threads, ...)")
    command.number("--chunks", CHUNKS, "tokens per step")
    command.number("--prompt", PROMPT_LEN, "tokens")
    command.number("--rounds", 3)
    command.json()
    args = command.read(argv)
    if max(args.chunks) > args.prompt:
        raise ConfigError(f"chunks: expected at most prompt ({args.prompt}), got {max(args.chunks)}", param="chunks")
    options = with_default(args.others, "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    ensure_checkpoint(options)
    costs = measure_chunks(load_config(options, command.prog), args.chunks, args.prompt, args.rounds)
    show(args, {"hardware": describe_hardware(), "prompt_len": args.prompt, "chunks": costs}, chunk_table(costs))
    return 0


def measure_chunks(config: Config, chunks: Sequence[int], prompt_len: int, num_rounds: int) -> list[ChunkCost]:
    """Measure prompts of `prompt_len` tokens, those of all chunk sizes turn about.

    Raises:
        ConfigError, CheckpointError: as `create_executor`.
    """
    from fastdeploy_sd.distributed.executor import create_executor

    # A finished request stays with the executor until its engine's next step.
    scheduler = replace(config.scheduler, max_num_batched_tokens=max(chunks), max_num_seqs=len(chunks) + 1)
    model = replace(config.model, max_model_len=prompt_len + 1, enforce_eager=False)
    # A prompt makes no drafts, and its steps need no room for them.
    config = replace(config, scheduler=scheduler, model=model, speculative=SpeculativeConfig())
    executor = create_executor(config)
    try:
        prompts = [_Prompts(config, executor, chunk, prompt_len) for chunk in chunks]
        operations = prompt_operations(config, prompt_len)
        progress = Progress(num_rounds, "prefill")
        for i in range(num_rounds):
            least_s = None if operations is None else least_seconds(operations)
            for prompt in prompts:
                prompt.run(i, least_s)
            progress.advance()
        return [prompt.cost() for prompt in prompts]
    finally:
        executor.shutdown()


def chunk_table(costs: Sequence[ChunkCost]) -> str:
    """Return the costs as a Markdown table; shares are of the ops' time in the first and in the last chunk."""
    columns: dict[str, str | Callable[[ChunkCost], object]] = {
        "Chunk": "{0.chunk_len}",
        "Prompt tokens/s": "{0.tokens_per_s:.0f}",
        "of peak": "{0.peak_share:.0%}",
        "Slowest step ms": "{0.step_ms:.0f}",
    }
    for place in ("first", "last"):
        for op in (*_OPS, "others"):
            columns[f"{op}, {place}"] = partial(_share, place, op)
    return table_of(costs, columns)


def _share(place: str, op: str, cost: ChunkCost) -> str:
    times: Milliseconds = getattr(cost, place)
    part = sum(ms for name, ms in times.items() if (name == op if op in _OPS else name not in _OPS))
    return f"{part / sum(times.values()):.1%}"


class _Prompts:
    """Prompts of one chunk size, over the executor that all sizes share one after another."""

    def __init__(self, config: Config, executor: Executor, chunk_len: int, prompt_len: int) -> None:
        scheduler = replace(config.scheduler, long_prefill_token_threshold=chunk_len)
        self._engine = Engine(replace(config, scheduler=scheduler), executor)
        self._chunk_len, self._prompt_len = chunk_len, prompt_len
        self._best: ChunkCost | None = None

    def run(self, number: int, least_s: float | None) -> None:
        """Run a prompt of its own, so that none is found in the prefix cache.

        Args:
            least_s: what its products take at the machine's peak.
        """
        rng = np.random.default_rng((number, self._chunk_len))
        tokens = rng.integers(1, self._engine.model_info.vocab_size, self._prompt_len, np.int32)
        self._engine.submit(greedy_request(f"{self._chunk_len}-{number}", tokens, 1))
        steps = []
        with _op_times() as times:
            while True:
                begin = time.perf_counter()
                outputs = self._engine.step()
                steps.append(time.perf_counter() - begin)
                if outputs:
                    break
        seconds = sum(steps)
        share = None if least_s is None else least_s / seconds
        tokens_per_s, step_ms = self._prompt_len / seconds, max(steps) * 1e3
        cost = ChunkCost(self._chunk_len, tokens_per_s, share, step_ms, times[0], times[-1])
        if self._best is None or cost.tokens_per_s > self._best.tokens_per_s:
            self._best = cost

    def cost(self) -> ChunkCost:
        assert self._best is not None
        return self._best


@contextmanager
def _op_times() -> Iterator[list[Milliseconds]]:
    """Meanwhile passes replay call by call, and each adds its ops' milliseconds to the list."""
    from fastdeploy_sd.worker.step.forward import RecordedForward

    times: list[Milliseconds] = []

    def timed(forward: RecordedForward) -> None:
        sums: Counter[str] = Counter()
        for op, nanoseconds in zip(*forward.program.timed_run(forward.sizes), strict=True):
            sums[op] += int(nanoseconds)
        times.append({op: total / 1e6 for op, total in sums.items()})

    plain = RecordedForward.__call__
    RecordedForward.__call__ = timed  # type: ignore[assignment,method-assign]
    try:
        yield times
    finally:
        RecordedForward.__call__ = plain  # type: ignore[method-assign]
