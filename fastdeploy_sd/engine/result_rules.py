"""Whether a step's result answers its plan, and its numbers as plain lists.

Lists, not arrays: a step's host work runs with cold caches, where the first call of a NumPy function costs as much as
some hundred rows of a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, eq, gt, sub
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import I32, MAX_TREE_ROWS, DraftSource, DraftTokens, RequestId, SchedulerOutput, StepResult

_SOURCES = frozenset(map(int, DraftSource))


class ResultRows(NamedTuple):
    """What a step did to each row of its plan; `ends`: tokens the row had run after it."""

    ends: list[int]
    num_draft: list[int]
    num_output: list[int]
    num_accepted: list[int]


Failures = dict[RequestId, tuple[str, str]]


def verify_result(plan: SchedulerOutput, result: StepResult, num_tokens: Sequence[int]) -> tuple[ResultRows, Failures]:
    """Refuse what would corrupt the pool: a row that breaks a rule fails its request, anything else the engine.

    Rules: same step and rows; a row whose committed tokens were all run, and which did not fail, has `num_accepted + 1`
    outputs, at most one more than it had drafts, or none as its request is held; any other row has none; at most
    `max_draft_len` drafts follow, in a chain, each with a known source.

    Returns the result's numbers, and the requests of rows that break a rule, without output, as in `StepResult.failed`.
    """
    num_rows, verified = len(plan.request_ids), result.verified
    if result.step_id != plan.step_id or result.request_ids != plan.request_ids:
        raise InternalError(f"step result: expected the rows of step {plan.step_id}, got step {result.step_id}")
    for length in (len(verified.cu_num_output) - 1, len(verified.num_accepted), len(result.drafts.cu_num_draft) - 1):
        if length != num_rows:
            raise InternalError(f"step result: expected {num_rows} rows, got {length}")
    rows = ResultRows(
        list(map(add, plan.num_computed_tokens.tolist(), plan.num_new_tokens.tolist())),
        _lengths(plan.draft.cu_num_draft),
        _lengths(verified.cu_num_output),
        verified.num_accepted.tolist(),
    )
    is_due = list(map(eq, map(sub, rows.ends, rows.num_draft), num_tokens))
    if result.failed:
        _leave_out_failed(plan, result, is_due)
    if result.held:
        pairs = zip(plan.request_ids, is_due, rows.num_output, strict=True)
        is_due = [due and (output > 0 or name not in result.held) for name, due, output in pairs]
    wanted = [(accepted + 1) * due for accepted, due in zip(rows.num_accepted, is_due, strict=True)]
    broken = _verify_drafts(plan, result.drafts)
    if rows.num_output != wanted or any(map(gt, rows.num_accepted, rows.num_draft)):
        broken |= _wrong_outputs(plan, rows, is_due)
    if broken:
        for r, request_id in enumerate(plan.request_ids):
            if request_id in broken:
                rows.num_output[r] = rows.num_accepted[r] = 0
    return rows, broken


def _lengths(cu: I32) -> list[int]:
    offsets = cu.tolist()
    return list(map(sub, offsets[1:], offsets))


def _leave_out_failed(plan: SchedulerOutput, result: StepResult, is_due: list[bool]) -> None:
    failed_rows = [r for r, request_id in enumerate(plan.request_ids) if request_id in result.failed]
    if len(failed_rows) != len(result.failed):
        raise InternalError(f"step result: expected failures among {plan.request_ids}, got {list(result.failed)}")
    for r in failed_rows:
        is_due[r] = False


def _wrong_outputs(plan: SchedulerOutput, rows: ResultRows, is_due: list[bool]) -> Failures:
    wrong: Failures = {}
    for r, (due, num_output, num_accepted) in enumerate(zip(is_due, rows.num_output, rows.num_accepted, strict=True)):
        if num_output != (num_accepted + 1) * due or num_accepted > rows.num_draft[r]:
            wanted = f"num_accepted + 1 outputs of at most {rows.num_draft[r]} drafts" if due else "no output"
            text = f"step result: expected {wanted}, got {num_output} outputs and {num_accepted} accepted"
            wrong[plan.request_ids[r]] = InternalError.__name__, text
    return wrong


def _verify_drafts(plan: SchedulerOutput, drafts: DraftTokens) -> Failures:
    if len(drafts.token_ids) != drafts.cu_num_draft[-1]:
        raise InternalError(f"step result: expected {drafts.cu_num_draft[-1]} drafts, got {len(drafts.token_ids)}")
    if len(drafts.token_ids) == 0:
        return {}
    num_next, max_draft_len = _lengths(drafts.cu_num_draft), plan.max_draft_len.tolist()
    wrong: Failures = {}
    if any(map(gt, num_next, max_draft_len)):
        for request_id, count, limit in zip(plan.request_ids, num_next, max_draft_len, strict=True):
            if count > limit:
                text = f"step result: expected at most {limit} drafts, got {count}"
                wrong[request_id] = InternalError.__name__, text
    if drafts.sources is not None:
        sources = drafts.sources.tolist()
        if len(sources) != len(drafts.token_ids) or not _SOURCES.issuperset(sources):
            raise InternalError(
                f"step result: expected a source in 0..{max(_SOURCES)} for each of {len(drafts.token_ids)} drafts, "
                f"got {sources}"
            )
    return wrong | _verify_trees(plan, drafts)


def _verify_trees(plan: SchedulerOutput, drafts: DraftTokens) -> Failures:
    """The rows whose drafts are no trees, or are larger than a step can verify."""
    if drafts.parents is None:
        return {}
    if len(drafts.parents) != len(drafts.token_ids):
        raise InternalError(
            f"step result: expected {len(drafts.token_ids)} parents of drafts, got {len(drafts.parents)}"
        )
    wrong: Failures = {}
    for r in np.flatnonzero(~drafts.is_chain).tolist():
        parents = drafts.parents_of(r)
        if len(parents) < MAX_TREE_ROWS and all(-1 <= parent < i for i, parent in enumerate(parents)):
            continue
        text = f"step result: expected fewer than {MAX_TREE_ROWS} drafts that each follow an earlier one or -1"
        wrong[plan.request_ids[r]] = InternalError.__name__, f"{text}, got the parents {list(parents)}"
    return wrong
