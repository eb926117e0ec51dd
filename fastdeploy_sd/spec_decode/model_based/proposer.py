"""Drafts by a model: draft layers over the target's hidden rows, such as multi-token prediction (MTP), or a whole one.

The row of a draft layer at slot q combines token q with the hidden row of position q - 1. So slot 0 stays empty, and a
full block depends only on its own prefix. After a step that ran the target's positions up to v - 1:

    slots   0      1 .......... next_slot .... v - 1   v
            empty  filled before, filled in this step, filled now if there is a block for it

Token v is the request's newest unless its prompt goes on; then drafting starts from the row at slot v. Unfilled slots
are filled when the request is drafted for again, or when its newest block is full, as others may use a full block.

A whole model's row at slot q reads token q only, so slot 0 is filled too, and slots that are not filled can wait; see
token_kv.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_sd.device.device import device
from fastdeploy_sd.spec_decode.model_based.async_passes import AsyncPasses
from fastdeploy_sd.spec_decode.model_based.draft_logits import DraftBranches, DraftLogprobs
from fastdeploy_sd.spec_decode.model_based.draft_memory import DraftMemory, StepPlan
from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel
from fastdeploy_sd.spec_decode.model_based.passes import EagerPasses
from fastdeploy_sd.spec_decode.model_based.recorded_passes import RecordedPasses
from fastdeploy_sd.spec_decode.model_based.token_kv import TokenKv
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import I32, DraftTokens, LogprobArrays

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

_NOT_OURS = -1
_NOT_ASKED = -1.0
# The joint probability of a complete chain is never lower.
_LEAST = float(np.finfo(np.float32).tiny)


class ModelProposer:
    """Keeps per table row the first slot of the draft layers that is not filled, and the tokens at its begin."""

    def __init__(self, config: SpeculativeConfig, context: ProposerContext, model: LoadedDraftModel) -> None:
        self._model, self._num_steps = model, config.num_model_steps
        self._num_begun = np.zeros(context.max_num_seqs, np.int32)
        self._next_slot = np.full(context.max_num_seqs, _NOT_OURS, np.int32)
        is_block = self._model.model.block is not None
        self._branches = DraftBranches(config.model_top_k, config.draft_p_min)
        makes_trees = self._branches.top_k > 1
        self._memory = DraftMemory(
            context.max_num_seqs, self._model.model.num_layers, self._num_steps, drafts_at_once=is_block
        )
        self._passes = (
            EagerPasses(self._model, self._memory, config.draft_p_min)
            if self._model.enforce_eager
            else RecordedPasses(
                model,
                self._memory,
                config.draft_p_min,
                self._num_steps,
                has_logits=config.enable_draft_logprob or makes_trees,
            )
        )
        # Several layers each have a pass over the step's tokens anyway, so no draft can end early.
        self._can_end = self._model.model.num_layers == 1 and not is_block
        token_map = model.model.token_map
        self._token_map: I32 | None = None if token_map is None else device().read(token_map).copy()
        self._least_acceptance = _NOT_ASKED
        if config.draft_p_min > 0:
            self._least_acceptance = _LEAST if self._can_end else 0.0
        columns = self._next_slot, self._num_begun
        self._plan = StepPlan(model, self._memory, *columns, self._num_steps)
        self._token_kv: TokenKv | None = None
        if not model.method.reads_hidden:
            vocab_size = None if model.vocab_size >= context.vocab_size else model.vocab_size
            cache = model.caches[0]
            self._token_kv = TokenKv(
                self._next_slot, model.host_blocks, cache.num_blocks, cache.block_size, self._num_steps, vocab_size
            )
        self.async_drafter: AsyncPasses | None = None
        can_start = self._token_kv is None and not config.draft_p_min and not makes_trees
        if isinstance(self._passes, RecordedPasses) and self._model.step is not None and can_start:
            self._memory.min_survival[:] = self._least_acceptance
            self._memory.set_survival(self._least_acceptance)
            self.async_drafter = AsyncPasses(
                self._model, self._model.step, self._memory, self._passes, *columns, self._num_steps
            )

    @property
    def num_lookahead_slots(self) -> int:
        return self._num_steps + self._model.num_more

    def is_async(self, table_rows: I32) -> bool:
        return self.async_drafter is not None

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            self._next_slot[request.table_row] = request.num_draft_slots
            self._num_begun[request.table_row] = request.num_tokens
            if self._token_kv is not None:
                self._token_kv.begin(request.table_row)
        if self.async_drafter is not None:
            self.async_drafter.send([request.table_row for request in requests])

    def forget(self, table_rows: I32) -> None:
        self._next_slot[table_rows] = _NOT_OURS
        if self.async_drafter is not None:
            self.async_drafter.send(table_rows.tolist())

    def close(self) -> None:
        """Nothing to save."""

    def propose(self, x: ProposeInput) -> DraftTokens:
        """See Proposer.propose. Rows with a prefix get no drafts: the layers have not run it."""
        assert x.target is not None, "a draft model needs what the target ran"
        if self.async_drafter is not None:
            self.async_drafter.restart()
        if self._token_kv is not None:
            self._token_kv.find(x, x.target)
        if not self._plan.make(x, x.target):
            return DraftTokens.none(len(x.table_rows))
        m, n = self._memory, self._memory.count
        m.min_survival[:n] = self._least_acceptance
        if x.probabilities is not None:
            m.min_survival[:n] = x.probabilities.min_survival if self._can_end else 0.0
        m.set_survival(self._least_acceptance if x.probabilities is None else 0.0)
        wanted = self._branches.wanted(x.num_draft_logprobs, n)
        logprobs = None if wanted is None else DraftLogprobs(wanted, m.cu_num_draft.item(n), self._token_map)
        if self._token_kv is not None:
            self._token_kv.note_begin(m)
        logits = self._passes.run(wants_logits=logprobs is not None)
        if logprobs is not None:
            for i, rows in enumerate(logits):
                logprobs.add(i, rows, m)
        self._model.agree()
        drafts = self._collect(None if logprobs is None else logprobs.arrays)
        if self._token_kv is not None:
            self._token_kv.note_end(x, m)
        return self._grown(x, drafts)

    def _grown(self, x: ProposeInput, drafts: DraftTokens) -> DraftTokens:
        """Return the drafts, as trees where these are made, and write their probabilities."""
        draft_prob = self._memory.draft_prob[: len(drafts.token_ids)]
        if self._branches.top_k > 1:
            most = x.max_draft_len if x.probabilities is None else x.probabilities.max_drafts
            drafts, draft_prob = self._branches.grow(drafts, most, x.num_draft_logprobs)
        if x.probabilities is not None:
            x.probabilities.draft_prob[: len(draft_prob)] = draft_prob
        return drafts

    def _collect(self, logprobs: LogprobArrays | None) -> DraftTokens:
        """Return the drafts in the memory, and note which slots are filled."""
        m, n = self._memory, self._memory.count
        self._plan.collect()
        cu = m.cu_num_draft[: n + 1].copy()
        num_drafts = cu.item(n)
        if logprobs is not None and len(logprobs.ranks) > num_drafts:
            logprobs = logprobs.take(m.kept[:num_drafts])
        return DraftTokens(m.draft_token_ids[:num_drafts].copy(), cu, logprobs=logprobs)
