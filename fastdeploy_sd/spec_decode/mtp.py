"""Drafts by multi-token prediction: layers of the model's own guess on from its hidden rows.

Owns which KV slots of the draft layers are filled for every request; spec_decode/mtp_passes.py runs the layers over
what each step added. Knows no scheduling.

The row at slot q combines token q with the hidden row of position q - 1, so slot 0 stays empty, and what a full block
holds depends on its own prefix alone. After a step that brought the target's rows of positions up to v - 1:

    slots   0      1 .......... next_slot .... v - 1   v
            empty  filled before, filled in this step, filled now if there is a block for it

Token v is the request's newest unless its prompt goes on; then drafting starts from the row at slot v.

A request that is not drafted for may fall behind: its slots are filled all at once when it is drafted for again, or
when its newest block is full, as others may use a full block from then on. The hidden rows of that block were kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.ops.sampling import token_logprobs
from fastdeploy_sd.runtime.device import DEVICE
from fastdeploy_sd.spec_decode.mtp_memory import DraftMemory
from fastdeploy_sd.spec_decode.mtp_passes import DraftPasses, EagerPasses
from fastdeploy_sd.spec_decode.mtp_recorded import RecordedPasses
from fastdeploy_sd.spec_decode.proposer import (
    DraftProbabilities,
    DraftRequest,
    ProposeInput,
    ProposerContext,
    TargetStep,
)
from fastdeploy_sd.types import F32, I32, DraftTokens, LogprobArrays, Rows, offsets

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

_NOT_OURS = -1
_NOT_ASKED = -1.0


class MtpProposer:
    """See the module. State per table row: the first KV slot of the draft layers that is not filled, and
    how many tokens there were when it was begun.

    Args:
        config: `num_model_steps` bounds the drafts per request and step.
        context: has a `draft_model`.
    """

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        assert context.draft_model is not None, "mtp runs a model"
        self._model, self._num_steps = context.draft_model, config.num_model_steps
        self._num_begun = np.zeros(context.max_num_seqs, np.int32)
        self._next_slot = np.full(context.max_num_seqs, _NOT_OURS, np.int32)
        self._memory = DraftMemory(context.max_num_seqs, self._model.model.num_layers, self._num_steps)
        self._passes: DraftPasses = (
            EagerPasses(self._model, self._memory)
            if self._model.enforce_eager
            else RecordedPasses(self._model, self._memory, self._num_steps, has_logits=config.enable_draft_logprob)
        )

    @property
    def num_lookahead_slots(self) -> int:
        return self._num_steps

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            self._next_slot[request.table_row] = request.num_draft_slots
            self._num_begun[request.table_row] = request.num_tokens

    def forget(self, table_rows: I32) -> None:
        self._next_slot[table_rows] = _NOT_OURS

    def close(self) -> None:
        """Nothing to save."""

    def propose(self, x: ProposeInput) -> DraftTokens:
        """See Proposer.propose. Rows that already have a prefix get no drafts: it was not run through the layers."""
        assert x.target is not None, "mtp drafts from what the model ran"
        has_run = self._plan(x, x.target)
        if not has_run.any():
            return DraftTokens.none(len(x.table_rows))
        m, n = self._memory, self._memory.count
        m.min_survival[:n] = _NOT_ASKED if x.probabilities is None else self._least_survival(x.probabilities)
        logprobs = _DraftLogprobs.wanted_by(x, m.cu_num_draft.item(n))
        logits = self._passes.run(wants_logits=logprobs is not None)
        if logprobs is not None:
            for i, rows in enumerate(logits):
                logprobs.add(i, rows, m)
        self._model.agree()
        self._next_slot[m.table_rows[:n][has_run]] = m.ends[0][:n][has_run]
        kept, drafts = _drafts(m, None if logprobs is None else logprobs.arrays)
        if x.probabilities is not None:
            x.probabilities.draft_prob[: len(kept)] = m.draft_prob[kept]
        return drafts

    def _least_survival(self, asked: DraftProbabilities) -> F32 | float:
        """Of several layers each has a pass over the step's tokens anyway: there is nothing to end early."""
        return asked.min_survival if self._model.model.num_layers == 1 else 0.0

    def _plan(self, x: ProposeInput, step: TargetStep) -> npt.NDArray[np.bool_]:
        """Write what the draft layers compute; returns bool[R], the rows they run for."""
        m, computed = self._memory, step.num_computed_tokens
        m.count = n = len(x.table_rows)
        next_slot = self._next_slot[x.table_rows]
        # A slot needs its token, the hidden row before it, and a block.
        end = np.minimum(np.minimum(step.num_valid + 1, x.num_tokens), step.num_kv_slots)
        can_run = (next_slot != _NOT_OURS) & (step.num_valid > computed)
        # Draft i is made at slot N - 1 + i, which needs a block and a row of the rotary table.
        num_kv_slots = np.minimum(step.num_kv_slots, x.token_table.shape[1])
        room = np.minimum(np.minimum(x.max_draft_len, self._num_steps), num_kv_slots - x.num_tokens + 1)
        may_draft = can_run & (end == x.num_tokens)
        if x.prefix is not None:
            may_draft &= np.diff(x.prefix.cu_num_draft) == 0
        num_drafts = np.where(may_draft, room.clip(0), 0)
        has_run = can_run & ((num_drafts > 0) | self._must_run(x, step, next_slot))
        begin = np.maximum(next_slot, 1)
        m.table_rows[:n], m.num_committed[:n] = x.table_rows, x.num_tokens
        m.begin[:n], m.ends[0][:n] = begin, np.where(has_run, end, begin)
        m.hidden_begin[:n], m.cu_hidden[: n + 1] = computed, step.query_start_loc
        m.num_drafts[:n] = num_drafts
        m.set_drafts()
        m.num_steps = int(m.num_drafts[:n].max(initial=0))
        return np.asarray(has_run & (end > begin))

    def _must_run(self, x: ProposeInput, step: TargetStep, next_slot: I32) -> npt.NDArray[np.bool_]:
        """bool[R]: what cannot wait. Rows of a prompt, as more are computed than kept, and a block that is now full."""
        block_size = self._model.caches[0].block_size
        is_prompt = step.num_computed_tokens < self._num_begun[x.table_rows]
        return np.asarray(is_prompt | (next_slot // block_size < step.num_valid // block_size))


def _drafts(memory: DraftMemory, logprobs: LogprobArrays | None) -> tuple[Rows, DraftTokens]:
    """Where in the memory the drafts are, and they; a row ends before a draft that was not made."""
    cu = memory.cu_num_draft[: memory.count + 1].copy()
    token_ids = memory.draft_token_ids[: cu.item(-1)].copy()
    drafts = DraftTokens(token_ids, cu, logprobs=logprobs)
    is_missing = token_ids < 0
    if not is_missing.any():
        return np.arange(len(token_ids)), drafts
    num_missing = offsets(is_missing)
    is_kept = num_missing[1:] == np.repeat(num_missing[cu[:-1]], np.diff(cu))
    kept = np.flatnonzero(is_kept)
    return kept, drafts.pick(kept, offsets(is_kept)[cu])


class _DraftLogprobs:
    """Log-probabilities of the drafts of requests that asked, under the draft layers; others have NaN and rank 0."""

    def __init__(self, wanted: I32, num_drafts: int) -> None:
        self._wanted = wanted
        self.arrays = LogprobArrays.empty(num_drafts, int(wanted.max()))

    @staticmethod
    def wanted_by(x: ProposeInput, num_drafts: int) -> _DraftLogprobs | None:
        """Return None when no request of the step asked."""
        if x.num_draft_logprobs is None or not (x.num_draft_logprobs >= 0).any():
            return None
        return _DraftLogprobs(x.num_draft_logprobs, num_drafts)

    def add(self, step: int, logits: Tensor, batch: DraftMemory) -> None:
        """Note draft `step`; the first rows of logits f32[R, V] are those of the requests with one."""
        drafting = np.flatnonzero(batch.num_wanted[: batch.count] > step)
        asked = np.flatnonzero(self._wanted[drafting] >= 0).astype(np.int32)
        if len(asked) == 0:
            return
        at = batch.cu_num_draft[drafting[asked]] + step
        # A failed draft is cut off afterwards.
        token_ids = batch.draft_token_ids[at].clip(0)
        num_top = min(self.arrays.top_token_ids.shape[1], int(logits.shape[1]))
        self.arrays.put(at, LogprobArrays(*token_logprobs(DEVICE.read(logits)[asked], token_ids, num_top)))
