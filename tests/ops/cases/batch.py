"""Cases of prepare_batch, settle_step_, group_slots, append_tokens, target_step and gather_output_rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import batch
from fastdeploy_sd.ops.batch import APPEND_TOKENS as APPEND
from fastdeploy_sd.ops.batch import PREPARE_BATCH as PREPARE
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.ops.reference import batch as reference
from fastdeploy_sd.ops.reference.batch import BatchMaps, OutputTables, SettleTables, Tables
from fastdeploy_sd.types import I32, DraftTokens
from tests.ops.cases.case import OpCases
from tests.ops.cases.sampling import with_parents

MAX_TOKENS = 40


def step(rng: np.random.Generator, kinds: list[tuple[int, int, int, int]], block_size: int) -> dict[str, Any]:
    """A step from (computed, new, committed, drafts) per request, with its tokens and blocks at random places."""
    computed, new, committed, num_draft = np.array(kinds, np.int32).reshape(-1, 4).T
    num_requests, num_table_rows, max_blocks = len(kinds), len(kinds) + 2, -(-(MAX_TOKENS + 8) // block_size)
    blocks = np.full((num_table_rows, max_blocks), -1, np.int32)
    table_rows = rng.permutation(num_table_rows)[:num_requests].astype(np.int32)
    num_tokens = rng.integers(0, MAX_TOKENS, num_table_rows).astype(np.int32)
    num_tokens[table_rows] = committed
    free = rng.permutation(max(1, num_requests) * max_blocks).astype(np.int32)
    for r in range(num_requests):
        count = -(-(computed[r] + new[r]) // block_size)
        blocks[table_rows[r], :count], free = free[:count], free[count:]
    cu_num_draft = np.concatenate([[0], np.cumsum(num_draft)]).astype(np.int32)
    drafts = DraftTokens(rng.integers(0, 500, cu_num_draft[-1]).astype(np.int32), cu_num_draft)
    tokens = rng.integers(0, 500, (num_table_rows, MAX_TOKENS)).astype(np.int32)
    return {
        "tables": Tables(tokens, num_tokens, blocks),
        "table_rows": table_rows,
        "num_computed": computed.copy(),
        "num_new": new.copy(),
        "draft": drafts,
        "block_size": block_size,
    }


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
        plan = list(zip(computed.tolist(), new.tolist(), committed.tolist(), num_draft.tolist(), strict=True))
        found[f"random-{r}"] = step(rng, plan, 16)
    for name in [name for name, case in found.items() if len(case["draft"].token_ids) > 1]:
        found[f"{name}-tree"] = found[name] | {"draft": with_parents(rng, found[name]["draft"])}
    return found


def appends() -> dict[str, dict[str, Any]]:
    """No, one and several tokens per row, some counted, one several times; a row that becomes full; no request."""
    rng = np.random.default_rng(3)
    found = {}
    for name, lengths in {"none": [], "one-each": [1] * 5, "some": [0, 3, 1, 0, 6, 2]}.items():
        num_requests, num_table_rows, vocab = len(lengths), len(lengths) + 2, 9
        num_tokens = rng.integers(0, MAX_TOKENS - 6, num_table_rows).astype(np.int32)
        table_rows = rng.permutation(num_table_rows)[:num_requests].astype(np.int32)
        if lengths:
            num_tokens[table_rows[-1]] = MAX_TOKENS - lengths[-1]
        count_rows = np.resize([-1, 2, 0, -1, 1, 3], num_table_rows).astype(np.int32)
        found[name] = {
            "tables": OutputTables(
                rng.integers(0, vocab, (num_table_rows, MAX_TOKENS)).astype(np.int32),
                num_tokens,
                np.minimum(num_tokens + rng.integers(0, 12, num_table_rows), MAX_TOKENS).astype(np.int32),
                count_rows,
                rng.integers(0, 5, (4, vocab)).astype(np.int32),
            ),
            "table_rows": table_rows,
            "token_ids": rng.integers(0, vocab, sum(lengths)).astype(np.int32),
            "cu_num_output": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            "planned_drafts": rng.integers(0, 5, num_requests).astype(np.int32),
        }
    return found


def settled() -> dict[str, dict[str, Any]]:
    """Steps whose tokens were known, and steps that counted on drafts that were wrong; drafts that the device has made;
    a row without tokens; no request."""
    found, rng = {}, np.random.default_rng(5)
    for name, case in steps().items():
        maps, tables, drafts = reference.prepare_batch(**case), case["tables"], case["draft"]
        table_rows, num_tokens = case["table_rows"], tables.num_tokens.copy()
        num_drafts = np.diff(drafts.cu_num_draft)
        for r, table_row in enumerate(table_rows):
            if case["num_computed"][r] == num_tokens[table_row] - 1:  # it runs its newest token, of as many as may be
                num_tokens[table_row] -= rng.integers(0, min(num_tokens[table_row], 5))
        made = rng.integers(0, 500, (len(num_tokens), num_drafts.max(initial=0) + 1)).astype(np.int32)
        draft_token_ids = np.append(drafts.token_ids, np.array([-7, -7], np.int32))
        offsets = [maps.query_start_loc, maps.cu_num_logits, drafts.cu_num_draft]
        if name == "mixed-16":
            offsets = [np.append(cu, cu[-1:]) for cu in offsets]
            table_rows = np.append(table_rows, table_rows[:1])
        for r in range(0, len(num_drafts), 2):
            draft_token_ids[drafts.cu_num_draft[r] : drafts.cu_num_draft[r + 1]] = -1
        room = len(table_rows) - len(case["num_computed"])
        found[name] = {
            "tables": SettleTables(tables.tokens, num_tokens, tables.blocks, made),
            "block_size": case["block_size"],
            "table_rows": table_rows,
            "offsets": tuple(offsets),
            "input_ids": np.append(maps.input_ids, np.full(2, -7, np.int32)),
            "positions": np.append(maps.positions, np.full(2, -7, np.int32)),
            "slot_mapping": np.append(maps.slot_mapping, np.full(2, -7, np.int64)),
            "num_computed": np.append(case["num_computed"], np.zeros(room, np.int32)),
            "seq_lens": np.append(maps.seq_lens, np.zeros(room, np.int32)),
            "output_positions": np.append(maps.output_positions, np.full(2, -7, np.int32)),
            "draft_token_ids": draft_token_ids,
        }
    return found


def slotted() -> dict[str, dict[str, Any]]:
    """Maps of the steps; with rows after those of the requests."""
    found = {}
    for name, case in steps().items():
        maps = reference.prepare_batch(**case)
        found[name] = {
            "first_slots": np.append(maps.slot_mapping, np.full(int(name.startswith("random")), -1, np.int64)),
            "query_start_loc": maps.query_start_loc,
            "seq_lens": maps.seq_lens,
            "blocks": RequestBlocks(case["table_rows"], case["tables"].blocks),
            "block_size": case["block_size"],
        }
    return found


def target_steps() -> dict[str, dict[str, Any]]:
    """Chunks, prompts, drafts, failed and held rows, blocks past the longest request; no request."""
    rng = np.random.default_rng(4)
    # (computed, new, logits, output, committed, blocks)
    plans = {
        "empty": [],
        "each": [(0, 16, 0, 0, 30, 1), (16, 14, 1, 1, 31, 2), (30, 4, 4, 2, 33, 3), (30, 4, 4, 4, 35, 3)],
        "failed-and-last": [(30, 4, 4, 0, 31, 2), (38, 1, 1, 1, 40, 3), (0, 1, 1, 1, 2, 0)],
        "held": [(0, 30, 1, 0, 30, 2), (16, 14, 1, 0, 30, 2), (29, 4, 4, 0, 30, 3)],
        "random": [(i, i % 4 + 1, i % 3 and i % 4 + 1, i % 3 and i % 2, i + 5, i % 4) for i in range(17)],
    }
    found = {}
    for name, plan in plans.items():
        computed, new, logits, output, committed, blocks = np.array(plan, np.int32).reshape(-1, 6).T.copy()
        table_rows = rng.permutation(len(plan) + 2)[: len(plan)].astype(np.int32)
        num_blocks = rng.integers(0, 4, len(plan) + 2).astype(np.int32)
        num_blocks[table_rows] = blocks
        found[name] = {
            "table_rows": table_rows,
            "num_computed": computed,
            "num_new": new,
            "cu_num_logits": np.concatenate([[0], np.cumsum(logits)]).astype(np.int32),
            "cu_num_output": np.concatenate([[0], np.cumsum(output)]).astype(np.int32),
            "num_committed": committed,
            "num_blocks": num_blocks,
            "block_size": 16,
            "max_tokens_per_row": MAX_TOKENS,
        }
    return found


def prepare_natively(
    tables: Tables, table_rows: I32, num_computed: I32, num_new: I32, draft: DraftTokens, block_size: int
) -> BatchMaps:
    """In memory that is larger than the step."""
    n, max_tokens, max_logits = len(table_rows), int(num_new.clip(0).sum()) + 3, n_logits(table_rows, draft) + 2
    out: dict[str, Any] = {name: np.full(max_tokens, -7, np.int32) for name in ("input_ids", "positions")}
    out |= {name: np.full(max_tokens, -7, np.int64) for name in ("slot_mapping", "tree_mask")}
    out |= {name: np.full(n + 1, -7, np.int32) for name in ("query_start_loc", "cu_num_logits")}
    out["seq_lens"] = np.full(n, -7, np.int32)
    rows = ("logits_indices", "batch_id_per_output", "output_positions", "parent_rows")
    out |= {name: np.full(max_logits, -7, np.int32) for name in rows}
    PREPARE.bind(
        table_rows=table_rows,
        token_table=tables.tokens,
        num_tokens=tables.num_tokens,
        block_tables=tables.blocks,
        num_computed=num_computed,
        num_new=num_new,
        draft_token_ids=draft.token_ids,
        cu_num_draft=draft.cu_num_draft,
        draft_parents=draft.parents,
        block_size=block_size,
        **out,
    ).run()
    lengths = dict.fromkeys(("input_ids", "positions", "slot_mapping", "tree_mask"), out["query_start_loc"][-1])
    lengths |= dict.fromkeys(rows, out["cu_num_logits"][-1])
    assert all((out[name][length:] == -7).all() for name, length in lengths.items()), "written past the step"
    return BatchMaps(**{name: array[: lengths.get(name)] for name, array in out.items()})


def n_logits(table_rows: I32, draft: DraftTokens) -> int:
    return len(table_rows) + len(draft.token_ids)


def append_natively(tables: OutputTables, **rows: I32) -> Any:
    return APPEND(**tables._asdict(), **rows)


def gathers() -> dict[str, dict[str, Any]]:
    """Repeated, reversed and no indices; rows narrower and wider than one task; no column."""
    rng = np.random.default_rng(2)
    found: dict[str, dict[str, Any]] = {}
    for rows, width, count in [(1, 1, 1), (5, 0, 3), (9, 17, 0), (9, 130, 20), (3, 70000, 5), (300, 1024, 300)]:
        x = rng.standard_normal((rows, width), np.float32)
        indices = rng.integers(0, rows, count).astype(np.int32)
        found[f"float32-{rows}x{width}-{count}"] = {"x": x, "indices": indices}
        found[f"bfloat16-{rows}x{width}-{count}"] = {"x": to_bf16(x), "indices": np.sort(indices)[::-1].copy()}
    return found


def as_rows() -> dict[str, dict[str, Any]]:
    """Requests with rows and without, and rows of none."""
    rng = np.random.default_rng(5)
    found: dict[str, dict[str, Any]] = {}
    for name, counts, num_more in (("none", [], 0), ("one", [8], 0), ("some", [3, 0, 1, 16], 5), ("many", [7] * 90, 1)):
        table_rows = rng.permutation(len(counts) + 2)[: len(counts)].astype(np.int32)
        found[name] = {
            "query_start_loc": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "seq_lens": rng.integers(20, 90, len(counts)).astype(np.int32),
            "blocks": RequestBlocks(table_rows, np.zeros((len(counts) + 2, 3), np.int32)),
            "num_rows": sum(counts) + num_more,
        }
    return found


PREPARE_BATCH = OpCases("prepare_batch", prepare_natively, reference.prepare_batch, steps())
SETTLE_STEP = OpCases("settle_step", batch.settle_step_, reference.settle_step_, settled(), batch.SETTLE_STEP)
ROW_REQUESTS = OpCases("row_requests", batch.row_requests, reference.row_requests, as_rows(), batch.ROW_REQUESTS)
GROUP_SLOTS = OpCases("group_slots", batch.group_slots, reference.group_slots, slotted(), batch.GROUP_SLOTS)
APPEND_TOKENS = OpCases("append_tokens", append_natively, reference.append_tokens, appends())
TARGET_STEP = OpCases("target_step", batch.TARGET_STEP, reference.target_step, target_steps())
GATHER_OUTPUT_ROWS = OpCases(
    "gather_output_rows",
    batch.gather_output_rows,
    reference.gather_output_rows,
    gathers(),
    batch.GATHER_OUTPUT_ROWS,
    on_host={"indices"},
    rtol=0.0,
    atol=0.0,
    bf16_ulps=0.0,
)
