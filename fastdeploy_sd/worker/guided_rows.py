"""The requests with a grammar, by table row: what each row of logits may be, and what their grammars say of drafts.

A step's bits are computed by a thread while the model runs, as nobody needs them before its logits are there. Row j of
a request gets what may follow its first j drafts. Matchers go forward when output has been committed and at no other
time, so that a step that fails may be run again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.guidance.output_matcher import OutputMatcher
from fastdeploy_sd.runtime.twins import RowsOnDevice
from fastdeploy_sd.step_memory import StepMemory
from fastdeploy_sd.types import F32, I32, DraftTokens, NewRequest, RequestId, VerifyResult, offsets

_log = logging.getLogger(__name__)

_NOBODY: Mapping[RequestId, Exception] = {}
_NOTHING = nullcontext()


class Matchers(Protocol):
    """Where matchers come from; see guidance.compiler.GrammarStore."""

    def matcher(self, grammar: str) -> LLMatcher:
        """Return one in the state before the first token."""
        ...

    def renewed(self, grammar: str) -> LLMatcher:
        """Return the same, with automata that nobody else has used."""
        ...


class GuidedRows:
    """Keeps a matcher for every request with a grammar.

    A step calls `masks`, and where it succeeded `advance`; `cut` then sees to the drafts for the next one.

    Args:
        matchers: None = no request may have a grammar.
        memory: of the steps; num_allowed, allowed_rows and allowed_bits are written.
    """

    def __init__(self, matchers: Matchers | None, memory: StepMemory, max_num_seqs: int) -> None:
        self._source, self._memory = matchers, memory
        self._matchers: dict[int, OutputMatcher] = {}
        self._admitted: dict[RequestId, OutputMatcher] = {}
        self._is_guided = np.zeros(max_num_seqs, np.bool_)
        self._step: list[tuple[int, OutputMatcher]] = []  # rows of the step and their matchers
        self._pool: ThreadPoolExecutor | None = None
        self._library: LLExecutor | None = None

    def admit(self, new: Sequence[NewRequest]) -> Mapping[RequestId, Exception]:
        """Get matchers for new requests, behind the output that they have; return whom there is none for, and why."""
        refused = {}
        for request in new:
            if request.request.grammar:
                try:
                    self._admitted[request.request.request_id] = self._matcher_of(request)
                except Exception as error:
                    refused[request.request.request_id] = error
        return refused or _NOBODY

    def settle(self, dropped: I32, added: Sequence[tuple[NewRequest, int]]) -> None:
        """Forget the requests of table rows that were given up, i32[n]; keep the matchers of those that got one."""
        for table_row in dropped.tolist():
            self._matchers.pop(table_row, None)
        self._is_guided[dropped] = False
        for request, table_row in added:
            if matcher := self._admitted.pop(request.request.request_id, None):
                self._matchers[table_row], self._is_guided[table_row] = matcher, True
        self._admitted.clear()

    def matcher(self, table_row: int) -> OutputMatcher:
        """The matcher of a request that has a grammar."""
        return self._matchers[table_row]

    def masks(self) -> AbstractContextManager[object]:
        """Return a context at whose end every row of the step in the memory has its bits.

        A request whose grammar cannot go on gets rows that allow nothing: it fails, see `failure`, and nobody else.
        """
        m = self._memory
        m.allowed_rows[: m.num_allowed] = -1
        m.num_allowed, self._step = 0, []
        if not self._matchers:
            return _NOTHING
        for r in self._is_guided.take(m.table_rows[: m.num_requests]).nonzero()[0].tolist():
            if m.cu_num_logits.item(r) < m.cu_num_logits.item(r + 1):
                self._step.append((r, self._matchers[m.table_rows.item(r)]))
        if not self._step:
            return _NOTHING
        m.num_allowed = m.num_logits
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="fdsd-masks")
            self._library = LLExecutor(1)
        return _Running(self._pool.submit(self._fill))

    def advance(self, result: VerifyResult) -> None:
        """Let every matcher of the step go on behind what its request produced, and was committed."""
        for r, matcher in self._step:
            matcher.consume(result.row(r).tolist())

    def cut(self, drafts: DraftTokens, table_rows: I32) -> DraftTokens:
        """Return the drafts without those that a grammar refuses, and without what follows these; raises nothing.

        Args:
            table_rows: i32[R], of the drafts' rows.
        """
        if not self._matchers or not len(drafts.token_ids):
            return drafts
        counts = np.diff(drafts.cu_num_draft)
        kept = counts.copy()
        for r in (self._is_guided.take(table_rows) & (counts > 0)).nonzero()[0].tolist():
            try:
                kept[r] = self._matchers[table_rows.item(r)].num_allowed(drafts.row(r).tolist())
            except Exception:  # the library promises that it raises none; output has been committed
                _log.exception("looking at drafts by a grammar failed")
                kept[r] = 0
        if (kept == counts).all():
            return drafts
        cu = offsets(kept)
        return drafts.pick(np.repeat(drafts.cu_num_draft[:-1] - cu[:-1], kept) + np.arange(cu[-1]), cu)

    def failure(self, r: int, logits: F32 | RowsOnDevice) -> tuple[str, str] | None:
        """Return what to tell a request of the step that got no token, by its row; None = it is not its grammar.

        Args:
            logits: f32[L, V], as the model left them.
        """
        matcher = dict(self._step).get(r)
        if matcher is None:
            return None
        if matcher.error:
            return BadRequest.__name__, f"the output cannot follow its grammar any further: {matcher.error}"
        rows = logits[self._memory.cu_num_logits.item(r) : self._memory.cu_num_logits.item(r + 1)]
        if not np.isfinite(rows).all():
            return None
        return BadRequest.__name__, (
            "no token is left that may come next: the request's other rules (bad_words, logit_bias, min_p) exclude all"
            " that its grammar allows"
        )

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _matcher_of(self, new: NewRequest) -> OutputMatcher:
        if self._source is None:
            raise BadRequest("grammar: expected none, as this server compiles no grammars, got one")
        source, grammar = self._source, new.request.grammar
        matcher = OutputMatcher(source.matcher(grammar), new.request.eos_token_ids, lambda: source.renewed(grammar))
        if output := new.token_ids[new.num_prompt_tokens :].tolist():
            matcher.consume(output)
        if matcher.error:
            raise BadRequest(f"the output cannot follow its grammar any further: {matcher.error}")
        return matcher

    def _fill(self) -> None:
        """Write the bits of the step's rows: row l has those at l."""
        cu = self._memory.cu_num_logits
        failed = self._write(self._step)
        if failed:
            rows_of = [(r, matcher, range(cu.item(r), cu.item(r + 1))) for r, matcher in self._step]
            self._write([(r, matcher) for r, matcher, rows in rows_of if failed & {*rows} and matcher.renew()])

    def _write(self, requests: Sequence[tuple[int, OutputMatcher]]) -> set[int]:
        """Write the bits of requests' rows; return the rows of which the library could not tell."""
        m = self._memory
        jobs: list[tuple[LLMatcher, int]] = []
        for r, matcher in requests:
            begin, end = m.cu_num_logits.item(r), m.cu_num_logits.item(r + 1)
            m.allowed_rows[begin:end] = np.arange(begin, end)
            first = m.cu_num_draft.item(r)
            states = matcher.states(m.draft_token_ids[first : first + end - begin - 1].tolist())
            m.allowed_bits[begin + len(states) : end] = 0  # behind a draft that is refused nothing is allowed
            for row, state in enumerate(states, begin):
                if state is None:
                    m.allowed_rows[row] = -1
                else:
                    jobs.append((state, row))
        assert self._library is not None
        if jobs:
            bits = m.allowed_bits
            self._library.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits.strides[0], len(bits))
        failed = [row for state, row in jobs if state.is_error()]
        m.allowed_bits[failed] = 0
        return set(failed)


class _Running:
    """Waits at its end for what a thread does, also where the rest failed: it writes to the step's memory."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failure = self._future.exception()
        if failure is not None and error is None:
            raise failure
