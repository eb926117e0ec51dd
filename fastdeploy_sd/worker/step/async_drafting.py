"""Drafts after an in-flight step, whose tokens only the device has. Knows no method and no device."""

from __future__ import annotations

import logging

import numpy as np

from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.proposer import DraftsAsync, PendingStep, ProposeInput, Proposer, TargetStep
from fastdeploy_sd.types import I32, DraftTokens, RequestId, VerifyResult, offsets
from fastdeploy_sd.worker.step.batch import PendingRows
from fastdeploy_sd.worker.step.request_table import RequestTable

_log = logging.getLogger(__name__)


class AsyncDrafting:
    """Has a method draft after in-flight steps, if it can do so.

    Args:
        proposer: of the server. guard: of it.
        table: the requests and their tokens.
        is_lossy: whether drafts decide the output. Then no drafts are made so: a step may run again on other ones.
    """

    def __init__(self, proposer: Proposer, guard: DraftGuard, table: RequestTable, *, is_lossy: bool) -> None:
        self._proposer = proposer if isinstance(proposer, DraftsAsync) and not is_lossy else None
        self._guard = guard
        self._drafter = None if self._proposer is None else self._proposer.async_drafter
        self._table = table

    @property
    def is_available(self) -> bool:
        """Whether some in-flight steps can be drafted for; constant."""
        return self._drafter is not None

    def serves(self, request_ids: tuple[RequestId, ...]) -> bool:
        """Whether an in-flight step of these requests can be drafted for."""
        if self._drafter is None or self._proposer is None:
            return False
        return self._proposer.is_async(self._table.table_rows(request_ids))

    def start(self, rows: PendingRows) -> None:
        """Start to draft after the step that was launched last.

        Raises:
            Exception: it could not be started.
        """
        assert self._drafter is not None, "nothing drafts ahead"
        max_total = self._table.max_total.take(rows.table_rows)
        step = PendingStep(
            table_rows=rows.table_rows,
            num_computed=rows.num_computed,
            num_new=rows.num_new,
            max_output=rows.max_output,
            max_tokens=rows.max_tokens,
            max_draft_len=rows.planned_drafts,
            sure_draft_len=np.minimum(rows.planned_drafts, max_total - rows.max_tokens - 1),
            num_kv_slots=rows.num_kv_slots,
            follows=rows.follows,
        )
        self._drafter.start(step)

    def finish(
        self, request_ids: tuple[RequestId, ...], rows: PendingRows, result: VerifyResult, committed: tuple[I32, I32]
    ) -> DraftTokens:
        """Return the drafts, once the step's output is committed. On failure, its requests get no more drafts.

        Args:
            committed: see BatchBuilder.commit_pending.
        """
        assert self._drafter is not None, "nothing drafts ahead"
        num_committed, max_draft_len = committed
        is_unfinished = np.diff(rows.cu_num_logits) == 0
        num_run = rows.num_computed + rows.num_new * is_unfinished
        num_valid = np.where(np.diff(result.cu_num_output) > 0, num_committed - 1, num_run) * rows.is_kept
        target = TargetStep(
            offsets(rows.num_new), rows.num_computed * rows.is_kept, num_valid.astype(np.int32), rows.num_kv_slots
        )
        x = ProposeInput(request_ids, rows.table_rows, self._table.tokens, num_committed, max_draft_len, target=target)
        try:
            return self._drafter.finish(x)
        except Exception:  # host and device may differ on these requests' drafts
            _log.exception("noting the drafts of %d requests failed", len(request_ids))
            kept = [request_ids[r] for r in np.flatnonzero(rows.is_kept).tolist()]
            self._guard.give_up(kept, rows.table_rows[rows.is_kept])
            return DraftTokens.none(len(request_ids))

    def restart(self) -> None:
        """Forget the started drafts."""
        if self._drafter is not None:
            self._drafter.restart()
