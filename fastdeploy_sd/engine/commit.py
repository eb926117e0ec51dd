"""What a step's result does to each of its requests. Knows no planning, text or executor."""

from __future__ import annotations

import time

import numpy as np

from fastdeploy_sd.engine.logprobs import slice_logprobs
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.engine.result_check import check_result
from fastdeploy_sd.engine.roster import Roster
from fastdeploy_sd.engine.stopping import find_stop
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import I32, FinishReason, RequestOutput, SchedulerOutput, StepResult, VerifyResult


def commit_result(roster: Roster, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
    """Append outputs, find ends, publish full blocks, keep the next drafts.

    Returns:
        One output per request that got tokens or failed, in the plan's order.

    Raises:
        InternalError: the result does not answer the plan; the books are unusable from here on.
    """
    check_result(plan, result)
    now = time.time()
    verified = result.verified
    token_ids, cu_output = verified.token_ids.tolist(), verified.cu_num_output.tolist()
    draft_ids, cu_draft = result.drafts.token_ids.tolist(), result.drafts.cu_num_draft.tolist()
    num_new = plan.num_new_tokens.tolist()
    outputs: list[RequestOutput] = []
    num_emitted = np.zeros(len(num_new), np.int32)
    for row, request_id in enumerate(plan.request_ids):
        state = roster.states[request_id]
        begin, end = cu_output[row], cu_output[row + 1]
        if request_id in result.failed:
            outputs.append(_fail(roster, state, result.failed[request_id], now))
        elif begin == end:
            state.num_computed_tokens += num_new[row]
            roster.kv.publish(state.table, state.token_ids, state.num_computed_tokens)
        else:
            output = _append(roster, state, token_ids[begin:end], begin, verified, now)
            num_emitted[row] = len(output.token_ids)
            room = state.max_total_tokens - state.num_tokens - 1
            state.drafts = draft_ids[cu_draft[row] : min(cu_draft[row + 1], cu_draft[row] + room)]
            outputs.append(output)
    _record(roster, plan, result, num_emitted)
    if any(output.finish_reason for output in outputs):
        roster.sweep()
    return outputs


def _append(
    roster: Roster, state: RequestState, token_ids: list[int], begin: int, verified: VerifyResult, now: float
) -> RequestOutput:
    """Commit a row's output, which starts at `begin` of the step's tokens."""
    stop = find_stop(token_ids, state.num_output_tokens, state.stop_rule)
    if stop is not None:
        del token_ids[stop.num_tokens :]
    if not state.first_token_time:
        state.first_token_time = now
        roster.stats.num_prompt_tokens += state.num_prompt_tokens
    state.append(token_ids)
    # The last output has no KV yet. Accepted drafts have theirs; that of rejected ones lies past num_tokens - 1 and is
    # overwritten before anyone reads it.
    state.num_computed_tokens = state.num_tokens - 1
    roster.kv.publish(state.table, state.token_ids, state.num_computed_tokens)
    num_alternatives = state.request.sampling.logprobs
    logprobs = None
    if verified.logprobs is not None and num_alternatives is not None:
        logprobs = slice_logprobs(verified.logprobs, begin, token_ids, num_alternatives)
    if stop is None:
        return state.output(token_ids, logprobs)
    roster.close(state, stop.reason, now)
    return state.last_output(stop.reason, now, token_ids, logprobs, stop_reason=stop.stop_reason)


def _fail(roster: Roster, state: RequestState, reason: str, now: float) -> RequestOutput:
    roster.close(state, FinishReason.ERROR, now)
    return state.last_output(FinishReason.ERROR, now, error=(InternalError.__name__, reason))


def _record(roster: Roster, plan: SchedulerOutput, result: StepResult, num_emitted: I32) -> None:
    """Count the step; `num_emitted` i32[R] is what was left of each row's output after the cut at a stop."""
    roster.stats.record_step(result.timings_ms)
    roster.stats.num_generated_tokens += int(num_emitted.sum())
    if plan.draft.token_ids.size == 0:
        return
    num_draft = np.diff(plan.draft.cu_num_draft)
    rows = (num_draft > 0) & (np.diff(result.verified.cu_num_output) > 0)
    num_accepted = result.verified.num_accepted[rows]
    roster.stats.record_verification(num_draft[rows], num_accepted, int(num_emitted[rows].sum()))
