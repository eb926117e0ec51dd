"""The requests with a grammar, by table row: masks of their rows of logits, and the drafts that grammars allow.

A thread computes a step's masks while the model runs. Row j of a request gets the tokens that may follow its first j
drafts. Matchers advance only when output is committed, so a failed step may run again.

A mask that takes longer than a step may wait (`mask_cost`) is computed off the steps. Meanwhile the request is *held*:
the current step gives it no output, and no step has it until its mask is ready. This never changes its output.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import numpy as np

from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.guidance.limits import STEP_S, share_s
from fastdeploy_sd.text.guidance.output_matcher import OutputMatcher, WornError
from fastdeploy_sd.types import F32, I32, DraftTokens, NewRequest, RequestId, VerifyResult
from fastdeploy_sd.worker.step.guided_request import GuidedRequest, MaskWorker, Matchers, write_mask

_log = logging.getLogger(__name__)

_NONE_REFUSED: Mapping[RequestId, Exception] = {}
_NOTHING = nullcontext()


class GuidedRows:
    """Keeps a matcher for every request with a grammar.

    A step calls `masks`, and after success `advance`; then `cut` checks the drafts for the next step.

    Args:
        matchers: None = no request may have a grammar.
        memory: of the steps; num_allowed, allowed_rows and allowed_bits are written.
        clock: seconds of processor time of the calling thread.
    """

    def __init__(
        self,
        matchers: Matchers | None,
        memory: StepMemory,
        max_num_seqs: int,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._source, self._memory, self._clock = matchers, memory, clock
        self._requests: dict[int, GuidedRequest] = {}
        self._admitted: dict[RequestId, GuidedRequest] = {}
        self._is_guided = np.zeros(max_num_seqs, np.bool_)
        self._step: list[tuple[int, GuidedRequest]] = []  # rows of the step and their requests
        self._late: set[int] = set()  # those of the step's rows that get no output
        self._pool: ThreadPoolExecutor | None = None
        self._worker = MaskWorker()

    def admit(self, new: Sequence[NewRequest]) -> Mapping[RequestId, Exception]:
        """Get matchers for new requests, advanced past their output; return the refused requests, and why."""
        refused = {}
        for request in new:
            if request.request.grammar:
                try:
                    self._admitted[request.request.request_id] = self._admit(request)
                except Exception as error:
                    refused[request.request.request_id] = error
        return refused or _NONE_REFUSED

    def update(self, dropped: I32, added: Sequence[tuple[NewRequest, int]]) -> None:
        """Forget the requests of dropped table rows, i32[n]; keep the matchers of those that got one."""
        for table_row in dropped.tolist():
            if request := self._requests.pop(table_row, None):
                request.is_gone = True
        self._is_guided[dropped] = False
        for new, table_row in added:
            if request := self._admitted.pop(new.request.request_id, None):
                self._requests[table_row], self._is_guided[table_row] = request, True
        for request in self._admitted.values():
            request.is_gone = True
        self._admitted.clear()

    def matcher(self, table_row: int) -> OutputMatcher:
        """Return the matcher of a request that has a grammar."""
        return self._requests[table_row].matcher

    def forced(self, table_row: int, max_tokens: int) -> list[int]:
        """Return the drafts that a request's grammar forces, at most max_tokens and as many as the mask cost allows."""
        request = self._requests[table_row]
        begin = self._clock()
        tokens = request.matcher.forced(min(max_tokens, self._max_drafts(request)))
        request.spent_s += self._clock() - begin
        return tokens

    def masks(self) -> AbstractContextManager[object]:
        """Return a context at whose end every row of the step in the memory has its mask.

        A request whose grammar cannot continue, or that is held, gets rows that allow nothing. Only this request fails;
        see `failure` and `is_late`.
        """
        m = self._memory
        m.allowed_rows[: m.num_allowed] = -1
        m.num_allowed, self._step = 0, []
        self._late.clear()
        if not self._requests:
            return _NOTHING
        for r in self._is_guided.take(m.table_rows[: m.num_requests]).nonzero()[0].tolist():
            if m.cu_num_logits.item(r) < m.cu_num_logits.item(r + 1):
                self._step.append((r, self._requests[m.table_rows.item(r)]))
        if not self._step:
            return _NOTHING
        m.num_allowed = m.num_logits
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="fdsd-masks")
        return _Running(self._pool.submit(self._fill))

    def advance(self, result: VerifyResult) -> None:
        """Advance every matcher of the step by its request's committed output."""
        share, seconds, num_masks = share_s(len(self._step)), 0.0, 0
        cu = self._memory.cu_num_logits
        for r, request in self._step:
            token_ids = result.row(r).tolist()
            if r in self._late or not token_ids:
                continue
            num_rows = cu.item(r + 1) - cu.item(r)
            num_masks += num_rows - (request.bits is not None)
            seconds += request.spent_s
            request.note(num_rows, len(token_ids))
            request.add(token_ids)
            if request.cost.max_rows(share) == 0 or not request.follow(share):
                self._order(request)
        if num_masks and self._source is not None:
            self._source.count(num_masks=num_masks, mask_s=seconds)

    def is_late(self, r: int) -> bool:
        """Whether a row of the step got no mask and no token, as its request is held."""
        return r in self._late

    def held(self, request_ids: Sequence[RequestId]) -> frozenset[RequestId]:
        """Return the step's requests that are not ready for the next one, until they are announced."""
        return frozenset(request_ids[r] for r, request in self._step if r in self._late or request.is_pending)

    def cut(self, drafts: DraftTokens, table_rows: I32) -> DraftTokens:
        """Return each row's drafts without those that a grammar refuses and what follows them; raises nothing.

        `table_rows`: i32[R], of the drafts' rows.
        """
        if not self._requests or not len(drafts.token_ids):
            return drafts
        counts = np.diff(drafts.cu_num_draft)
        is_kept = np.ones(len(drafts.token_ids), np.bool_)
        for r in (self._is_guided.take(table_rows) & (counts > 0)).nonzero()[0].tolist():
            request = self._requests[table_rows.item(r)]
            first, end = drafts.cu_num_draft[r : r + 2].tolist()
            is_kept[first:end] = False
            count = self._max_drafts(request)
            try:
                begin = self._clock()
                is_kept[first + np.array(_allowed(request.matcher, drafts, r, count), np.intp)] = True
                request.spent_s += self._clock() - begin
            except Exception:  # the library promises that it raises none; output has been committed
                _log.exception("looking at drafts by a grammar failed")
        return drafts if is_kept.all() else drafts.keep(is_kept)

    def failure(self, r: int, logits: F32 | RowsOnDevice) -> tuple[str, str] | None:
        """Return the error of a row of the step that got no token; None = its grammar is not the reason.

        `logits`: f32[L, V], as the model left them.
        """
        request = dict(self._step).get(r)
        if request is None:
            return None
        if request.matcher.error:
            if request.cost.is_too_much and self._source is not None:
                self._source.count(num_over_budget=1)
            return BadRequest.__name__, _cannot_follow(request.matcher.error)
        rows = logits[self._memory.cu_num_logits.item(r) : self._memory.cu_num_logits.item(r + 1)]
        if not np.isfinite(rows).all():
            return None
        return BadRequest.__name__, (
            "no token is left that may come next: the request's other rules (bad_words, logit_bias, min_p) exclude all"
            " that its grammar allows"
        )

    def close(self) -> None:
        """End the threads. May be called twice."""
        self._worker.close()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _admit(self, new: NewRequest) -> GuidedRequest:
        if self._source is None:
            raise BadRequest("grammar: expected none, as this server compiles no grammars, got one")
        source, grammar = self._source, new.request.grammar
        matcher = OutputMatcher(source.matcher(grammar), new.request.eos_token_ids, lambda: source.renewed(grammar))
        num_words = self._memory.allowed_bits.shape[1]
        request = GuidedRequest(new.request.request_id, matcher, num_words, self._clock, self._take_late)
        request.add(new.token_ids[new.num_prompt_tokens :].tolist())
        if not request.follow(STEP_S):
            self._order(request)
        elif matcher.error:
            raise BadRequest(_cannot_follow(matcher.error))
        return request

    def _max_drafts(self, request: GuidedRequest) -> int:
        """How many drafts a request may have in the next step."""
        return 0 if request.is_pending else max(request.cost.max_rows(share_s(len(self._step))) - 1, 0)

    def _order(self, request: GuidedRequest) -> None:
        """Have a request's next mask computed off the steps."""
        request.order()
        self._worker.put(request, request.cost.row_s)

    def _take_late(self, request: GuidedRequest, seconds: float) -> None:
        if self._source is not None and not request.is_gone:
            self._source.count(num_late_masks=1, late_mask_s=seconds)
            self._source.announce(request.request_id)

    def _fill(self) -> None:
        """Write the masks of the step's rows, row l at index l: the cheapest first, while time is left."""
        m, begin = self._memory, self._clock()
        limit = len(self._step) * share_s(len(self._step))
        for r, request in sorted(self._step, key=lambda step: step[1].cost.row_s):
            first, last = m.cu_num_logits.item(r), m.cu_num_logits.item(r + 1)
            m.allowed_rows[first:last] = np.arange(first, last)
            start, is_written = self._clock(), False
            if not request.is_pending:
                with contextlib.suppress(WornError):
                    is_written = self._write(r, request, begin + limit)
                request.spent_s += self._clock() - start
            if not is_written:
                m.allowed_bits[first:last] = 0
                self._late.add(r)
                if not request.is_pending:
                    request.note(1, 0)
                    self._order(request)

    def _write(self, r: int, request: GuidedRequest, end: float) -> bool:
        """Write the masks of a request's rows; returns whether time sufficed for all.

        Raises WornError: see OutputMatcher.
        """
        m = self._memory
        first, last = m.cu_num_logits.item(r), m.cu_num_logits.item(r + 1)
        if request.bits is not None and last - first == 1:
            m.allowed_bits[first] = request.bits
            return True
        begin, refused = m.cu_num_draft.item(r), set(range(first, last))
        token_ids = m.draft_token_ids[begin : begin + last - first - 1].tolist()
        parents = m.parent_rows[first + 1 : last] - 1
        for place, state in request.matcher.states(token_ids, parents.tolist()):
            row = first + place
            refused.remove(row)
            if state is None:
                m.allowed_rows[row] = -1
            elif self._clock() > end:
                return False
            else:
                write_mask(state, m.allowed_bits[row])
        m.allowed_bits[list(refused)] = 0  # after a refused draft nothing is allowed
        return True


def _allowed(matcher: OutputMatcher, drafts: DraftTokens, r: int, count: int) -> list[int]:
    """Return the first drafts of a row, at most `count`, that a grammar allows."""
    return matcher.allowed(drafts.row(r)[:count].tolist(), drafts.parents_of(r)[:count])


def _cannot_follow(error: str) -> str:
    return f"the output cannot follow its grammar or schema any further: {error}"


class _Running:
    """Waits at its end for a thread that writes to the step's memory, also after a failure."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failure = self._future.exception()
        if failure is not None and error is None:
            raise failure
