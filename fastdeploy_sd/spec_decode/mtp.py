"""Drafts by multi-token prediction: layers of the model's own guess on from its hidden rows.

Owns which KV slots of the draft layers are filled for every request, and runs the layers over what each step added.
Knows the model only as MtpTarget, and no scheduling.

The row at slot q combines token q with the hidden row of position q - 1, so slot 0 stays empty, and what a full block
holds depends on its own prefix alone. After a step that brought the target's rows of positions up to v - 1:

    slots   0      1 .......... next_slot .... v - 1   v
            empty  filled before, filled in this step, filled now if there is a block for it

Token v is the request's newest unless its prompt goes on; then drafting starts from the row at slot v.

One layer makes all steps, each reading the output of the one before; of several layers, each makes one.
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
from fastdeploy_sd.layers.attention import AttentionInputs, OutputRows
from fastdeploy_sd.models.mtp import MtpModel, MtpOutput
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache, Rotary
from fastdeploy_sd.ops.mtp import (
    DraftBatch,
    HiddenRows,
    MtpInputs,
    MtpPass,
    NextInputs,
    mtp_postprocess_,
    mtp_preprocess_,
)
from fastdeploy_sd.ops.sampling import token_logprobs
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext, TargetStep
from fastdeploy_sd.types import I32, DraftSource, DraftTokens, LogprobArrays

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

_NOT_OURS = -1


@dataclass(frozen=True, slots=True, eq=False)
class MtpTarget:
    """What the worker has loaded for drafting; ProposerContext.target.

    Attributes:
        caches: one KV cache per draft layer, over the target's blocks; layer j's first_key is j + 1.
        rotary: its table has max_model_len rows.
        block_hidden: per hidden source (the target, then every draft layer but the last) [num_blocks, H]: the hidden
            row of the last token of every full block. Valid as long as the block's KV is.
    """

    model: MtpModel
    caches: Sequence[KvCache[Tensor]]
    rotary: Rotary[Tensor]
    block_hidden: Sequence[Tensor]


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
        self._request_hidden = [
            paddle.zeros((context.max_num_seqs, rows.shape[1]), rows.dtype) for rows in target.block_hidden
        ]

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
        cu_num_draft = np.concatenate([[0], np.cumsum(fill.num_drafts)]).astype(np.int32)
        batch = DraftBatch(
            slots=x.slots,
            num_committed=x.num_tokens,
            cu_num_draft=cu_num_draft,
            draft_token_ids=np.zeros(cu_num_draft[-1], np.int32),
            token_table=x.token_table,
            block_table=x.target.block_table,
            block_size=self._target.caches[0].block_size,
        )
        run = _DraftRun(self._target, batch, fill, _DraftLogprobs.wanted_by(x, cu_num_draft))
        run.fill_and_draft(x.target, self._request_hidden)
        self._next_slot[x.slots[fill.has_run]] = fill.end[fill.has_run]
        return run.drafts()

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


class _DraftRun:
    """The passes of one step."""

    def __init__(self, target: MtpTarget, batch: DraftBatch, fill: _Fill, logprobs: _DraftLogprobs | None) -> None:
        self._target, self._batch, self._fill, self._logprobs = target, batch, fill, logprobs
        last_slot = int((fill.end + fill.num_drafts).max())
        self._block_tables = from_numpy(
            np.ascontiguousarray(batch.block_table[batch.slots, : -(-last_slot // batch.block_size)])
        )

    def fill_and_draft(self, step: TargetStep, request_hidden: Sequence[Tensor]) -> None:
        """Fill the draft layers' KV, and write the drafts into the batch.

        Layer l also computes the drafts that layers before it made, as its own step attends to them:

            layer 0   [begin .... N)
            layer 1   [begin .... N) d0
            layer 2   [begin .... N) d0 d1
        """
        target, fill = self._target, self._fill
        hidden, hidden_begin, hidden_end = step.hidden, step.num_computed_tokens, fill.hidden_end
        cu_hidden = step.query_start_loc
        last = target.model.num_layers - 1
        for layer in range(last + 1):
            end = fill.end + np.where(fill.num_drafts > layer, layer, 0).astype(np.int32)
            todo = MtpPass(fill.begin, end, layer, hidden_begin, hidden_end, cu_hidden)
            rows = HiddenRows(hidden, target.block_hidden[layer], request_hidden[layer])
            inputs = mtp_preprocess_(self._batch, todo, rows)
            if todo.num_tokens() == 0:
                return
            draft_rows = inputs.draft_rows.numpy()
            if layer == last:
                self._finish(layer, inputs, draft_rows)
                return
            output = self._forward(layer, inputs)
            if len(draft_rows) > 0:
                normed, chained = (gather_output_rows(part, draft_rows) for part in output)
                self._draft(layer, layer, MtpOutput(normed, chained))
            hidden, hidden_begin, hidden_end = output.chained, fill.begin, fill.end
            cu_hidden = inputs.query_start_loc.numpy()

    def drafts(self) -> DraftTokens:
        """Return what was drafted; a row ends before a draft that could not be made."""
        token_ids, cu = self._batch.draft_token_ids, self._batch.cu_num_draft
        logprobs = None if self._logprobs is None else self._logprobs.arrays
        is_failed = token_ids < 0
        if is_failed.any():
            num_failed = np.concatenate([[0], np.cumsum(is_failed)])
            kept = num_failed[1:] == np.repeat(num_failed[cu[:-1]], np.diff(cu))
            cu = np.concatenate([[0], np.cumsum(kept)])[cu].astype(np.int32)
            token_ids = token_ids[kept]
            if logprobs is not None:
                logprobs = LogprobArrays(*(getattr(logprobs, field.name)[kept] for field in fields(logprobs)))
        return DraftTokens(token_ids, cu, np.full(len(token_ids), DraftSource.MTP, np.int8), logprobs)

    def _finish(self, layer: int, first: MtpInputs, draft_rows: I32) -> None:
        """Run the last layer, of whose outputs only those at `draft_rows` are looked at; an only layer goes on."""
        if len(draft_rows) == 0:
            hidden, cache, model = first.hidden, self._target.caches[layer], self._target.model
            model.store_kv(layer, first.input_ids.numpy(), hidden, cache, self._attention_inputs(first))
            return
        is_drafting = self._fill.num_drafts > layer
        starts = np.concatenate([[0], np.cumsum(is_drafting)]).astype(np.int32)
        output = self._forward(layer, first, OutputRows(draft_rows, from_numpy(starts)))
        # More than one step only if this is the only layer.
        for step in range(layer, int(self._fill.num_drafts.max())):
            inputs = self._draft(layer, step, output)
            if inputs.hidden.shape[0] > 0:
                output = self._forward(layer, inputs)

    def _draft(self, layer: int, step: int, output: MtpOutput) -> NextInputs:
        """Write draft `step` of every request that has one; `output` has a row for each of them."""
        logits = self._target.model.logits(layer, output.normed)
        inputs = mtp_postprocess_(self._batch, step, logits, output.chained)
        if self._logprobs is not None:
            self._logprobs.add(step, logits, self._batch)
        return inputs

    def _forward(self, layer: int, inputs: MtpInputs | NextInputs, outputs: OutputRows | None = None) -> MtpOutput:
        maps, cache = self._attention_inputs(inputs, outputs), self._target.caches[layer]
        return self._target.model.forward(layer, inputs.input_ids.numpy(), inputs.hidden, cache, maps)

    def _attention_inputs(self, inputs: MtpInputs | NextInputs, outputs: OutputRows | None = None) -> AttentionInputs:
        return AttentionInputs(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_tables=self._block_tables,
            rotary=self._target.rotary,
            outputs=outputs,
        )


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
        found = token_logprobs(gather_output_rows(logits, asked), token_ids, num_top)
        self.arrays.logprobs[at], self.arrays.ranks[at] = found.logprobs, found.ranks
        self.arrays.top_token_ids[at, :num_top] = found.top_token_ids
        self.arrays.top_logprobs[at, :num_top] = found.top_logprobs
