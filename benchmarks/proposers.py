"""`bench proposers`: what the methods that need no model cost by themselves, in microseconds and bytes.

Many requests with long texts, each growing by a token per step, as in plain decoding: the most calls a token can need.
Verification, model and engine are left out.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import Command, show, table_of
from benchmarks.configurations import speculative_of
from benchmarks.percentiles import percentiles
from benchmarks.progress import Progress
from fastdeploy_sd.cli.replay.memory import memory_of
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.spec_decode.router import create_method
from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.draft_methods import METHODS

MODEL_FREE = [method.name for method in METHODS.values() if method.source is not None and not method.needs_model]
COLUMNS = {
    "Method": "{0.method}",
    "Batch": "{0.batch}",
    "Context": "{0.context_len}",
    "us per request and step": "{0.us_per_request:.2f}",
    "Step us": "{0.step_us[p50]:.0f}",
    "p99": "{0.step_us[p99]:.0f}",
    "Read us per token": "{0.begin_us_per_token:.3f}",
    "Bytes per token": "{0.bytes_per_token:.1f}",
}
_US_PER_S = 1e6
_VOCAB_SIZE = 4096


@dataclass(frozen=True, slots=True)
class ProposerCost:
    """What one method cost.

    Attributes:
        begin_us_per_token: reading the first texts, per token of them.
        step_us: {p50, p90, p99} of a propose call.
        us_per_request: the median call over the batch.
        num_drafts: made in all steps.
        bytes_per_token: memory over the tokens it knows: the texts, or what was kept of them for others.
    """

    method: str
    batch: int
    context_len: int
    begin_us_per_token: float
    step_us: dict[str, float]
    us_per_request: float
    num_drafts: int
    bytes_per_token: float | None


def main(argv: Sequence[str]) -> int:
    """Measure every model-free method and print a table."""
    command = Command("proposers", "Measure drafting by itself.")
    command.number("--batch", 64, "requests")
    command.number("--context", 8192, "tokens each")
    command.number("--steps", 256)
    command.json()
    args = command.read(argv)
    texts = _texts(args.batch, args.context + args.steps)
    progress, costs = Progress(len(MODEL_FREE), "proposers"), []
    for method in MODEL_FREE:
        costs.append(measure_proposer(method, texts, args.context))
        progress.advance(method)
    show(args, costs, table_of(costs, COLUMNS))
    return 0


def measure_proposer(method: str, texts: I32, context_len: int) -> ProposerCost:
    """Let a method read the first `context_len` tokens of every text, then draft after each of the others.

    Args:
        texts: i32[batch, context_len + steps].
    """
    batch, length = texts.shape
    config = speculative_of(method)
    proposer = create_method(method, config, ProposerContext(batch, length, _VOCAB_SIZE))
    table_rows = np.arange(batch, dtype=np.int32)
    ids = tuple(f"r{table_row}" for table_row in table_rows)
    max_draft_len = np.full(batch, config.num_speculative_tokens, np.int32)
    times, num_drafts = [], 0
    try:
        begin = time.perf_counter()
        proposer.begin([DraftRequest(i, table_row, context_len, context_len) for table_row, i in enumerate(ids)])
        proposer.propose(ProposeInput(ids, table_rows, texts, _full(batch, context_len), np.zeros(batch, np.int32)))
        begin_s = time.perf_counter() - begin
        for num_tokens in range(context_len + 1, length + 1):
            x = ProposeInput(ids, table_rows, texts, _full(batch, num_tokens), max_draft_len)
            start = time.perf_counter()
            drafts = proposer.propose(x)
            times.append((time.perf_counter() - start) * _US_PER_S)
            num_drafts += len(drafts.token_ids)
        memory = memory_of(proposer)
        # A cache of outputs knows the tokens of the steps, an index the whole texts.
        known = batch * (length if method == "ngram" else length - context_len)
        num_bytes = None if memory is None else memory() / known
    finally:
        proposer.close()
    step_us = percentiles(times) or {}
    return ProposerCost(
        method=method,
        batch=batch,
        context_len=context_len,
        begin_us_per_token=begin_s * _US_PER_S / (batch * context_len),
        step_us=step_us,
        us_per_request=step_us["p50"] / batch,
        num_drafts=num_drafts,
        bytes_per_token=num_bytes,
    )


def _texts(batch: int, length: int) -> I32:
    """Python source as tokens of the demo model, i32[batch, length]: every request has a stretch of its own."""
    tokenizer = load_tokenizer(ModelConfig(DEMO_MODEL).path)
    token_ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        token_ids += tokenizer.encode_segments(
            [Segment(path.read_text(encoding="utf-8", errors="replace"), is_control=False)]
        )
        if len(token_ids) >= batch * length:
            return np.array(token_ids[: batch * length], np.int32).reshape(batch, length)
    raise ConfigError(f"batch: expected batch x (context + steps) of at most {len(token_ids)}, got {batch * length}")


def _full(batch: int, value: int) -> I32:
    return np.full(batch, value, np.int32)
