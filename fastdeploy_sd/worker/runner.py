"""ModelRunner: one step of the model, from plan to result. Knows no scheduling, no stop rules and no HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from paddle import Tensor

from fastdeploy_sd.layers.attention import AttentionInputs
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache, Rotary
from fastdeploy_sd.ops.rope_table import rope_table
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.sampling.verify import verify
from fastdeploy_sd.spec_decode.proposer import ProposeInput, Proposer
from fastdeploy_sd.types import I32, Batch, DraftTokens, SchedulerOutput, StepResult, VerifyResult
from fastdeploy_sd.worker.batch import build_batch
from fastdeploy_sd.worker.request_state import RequestTable

_NOT_FINITE = "the model produced non-finite logits for this request"


class ModelRunner:
    """Owns the KV cache and the request table, and runs the decoder over them.

    Args:
        caches: one KV cache per decoder layer.
        verify_strategy: how drafts are judged; see sampling.verify.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[KvCache[Tensor]],
        table: RequestTable,
        proposer: Proposer,
        block_size: int,
        verify_strategy: str = "target_match",
    ) -> None:
        self._decoder, self._caches, self._table = decoder, caches, table
        self._proposer, self._block_size, self._verify_strategy = proposer, block_size, verify_strategy
        c = decoder.config
        rope = rope_table(table.tokens.shape[1], c.head_dim, c.rope_theta, c.rope_scaling)
        self._rotary = Rotary(from_numpy(rope), c.rope_interleaved)

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; see Executor.execute."""
        clock = [time.perf_counter()]
        self._proposer.forget((*plan.finished_ids, *plan.preempted_ids))
        self._table.apply(plan)
        slots = self._table.slots(plan.request_ids)
        batch = build_batch(plan, self._table, slots, self._block_size)
        clock.append(time.perf_counter())
        hidden = self._forward(batch)
        clock.append(time.perf_counter())
        verified, failed_rows = self._verify(batch, hidden)
        clock.append(time.perf_counter())
        self._table.commit(slots, verified)
        drafts = self._propose(plan, slots, verified)
        clock.append(time.perf_counter())
        spans = np.diff(np.array(clock)) * 1e3
        return StepResult(
            step_id=plan.step_id,
            request_ids=plan.request_ids,
            verified=verified,
            drafts=drafts,
            failed={plan.request_ids[r]: _NOT_FINITE for r in failed_rows},
            timings_ms=dict(zip(("batch", "forward", "verify", "draft"), spans.tolist(), strict=True)),
        )

    def _forward(self, batch: Batch) -> Tensor:
        inputs = AttentionInputs(
            positions=from_numpy(batch.positions),
            slot_mapping=from_numpy(batch.slot_mapping),
            query_start_loc=from_numpy(batch.query_start_loc),
            seq_lens=from_numpy(batch.seq_lens),
            block_tables=from_numpy(batch.block_tables),
            rotary=self._rotary,
        )
        return self._decoder.forward(batch.input_ids, self._caches, inputs)

    def _verify(self, batch: Batch, hidden: Tensor) -> tuple[VerifyResult, tuple[int, ...]]:
        if len(batch.logits_indices) == 0:
            none = np.zeros(len(batch.request_ids) + 1, np.int32)
            return VerifyResult(none[:0], none, none[1:].copy()), ()
        rows = gather_output_rows(hidden, batch.logits_indices)
        return verify(self._decoder.logits(rows), batch, self._verify_strategy)

    def _propose(self, plan: SchedulerOutput, slots: I32, verified: VerifyResult) -> DraftTokens:
        produced = np.diff(verified.cu_num_output) > 0
        x = ProposeInput(
            request_ids=plan.request_ids,
            token_ids=[self._table.tokens[s, : self._table.num_tokens[s]] for s in slots],
            max_draft_len=np.where(produced, plan.max_draft_len, 0).astype(np.int32),
            verified=verified,
        )
        return self._proposer.propose(x)
