"""What a step's result does to each of its requests. Knows no planning, text or executor.

The rows' numbers are plain lists until they go into the counters; see `result_rules`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise
from operator import add

from fastdeploy_sd.engine.requests.request_pool import RequestPool
from fastdeploy_sd.engine.result_rules import ResultRows, verify_result
from fastdeploy_sd.engine.stopping import Stop, find_stop
from fastdeploy_sd.types import (
    TARGET,
    DraftLogprob,
    DraftSource,
    DraftTokens,
    FinishReason,
    LogprobArrays,
    RequestId,
    RequestOutput,
    SchedulerOutput,
    StepResult,
    StepSources,
    TokenLogprob,
)


def commit_result(pool: RequestPool, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
    """Append outputs, find ends, publish full blocks, keep the next drafts.

    Returns an output for each request that got tokens or failed, in the plan's order. The pool is unusable after an
    InternalError.
    """
    return _Commit(pool, plan, result).run()


class _Commit:
    """One step's rows on their way into the pool. Arrays and lists have an entry per row of the plan."""

    def __init__(self, pool: RequestPool, plan: SchedulerOutput, result: StepResult) -> None:
        self._pool, self._plan, self._result = pool, plan, result
        self._states, self._counter_rows = pool.find(plan.request_ids)
        self._stops: dict[int, Stop] = {}
        self._ended: list[tuple[int, int]] = []  # index of the output, row; stopped or failed
        self._failed: Mapping[RequestId, tuple[str, str]] = {}
        self._now = time.time()

    def run(self) -> list[RequestOutput]:
        """Commit every row; returns the outputs there are."""
        pool, result = self._pool, self._result
        num_tokens = [len(state.token_ids) for state in self._states]
        rows, broken = verify_result(self._plan, result, num_tokens)
        self._failed = {**result.failed, **broken} if broken else result.failed
        outputs = self._append()
        for r, stop in self._stops.items():
            rows.num_output[r] = stop.num_tokens
        self._advance(list(map(add, num_tokens, rows.num_output)), rows)
        self._count(rows)
        pool.drafts.keep(self._counter_rows, result.drafts)
        pool.drafts.skip_draft_steps = result.skip_draft_steps
        pool.held.add(result.held)
        for i, r in self._ended:
            outputs[i] = self._close(outputs[i], r)
        if self._ended:
            pool.sweep()
        pool.drafts.forget_unwanted(pool.running_rows)
        return outputs

    def _append(self) -> list[RequestOutput]:
        verified, failed, stats = self._result.verified, self._failed, self._pool.stats
        prompts, embeddings = self._result.prompt_logprobs, self._result.embeddings
        token_ids, outputs = verified.token_ids.tolist(), list[RequestOutput]()
        for r, (state, (begin, end)) in enumerate(
            zip(self._states, pairwise(verified.cu_num_output.tolist()), strict=True)
        ):
            row = token_ids[begin:end]
            if prompts and (found := prompts.get(state.request_id)) is not None:
                state.add_prompt_logprobs(self._plan.num_computed_tokens.item(r), found)
            if embeddings and state.request_id in embeddings:
                state.embedding = embeddings[state.request_id]
            if failed and state.request_id in failed:
                self._ended.append((len(outputs), r))
                outputs.append(state.empty_output())
                continue
            if not row:
                continue
            num_before = len(state.token_ids)
            if num_before + len(row) >= state.max_total_tokens or not state.end_token_ids.isdisjoint(row):
                stop = find_stop(row, num_before - state.num_prompt_tokens, state.stop_rule)
                if stop is not None:
                    self._stops[r] = stop
                    self._ended.append((len(outputs), r))
                    del row[stop.num_tokens :]
            state.token_ids.extend(row)
            state.num_token_steps += 1
            if not state.first_token_time:
                state.first_token_time = self._now
                stats.num_prompt_tokens += state.num_prompt_tokens
            output = RequestOutput(state.request_id, tuple(row), num_cached_tokens=state.num_cached_tokens)
            outputs.append(self._report(output, r) if state.has_reports else output)
        return outputs

    def _advance(self, num_tokens: list[int], rows: ResultRows) -> None:
        """Move the counters, publish full blocks, and free those that are outside of their window.

        The last output has no KV yet. Accepted drafts have theirs; that of rejected ones lies past num_tokens - 1 and
        is overwritten before it is read. A row without output has run a part of its prompt, or failed, or its
        request is held and runs its newest token again.
        """
        pool, kv, block_size = self._pool, self._pool.kv, self._pool.kv.block_size
        before = self._plan.num_computed_tokens.tolist()
        num_computed = [
            known - 1 if output else end
            for known, output, end in zip(num_tokens, rows.num_output, rows.ends, strict=True)
        ]
        for name in self._failed.keys() | self._result.held:
            row = self._plan.request_ids.index(name)
            is_early = not rows.num_output[row] and rows.ends[row] >= num_tokens[row]
            if name in self._failed:
                num_computed[row] = before[row]  # nothing that failed is published
            elif is_early:
                num_computed[row] = num_tokens[row] - 1
        pool.counters.num_tokens[self._counter_rows] = num_tokens
        pool.counters.num_computed_tokens[self._counter_rows] = num_computed
        for r, (now, then) in enumerate(zip(num_computed, before, strict=True)):
            if now // block_size > then // block_size:
                kv.publish(self._states[r].table, self._states[r].token_ids, now)
            if kv.states is not None:
                kv.states.publish(self._states[r].table, self._states[r].token_ids, now)
            if kv.has_windows:
                kv.free_before_windows(self._states[r].table, now)

    def _count(self, rows: ResultRows) -> None:
        """Count the step and what became of its drafts.

        A draft with i others before it on its path became output token i or was in its place: those after the last one
        had no effect and do not count, nor does anything of a row that failed.
        """
        stats, draft = self._pool.stats, self._plan.draft
        stats.record_step(self._result.timings_ms)
        stats.choice = self._result.choice
        stats.num_generated_tokens += sum(rows.num_output)
        stats.num_token_steps += sum(map(bool, rows.num_output))
        if len(draft.token_ids):
            held = self._result.held
            early = [r for r, name in enumerate(self._plan.request_ids) if name in held] if held else []
            for r in chain((r for _, r in self._ended), early):
                rows.num_draft[r] = min(rows.num_draft[r], rows.num_output[r])
            self._count_drafts(draft, rows)

    def _count_drafts(self, draft: DraftTokens, rows: ResultRows) -> None:
        sources = bytes(len(draft.token_ids)) if draft.sources is None else draft.sources.tobytes()
        for r, (state, begin) in enumerate(zip(self._states, draft.cu_num_draft.tolist(), strict=False)):
            num_draft = rows.num_draft[r]
            if num_draft and draft.parents is not None:
                parents = draft.parents_of(r)
                longest = len(parents) if num_draft == len(parents) else num_draft  # as far as the output goes
                nodes = [i for i in range(len(parents)) if len(draft.path(r, i)) <= longest]
                place = {-1: 0} | {node: i + 1 for i, node in enumerate(nodes)}
                tree = bytes(place[parents[node]] for node in nodes)
                path = bytes(place[node] for node in self._result.verified.accepted(r) if node in place)
                own = bytes(sources[begin + node] for node in nodes)
                state.drafts.add(own, len(path), rows.num_output[r], tree, path)
            elif num_draft:
                num_accepted = min(rows.num_accepted[r], num_draft)
                state.drafts.add(sources[begin : begin + num_draft], num_accepted, rows.num_output[r])

    def _report(self, output: RequestOutput, r: int) -> RequestOutput:
        state, verified = self._states[r], self._result.verified
        logprobs, draft_logprobs, sources = None, None, None
        num_top = state.request.sampling.logprobs
        if num_top is not None and verified.logprobs is not None:
            begin = int(verified.cu_num_output[r])
            logprobs = slice_logprobs(verified.logprobs, begin, output.token_ids, num_top)
        wanted = state.request.speculation
        if wanted.num_draft_logprobs is not None or wanted.token_sources:
            accepted = verified.accepted(r)[: len(output.token_ids)]
            if wanted.num_draft_logprobs is not None:
                draft_logprobs = slice_draft_logprobs(self._plan.draft, r, accepted, wanted.num_draft_logprobs)
            if wanted.token_sources:
                sources = step_sources(self._plan.draft, r, accepted, len(output.token_ids))
        is_first = len(state.token_ids) - len(output.token_ids) == state.num_prompt_tokens
        prompt_logprobs = state.take_prompt_logprobs() if is_first else None
        return replace(
            output,
            logprobs=logprobs,
            draft_logprobs=draft_logprobs,
            prompt_logprobs=prompt_logprobs,
            sources=sources,
            embedding=state.embedding if is_first else None,
        )

    def _close(self, output: RequestOutput, r: int) -> RequestOutput:
        state, stop = self._states[r], self._stops.get(r)
        if stop is None:
            metrics = self._pool.close(state, FinishReason.ERROR, self._now)
            error = self._failed[state.request_id]
            return replace(output, finish_reason=FinishReason.ERROR, error=error, metrics=metrics)
        metrics = self._pool.close(state, stop.reason, self._now)
        return replace(output, finish_reason=stop.reason, stop_reason=stop.stop_reason, metrics=metrics)


