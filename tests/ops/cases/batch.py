"""Cases of prepare_batch, append_tokens and gather_output_rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import batch
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.native import batch as native
from fastdeploy_sd.ops.native.batch import BatchRows, OutputRows, TokenTables
from fastdeploy_sd.ops.reference import batch as reference
from fastdeploy_sd.types import DraftTokens
from tests.ops.backends import from_paddle, to_paddle
from tests.ops.cases.case import OpCases

MAX_TOKENS = 40


def step(rng: np.random.Generator, kinds: list[tuple[int, int, int, int]], block_size: int) -> dict[str, Any]:
    """A step from (computed, new, committed, drafts) per request, with its tokens and blocks at random places."""
    computed, new, committed, num_draft = np.array(kinds, np.int32).reshape(-1, 4).T
    num_requests, num_slots, max_blocks = len(kinds), len(kinds) + 2, -(-(MAX_TOKENS + 8) // block_size)
    block_tables = np.full((num_requests, max_blocks), -1, np.int32)
    free = rng.permutation(max(1, num_requests) * max_blocks).astype(np.int32)
    for r in range(num_requests):
        count = -(-(computed[r] + new[r]) // block_size)
        block_tables[r, :count], free = free[:count], free[count:]
    cu_num_draft = np.concatenate([[0], np.cumsum(num_draft)]).astype(np.int32)
    drafts = DraftTokens(rng.integers(0, 500, cu_num_draft[-1]).astype(np.int32), cu_num_draft)
    slots = rng.permutation(num_slots)[:num_requests].astype(np.int32)
    rows = BatchRows(computed.copy(), new.copy(), committed + num_draft, slots, drafts, block_tables)
    token_table = rng.integers(0, 500, (num_slots, MAX_TOKENS)).astype(np.int32)
    return {"rows": rows, "token_table": token_table, "block_size": block_size}


def steps() -> dict[str, dict[str, Any]]:
    """Whole prompts, chunks, decodes and drafts; rows without logits; borders of blocks; a full row; no request."""
    rng = np.random.default_rng(1)
    plans = {
        "empty": [],
        "prompt": [(0, 7, 7, 0)],
        "chunks": [(0, 5, 20, 0), (16, 3, 20, 0), (16, 4, 20, 0)],
        "decode": [(n, 1, n + 1, 0) for n in (0, 3, 15, 16, 17, 39)],
        "drafts": [(9, 4, 10, 3), (15, 2, 16, 1), (39, 9, 40, 8)],
        "drafts-after-several": [(4, 9, 10, 3)],
        "mixed": [(0, 5, 20, 0), (9, 4, 10, 3), (20, 1, 21, 0), (0, 40, 40, 0)],
    }
    found = {f"{name}-{size}": step(rng, plan, size) for name, plan in plans.items() for size in (1, 16, 64)}
    for r in range(20):
        computed = rng.integers(0, MAX_TOKENS, 9)
        committed = computed + rng.integers(1, MAX_TOKENS + 1 - computed)
        num_draft = rng.integers(0, 2, 9) * rng.integers(0, 8, 9)
        new = np.where(num_draft > 0, committed + num_draft - computed, rng.integers(1, committed - computed + 1))
        plan = [tuple(int(v) for v in row) for row in zip(computed, new, committed, num_draft, strict=True)]
        found[f"random-{r}"] = step(rng, plan, 16)
    return found


def appends() -> dict[str, dict[str, Any]]:
    """No, one and several tokens per row, some counted, one several times; a row that becomes full; no request."""
    rng = np.random.default_rng(3)
    found = {}
    for name, lengths in {"none": [], "one-each": [1] * 5, "some": [0, 3, 1, 0, 6, 2]}.items():
        num_requests, num_slots, vocab = len(lengths), len(lengths) + 2, 9
        num_tokens = rng.integers(0, MAX_TOKENS - 6, num_slots).astype(np.int32)
        slots = rng.permutation(num_slots)[:num_requests].astype(np.int32)
        if lengths:
            num_tokens[slots[-1]] = MAX_TOKENS - lengths[-1]
        found[name] = {
            "output": OutputRows(
                slots,
                rng.integers(0, vocab, sum(lengths)).astype(np.int32),
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
                np.resize([-1, 2, 0, -1, 1, 3], num_requests).astype(np.int32),
            ),
            "tables": TokenTables(
                rng.integers(0, vocab, (num_slots, MAX_TOKENS)).astype(np.int32),
                num_tokens,
                rng.integers(0, 5, (4, vocab)).astype(np.int32),
            ),
        }
    return found


def append_natively(output: OutputRows, tables: TokenTables) -> TokenTables:
    changed = TokenTables(*(table.copy() for table in tables))
    native.TokenAppender().append(output, changed)
    return changed


def gathers() -> dict[str, dict[str, Any]]:
    """Repeated, reversed and no indices; rows narrower and wider than one task; no column."""
    rng = np.random.default_rng(2)
    found = {}
    for rows, width, count in [(1, 1, 1), (5, 0, 3), (9, 17, 0), (9, 130, 20), (3, 70000, 5), (300, 1024, 300)]:
        x = rng.standard_normal((rows, width), np.float32)
        indices = rng.integers(0, rows, count).astype(np.int32)
        found[f"float32-{rows}x{width}-{count}"] = {"x": x, "indices": indices}
        found[f"bfloat16-{rows}x{width}-{count}"] = {"x": to_bf16(x), "indices": np.sort(indices)[::-1].copy()}
    return found


def gather_through_paddle(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return from_paddle(batch.gather_output_rows(to_paddle(x), indices))


PREPARE_BATCH = OpCases("prepare_batch", native.prepare_batch, reference.prepare_batch, None, steps())
APPEND_TOKENS = OpCases("append_tokens", append_natively, reference.append_tokens, None, appends())
GATHER_OUTPUT_ROWS = OpCases(
    "gather_output_rows",
    native.gather_output_rows,
    reference.gather_output_rows,
    gather_through_paddle,
    gathers(),
    rtol=0.0,
    atol=0.0,
    bf16_ulps=0.0,
)
