"""`bench drafters`: what the methods that need no model cost by themselves, in microseconds and bytes.

Many requests with long texts, each growing by a token per step, as in plain decoding: the most calls a token can need.
Verification, model and engine are left out.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fastdeploy_sd.bench.contenders import METHODS
from fastdeploy_sd.bench.percentiles import percentiles
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from fastdeploy_sd.config.speculative_map import read_speculative
from fastdeploy_sd.entrypoints.text.added_tokens import Segment
from fastdeploy_sd.entrypoints.text.tokenizer import load_tokenizer
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.replay.memory import memory_of
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext, create_method
from fastdeploy_sd.types import I32

MODEL_FREE = ("ngram", "suffix")
_US_PER_S = 1e6
_VOCAB_SIZE = 4096


@dataclass(frozen=True, slots=True)
class DrafterCost:
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
    """Measure every model-free method and print a table.

    Raises:
        ConfigError: an option is wrong, or there is too little text.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastdeploy_sd.bench drafters", allow_abbrev=False, description="Measure drafting by itself."
    )
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="requests (default: %(default)s)")
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="tokens each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    for name in ("batch", "context", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}: expected at least 1, got {getattr(args, name)}", param=name)
    texts = _texts(args.batch, args.context + args.steps)
    costs = [measure_drafter(method, texts, args.context) for method in MODEL_FREE]
    print(json.dumps([asdict(cost) for cost in costs], indent=1) if args.json else drafters_table(costs))
    return 0


def measure_drafter(method: str, texts: I32, context_len: int) -> DrafterCost:
    """Let a method read the first `context_len` tokens of every text, then draft after each of the others.

    Args:
        texts: i32[batch, context_len + steps].
    """
    batch, length = texts.shape
    config = read_speculative(METHODS[method]).config
    proposer = create_method(method, config, ProposerContext(batch, length, _VOCAB_SIZE))
    slots = np.arange(batch, dtype=np.int32)
    ids = tuple(f"r{slot}" for slot in slots)
    max_draft_len = np.full(batch, config.num_speculative_tokens, np.int32)
    times, num_drafts = [], 0
    try:
        begin = time.perf_counter()
        proposer.begin([DraftRequest(i, slot, context_len, context_len) for slot, i in enumerate(ids)])
        proposer.propose(ProposeInput(ids, slots, texts, _full(batch, context_len), np.zeros(batch, np.int32)))
        begin_s = time.perf_counter() - begin
        for num_tokens in tqdm(range(context_len + 1, length + 1), desc=method, disable=None, leave=False):
            x = ProposeInput(ids, slots, texts, _full(batch, num_tokens), max_draft_len)
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
    return DrafterCost(
        method=method,
        batch=batch,
        context_len=context_len,
        begin_us_per_token=begin_s * _US_PER_S / (batch * context_len),
        step_us=step_us,
        us_per_request=step_us["p50"] / batch,
        num_drafts=num_drafts,
        bytes_per_token=num_bytes,
    )


def drafters_table(costs: Sequence[DrafterCost]) -> str:
    """Return the costs as a Markdown table."""
    head = (
        "| Method | Batch | Context | us per request and step | Step us | p99 | Read us per token | Bytes per token |"
    )
    rows = [
        f"| {c.method} | {c.batch} | {c.context_len} | {c.us_per_request:.2f} | {c.step_us['p50']:.0f} |"
        f" {c.step_us['p99']:.0f} | {c.begin_us_per_token:.3f} |"
        f" {'-' if c.bytes_per_token is None else f'{c.bytes_per_token:.1f}'} |"
        for c in costs
    ]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


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