def slice_logprobs(
    arrays: LogprobArrays, begin: int, token_ids: Sequence[int], num_alternatives: int
) -> tuple[TokenLogprob, ...]:
    """Pick a row's log-probabilities out of a step's, with as many alternatives as the request asked for."""
    end = begin + len(token_ids)
    return tuple(
        TokenLogprob(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            token_ids,
            arrays.logprobs[begin:end].tolist(),
            arrays.ranks[begin:end].tolist(),
            arrays.top_token_ids[begin:end, :num_alternatives].tolist(),
            arrays.top_logprobs[begin:end, :num_alternatives].tolist(),
            strict=True,
        )
    )


def step_sources(drafts: DraftTokens, row: int, accepted: Sequence[int], num_tokens: int) -> StepSources:
    """Return who guessed a row's output tokens: the accepted drafts come first, then those of the target."""
    begin, end = drafts.cu_num_draft[row : row + 2].tolist()
    numbers = [0] * (end - begin) if drafts.sources is None else drafts.sources[begin:end].tolist()
    runs = [(_name_of(number), len(list(run))) for number, run in groupby(numbers[node] for node in accepted)]
    if num_tokens > len(accepted):
        runs.append((TARGET, num_tokens - len(accepted)))
    return StepSources(tuple(runs), {_name_of(number): count for number, count in Counter(numbers).items()})


def _name_of(source: int) -> str:
    return DraftSource(source).name.lower()


def slice_draft_logprobs(
    drafts: DraftTokens, row: int, accepted: Sequence[int], num_alternatives: int
) -> tuple[DraftLogprob, ...]:
    """Pick the drafts of a row that have a log-probability; those of methods without a model have none."""
    if drafts.logprobs is None:
        return ()
    begin = int(drafts.cu_num_draft[row])
    entries = slice_logprobs(drafts.logprobs, begin, drafts.row(row).tolist(), num_alternatives)
    return tuple(
        DraftLogprob(entry, len(drafts.path(row, i)) - 1, i in accepted)
        for i, entry in enumerate(entries)
        if not math.isnan(entry.logprob)
    )
