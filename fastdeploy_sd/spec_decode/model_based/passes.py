"""The passes of one step of drafting by a model: every layer over what the step added, then draft after draft.

Layer l also computes the drafts that layers before it made, as its own step attends to them:

    layer 0   [begin .... N)
    layer 1   [begin .... N) d0
    layer 2   [begin .... N) d0 d1

An only layer makes all drafts, each from the output of the one before; of several layers, each makes one. A model with
a `block` makes all drafts in one pass, from rows that know only their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.device.program.recorder import SymbolicTensor
from fastdeploy_sd.models.drafters.draft_model import DraftBlock, DraftInputs, DraftOutput
from fastdeploy_sd.models.layers.attention import AttentionInputs, OutputRows
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.ops.logprob_rows import logit_rows
from fastdeploy_sd.ops.mtp import keep_hidden_, mtp_postprocess_, mtp_preprocess
from fastdeploy_sd.ops.mtp_batch import DraftBatch, HiddenRows, MaskedRows, MtpInputs, MtpPass, NextInputs
from fastdeploy_sd.spec_decode.model_based.draft_memory import DraftMemory
from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel
from fastdeploy_sd.types import F32


@dataclass(frozen=True, slots=True, eq=False)
class DraftStep:
    """Inputs of the passes of a step: tensors, or symbolic ones of a recording.

    Attributes:
        batch: the requests; the passes write its draft_token_ids, num_wanted and draft_prob.
        begin: i32[R], the first slot that every layer computes.
        ends: per layer i32[R], past the last one.
        hidden: [rows, H], the target's rows of this step, of positions from hidden_begin i32[R] on; row r's are
            hidden[cu_hidden[r]:cu_hidden[r + 1]], i32[R+1].
        draft_start_loc: i32[R+1], how many requests before r get a draft from the last layer.
        num_tokens: per layer, the rows of its first pass: the sum of its end - begin.
        num_steps: most drafts of a request.
        drafts: every draft as a request of its own that gets one, where all are made in one pass.
        num_drafts: of all requests, likewise.
        num_block_rows: rows of that pass.
    """

    batch: DraftBatch
    begin: Any
    ends: tuple[Any, ...]
    hidden: Any
    hidden_begin: Any
    cu_hidden: Any
    draft_start_loc: Any
    num_tokens: Sequence[int]
    num_steps: int
    drafts: DraftBatch | None = None
    num_drafts: int = 0
    num_block_rows: int = 0

    @staticmethod
    def over(  # noqa: PLR0913, PLR0917 (a step)
        target: LoadedDraftModel,
        columns: Mapping[str, Any],
        num_tokens: Any,
        num_drafting: Any,
        num_steps: int,
        min_prob: float,
        block_sizes: tuple[Any, Any] | None = None,
    ) -> DraftStep:
        """Return a step over columns by the names that DraftMemory has for them, and `hidden` and the two tables.

        `block_sizes`: num_drafts and num_block_rows.
        """
        requests = ("table_rows", "num_committed", "cu_num_draft", "num_wanted", "token_table", "block_table")
        drafts, begins = ("draft_token_ids", "draft_prob", "min_survival"), ("begin", "draft_start_loc")
        batch = DraftBatch(
            **{name: columns[name] for name in requests + drafts},
            min_prob=min_prob,
            block_size=target.block_size,
            num_drafting=num_drafting,
        )
        found = DraftStep(
            batch=batch,
            **{name: columns[name] for name in ("hidden", "hidden_begin", "cu_hidden", *begins)},
            ends=tuple(columns[f"end_{layer}"] for layer in range(target.model.num_layers)),
            num_tokens=num_tokens,
            num_steps=num_steps,
        )
        if block_sizes is None:
            return found
        of_draft = {name: columns[column] for name, column in _OF_DRAFT.items()}
        of_each = replace(batch, **of_draft, num_drafting=(block_sizes[0], 0))
        return replace(found, drafts=of_each, num_drafts=block_sizes[0], num_block_rows=block_sizes[1])

    def first_pass(self) -> MtpPass:
        return MtpPass(self.begin, self.ends[0], 0, self.hidden_begin, self.cu_hidden, self.num_tokens[0])

    def later_pass(self, layer: int, cu_hidden: Any) -> MtpPass:
        """What another layer computes, from the rows of the layer before it."""
        return MtpPass(self.begin, self.ends[layer], layer, self.begin, cu_hidden, self.num_tokens[layer])


# Of a batch in which every draft is a request: the columns.
_OF_DRAFT = {
    "table_rows": "no_rows",
    "num_committed": "no_rows",
    "cu_num_draft": "draft_offsets",
    "num_wanted": "one_each",
    "min_survival": "draft_survival",
}


def block_sizes_of(
    target: LoadedDraftModel, num_tokens: Sequence[int], num_drafting: Sequence[int]
) -> tuple[int, int] | None:
    """Return the drafts of a step and the rows of the pass that makes them; None = the model makes one after another.

    `num_tokens`, `num_drafting`: see DraftMemory; bounds give bounds.
    """
    block = target.model.block
    if block is None:
        return None
    num_drafts = sum(num_drafting)
    num_rows = num_drafts + block.more_rows * num_drafting[0]
    return num_drafts, num_rows if block.is_apart else num_tokens[0] + num_rows


class EagerPasses:
    """Calls the ops one by one."""

    def __init__(self, target: LoadedDraftModel, memory: DraftMemory, min_prob: float) -> None:
        self._target, self._memory, self._min_prob = target, memory, min_prob

    def run(self, *, wants_logits: bool) -> Sequence[F32 | RowsOnDevice]:
        """Write the drafts of the step in the memory, and the KV of all layers; return every draft's logits, if wanted.

        Logits are f32[A, V]; their first rows are of the requests that got the draft.
        """
        target, m = self._target, self._memory
        arrays: dict[str, Any] = {name: column[: m.count] for name, column in m.per_request().items()}
        arrays |= {name: column[: m.count + 1] for name, column in m.offsets().items()}
        arrays |= {name: column[: m.cu_num_draft[m.count]] for name, column in m.per_draft().items()}
        arrays |= {"token_table": target.token_table, "block_table": target.block_table}
        sizes = block_sizes_of(target, m.num_tokens, m.num_drafting)
        if sizes is not None:
            arrays |= {name: column[: sizes[0] + (name == "draft_offsets")] for name, column in m.of_draft.items()}
        # Each array once: Paddle frees the memory at an address once.
        columns = {"hidden": target.hidden} | {name: device().wrap(array) for name, array in arrays.items()}
        logits = run_passes(
            target, DraftStep.over(target, columns, m.num_tokens, m.num_drafting, m.num_steps, self._min_prob, sizes)
        )
        return logit_rows(*logits) if wants_logits else ()


def run_passes(target: LoadedDraftModel, step: DraftStep) -> list[Tensor]:
    """Run every layer, and return the logits of every draft.

    The target's pass keeps its own hidden rows for later steps. Those of draft layers are kept here, each after the
    layer that reads them has read its rows of earlier steps.
    """
    passes, last = _Passes(target, step), target.model.num_layers - 1
    if target.model.block is not None and step.num_steps > 0:
        return [_run_block(target.model.block, passes, step, HiddenRows(step.hidden, target.kept_hidden[0]))]
    logits: list[Tensor] = []
    inputs = mtp_preprocess(step.batch, step.first_pass(), HiddenRows(step.hidden, target.kept_hidden[0]))
    for layer in range(last):
        output = passes.forward(layer, inputs)
        if step.num_steps > layer:
            normed, chained = (gather_output_rows(part, inputs.draft_rows) for part in output)
            logits.append(passes.draft(layer, DraftOutput(normed, chained))[0])
        kept, todo = target.kept_hidden[layer + 1], step.later_pass(layer + 1, inputs.query_start_loc)
        following = mtp_preprocess(step.batch, todo, HiddenRows(output.chained, kept))
        keep_hidden_(passes.blocks, inputs, output.chained, kept)
        inputs = following
    if step.num_steps <= last:
        passes.store_kv(last, inputs)
        return logits
    output = passes.forward(last, inputs, OutputRows(inputs.draft_rows, passes.draft_start_loc))
    # More than one draft only if this is the only layer.
    for i in range(last, step.num_steps):
        row_logits, chain = passes.draft(i, output)
        logits.append(row_logits)
        if i + 1 < step.num_steps:
            rest = _continued(chain, step.batch.num_drafting[i + 1])
            if rest is None:
                break
            output = passes.forward(i + 1, rest)
    return logits


def _run_block(block: DraftBlock, passes: _Passes, step: DraftStep, hidden: HiddenRows[Tensor]) -> Tensor:
    """Make all drafts in one pass; return their logits, a row each."""
    todo = step.first_pass()
    if block.is_apart:
        passes.store_kv(0, mtp_preprocess(step.batch, todo, hidden))
        todo = replace(todo, begin=todo.end)
    masked = MaskedRows(block.token, block.hidden, block.more_rows, int(block.is_apart), step.num_drafts)
    inputs = mtp_preprocess(step.batch, replace(todo, num_tokens=step.num_block_rows), hidden, masked)
    cu_num_draft: Any = step.batch.cu_num_draft
    output = passes.forward(0, inputs, OutputRows(inputs.draft_rows, cu_num_draft))
    assert step.drafts is not None, "sizes of a block were given"
    return passes.draft(0, output, step.drafts)[0]


def _continued(chain: NextInputs, room: Any) -> NextInputs | None:
    """Return the rows that continue, None where none does. `room`: the size that a recording has for them."""
    if isinstance(chain.num_continued, SymbolicTensor):
        chain.num_continued.recorder.set_size(room, chain.num_continued)
        return chain
    count = int(device().read(chain.num_continued)[0])
    return chain.first(count) if count else None


class _Passes:
    """One pass at a time."""

    def __init__(self, target: LoadedDraftModel, step: DraftStep) -> None:
        batch: Any = step.batch  # of tensors
        self._target, self._batch = target, batch
        self.blocks = RequestBlocks(batch.table_rows, batch.block_table)
        self.draft_start_loc = step.draft_start_loc

    def forward(self, step: int, inputs: MtpInputs | NextInputs, outputs: OutputRows | None = None) -> DraftOutput:
        return self._target.model.forward(step, self._rows(inputs, outputs))

    def store_kv(self, step: int, inputs: MtpInputs) -> None:
        self._target.model.store_kv(step, self._rows(inputs, None))

    def draft(self, i: int, output: DraftOutput, batch: Any = None) -> tuple[Tensor, NextInputs]:
        """Write draft i of every request with a row of `output`; return its logits and the next inputs.

        `batch`: other requests than the step's.
        """
        logits = self._target.model.logits(i, output.normed)
        token_map = self._target.model.token_map
        return logits, mtp_postprocess_(batch or self._batch, i, logits, output.chained, token_map)

    def _rows(self, inputs: MtpInputs | NextInputs, outputs: OutputRows | None) -> DraftInputs:
        maps = AttentionInputs(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            blocks=self.blocks,
            rotary=self._target.rotary,
            outputs=outputs,
        )
        return DraftInputs(inputs.input_ids, inputs.hidden, self._target.caches, maps)
