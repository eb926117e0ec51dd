"""Cases of mtp_preprocess, mtp_postprocess_ and keep_hidden_; what these write in place is compared too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_sd.ops import mtp as ops
from fastdeploy_sd.ops.bf16 import narrow
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.ops.mtp_batch import DraftBatch, HiddenRows, HiddenStateBuffer, MaskedRows, MtpPass, NextInputs
from fastdeploy_sd.ops.reference import mtp as reference
from tests.ops.cases.case import OpCases

MAX_TOKENS, VOCAB_SIZE = 90, 500
# (first hidden position c, hidden rows run, certain ones v - c, draft KV ahead of c by 1 at most, or behind, committed
# tokens, drafts) of each request of a step.
Kind = tuple[int, int, int, int, int, int]
STEPS: dict[str, list[Kind]] = {
    "empty": [],
    "prompt": [(0, 7, 7, 0, 8, 3)],
    "chunks": [(0, 16, 16, 0, 40, 0), (16, 16, 16, 1, 33, 2), (32, 5, 5, 1, 80, 0)],
    "decode": [(n, 1, 1, 1, n + 2, 2) for n in (1, 14, 15, 16, 30, 31, 32)],
    "rejected": [(9, 5, 1, 1, 11, 4), (14, 6, 3, 1, 18, 1), (31, 3, 3, 1, 35, 2), (15, 4, 1, 1, 17, 0)],
    "prefix-hit": [(16, 20, 20, 0, 37, 3), (32, 1, 1, 0, 34, 1)],
    "late-block": [(32, 1, 1, 0, 34, 2)],
    "behind": [(32, 1, 1, -9, 34, 2), (41, 3, 2, -16, 44, 3), (20, 1, 1, -3, 22, 0), (48, 2, 1, 1, 50, 1)],
    "failed-and-other": [(20, 3, 0, 1, 21, 0), (5, 1, 1, 1, 7, 1), (0, 9, 0, 0, 9, 0)],
}


def make_batch(rng: np.random.Generator, kinds: Sequence[Kind], block_size: int) -> DraftBatch:
    """Tokens and scattered blocks, enough for all drafts, of the requests of a step; a fifth of the drafts failed."""
    committed, num_drafts = np.array(kinds, np.int32).reshape(-1, 6).T[4:]
    num_table_rows, max_blocks = len(kinds) + 2, -(-(MAX_TOKENS + 8) // block_size)
    table_rows = rng.permutation(num_table_rows)[: len(kinds)].astype(np.int32)
    block_table = np.full((num_table_rows, max_blocks), -1, np.int32)
    free = rng.permutation(num_table_rows * max_blocks).astype(np.int32)
    for r, table_row in enumerate(table_rows):
        count = -(-(int(committed[r]) + int(num_drafts[r]) + 1) // block_size)
        block_table[table_row, :count], free = free[:count], free[count:]
    cu_num_draft = np.concatenate([[0], np.cumsum(num_drafts)]).astype(np.int32)
    return DraftBatch(
        table_rows=table_rows,
        num_committed=committed.copy(),
        cu_num_draft=cu_num_draft,
        draft_token_ids=np.maximum(rng.integers(-VOCAB_SIZE // 4, VOCAB_SIZE, cu_num_draft[-1]), -1).astype(np.int32),
        token_table=rng.integers(0, VOCAB_SIZE, (num_table_rows, MAX_TOKENS)).astype(np.int32),
        block_table=block_table,
        block_size=block_size,
        num_wanted=num_drafts.copy(),
        draft_prob=rng.random(cu_num_draft[-1], np.float32),
        min_prob=0.0,
        min_survival=rng.choice(np.array([-1, 0, 0.01, 0.2], np.float32), len(kinds)),
        num_drafting=[int((num_drafts > i).sum()) for i in range(8)],
    )


def preprocess_case(rng: np.random.Generator, kinds: Sequence[Kind], block_size: int, source: int) -> dict[str, Any]:
    """A pass of layer source + 1; its hidden rows are the target's, or those of a pass over the same slots."""
    batch = make_batch(rng, kinds, block_size)
    computed, num_run, num_valid, lag, committed, num_drafts = np.array(kinds, np.int32).reshape(-1, 6).T
    begin = np.maximum(computed + lag, 1).astype(np.int32)
    end = np.where(num_valid > 0, np.minimum(computed + num_valid + 1, committed), begin).astype(np.int32)
    if source == 0:
        hidden_begin, num_hidden = computed.copy(), num_run
    else:
        # The layer before made its own drafts' slots too.
        hidden_begin = begin
        num_hidden = end - begin + np.minimum(source - 1, np.where(num_drafts >= source, num_drafts, 0))
    end = (end + np.where(num_drafts > source, source, 0)).astype(np.int32)
    # Rows of other requests may come first.
    first = 3 if block_size == 16 else 0
    cu_hidden = np.concatenate([[first], first + np.cumsum(num_hidden)]).astype(np.int32)
    dtype, width = (np.float32, 17) if block_size == 16 else (np.uint16, 130)
    num_table_rows, num_blocks = len(batch.token_table), batch.block_table.size
    num_kept = block_size + 5
    step, blocks, requests = (
        narrow(rng.standard_normal((n, width), np.float32), dtype)
        for n in (int(cu_hidden[-1]) + 2, num_blocks, num_table_rows * num_kept)
    )
    todo = MtpPass(begin, end, source, hidden_begin, cu_hidden, int((end - begin).sum()))
    return {
        "batch": batch,
        "todo": todo,
        "hidden": HiddenRows(step, HiddenStateBuffer(blocks, requests, block_size, num_kept)),
    }


