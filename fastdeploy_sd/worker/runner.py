"""ModelRunner: one step of the model, from plan to result. Knows no scheduling, no stop rules and no HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from paddle import Tensor

from fastdeploy_sd.layers.attention import AttentionInputs
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.sampling.verify import VerifyRule, verify
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, TargetStep
from fastdeploy_sd.types import I32, Batch, DraftTokens, SchedulerOutput, SpeculationInfo, StepResult, VerifyResult
from fastdeploy_sd.worker.batch import build_batch
from fastdeploy_sd.worker.request_state import RequestTable
from fastdeploy_sd.worker.rotary import make_rotary

_NOT_FINITE = "the model produced non-finite logits for this request"


class ModelRunner:
    """Owns the KV cache and the request table, and runs the decoder over them.

    Args:
        caches: one KV cache per decoder layer.
        speculation: what requests may ask for.
        rule: how drafts are judged.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[KvCache[Tensor]],
        table: RequestTable,
        proposer: Proposer,
        speculation: SpeculationInfo,
        rule: VerifyRule,
    ) -> None:
        self._decoder, self._caches, self._table = decoder, caches, table
        self._proposer, self._block_size = proposer, caches[0].block_size
        self._speculation, self._rule = speculation, rule
        self._rotary = make_rotary(decoder.config, table.tokens.shape[1])

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; see Executor.execute."""
        clock = [time.perf_counter()]
        dropped, added = self._table.apply(plan)
        self._proposer.forget(dropped)
        self._begin(plan, added)
        slots = self._table.slots(plan.request_ids)
        batch = build_batch(plan, self._table, slots, self._block_size)
        clock.append(time.perf_counter())
        hidden = self._forward(batch)
        logits = self._logits(batch, hidden)
        clock.append(time.perf_counter())
        verified, failed_rows = self._verify(batch, logits)
        clock.append(time.perf_counter())
        self._table.commit(slots, verified)
        drafts = self._propose(plan, slots, batch, verified, hidden)
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

    def _logits(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """f32[L, V], None when every row's prompt is unfinished."""
        if len(batch.logits_indices) == 0:
            return None
        return self._decoder.logits(gather_output_rows(hidden, batch.logits_indices))

    def _verify(self, batch: Batch, logits: Tensor | None) -> tuple[VerifyResult, tuple[int, ...]]:
        if logits is None:
            none = np.zeros(len(batch.request_ids) + 1, np.int32)
            return VerifyResult(none[:0], none, none[1:].copy()), ()
        return verify(logits, batch, self._rule)

    def _begin(self, plan: SchedulerOutput, slots: I32) -> None:
        if not plan.new:
            return
        row_of = {request_id: row for row, request_id in enumerate(plan.request_ids)}
        self._proposer.begin(
            [
                DraftRequest(
                    request_id=new.request.request_id,
                    slot=int(slot),
                    num_prompt_tokens=new.num_prompt_tokens,
                    num_tokens=len(new.token_ids),
                    num_computed_tokens=int(plan.num_computed_tokens[row_of[new.request.request_id]]),
                    cache_salt=new.request.cache_salt,
                    method=self._speculation.method_of(new.request.speculation),
                    end_token_ids=self._table.rules[int(slot)].end_token_ids,
                    min_tokens=self._table.rules[int(slot)].min_tokens,
                )
                for new, slot in zip(plan.new, slots, strict=True)
            ]
        )

    def _propose(
        self, plan: SchedulerOutput, slots: I32, batch: Batch, verified: VerifyResult, hidden: Tensor
    ) -> DraftTokens:
        table = self._table
        produced = np.diff(verified.cu_num_output) > 0
        num_tokens = table.num_tokens[slots]
        # A row whose tokens were all run and that has no output nevertheless has failed.
        computed = plan.num_computed_tokens
        unfinished = np.diff(batch.cu_num_logits) == 0
        num_valid = np.where(produced, num_tokens - 1, computed + np.where(unfinished, plan.num_new_tokens, 0))
        # The plan was made before it was known how many drafts would be accepted. What follows must leave room for the
        # token that verification adds.
        room = (table.max_total[slots] - num_tokens - 1).clip(0)
        # The last block may reach past the model's length, where the rotary table ends.
        num_kv_slots = np.minimum(table.num_blocks[slots] * self._block_size, table.tokens.shape[1])
        x = ProposeInput(
            request_ids=plan.request_ids,
            slots=slots,
            token_table=table.tokens,
            num_tokens=num_tokens,
            max_draft_len=np.where(produced, np.minimum(plan.max_draft_len, room), 0).astype(np.int32),
            num_draft_logprobs=table.num_draft_logprobs[slots],
            target=TargetStep(
                query_start_loc=batch.query_start_loc,
                num_computed_tokens=computed,
                num_valid=num_valid.astype(np.int32),
                block_table=table.blocks,
                num_kv_slots=num_kv_slots,
                hidden=hidden,
            ),
        )
        return self._proposer.propose(x)

    def close(self) -> None:
        """Let the drafting method save what should outlive it."""
        self._proposer.close()
