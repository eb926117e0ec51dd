"""The passes of one step of MTP drafting: every layer over what the step added, then draft after draft.

`run_passes` is their definition, and EagerPasses calls it; spec_decode/mtp_recorded.py replays what it did.

Layer l also computes the drafts that layers before it made, as its own step attends to them:

    layer 0   [begin .... N)
    layer 1   [begin .... N) d0
    layer 2   [begin .... N) d0 d1

An only layer makes all drafts, each from the output of the one before; of several layers, each makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from paddle import Tensor

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
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.types import I32

# No slot can be computed: hidden rows are only kept for later steps.
NOTHING_TO_RUN = -1


@dataclass(frozen=True, slots=True, eq=False)
class MtpTarget:
    """What the worker has loaded for drafting; ProposerContext.target.

    Attributes:
        caches: one KV cache per draft layer, over the target's blocks; layer j's first_key is j + 1.
        rotary: its table has max_model_len rows.
        block_hidden: per hidden source (the target, then every draft layer but the last) [num_blocks, H]: the hidden
            row of the last token of every full block. Valid as long as the block's KV is.
        enforce_eager: run the ops one by one instead of replaying a recording.
    """

    model: MtpModel
    caches: Sequence[KvCache[Tensor]]
    rotary: Rotary[Tensor]
    block_hidden: Sequence[Tensor]
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DraftStep:
    """What the passes of a step read. Arrays on the host, but for the hidden rows.

    Attributes:
        batch: the requests; the passes write its draft_token_ids.
        begin: i32[R], the first slot that every layer computes.
        ends: per layer i32[R], past the last one.
        hidden: [rows, H], the target's rows of this step: of positions from hidden_begin i32[R] on, those before
            hidden_end i32[R] certain; row r's are hidden[cu_hidden[r]:cu_hidden[r + 1]], i32[R+1].
        block_tables: i32[R, n], the blocks of the batch's requests.
        draft_start_loc: i32[R+1], how many requests before r get a draft from the last layer.
        num_steps: most drafts of a request, or NOTHING_TO_RUN.
    """

    batch: DraftBatch
    begin: I32
    ends: tuple[I32, ...]
    hidden: Tensor
    hidden_begin: I32
    hidden_end: I32
    cu_hidden: I32
    block_tables: I32
    draft_start_loc: I32
    num_steps: int

    def first_pass(self) -> MtpPass:
        """What layer 0 computes, from the target's hidden rows."""
        return MtpPass(self.begin, self.ends[0], 0, self.hidden_begin, self.hidden_end, self.cu_hidden)

    def later_pass(self, layer: int, cu_hidden: Any) -> MtpPass:
        """What another layer computes, from the rows of the layer before it."""
        return MtpPass(self.begin, self.ends[layer], layer, self.begin, self.ends[0], cu_hidden)


class DraftPasses(Protocol):
    """Writes the drafts of a step and the KV of all draft layers."""

    def run(self, step: DraftStep, *, wants_logits: bool) -> Sequence[Tensor]:
        """Return, where they are wanted, f32[A, V] of every draft: a row for each request that got it."""


class EagerPasses:
    """Calls the ops one by one.

    Args:
        request_hidden: per hidden source [max_num_seqs, H], each request's newest row; written.
    """

    def __init__(self, target: MtpTarget, request_hidden: Sequence[Tensor]) -> None:
        self._target, self._request_hidden = target, request_hidden

    def run(self, step: DraftStep, *, wants_logits: bool) -> Sequence[Tensor]:
        """See DraftPasses.run."""
        logits = run_passes(self._target, self._request_hidden, step)
        return logits if wants_logits else ()


def run_passes(target: MtpTarget, request_hidden: Sequence[Tensor], step: DraftStep) -> list[Tensor]:
    """Run every layer, and return the logits of every draft."""
    passes, last = _Passes(target, step), target.model.num_layers - 1
    logits: list[Tensor] = []
    todo, hidden = step.first_pass(), step.hidden
    for layer in range(last):
        inputs = mtp_preprocess_(
            step.batch, todo, HiddenRows(hidden, target.block_hidden[layer], request_hidden[layer])
        )
        if step.num_steps == NOTHING_TO_RUN:
            return []
        output = passes.forward(layer, inputs)
        if step.num_steps > layer:
            normed, chained = (gather_output_rows(part, inputs.draft_rows) for part in output)
            logits.append(passes.draft(layer, layer, MtpOutput(normed, chained))[0])
        todo, hidden = step.later_pass(layer + 1, inputs.query_start_loc), output.chained
    inputs = mtp_preprocess_(step.batch, todo, HiddenRows(hidden, target.block_hidden[last], request_hidden[last]))
    if step.num_steps == NOTHING_TO_RUN:
        return []
    if step.num_steps <= last:
        passes.store_kv(last, inputs)
        return logits
    output = passes.forward(last, inputs, OutputRows(inputs.draft_rows, passes.draft_start_loc))
    # More than one draft only if this is the only layer.
    for i in range(last, step.num_steps):
        row_logits, following = passes.draft(last, i, output)
        logits.append(row_logits)
        if i + 1 < step.num_steps:
            output = passes.forward(last, following)
    return logits


class _Passes:
    """One layer's pass at a time."""

    def __init__(self, target: MtpTarget, step: DraftStep) -> None:
        self._target, self._batch = target, step.batch
        self._block_tables, self.draft_start_loc = _tensor(step.block_tables), _tensor(step.draft_start_loc)

    def forward(self, layer: int, inputs: MtpInputs | NextInputs, outputs: OutputRows | None = None) -> MtpOutput:
        """Run a layer, for all rows' output or for that of some."""
        maps, cache = self._maps(inputs, outputs), self._target.caches[layer]
        return self._target.model.forward(layer, inputs.input_ids, inputs.hidden, cache, maps)

    def store_kv(self, layer: int, inputs: MtpInputs) -> None:
        """Only fill a layer's KV."""
        maps, cache = self._maps(inputs, None), self._target.caches[layer]
        self._target.model.store_kv(layer, inputs.input_ids, inputs.hidden, cache, maps)

    def draft(self, layer: int, i: int, output: MtpOutput) -> tuple[Tensor, NextInputs]:
        """Write draft i of every request that has one, a row of `output` each; return its logits and what follows."""
        logits = self._target.model.logits(layer, output.normed)
        return logits, mtp_postprocess_(self._batch, i, logits, output.chained)

    def _maps(self, inputs: MtpInputs | NextInputs, outputs: OutputRows | None) -> AttentionInputs:
        return AttentionInputs(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_tables=self._block_tables,
            rotary=self._target.rotary,
            outputs=outputs,
        )


def _tensor(array: Any) -> Tensor:
    return from_numpy(array) if isinstance(array, np.ndarray) else array