def preprocess_cases() -> dict[str, dict[str, Any]]:
    """Prompts, chunks, accepted and rejected drafts, prefix hits, blocks that came late; later layers; random steps."""
    rng = np.random.default_rng(11)
    plans = dict(STEPS)
    for i in range(8):
        plans[f"random-{i}"] = [random_kind(rng) for _ in range(9)]
    found = {
        f"{name}-block{size}-source{source}": preprocess_case(rng, kinds, size, source)
        for name, kinds in plans.items()
        for size in (16, 32)
        for source in (0, 1, 2)
    }
    first = {name.removesuffix("-source0"): case for name, case in found.items() if name.endswith("source0")}
    for more_rows, token_shift in ((-1, 0), (0, 1), (1, 1)):
        found |= {
            f"{name}-masked{more_rows}{token_shift}": block_case(case, rng, more_rows, token_shift)
            for name, case in first.items()
        }
    return found


def block_case(case: Mapping[str, Any], rng: np.random.Generator, more_rows: int, token_shift: int) -> dict[str, Any]:
    """The same pass with rows for all drafts; a shifted one has no other rows."""
    batch, todo, step = case["batch"], case["todo"], case["hidden"].step
    if token_shift:
        todo = replace(todo, begin=todo.end)
    mask = narrow(rng.standard_normal(step.shape[1], np.float32), step.dtype)
    return with_block_rows({**case, "todo": todo}, MaskedRows(77, mask, more_rows, token_shift, 0), batch)


def with_block_rows(case: dict[str, Any], block: MaskedRows[np.ndarray], batch: DraftBatch) -> dict[str, Any]:
    todo, num_drafts = case["todo"], np.diff(batch.cu_num_draft)
    num_rows = (todo.end - todo.begin).sum() + np.where(num_drafts > 0, num_drafts + block.more_rows, 0).sum()
    block = replace(block, num_drafts=int(num_drafts.sum()))
    return {**case, "todo": replace(todo, num_tokens=int(num_rows)), "block": block}


