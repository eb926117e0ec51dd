"""`bench sampling`: what drawing and verifying tokens costs by itself, in microseconds per logits row.

Random logits of two shapes: peaked, a few tokens far above the rest, as a trained model gives them; and flat, a normal
distribution, where filters keep much of the vocabulary. The model is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.command import Command, show, table_of
from benchmarks.hardware import measure_memory
from benchmarks.progress import Progress
from fastdeploy_sd.device import library
from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.ops.sampling import sample
from fastdeploy_sd.types import EMPTY_I32, F32, DraftTokens, SamplingArrays

# Name -> what differs from plain sampling at temperature 1.
CASES: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy, first draft wrong": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_k 20000": {"top_k": 20000},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9, flat": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
}
COLUMNS = {
    "Case": "{0.case}",
    "Requests": "{0.requests}",
    "Rows each": "{0.rows}",
    "Step us": "{0.us:.0f}",
    "us per row": "{0.us_per_row:.1f}",
    "GB/s of logits": "{0.gb_per_s:.1f}",
}
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class SamplingCost:
    """What one case cost for one shape of a step.

    Attributes:
        rows: logits rows per request: its drafts and one.
        us: the median call.
        us_per_row: of all rows, also those that a wrong draft leaves out.
        gb_per_s: logits of all rows over that time.
    """

    case: str
    requests: int
    rows: int
    us: float
    us_per_row: float
    gb_per_s: float


def main(argv: Sequence[str]) -> int:
    """Measure every case and print a table."""
    command = Command("sampling", "Measure sampling by itself.")
    command.number("--vocab-size", 151_936)
    command.number("--batches", (1, 64))
    command.number("--drafts", (0, 4), least=0)
    command.number("--repeats", 5)
    command.json()
    args = command.read(argv)
    memory = [measure_memory()]
    costs = measure_sampling(args.vocab_size, args.batches, args.drafts, args.repeats)
    memory.append(measure_memory())
    speeds = ", ".join(f"{speed.read_gb_per_s:.0f}" for speed in memory)
    text = f"{table_of(costs, COLUMNS)}\n\n{library.num_threads()} threads; memory reads {speeds} GB/s."
    show(args, {"memory": memory, "costs": costs}, text)
    return 0


def measure_sampling(
    vocab_size: int, batches: Sequence[int], drafts: Sequence[int], repeats: int
) -> list[SamplingCost]:
    """Measure all cases for every batch and number of drafts; they take turns, so that all see the same machine."""
    shapes = [(batch, num_drafts + 1) for batch in batches for num_drafts in drafts]
    num_rows = max(batch * rows for batch, rows in shapes)
    peaked, flat = _logits(num_rows, vocab_size)
    seconds: dict[tuple[str, int, int], list[float]] = {}
    progress = Progress(repeats, "sampling")
    for _ in range(repeats):
        for batch, rows in shapes:
            # A small step is over soon: more calls, each on other rows, make its median as steady as a large one's.
            for call in range(min(20, num_rows // (batch * rows))):
                these = slice(call * batch * rows, (call + 1) * batch * rows)
                for case in CASES:
                    logits = (flat if "flat" in case else peaked)[these]
                    seconds.setdefault((case, batch, rows), []).append(_time(case, logits, batch, rows))
        progress.advance()
    return [_cost(key, times, vocab_size) for key, times in sorted(seconds.items(), key=_order)]


def _time(case: str, logits: F32, batch: int, rows: int) -> float:
    request_ids = np.repeat(np.arange(batch, dtype=np.int32), rows)
    positions, sampling = (
        np.arange(len(logits), dtype=np.int32),
        sampling_columns(batch, rows, logits.shape[1], CASES[case]),
    )
    drafted = _all_wrong(batch, rows) if "wrong" in case else None
    begin = time.perf_counter()
    sample(logits, request_ids, positions, sampling, drafted)
    return time.perf_counter() - begin


def _cost(key: tuple[str, int, int], times: list[float], vocab_size: int) -> SamplingCost:
    case, batch, rows = key
    us = float(np.median(times)) * _US_PER_S
    gb_per_s = batch * rows * vocab_size * 4 / us / 1e3
    return SamplingCost(case, batch, rows, us, us / (batch * rows), gb_per_s)


def _order(item: tuple[tuple[str, int, int], list[float]]) -> tuple[int, int, int]:
    case, batch, rows = item[0]
    return list(CASES).index(case), batch, rows


def _logits(num_rows: int, vocab_size: int) -> tuple[F32, F32]:
    rng = np.random.default_rng(0)
    flat = rng.standard_normal((num_rows, vocab_size), dtype=np.float32)
    peaked = flat * np.float32(2.5)
    num_likely = min(20, vocab_size)
    for row in peaked:
        row[rng.integers(0, vocab_size, num_likely)] += rng.uniform(6.0, 14.0, num_likely).astype(np.float32)
    return peaked, flat


def sampling_columns(
    num_requests: int, num_rows: int, vocab_size: int, settings: Mapping[str, float]
) -> SamplingArrays:
    """Return what requests of `num_rows` rows each ask for: plain sampling at temperature 1, but for `settings`."""

    def full(value: float, dtype: type = np.float32) -> np.ndarray:
        return np.full(num_requests, value, dtype)

    plain = SamplingArrays(
        table_rows=np.arange(num_requests, dtype=np.int32),
        temperature=full(1.0),
        top_k=full(0, np.int32),
        top_p=full(1.0),
        min_p=full(0.0),
        repetition_penalty=full(1.0),
        presence_penalty=full(0.0),
        frequency_penalty=full(0.0),
        seed=np.arange(num_requests, dtype=np.uint64),
        num_logprobs=full(-1, np.int32),
        count_rows=full(-1, np.int32),
        token_counts=np.zeros((0, vocab_size), np.int32),
        num_bias=np.zeros(num_requests, np.int32),
        bias_token_ids=np.zeros((num_requests, 0), np.int32),
        bias_values=np.zeros((num_requests, 0), np.float32),
        cu_mask=np.zeros(num_requests * num_rows + 1, np.int32),
        mask_token_ids=EMPTY_I32,
        allowed_rows=np.full(num_requests * num_rows, -1, np.int32),
        allowed_bits=np.zeros((0, 0), np.int32),
    )
    columns = {name: full(value, np.int32 if name == "top_k" else np.float32) for name, value in settings.items()}
    return replace(plain, **columns)


def _all_wrong(batch: int, rows: int) -> DraftedRows:
    """Drafts that no row can agree with."""
    cu_num_logits = np.arange(batch + 1, dtype=np.int32) * rows
    cu_num_draft = np.arange(batch + 1, dtype=np.int32) * (rows - 1)
    drafts = np.full(batch * (rows - 1), np.iinfo(np.int32).max, np.int32)
    return DraftedRows(cu_num_logits.astype(np.int32), DraftTokens(drafts, cu_num_draft.astype(np.int32)))
