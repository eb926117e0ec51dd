"""Drafts by multi-token prediction: layers of the model's own guess on from its hidden rows.

Owns which KV slots of the draft layers are filled for every request; spec_decode/mtp_passes.py runs the layers over
what each step added. Knows no scheduling.

The row at slot q combines token q with the hidden row of position q - 1, so slot 0 stays empty, and what a full block
holds depends on its own prefix alone. After a step that brought the target's rows of positions up to v - 1:

    slots   0      1 .......... next_slot .... v - 1   v
            empty  filled before, filled in this step, filled now if there is a block for it

Token v is the request's newest unless its prompt goes on; then drafting starts from the row at slot v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.mtp import DraftBatch
from fastdeploy_sd.ops.native.sampling import token_logprobs
from fastdeploy_sd.ops.tensors import to_numpy
from fastdeploy_sd.spec_decode.mtp_passes import (
    NOTHING_TO_RUN,
    DraftPasses,
    DraftStep,
    EagerPasses,
    MtpTarget,
)
from fastdeploy_sd.spec_decode.mtp_recorded import RecordedPasses
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext, TargetStep
from fastdeploy_sd.types import I32, DraftSource, DraftTokens, LogprobArrays

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

_NOT_OURS = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Fill:
    """What a step's rows let the draft layers compute.

    Attributes:
        has_run: bool[R], the row is ours and has new hidden rows.
        begin, end: i32[R], KV slots to fill from committed tokens.
        hidden_end: i32[R], past the last position with a hidden row.
        num_drafts: i32[R].
    """

    has_run: npt.NDArray[np.bool_]
    begin: I32
    end: I32
    hidden_end: I32
    num_drafts: I32


class MtpProposer:
    """See the module. State per slot: the first KV slot of the draft layers that is not filled, and hidden rows.

    Args:
        config: `num_model_steps` bounds the drafts per request and step.
        context: `target` is an MtpTarget.

    Raises:
        ConfigError: no model is loaded.
    """

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        target = context.target
        if not isinstance(target, MtpTarget):
            raise ConfigError(
                "speculative_config.method: expected a method that needs no model, as none is loaded, got 'mtp'",
                param="speculative_config",
            )
        self._target, self._num_steps = target, config.num_model_steps
        self._next_slot = np.full(context.max_num_seqs, _NOT_OURS, np.int32)
        request_hidden = [
            paddle.zeros((context.max_num_seqs, rows.shape[1]), rows.dtype) for rows in target.block_hidden
        ]
        self._passes: DraftPasses = (
            EagerPasses(target, request_hidden)
            if target.enforce_eager
            else RecordedPasses(target, request_hidden, self._num_steps, has_logits=config.enable_draft_logprob)
        )

    @property
    def num_lookahead_slots(self) -> int:
        return self._num_steps

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            self._next_slot[request.slot] = request.num_computed_tokens

    def forget(self, slots: I32) -> None:
        self._next_slot[slots] = _NOT_OURS

    def close(self) -> None:
        """Nothing to save."""

    def propose(self, x: ProposeInput) -> DraftTokens:
        """See Proposer.propose. Rows that already have a prefix get no drafts: it was not run through the layers."""
        assert x.target is not None, "mtp drafts from what the model ran"
        fill = self._plan(x, x.target)
        if not fill.has_run.any():
            return DraftTokens.none(len(x.slots))
        target = self._target
        step = _step_of(x, x.target, fill, target.caches[0].block_size, target.model.num_layers)
        logprobs = _DraftLogprobs.wanted_by(x, step.batch.cu_num_draft)
        try:
            logits = self._passes.run(step, wants_logits=logprobs is not None)
            if logprobs is not None:
                for i, rows in enumerate(logits):
                    logprobs.add(i, rows, step.batch)
        except Exception:
            self._give_up_overwritten(x, x.target, fill, target.caches[0].block_size)
            raise
        self._next_slot[x.slots[fill.has_run]] = fill.end[fill.has_run]
        return _drafts(step.batch, None if logprobs is None else logprobs.arrays)

    def _give_up_overwritten(self, x: ProposeInput, step: TargetStep, fill: _Fill, block_size: int) -> None:
        """Give up the rows that began with a hidden row of an earlier step, which the failed passes may have replaced.

        All else can be done again: KV is written where it was, and the other hidden rows are the step's or a block's.
        """
        first = fill.begin == step.num_computed_tokens
        self._next_slot[x.slots[fill.has_run & first & (fill.begin % block_size != 0)]] = _NOT_OURS

    def _plan(self, x: ProposeInput, step: TargetStep) -> _Fill:
        next_slot, computed = self._next_slot[x.slots], step.num_computed_tokens
        has_run = (next_slot != _NOT_OURS) & (step.num_valid > computed)
        # A slot needs its token, the hidden row before it, and a block.
        end = np.minimum(np.minimum(step.num_valid + 1, x.num_tokens), step.num_kv_slots)
        lag = (next_slot - computed)[has_run]
        assert ((lag == 0) | (lag == 1)).all(), "a row's draft KV is ahead of its tokens, or behind them"
        begin = np.maximum(next_slot, 1)
        # Draft i is made at slot N - 1 + i, which needs a block and a row of the rotary table.
        num_slots = np.minimum(step.num_kv_slots, x.token_table.shape[1])
        room = np.minimum(np.minimum(x.max_draft_len, self._num_steps), num_slots - x.num_tokens + 1)
        may_draft = has_run & (end == x.num_tokens)
        if x.prefix is not None:
            may_draft &= np.diff(x.prefix.cu_num_draft) == 0
        return _Fill(
            has_run=has_run,
            begin=begin,
            end=np.where(has_run, end, begin).astype(np.int32),
            hidden_end=np.where(has_run, step.num_valid, computed).astype(np.int32),
            num_drafts=np.where(may_draft, room.clip(0), 0).astype(np.int32),
        )


def _step_of(x: ProposeInput, step: TargetStep, fill: _Fill, block_size: int, num_layers: int) -> DraftStep:
    """What the passes read; the drafts are still to be written."""
    num_drafts = fill.num_drafts
    batch = DraftBatch(
        slots=x.slots,
        num_committed=x.num_tokens,
        cu_num_draft=_offsets(num_drafts),
        draft_token_ids=np.zeros(num_drafts.sum(), np.int32),
        token_table=x.token_table,
        block_table=step.block_table,
        block_size=block_size,
    )
    has_slots = (fill.end > fill.begin).any()
    num_blocks = -(-int((fill.end + num_drafts).max()) // block_size)
    return DraftStep(
        batch=batch,
        begin=fill.begin,
        ends=(fill.end, *(fill.end + np.int32(layer) * (num_drafts > layer) for layer in range(1, num_layers))),
        hidden=step.hidden,
        hidden_begin=step.num_computed_tokens,
        hidden_end=fill.hidden_end,
        cu_hidden=step.query_start_loc,
        block_tables=step.block_table[:, :num_blocks].take(x.slots, axis=0),
        draft_start_loc=_offsets(num_drafts > num_layers - 1),
        num_steps=int(num_drafts.max()) if has_slots else NOTHING_TO_RUN,
    )


def _offsets(counts: npt.NDArray[np.generic]) -> I32:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _drafts(batch: DraftBatch, logprobs: LogprobArrays | None) -> DraftTokens:
    """What was drafted; a row ends before a draft that could not be made."""
    token_ids, cu = batch.draft_token_ids, batch.cu_num_draft
    is_failed = token_ids < 0
    if is_failed.any():
        num_failed = np.concatenate([[0], np.cumsum(is_failed)])
        kept = num_failed[1:] == np.repeat(num_failed[cu[:-1]], np.diff(cu))
        cu = np.concatenate([[0], np.cumsum(kept)])[cu].astype(np.int32)
        token_ids = token_ids[kept]
        if logprobs is not None:
            logprobs = LogprobArrays(*(getattr(logprobs, field.name)[kept] for field in fields(logprobs)))
    return DraftTokens(token_ids, cu, np.full(len(token_ids), DraftSource.MTP, np.int8), logprobs)


class _DraftLogprobs:
    """Log-probabilities of the drafts of requests that asked, under the draft layers; others have NaN and rank 0."""

    def __init__(self, wanted: I32, num_drafts: int) -> None:
        num_top = int(wanted.max())
        self._wanted = wanted
        self.arrays = LogprobArrays(
            logprobs=np.full(num_drafts, np.nan, np.float32),
            ranks=np.zeros(num_drafts, np.int32),
            top_token_ids=np.zeros((num_drafts, num_top), np.int32),
            top_logprobs=np.full((num_drafts, num_top), np.nan, np.float32),
        )

    @staticmethod
    def wanted_by(x: ProposeInput, cu_num_draft: I32) -> _DraftLogprobs | None:
        """Return None when no request of the step asked."""
        if x.num_draft_logprobs is None or not (x.num_draft_logprobs >= 0).any():
            return None
        return _DraftLogprobs(x.num_draft_logprobs, int(cu_num_draft[-1]))

    def add(self, step: int, logits: Tensor, batch: DraftBatch) -> None:
        """Note draft `step`; logits f32[A, V] has a row for every request with one."""
        drafting = np.flatnonzero(np.diff(batch.cu_num_draft) > step)
        asked = np.flatnonzero(self._wanted[drafting] >= 0).astype(np.int32)
        if len(asked) == 0:
            return
        at = batch.cu_num_draft[drafting[asked]] + step
        # A failed draft is cut off afterwards.
        token_ids = batch.draft_token_ids[at].clip(0)
        num_top = min(self.arrays.top_token_ids.shape[1], int(logits.shape[1]))
        found = LogprobArrays(*token_logprobs(to_numpy(logits)[asked], token_ids, num_top))
        self.arrays.logprobs[at], self.arrays.ranks[at] = found.logprobs, found.ranks
        self.arrays.top_token_ids[at, :num_top] = found.top_token_ids
        self.arrays.top_logprobs[at, :num_top] = found.top_logprobs
