"""Cases of mtp_plan and mtp_collect_: what comes before and after the passes of a drafting step."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops.mtp import MTP_COLLECT as COLLECT
from fastdeploy_sd.ops.mtp import MTP_HOLD as HOLD
from fastdeploy_sd.ops.mtp import MTP_PLAN as PLAN
from fastdeploy_sd.ops.reference import mtp as reference
from fastdeploy_sd.ops.reference.mtp import MtpPlan
from fastdeploy_sd.types import I32
from tests.ops.cases.case import OpCases

MAX_POSITION, BLOCK_SIZE, SPARE = 80, 16, -7
NO_LIMIT = np.iinfo(np.int32).max
# (computed, valid, committed, KV slots, next slot, begun, most drafts) of a request.
Row = tuple[int, int, int, int, int, int, int]
ROWS: dict[str, list[Row]] = {
    "empty": [],
    "prompt-and-chunk": [(0, 7, 8, 16, 0, 7, 9), (16, 32, 40, 32, 16, 40, 0), (0, 1, 2, 16, 0, 1, 2)],
    "decode": [(n, n + 1, n + 2, 64, n, 3, 2) for n in (6, 14, 15, 16, 30, 31)],
    "behind": [(40, 41, 42, 48, 33, 3, 4), (40, 41, 42, 48, 33, 3, 0), (47, 48, 49, 64, 33, 3, 0)],
    "no-block": [(31, 32, 33, 32, 31, 3, 3), (14, 15, 16, 16, 15, 3, 3), (14, 15, 16, 32, 15, 3, 3)],
    "last-positions": [(n, n + 1, n + 2, 96, n + 1, 3, 4) for n in (75, 76, 77, 78)],
    "failed-and-others": [(20, 20, 23, 32, 20, 3, 3), (9, 10, 11, 32, -1, 3, 3), (9, 10, 11, 32, 10, 3, -1)],
    "recomputed": [(15, 18, 19, 32, 19, 3, 3), (15, 16, 17, 16, 17, 3, 0)],
}


def plan_case(
    rng: np.random.Generator,
    rows: list[Row],
    num_steps: int,
    num_layers: int,
    max_filled: int = NO_LIMIT,
    *,
    num_newest: int = NO_LIMIT,
    num_more: int = 0,
) -> dict[str, Any]:
    columns = np.array(rows, np.int32).reshape(-1, 7).T.copy()
    computed, valid, committed, slots, first, begun, most = columns
    num_table_rows = len(rows) + 2
    table_rows = rng.permutation(num_table_rows)[: len(rows)].astype(np.int32)
    next_slot, num_begun = rng.integers(-1, 50, (2, num_table_rows)).astype(np.int32)
    next_slot[table_rows], num_begun[table_rows] = first, begun
    return {
        "table_rows": table_rows,
        "num_committed": committed,
        "max_draft_len": most,
        "num_computed": computed,
        "num_valid": valid,
        "num_kv_slots": slots,
        "next_slot": next_slot,
        "num_begun": num_begun,
        "num_steps": num_steps,
        "max_position": MAX_POSITION,
        "block_size": BLOCK_SIZE,
        "max_filled": max_filled,
        "num_newest": num_newest,
        "num_more": num_more,
        "reads_hidden": int(max_filled == num_newest == NO_LIMIT),
        "num_layers": num_layers,
    }


def random_row(rng: np.random.Generator) -> Row:
    computed, num_run = int(rng.integers(0, 60)), int(rng.integers(1, 12))
    valid = computed + int(rng.integers(0, num_run + 1))
    committed = valid + 1 + int(rng.integers(0, 2)) * int(rng.integers(0, 9))
    slots = -(-int(rng.integers(committed - 1, committed + 9)) // BLOCK_SIZE) * BLOCK_SIZE
    first = int(rng.integers(-1, computed + 2))
    return computed, valid, committed, max(slots, valid), first, int(rng.integers(1, 70)), int(rng.integers(0, 6))


def plan_cases() -> dict[str, dict[str, Any]]:
    """One layer and several; prompts, chunks, requests that lag, without a block, at the last positions.

    Layers that read no hidden rows fill few slots per step; those without KV need a request's newest one.
    """
    rng = np.random.default_rng(21)
    plans = dict(ROWS) | {f"random-{i}": [random_row(rng) for _ in range(11)] for i in range(12)}
    limited = {
        f"{name}-at-most-{max_filled}": plan_case(rng, rows, 3, 1, max_filled)
        for name, rows in plans.items()
        for max_filled in (0, 9, 30)
    }
    newest = {f"{name}-newest": plan_case(rng, rows, 3, 1, num_newest=1) for name, rows in plans.items()}
    more = {f"{name}-more": plan_case(rng, rows, 3, 1, num_more=2) for name, rows in plans.items()}
    return (
        limited
        | newest
        | more
        | {
            f"{name}-{num_steps}-steps-{num_layers}-layers": plan_case(rng, rows, num_steps, num_layers)
            for name, rows in plans.items()
            for num_steps, num_layers in ((3, 1), (1, 1), (3, 3), (2, 2))
        }
    )


def plan_natively(num_layers: int, **kwargs: Any) -> MtpPlan:
    """In memory that is larger than the step."""
    n, num_steps = len(kwargs["table_rows"]), kwargs["num_steps"]
    shapes: dict[str, Any] = dict.fromkeys(("begin", "num_wanted"), n)
    shapes |= dict.fromkeys(("cu_num_draft", "draft_start_loc"), n + 1)
    shapes |= {"ends": (num_layers, n + 3), "draft_token_ids": n * num_steps + 2, "num_filling": 1}
    shapes |= {"num_tokens": num_layers, "num_drafting": max(num_layers, num_steps) + 1}
    out = {name: np.full(shape, SPARE, np.int32) for name, shape in shapes.items()}
    PLAN.bind(**kwargs, **out).run()
    num_drafts = out["cu_num_draft"][-1]
    assert (out["ends"][:, n:] == SPARE).all()
    assert (out["draft_token_ids"][num_drafts:] == SPARE).all()
    out |= {"ends": out["ends"][:, :n], "draft_token_ids": out["draft_token_ids"][:num_drafts]}
    return MtpPlan(**out)


def collect_cases() -> dict[str, dict[str, Any]]:
    """Nothing made, all made, and gaps at every place; requests that filled nothing."""
    rng = np.random.default_rng(22)
    found = {}
    for name, num_drafts in {"none": [], "zero": [0, 0], "one": [3], "several": [2, 0, 3, 1, 4, 3, 3]}.items():
        for num_missing in (0, 1, 4):
            count, total = len(num_drafts), sum(num_drafts)
            token_ids = rng.integers(0, 99, total).astype(np.int32)
            token_ids[rng.permutation(total)[:num_missing]] = -1
            begin = rng.integers(1, 40, count).astype(np.int32)
            found[f"{name}-{num_missing}"] = {
                "table_rows": rng.permutation(count + 2)[:count].astype(np.int32),
                "begin": begin,
                "end": begin + rng.integers(0, 2, count).astype(np.int32),
                "next_slot": rng.integers(-1, 40, count + 2).astype(np.int32),
                "cu_num_draft": np.concatenate([[0], np.cumsum(num_drafts)]).astype(np.int32),
                "draft_token_ids": token_ids,
                "draft_prob": rng.random(total, np.float32),
            }
    return found


def collect_natively(**kwargs: I32) -> I32:
    kept: I32 = COLLECT(**kwargs)
    return kept[: kwargs["cu_num_draft"][-1]]


def hold_cases() -> dict[str, dict[str, Any]]:
    """As those of mtp_collect; requests with fewer drafts than there is room for."""
    rng = np.random.default_rng(23)
    found = {}
    for name, case in collect_cases().items():
        kept = {key: value for key, value in case.items() if key != "draft_prob"}
        found[name] = {**kept, "made_drafts": rng.integers(0, 99, (len(case["next_slot"]), 4)).astype(np.int32)}
    return found


MTP_HOLD = OpCases("mtp_hold", HOLD, reference.mtp_hold_, hold_cases())
MTP_PLAN = OpCases("mtp_plan", plan_natively, reference.mtp_plan, plan_cases())
MTP_COLLECT = OpCases("mtp_collect", collect_natively, reference.mtp_collect_, collect_cases(), rtol=0.0, atol=0.0)
