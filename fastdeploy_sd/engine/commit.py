"""What a step's result does to each of its requests. Knows no planning, text or executor."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from fastdeploy_sd.engine.logprobs import slice_draft_logprobs, slice_logprobs
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.engine.result_check import check_result
from fastdeploy_sd.engine.roster import Roster
from fastdeploy_sd.engine.stopping import find_stop
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import FinishReason, RequestOutput, SchedulerOutput, StepResult


def commit_result(roster: Roster, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
    """Append outputs, find ends, publish full blocks, keep the next drafts.

    Returns:
        One output per request that got tokens or failed, in the plan's order.

    Raises:
        InternalError: the result does not answer the plan; the books are unusable from here on.
    """
    states = roster.states
    num_tokens = np.fromiter([states[i].num_tokens for i in plan.request_ids], np.int32, len(plan.request_ids))
    check_result(plan, result, num_tokens)
    commit = _Commit(roster, plan, result)
    outputs = commit.run()
    roster.stats.record_step(result.timings_ms)
    if len(plan.draft.token_ids):
        num_counted = np.array(commit.num_counted, np.int32)
        roster.stats.record_drafts(plan.draft, num_counted, np.minimum(result.verified.num_accepted, num_counted))
    if commit.has_ends:
        roster.sweep()
    return outputs


class _Commit:
    """One step's rows on their way into the books; arrays as lists, since every row is read once.

    Attributes:
        num_counted: drafts of each row that count in statistics: those judged, up to the token that ended the request,
            and none where the computation failed.
        has_ends: whether a request was closed.
    """

    def __init__(self, roster: Roster, plan: SchedulerOutput, result: StepResult) -> None:
        self._roster, self._plan, self._result = roster, plan, result
        self._now = time.time()
        self.num_counted: list[int] = np.diff(plan.draft.cu_num_draft).tolist()
        self._cu_draft = result.drafts.cu_num_draft.tolist()
        self.has_ends = False

    def run(self) -> list[RequestOutput]:
        """Commit every row; returns the outputs there are."""
        states, kv, failed = self._roster.states, self._roster.kv, self._result.failed
        token_ids, cu_output = self._result.verified.token_ids.tolist(), self._result.verified.cu_num_output.tolist()
        outputs: list[RequestOutput] = []
        begin = 0
        for row, (request_id, end) in enumerate(zip(self._plan.request_ids, cu_output[1:], strict=True)):
            state = states[request_id]
            if request_id in failed:
                outputs.append(self._fail(row, state, failed[request_id]))
            elif begin == end:
                state.num_computed_tokens += int(self._plan.num_new_tokens[row])
                kv.publish(state.table, state.token_ids, state.num_computed_tokens)
            else:
                outputs.append(self._append(row, state, begin, token_ids[begin:end]))
            begin = end
        return outputs

    def _append(self, row: int, state: RequestState, begin: int, token_ids: list[int]) -> RequestOutput:
        """Commit a row's output, which starts at `begin` of the step's tokens."""
        stats, num_accepted = self._roster.stats, len(token_ids) - 1
        num_counted = self.num_counted[row]
        stop = find_stop(token_ids, state.num_tokens - state.num_prompt_tokens, state.stop_rule)
        if stop is not None:
            del token_ids[stop.num_tokens :]
            # Draft i became output token i or was in its place: what lies behind the last one had no say.
            num_counted = self.num_counted[row] = min(num_counted, stop.num_tokens)
            num_accepted = min(num_accepted, stop.num_tokens)
        if not state.first_token_time:
            state.first_token_time = self._now
            stats.num_prompt_tokens += state.num_prompt_tokens
        stats.num_generated_tokens += len(token_ids)
        state.append(token_ids)
        # The last output has no KV yet. Accepted drafts have theirs; that of rejected ones lies past num_tokens - 1 and
        # is overwritten before anyone reads it.
        state.num_computed_tokens = state.num_tokens - 1
        self._roster.kv.publish(state.table, state.token_ids, state.num_computed_tokens)
        if num_counted:
            state.tally.add(num_counted, num_accepted, len(token_ids))
        logprobs, draft_logprobs = None, None
        if state.request.sampling.logprobs is not None and self._result.verified.logprobs is not None:
            logprobs = slice_logprobs(self._result.verified.logprobs, begin, token_ids, state.request.sampling.logprobs)
        if state.request.speculation.num_draft_logprobs is not None:
            num_alternatives = state.request.speculation.num_draft_logprobs
            draft_logprobs = slice_draft_logprobs(self._plan.draft, row, num_accepted, num_alternatives)
        output = state.output(token_ids, logprobs, draft_logprobs)
        if stop is None:
            state.keep_drafts(self._result.drafts, self._cu_draft[row], self._cu_draft[row + 1])
            return output
        self.has_ends = True
        metrics = self._roster.close(state, stop.reason, self._now)
        return replace(output, finish_reason=stop.reason, stop_reason=stop.stop_reason, metrics=metrics)

    def _fail(self, row: int, state: RequestState, reason: str) -> RequestOutput:
        self.has_ends = True
        self.num_counted[row] = 0
        metrics = self._roster.close(state, FinishReason.ERROR, self._now)
        error = (InternalError.__name__, reason)
        return replace(state.empty_output(), finish_reason=FinishReason.ERROR, error=error, metrics=metrics)