def random_kind(rng: np.random.Generator) -> Kind:
    computed, num_run = int(rng.integers(0, 60)), int(rng.integers(1, 20))
    num_valid = int(rng.integers(0, num_run + 1))
    finishes = bool(rng.integers(0, 2))
    committed = computed + num_valid + 1 + (0 if finishes else int(rng.integers(1, 9)))
    num_drafts = int(rng.integers(0, 5)) if finishes and num_valid > 0 else 0
    return computed, num_run, num_valid, min(computed, int(rng.integers(0, 2))), committed, num_drafts


class Maps(NamedTuple):
    """See RowMaps."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray


def keep_case(rng: np.random.Generator, kinds: Sequence[Kind], block_size: int, num_kept: int) -> dict[str, Any]:
    """A pass of the target over a step, drafts that will be rejected included."""
    batch = make_batch(rng, kinds, block_size)
    computed, num_run = np.array(kinds, np.int32).reshape(-1, 6).T[:2]
    maps = Maps(np.concatenate([[0], np.cumsum(num_run)]).astype(np.int32), (computed + num_run).astype(np.int32))
    dtype, width = (np.float32, 17) if block_size == 16 else (np.uint16, 130)
    hidden, blocks, requests = (
        narrow(rng.standard_normal((n, width), np.float32), dtype)
        for n in (int(num_run.sum()) + 1, batch.block_table.size, len(batch.token_table) * num_kept)
    )
    return {
        "blocks": RequestBlocks(batch.table_rows, batch.block_table),
        "maps": maps,
        "hidden": hidden,
        "kept": HiddenStateBuffer(blocks, requests, block_size, num_kept),
    }


def keep_cases() -> dict[str, dict[str, Any]]:
    """Every step, with fewer kept rows than run and with more."""
    rng = np.random.default_rng(13)
    return {
        f"{name}-block{size}-kept{num_kept}": keep_case(rng, [with_blocks(kind) for kind in kinds], size, num_kept)
        for name, kinds in STEPS.items()
        for size, num_kept in ((16, 1), (16, 21), (32, 37))
    }


def with_blocks(kind: Kind) -> Kind:
    """The same with so many drafts that every row that is run has a block."""
    computed, num_run, _, _, committed, num_drafts = kind
    return (*kind[:5], max(num_drafts, computed + num_run - committed))


def postprocess_cases() -> dict[str, dict[str, Any]]:
    """Drafts of different lengths at every step; ties; NaN, infinities and rows without any finite logit; requests
    whose drafts are improbable together, now or already before; drafts that are too improbable by themselves."""
    rng = np.random.default_rng(12)
    found = {}
    for i, num_drafts in enumerate([[], [1], [3, 0, 1, 5, 2], [0, 0], [4] * 9]):
        kinds: list[Kind] = [(n, 1, 1, 1, n + 2, d) for n, d in zip(rng.integers(1, 60, 9), num_drafts, strict=False)]
        for size, vocab_size in ((16, 33), (64, 9000)):
            batch = make_batch(rng, kinds, size)
            for step in range(max([*num_drafts, 1])):
                wanted = np.where(rng.random(len(kinds)) < 0.2, np.minimum(batch.num_wanted, step), batch.num_wanted)
                batch = replace(batch, num_wanted=wanted.astype(np.int32), min_prob=0.3 * (step % 2))
                logits = rng.standard_normal((int((wanted > step).sum()), vocab_size), np.float32).round(1)
                logits[:, 5] += 8  # so that it is not improbable
                spoil(logits)
                hidden = narrow(rng.standard_normal((len(logits), 24), np.float32), np.uint16)
                found[f"{i}-block{size}-step{step}"] = {
                    "batch": batch, "step": step, "logits": logits, "hidden": hidden,
                }  # fmt: skip
                if vocab_size > MAX_TOKENS:
                    continue
                token_map = 3 * np.arange(vocab_size, dtype=np.int32) + 7
                found[f"{i}-block{size}-step{step}-mapped"] = {
                    **found[f"{i}-block{size}-step{step}"], "token_map": token_map,
                }  # fmt: skip
    return found


def spoil(logits: np.ndarray) -> None:
    """Give some rows, where there are as many, what a broken layer gives."""
    for row, value in ((1, np.nan), (3, np.inf)):
        if len(logits) > row:
            logits[row, len(logits[0]) // 2] = value
    if len(logits) > 4:
        logits[4] = -np.inf


def take_batch(batch: DraftBatch, rows: Sequence[int]) -> DraftBatch:
    """Some of the requests."""
    drafts = ragged(batch.cu_num_draft, rows)
    return replace(
        batch,
        table_rows=batch.table_rows[list(rows)],
        num_committed=batch.num_committed[list(rows)],
        cu_num_draft=offsets(drafts),
        draft_token_ids=batch.draft_token_ids[np.concatenate(drafts)],
        num_wanted=batch.num_wanted[list(rows)],
        draft_prob=batch.draft_prob[np.concatenate(drafts)],
        min_survival=batch.min_survival[list(rows)],
        num_drafting=[sum(len(part) > i for part in drafts) for i in range(8)],
    )


def ragged(cu: np.ndarray, rows: Sequence[int]) -> list[np.ndarray]:
    """Where the elements of some rows are; the first of the list belongs to none."""
    return [np.zeros(0, np.int64), *(np.arange(cu[row], cu[row + 1]) for row in rows)]


def offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([len(part) for part in parts]).astype(np.int32)


def take_preprocess(kwargs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    todo, hidden = kwargs["todo"], kwargs["hidden"]
    columns = {name: getattr(todo, name)[list(rows)] for name in ("begin", "end", "hidden_begin")}
    parts = ragged(todo.cu_hidden, rows)
    taken = {
        "batch": take_batch(kwargs["batch"], rows),
        "todo": replace(
            todo, **columns, cu_hidden=offsets(parts), num_tokens=int((columns["end"] - columns["begin"]).sum())
        ),
        "hidden": replace(hidden, step=hidden.step[np.concatenate(parts)]),
    }
    return with_block_rows(taken, kwargs["block"], taken["batch"]) if "block" in kwargs else taken


def take_postprocess(kwargs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    batch, step = kwargs["batch"], kwargs["step"]
    drafts = batch.num_wanted > step
    logits_rows = (np.cumsum(drafts) - 1)[[row for row in rows if drafts[row]]]
    taken = {name: kwargs[name][logits_rows] for name in ("logits", "hidden")}
    return {**kwargs, "batch": take_batch(batch, rows), **taken}


def postprocess(**kwargs: Any) -> NextInputs:
    """Without the room for requests that did not go on."""
    found = ops.mtp_postprocess_(**kwargs)
    return found.first(int(found.num_continued[0]))


MTP_PREPROCESS = OpCases(
    "mtp_preprocess",
    ops.mtp_preprocess,
    reference.mtp_preprocess,
    preprocess_cases(),
    ops.MTP_PREPROCESS,
    on_host={"batch", "todo"},
    take=take_preprocess,
    offsets={"query_start_loc", "draft_rows"},
    rtol=0.0,
    atol=0.0,
    bf16_ulps=0.0,
)
KEEP_HIDDEN = OpCases(
    "keep_hidden", ops.keep_hidden_, reference.keep_hidden_, keep_cases(), ops.KEEP_HIDDEN, rtol=0.0, atol=0.0,
    bf16_ulps=0.0,
)  # fmt: skip
MTP_POSTPROCESS = OpCases(
    "mtp_postprocess",
    postprocess,
    reference.mtp_postprocess_,
    postprocess_cases(),
    ops.MTP_POSTPROCESS,
    on_host={"batch"},
    take=take_postprocess,
    offsets={"query_start_loc", "num_continued"},
    rtol=2e-6,  # of probabilities
    atol=0.0,
    bf16_ulps=0.0,
)
